"""``kvstore serve``: mlx_lm.server with the same flags, and a cache directory when ``--kv-cache-dir`` is given.

Without that flag mlx_lm.server's own main runs, and nothing of it is replaced but the parser's flag list. With it,
three names of the server module are replaced while it runs: what it makes batches with, what it makes single responses
with, and how it starts and stops.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.fs import Durability
from kvstore.locations import place_of, warnings_for
from kvstore.sizes import format_size, parse_size
from kvstore.store import DEFAULT_INTERVAL, Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.versions import check_versions

__all__ = ["CacheArguments", "command"]

DEFAULT_SIZE = "20GiB"
MIN_SIZE = 1 << 20


@dataclass(frozen=True)
class CacheArguments:
    """The flags that kvstore adds to mlx_lm.server's. directory: empty for the default one, None for none at all."""

    directory: str | None
    size: int
    interval: int | None
    durability: Durability
    shared: bool
    strict: bool
    saving: Saving

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Add the flags to the server's parser, in a group of their own."""
        group = parser.add_argument_group(
            "KV cache directory (kvstore)", "Without --kv-cache-dir the server is exactly mlx_lm.server."
        )
        group.add_argument(
            "--kv-cache-dir",
            metavar="DIR",
            nargs="?",
            const="",
            help="Keep computed prompts in this directory and restore them after a restart (created if missing); "
            "without DIR: in $KVSTORE_DIR, or else in kvstore/kv among your caches",
        )
        group.add_argument(
            "--kv-cache-size",
            metavar="SIZE",
            type=_size,
            help=f"Budget of the directory, oldest prompts go first (default: {DEFAULT_SIZE})",
        )
        group.add_argument(
            "--kv-cache-interval",
            metavar="TOKENS",
            type=int,
            help=f"Tokens a chunk, fixed when the directory is created (default: {DEFAULT_INTERVAL})",
        )

        group.add_argument(
            "--kv-cache-durability",
            metavar="MODE",
            type=_durability,
            help="What survives power loss: none (what the system wrote so far), barrier (all that was published, but "
            "maybe not the last seconds) or full (all of it) (default: barrier)",
        )
        group.add_argument(
            "--kv-cache-shared",
            action="store_true",
            help="When creating the directory, let its permissions follow the umask instead of being yours alone",
        )

        group.add_argument(
            "--kv-cache-strict",
            action="store_true",
            help="Share saved prompts only with servers on the same kind of device and with the same "
            "--prefill-step-size, so that a restored prompt has every bit it had",
        )
        group.add_argument(
            "--kv-cache-states",
            metavar="N",
            type=_count,
            help="For models with recurrent layers or sliding windows: save a state to resume from at every N-th "
            "chunk, beside those at the end of each prompt and answer; 0 saves only the latter (default: 1)",
        )
        group.add_argument(
            "--kv-cache-exact",
            action="store_true",
            help="Restore only what a prefill computed, not what was decoded, whose last bits can differ",
        )

    @staticmethod
    def take_from(arguments: argparse.Namespace) -> CacheArguments:
        """Take the flags out of parsed arguments, so that the server sees only its own.

        Raises KVStoreError for flags that would silently do nothing.
        """
        taken = arguments.__dict__.pop
        strict, states, exact = (taken(f"kv_cache_{name}") for name in ("strict", "states", "exact"))
        directory, size, interval, durability, shared = (
            taken(f"kv_cache_{name}") for name in ("dir", "size", "interval", "durability", "shared")
        )
        given = (size, interval, durability, shared or None, strict or None, states, exact or None)
        if directory is None and any(flag is not None for flag in given):
            raise KVStoreError("the --kv-cache-… flags need --kv-cache-dir")
        return CacheArguments(
            directory,
            size or parse_size(DEFAULT_SIZE),
            interval,
            durability or Durability.BARRIER,
            shared,
            strict,
            Saving(1 if states is None else states, exact),
        )


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except KVStoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < MIN_SIZE:
        raise argparse.ArgumentTypeError(f"a budget of {format_size(size)} holds no prompt; give at least 1MiB")
    return size


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of chunks such as 1 or 4")
    return int(text)


