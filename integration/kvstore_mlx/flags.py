"""The flags that kvstore adds to those of mlx-lm's commands, the same for all of them.

A flag is one field and one argument of the same name; fields that are not given keep their defaults.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, fields
from typing import Any

from kvstore.directory import MIN_INTERVAL
from kvstore.errors import KVStoreError
from kvstore.fs import Durability
from kvstore.manifest import MAX_INTERVAL
from kvstore.sizes import format_size, parse_size
from kvstore.store import DEFAULT_INTERVAL
from kvstore_mlx.boundaries import Saving

__all__ = ["CacheArguments"]

DEFAULT_SIZE = "20GiB"
MIN_SIZE = 1 << 20

SALT_VARIABLE = "KVSTORE_SALT"
"""The environment variable that holds a salt when no flag does."""

_MAX_SALT_BYTES = 4096


@dataclass(frozen=True)
class CacheArguments:
    """directory: empty for the default one, None for none at all. salt: a secret, so never shown. The others are
    explained by the parser.
    """

    directory: str | None = None
    size: int = parse_size(DEFAULT_SIZE)
    interval: int | None = None
    durability: Durability = Durability.BARRIER
    shared: bool = False
    strict: bool = False
    states: int = 1
    exact: bool = False
    salt: bytes = field(default=b"", repr=False)
    min_tokens: int | None = None
    write_limit: int | None = None
    explain: bool = False
    report: bool = False

    @property
    def saving(self) -> Saving:
        """How states are thinned, and what is taken from disk."""
        return Saving(self.states, self.exact, self.min_tokens)

    @staticmethod
    def add_to(parser: argparse.ArgumentParser, engine: str) -> None:
        """Add the flags to the parser of an engine's command, in a group of their own."""
        group = parser.add_argument_group(
            "KV cache directory (kvstore)", f"Without --kv-cache-dir this is exactly {engine}."
        )
        for name, settings in _FLAGS.items():
            group.add_argument(name, **settings)
        if engine == "mlx_lm.server":
            group.add_argument("--kv-cache-report", **_REPORT)
        salts = group.add_mutually_exclusive_group()
        for name, settings in _SALTS.items():
            salts.add_argument(name, **settings)

    @staticmethod
    def take_from(arguments: argparse.Namespace) -> CacheArguments:
        """Take the flags out of parsed arguments, so that the engine sees only its own.

        Raises KVStoreError for flags that would silently do nothing.
        """
        taken = {each.name: arguments.__dict__.pop(f"kv_cache_{each.name}", None) for each in fields(CacheArguments)}
        given = {name: value for name, value in taken.items() if value is not None}
        if given and "directory" not in given:
            raise KVStoreError("the --kv-cache-… flags need --kv-cache-dir")
        if "directory" in given and "salt" not in given and (salt := os.environ.get(SALT_VARIABLE)) is not None:
            try:
                given["salt"] = _checked(os.fsencode(salt), SALT_VARIABLE)
            except argparse.ArgumentTypeError as error:
                raise KVStoreError(f"{error}, or unset it") from error
        return CacheArguments(**given)


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except KVStoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < MIN_SIZE:
        raise argparse.ArgumentTypeError(f"a budget of {format_size(size)} holds no prompt; give at least 1MiB")
    return size


def _interval(text: str) -> int:
    if not text.isdecimal() or not MIN_INTERVAL <= int(text) <= MAX_INTERVAL:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from {MIN_INTERVAL} to {MAX_INTERVAL}, such as {DEFAULT_INTERVAL}"
        )
    return int(text)


def _salt(text: str) -> bytes:
    return _checked(os.fsencode(text), "the salt")


def _checked(salt: bytes, name: str) -> bytes:
    """A salt that separates. One that is empty, or nothing but white space, is a command or a variable that failed, and
    to take it for none would let tenants meet. No message holds it.
    """
    if not salt.strip():
        raise argparse.ArgumentTypeError(f"{name} is empty, which separates nobody from anybody; give it a secret")
    if len(salt) > _MAX_SALT_BYTES:
        raise argparse.ArgumentTypeError(f"{name} is too long; give it from 1 to {_MAX_SALT_BYTES} bytes")
    return salt


