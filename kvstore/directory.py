"""Make, recognise and refuse cache directories.

kvstore.json makes a folder a cache directory and is written last. It holds the format version, the interval, and
whether several users share the directory on purpose; none of them ever changes. (What is done about a directory that
is emptied under a process which has it open is in kvstore.renewal.)
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore._version import __version__
from kvstore.commit import put_file
from kvstore.context import Clock, Context
from kvstore.errors import (
    FormatVersionError,
    IntervalMismatchError,
    KVStoreError,
    NotACacheDirectoryError,
    UnavailableError,
)
from kvstore.fs import Durability, FileSystem
from kvstore.layout import Layout
from kvstore.locks import publish_lock
from kvstore.manifest import FORMAT, MAX_INTERVAL
from kvstore.untrusted import parse

__all__ = [
    "CACHEDIR_TAG",
    "DEFAULT_INTERVAL",
    "advice",
    "check_free",
    "check_interval",
    "check_same",
    "complete",
    "fill",
    "interval_of",
    "open_directory",
    "read_config",
    "unavailable",
]

DEFAULT_INTERVAL = 2048
"""Tokens a chunk. Small enough that a resume loses little, large enough that a 200,000-token prompt is 100 files."""

MIN_INTERVAL = 16

CACHEDIR_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# This file marks a cache directory created by kvstore. It can be deleted; its contents can be computed again.\n"
    b"# For information about cache directory tags see https://bford.info/cachedir/\n"
)
_CONFIG_LIMIT = 1 << 16


def open_directory(
    path: str | os.PathLike[str],
    *,
    interval: int | None,
    create: bool,
    shared: bool,
    durability: Durability,
    fs: FileSystem | None,
    clock: Clock,
) -> Context:
    """See Store.open. A given fs is used as it is, whatever shared and durability say."""
    layout = Layout(Path(os.path.abspath(os.path.expanduser(path))))
    if interval is not None and not _is_interval(interval):
        raise IntervalMismatchError(f"interval must be from {MIN_INTERVAL} to {MAX_INTERVAL} tokens, not {interval!r}")
    try:
        given = fs or FileSystem(durability, private=not shared)
    except ValueError as error:
        raise KVStoreError(f"durability must be one of {', '.join(Durability)}, not {durability!r}") from error
    try:
        config = read_config(given, layout)
        if config is None:
            check_free(layout, create)
            config = _create(given, layout, interval or DEFAULT_INTERVAL, clock)
        found = interval_of(layout, config)
        used = fs or replace(given, private=config.get("shared") is not True)
        if create:
            complete(used, layout)
    except OSError as error:
        raise unavailable(layout.root, error) from error
    if interval is not None and interval != found:
        raise IntervalMismatchError(
            f"{layout.root} was created with an interval of {found} tokens, not {interval}; "
            f"use {found} or another directory"
        )
    return Context(layout, used, found, clock, f"kvstore {__version__}")


def unavailable(path: Path, error: OSError) -> UnavailableError:
    """The sentence for people that goes with an operating system error; it names the file in the directory, if any."""
    return UnavailableError(f"cannot use the cache directory {path}: {advice(error, _named(path, error))}")


def advice(error: OSError, file: str = "") -> str:
    """What is wrong and what to do about it, with no name but the one that is given."""
    known = {
        errno.ENOSPC: "the disk is full; free some space or lower the budget",
        errno.EDQUOT: "your disk quota is used up; free some space or lower the budget",
        errno.EROFS: "it is on a read-only file system; choose another directory",
        errno.EACCES: f"{file}permission denied; check who owns it, or choose another directory",
        errno.EPERM: f"{file}permission denied; check who owns it, or choose another directory",
        errno.ENOENT: "the directory or its parent does not exist; create it or check that its volume is mounted",
        errno.ENOTDIR: f"{file}a file where a folder should be; move it away"
        if file
        else "a part of the path is a file; choose another directory",
        errno.EEXIST: f"{file}something else where a folder should be; move it away",
        errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
        errno.ELOOP: f"{file}a symbolic link where a file should be; move it away",
        errno.EISDIR: f"{file}a folder where a file should be; move it away",
        errno.EINVAL: f"{file}{error.strerror}; move it away" if file else f"{error.strerror}; check the disk",
    }
    return known.get(error.errno or 0, f"{file}{error.strerror or type(error).__name__}; check the disk")


def _named(path: Path, error: OSError) -> str:
    """The file in the directory that an error is about; empty when it is about none.

    What is in the way of a file that shall be made, or must not be seen, is the folder that it would lie in.
    """
    if not isinstance(error.filename, str | bytes):
        return ""
    file = Path(os.fsdecode(error.filename))
    if error.errno in {errno.EACCES, errno.EPERM, errno.ENOTDIR}:
        while path in file.parents and not os.path.lexists(file):
            file = file.parent
    return f"{file.name} in it: " if path in file.parents else ""


def read_config(fs: FileSystem, layout: Layout) -> dict[str, Any] | None:
    """kvstore.json, or None when there is none. Never trusts its shape."""
    try:
        data, _ = fs.read_file(layout.config, _CONFIG_LIMIT)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if not os.path.lexists(layout.root):
            raise  # A part of the path before it is a file.
        raise NotACacheDirectoryError(f"{layout.root} is a file; name a directory") from None
    try:
        config = parse(data)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or type(config.get("format")) is not int:  # True is an int, too
        raise NotACacheDirectoryError(
            f"{layout.config} cannot be read; restore it from a copy, or move the directory away and start anew"
        )
    return config


def interval_of(layout: Layout, config: dict[str, Any]) -> int:
    """Tokens a chunk; FormatVersionError for a newer format, NotACacheDirectoryError for one that never was and
    for no usable interval.
    """
    if config["format"] < FORMAT:
        raise NotACacheDirectoryError(
            f"{layout.config} says format {config['format']}, which no kvstore ever wrote; restore it from a copy, or "
            "move the directory away and start anew"
        )
    if config["format"] != FORMAT:
        raise FormatVersionError(
            f"{layout.root} has format {config['format']}, and this kvstore knows format {FORMAT}; "
            "upgrade kvstore or use another directory"
        )
    interval: int = config.get("interval", 0)
    if not _is_interval(interval):
        raise NotACacheDirectoryError(
            f"{layout.config} has no usable interval; restore it from a copy, or move the directory away and start anew"
        )
    return interval


def _is_interval(interval: object) -> bool:
    return type(interval) is int and MIN_INTERVAL <= interval <= MAX_INTERVAL


def check_same(context: Context) -> None:
    """Raise KVStoreError unless what lies there now has the format and the interval of what was opened; OSError when
    that cannot be told. For small files that are written without a publish, which looks more closely (kvstore.renewal).
    """
    config = read_config(context.fs, context.layout)
    if config is None:
        raise NotACacheDirectoryError(f"{context.layout.root} is no cache directory any more; check the path")
    check_interval(context, config)


def check_interval(context: Context, config: dict[str, Any]) -> None:
    """Raise KVStoreError unless the kvstore.json of what lies there now fits what was opened."""
    found = interval_of(context.layout, config)
    if found != context.interval:
        raise IntervalMismatchError(
            f"{context.layout.root} is another directory now, with an interval of {found} tokens instead of "
            f"{context.interval}; restart to use it"
        )


def check_free(layout: Layout, create: bool) -> None:
    """Creating is for a missing or empty folder, or one where a creation was cut off; anything else is not ours."""
    if not create:
        raise NotACacheDirectoryError(f"{layout.root} is not a cache directory; check the path")
    with suppress(FileNotFoundError):
        # kvstore.json too: another process may have finished creating it since it was looked for.
        ours = {folder.relative_to(layout.root).parts[0] for folder in layout.folders}
        ours |= {layout.tag.name, layout.config.name, layout.stats.name}
        others = sorted(name for name in os.listdir(layout.root) if name not in ours and not name.startswith("."))
        if others:
            raise NotACacheDirectoryError(
                f"{layout.root} holds other files ({others[0]}) and is not a cache directory; name an empty or new one"
            )


def _create(fs: FileSystem, layout: Layout, interval: int, clock: Clock) -> dict[str, Any]:
    for missing in reversed([layout.root, *layout.root.parents]):
        if not missing.exists():
            fs.make_dir(missing)
    return fill(fs, layout, interval, clock)


def fill(fs: FileSystem, layout: Layout, interval: int, clock: Clock) -> dict[str, Any]:
    """Make the tree in a folder that is there, kvstore.json last: it is what makes a folder a cache directory. Two
    processes may both be here; what kvstore.json says then.
    """
    with suppress(OSError):
        fs.exclude_from_backup(layout.root)
    for folder in layout.folders:
        fs.make_dir(folder)
    # Synced whatever is asked for the rest: after power loss a block may be short, which its digest tells, but with an
    # empty kvstore.json the whole directory would be refused.
    durable = fs if fs.durability is not Durability.NONE else replace(fs, durability=Durability.BARRIER)
    context = Context(layout, durable, interval, clock, "")
    config = {"format": FORMAT, "interval": interval, "created": clock() / 1e9, "writer": f"kvstore {__version__}"}
    if not fs.private:
        config["shared"] = True
    try:
        with publish_lock(layout):
            found = read_config(fs, layout)
            if found is None:
                put_file(context, layout.tag, [CACHEDIR_TAG])
                put_file(context, layout.config, [json.dumps(config, indent=2).encode() + b"\n"])
                found = config
    finally:
        context.staging.close()
    return found


def complete(fs: FileSystem, layout: Layout) -> None:
    """Make folders that a copy left out because they were empty. What cannot be written can still be read."""
    for folder in layout.folders:
        if not folder.is_dir():
            with suppress(OSError):
                fs.make_dir(folder)