def _durability(text: str) -> Durability:
    try:
        return Durability(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(Durability)}") from None


def command(argv: Sequence[str]) -> int:
    """Run the server; returns the exit code of the process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from mlx_lm import server  # noqa: PLC0415 - takes a second; only this command pays it
    except ImportError as error:
        return _refuse(f"mlx-lm cannot be imported ({error}); install it with: pip install 'kvstore-llm[mlx]'")

    taken: list[CacheArguments] = []

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            self.prog = "kvstore serve"
            CacheArguments.add_to(self)
            arguments = super().parse_args(*args, **kwargs)
            try:
                taken.append(CacheArguments.take_from(arguments))
            except KVStoreError as error:
                self.error(str(error))
            return arguments

    code = 0

    def run(host: str, port: int, provider: Any, **kwargs: Any) -> None:
        nonlocal code
        (cache,) = taken
        if cache.directory is None:
            original(host, port, provider, **kwargs)
        else:
            code = _serve(server, cache, host, port, provider)

    original = server.run
    lenient = SimpleNamespace(ArgumentParser=Parser, Namespace=argparse.Namespace)
    with _replaced(server, argparse=lenient, run=run), _arguments(argv):
        try:
            server.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    if taken and taken[0].directory is not None:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process without the destructors of the engine's libraries.

    Everything of ours is finished by now. MLX 0.32.4 on Linux may abort while its threads are torn down at exit
    ("terminate called without an active exception": 2 of 5 stops on a loaded machine), which turns an orderly stop
    into exit code 134.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    """Module attributes replaced for a while."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def _arguments(argv: Sequence[str]) -> Iterator[None]:
    """sys.argv as mlx_lm.server's main expects it."""
    before, sys.argv = sys.argv, ["kvstore serve", *argv]
    try:
        yield
    finally:
        sys.argv = before


def _serve(server: ModuleType, cache: CacheArguments, host: str, port: int, provider: Any) -> int:
    """Serve with a cache directory until told to stop; 1 with one sentence when that cannot be done."""
    import mlx.core as mx  # noqa: PLC0415 - as above

    from kvstore_mlx.running import RunningServer  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.spaces import Settings  # noqa: PLC0415 - as above

    try:
        versions = check_versions()
        if mx.distributed.init().size() > 1:
            raise KVStoreError("--kv-cache-dir does not work with distributed inference; start without it")
        assert cache.directory is not None
        store = Store.open(
            place_of(cache.directory or None).path,
            interval=cache.interval,
            shared=cache.shared,
            durability=cache.durability,
        )
        store.check_writable()
    except KVStoreError as error:
        return _refuse(error)
    with store:
        settings = Settings(
            versions,
            quantization=_quantization(provider.cli_args),
            strict_step=provider.cli_args.prefill_step_size if cache.strict else None,
        )
        running = RunningServer(server, store, cache.size, provider, settings=settings, saving=cache.saving)
        for warning in warnings_for(store.path):
            logging.getLogger("kvstore").warning("kvstore: %s", warning)
        logging.getLogger("kvstore").info(
            "kvstore: caching in %s (budget %s, interval %d tokens)",
            store.path,
            format_size(cache.size),
            store.interval,
        )
        replaced = _replaced(
            server,
            BatchGenerator=running.batch_generator,
            stream_generate=running.stream_generate(server.stream_generate),
        )
        with replaced:
            failure = running.serve(host, port)
    return _refuse(failure) if failure is not None else 0


def _quantization(arguments: argparse.Namespace) -> Any:
    from kvstore_mlx.fingerprint import Quantization  # noqa: PLC0415 - imports the engine

    if arguments.kv_bits is None:
        return None
    return Quantization(arguments.kv_bits, arguments.kv_group_size, arguments.quantized_kv_start)


def _refuse(error: object) -> int:
    print(f"kvstore serve: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
    return 1