def _salt_file(path: str) -> bytes:
    """What a file (or a pipe) holds. Its content is in no message."""
    try:
        with open(path, "rb") as file:
            salt = file.read(_MAX_SALT_BYTES + 1)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from error
    return _checked(salt.removesuffix(b"\n").removesuffix(b"\r"), path)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of chunks such as 1 or 4")
    return int(text)


def _limit(text: str) -> int:
    try:
        size = parse_size(text)
    except KVStoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < MIN_SIZE:
        raise argparse.ArgumentTypeError(f"{format_size(size)} an hour is not a prompt; give at least 1MiB")
    return size


def _min_tokens(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of tokens such as 256")
    return int(text)


def _durability(text: str) -> Durability:
    try:
        return Durability(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(Durability)}") from None


_ON: dict[str, Any] = {"action": "store_const", "const": True}

_FLAGS: dict[str, dict[str, Any]] = {
    "--kv-cache-dir": {
        "dest": "kv_cache_directory",
        "metavar": "DIR",
        "nargs": "?",
        "const": "",
        "help": "Keep computed prompts in this directory and restore them after a restart (created if missing); "
        "without DIR: in $KVSTORE_DIR, or else in kvstore/kv among your caches",
    },
    "--kv-cache-size": {
        "metavar": "SIZE",
        "type": _size,
        "help": f"Budget of the directory, least recently used prompts go first (default: {DEFAULT_SIZE})",
    },
    "--kv-cache-interval": {
        "metavar": "TOKENS",
        "type": _interval,
        "help": f"Tokens per chunk, fixed when the directory is created (default: {DEFAULT_INTERVAL})",
    },
    "--kv-cache-durability": {
        "metavar": "MODE",
        "type": _durability,
        "choices": tuple(Durability),
        "help": "What survives power loss: none (what the system wrote so far), barrier (all that was published, but "
        "maybe not the last seconds) or full (all of it) (default: barrier)",
    },
    "--kv-cache-shared": _ON
    | {"help": "When creating the directory, let its permissions follow the umask instead of being yours alone"},
    "--kv-cache-strict": _ON
    | {
        "help": "Share saved prompts only with processes on the same kind of device and with the same "
        "--prefill-step-size, so that a restored prompt has every bit it had",
    },
    "--kv-cache-states": {
        "metavar": "N",
        "type": _count,
        "help": "For models with recurrent layers or sliding windows: save a state to resume from at every N-th "
        "chunk, beside those at the end of each prompt and answer; 0 saves only the latter (default: 1)",
    },
    "--kv-cache-exact": _ON
    | {"help": "Reuse and save only what a prefill computed, not what was decoded, whose last bits can differ"},
    "--kv-cache-min-tokens": {
        "metavar": "N",
        "type": _min_tokens,
        "help": "Neither save nor restore fewer tokens than this; auto measures what is cheaper to compute than to "
        "read (default: auto)",
    },
    "--kv-cache-write-limit": {
        "metavar": "SIZE",
        "type": _limit,
        "help": "Write at most so much in any hour, to spare the disk, such as 50GiB; counted from the start of this "
        "process (default: no limit)",
    },
    "--kv-cache-explain": _ON
    | {"help": "Log where a prompt differs from the nearest saved one, with both texts around it"},
}

_REPORT = _ON | {
    "help": "Add a kv_cache object to each response, and to the last event of each stream: what was reused, "
    "from where, what was written, and how long it took",
}
"""Only a server has responses."""

_SALTS: dict[str, dict[str, Any]] = {
    "--kv-cache-salt": {
        "metavar": "TEXT",
        "type": _salt,
        "help": "A secret of your own: prompts are shared only with processes that have the same one. It shows in "
        f"the list of processes; a file or ${SALT_VARIABLE} does not",
    },
    "--kv-cache-salt-file": {
        "dest": "kv_cache_salt",
        "metavar": "FILE",
        "type": _salt_file,
        "help": "The same, read from a file; a line's end at its end does not count",
    },
}
