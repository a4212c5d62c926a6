"""Open a cache directory and work with it: the public face of the store.

    store = Store.open("~/.cache/kv", interval=2048)
    space = store.namespace(NamespaceInfo({"model": "…"}, label="my model"))
    match = space.lookup(tokens)
    restored = space.read(match, allocate)
    space.publish(tokens, spans)

This module creates the directory, refuses what is not one, and hands each job to the module that knows it.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore._version import __version__
from kvstore.blocks import Span
from kvstore.context import Clock, Context, Counters, Space
from kvstore.errors import (
    FormatVersionError,
    IntervalMismatchError,
    KVStoreError,
    NotACacheDirectoryError,
    UnavailableError,
)
from kvstore.fs import FileSystem
from kvstore.keys import pack_tokens
from kvstore.layout import Layout
from kvstore.locks import publish_lock
from kvstore.lookup import Match, find
from kvstore.manifest import FORMAT, MAX_INTERVAL
from kvstore.namespace import NamespaceInfo
from kvstore.publish import Published, publish, publish_state
from kvstore.restore import THREADS, Allocate, Restored, read
from kvstore.states import AllocateState, Scalar, State, read_state
from kvstore.tokenizations import Tokenizations

__all__ = ["DEFAULT_INTERVAL", "Namespace", "Store"]

DEFAULT_INTERVAL = 2048
"""Tokens a chunk. Small enough that a resume loses little, large enough that a 200,000-token prompt is 100 files."""

MIN_INTERVAL = 16

_CACHEDIR_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# This file marks a cache directory created by kvstore. It can be deleted; its contents can be computed again.\n"
    b"# For information about cache directory tags see https://bford.info/cachedir/\n"
)
_CONFIG_LIMIT = 1 << 16


class Store:
    """One open cache directory. Safe to use from several threads; several processes may open the same directory."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        interval: int | None = None,
        create: bool = True,
        fs: FileSystem | None = None,
        clock: Clock = time.time_ns,
    ) -> Self:
        """Open a cache directory, creating it when it is missing or empty (unless create is False).

        interval is fixed at creation (default 2,048); naming another one later raises IntervalMismatchError. Raises
        NotACacheDirectoryError for a file or a folder of something else, FormatVersionError for a newer format (and
        then touches nothing), UnavailableError when the file system refuses.
        """
        fs = fs or FileSystem()
        layout = Layout(Path(os.path.abspath(os.path.expanduser(path))))
        if interval is not None and not MIN_INTERVAL <= interval <= MAX_INTERVAL:
            raise IntervalMismatchError(
                f"interval must be from {MIN_INTERVAL} to {MAX_INTERVAL} tokens, not {interval}"
            )
        try:
            config = _read_config(fs, layout)
            if config is None:
                _check_free(layout, create)
                config = _create(fs, layout, interval or DEFAULT_INTERVAL, clock)
            elif create and config.get("format") == FORMAT:
                _complete(fs, layout)
        except OSError as error:
            raise unavailable(layout.root, error) from error
        found = _interval(layout, config)
        if interval is not None and interval != found:
            raise IntervalMismatchError(
                f"{layout.root} was created with an interval of {found} tokens, not {interval}; "
                f"use {found} or another directory"
            )
        return cls(Context(layout, fs, found, clock, f"kvstore {__version__}"))

    @property
    def path(self) -> Path:
        """The cache directory."""
        return self._context.layout.root

    @property
    def interval(self) -> int:
        """Tokens a chunk."""
        return self._context.interval

    @property
    def counters(self) -> Counters:
        """What happened through this object since it was opened."""
        return self._context.counters

    @property
    def context(self) -> Context:
        """For the modules of kvstore that work on a whole directory (gc, listing)."""
        return self._context

    def namespace(self, info: NamespaceInfo) -> Namespace:
        """A namespace of this directory. Nothing is written before something is published into it."""
        return Namespace(Space(self._context, info))

    def tokenizations(self, scope: bytes) -> Tokenizations:
        """Saved tokenizations of whole requests; scope is everything of the tokenizer that decides tokens."""
        return Tokenizations(self._context, scope)

    def check_writable(self) -> None:
        """Raise UnavailableError now when nothing can be written, rather than at the first publish."""
        try:
            fd, path = self._context.staging.create()
            try:
                self._context.fs.allocate(fd, 1 << 16)
                self._context.fs.write(fd, [bytes(4096)])
            finally:
                os.close(fd)
                self._context.staging.discard(path)
            with publish_lock(self._context.layout):
                pass
        except OSError as error:
            raise unavailable(self.path, error) from error

    def close(self) -> None:
        """Remove this process's staging folder. The object must not be used afterwards."""
        self._context.staging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Namespace:
    """One namespace of a store: look prefixes up, read them, publish them."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._described = False

    @property
    def id(self) -> str:
        """The namespace's folder name: 32 hex digits of its fingerprint."""
        return self._space.id

    @property
    def interval(self) -> int:
        """Tokens a chunk."""
        return self._space.context.interval

    def lookup(self, tokens: Iterable[int] | bytes, *, trimmable: bool = True) -> Match:
        """The longest saved prefix of these tokens; match.count is 0 when there is none. Never raises OSError.

        trimmable False is for engines whose caches cannot be cut at any token: the match ends at a boundary state.
        """
        return find(self._space, pack_tokens(tokens), trimmable=trimmable)

    def read(self, match: Match, allocate: Allocate, threads: int = THREADS) -> Restored:
        """Read a match into memory that allocate provides, every digest checked. Never raises for a bad file."""
        return read(match, allocate, threads)

    def read_state(self, match: Match, allocate: AllocateState) -> dict[str, Scalar] | None:
        """Read the boundary state at the end of a match; its values, or None when there is no good one."""
        return read_state(self._space, match.steps[-1], allocate) if match.steps and match.exact else None

    def publish(self, tokens: Iterable[int] | bytes, spans: Sequence[Span]) -> Published:
        """Publish KV of consecutive spans of a prompt; see kvstore.publish for the rules and errors.

        OSError becomes UnavailableError. Every failure is counted before it is raised.
        """
        with self._publishing():
            return publish(self._space, pack_tokens(tokens), spans)

    def publish_state(self, tokens: Iterable[int] | bytes, state: State) -> Published:
        """Publish the boundary state at the end of these tokens, whose spans were published before."""
        with self._publishing():
            return publish_state(self._space, pack_tokens(tokens), state)

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        context = self._space.context
        try:
            self._describe()
            yield
        except OSError as error:
            context.counters.add(failed_publishes=1)
            raise unavailable(context.layout.root, error) from error
        except KVStoreError:
            context.counters.add(failed_publishes=1)
            raise

    def _describe(self) -> None:
        """Write the namespace's description once, for people: `ls` shows it, nothing needs it."""
        if self._described:
            return
        context = self._space.context
        path = context.layout.namespace_file(self.id)
        if not path.exists():
            _write_file(context, path, self._space.info.document(context.clock() / 1e9))
        self._described = True


def unavailable(path: Path, error: OSError) -> UnavailableError:
    """The sentence for people that goes with an operating system error."""
    advice = {
        errno.ENOSPC: "the disk is full; free some space or lower the budget",
        errno.EDQUOT: "your disk quota is used up; free some space or lower the budget",
        errno.EROFS: "it is on a read-only file system; choose another directory",
        errno.EACCES: "permission denied; choose a directory you may write to",
        errno.EPERM: "permission denied; choose a directory you may write to",
        errno.ENOENT: "it, or the folder above it, does not exist; create it or check that its volume is mounted",
        errno.ENOTDIR: "a part of the path is a file; choose another directory",
    }.get(error.errno or 0, f"{error.strerror or error}; check the disk")
    return UnavailableError(f"cannot use the cache directory {path}: {advice}")


def _read_config(fs: FileSystem, layout: Layout) -> dict[str, Any] | None:
    """kvstore.json, or None when there is none. Never trusts its shape."""
    try:
        data, _ = fs.read_file(layout.config, _CONFIG_LIMIT)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise NotACacheDirectoryError(f"{layout.root} is a file; name a directory") from None
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not isinstance(config.get("format"), int):
        raise NotACacheDirectoryError(
            f"{layout.config} cannot be read; restore it from a copy, or move the directory away and start anew"
        )
    return config


def _interval(layout: Layout, config: dict[str, Any]) -> int:
    if config["format"] != FORMAT:
        raise FormatVersionError(
            f"{layout.root} has format {config['format']}, and this kvstore knows format {FORMAT}; "
            "upgrade kvstore or use another directory"
        )
    interval = config.get("interval")
    if not isinstance(interval, int) or not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        raise NotACacheDirectoryError(f"{layout.config} has no usable interval; restore it from a copy")
    return interval


def _check_free(layout: Layout, create: bool) -> None:
    """Creating is for a missing or empty folder, or one where a creation was cut off; anything else is not ours."""
    if not create:
        raise NotACacheDirectoryError(f"{layout.root} is not a cache directory; check the path")
    with suppress(FileNotFoundError):
        ours = {folder.relative_to(layout.root).parts[0] for folder in layout.folders} | {layout.tag.name}
        others = sorted(name for name in os.listdir(layout.root) if name not in ours and not name.startswith("."))
        if others:
            raise NotACacheDirectoryError(
                f"{layout.root} holds other files ({others[0]}) and is not a cache directory; name an empty or new one"
            )


def _create(fs: FileSystem, layout: Layout, interval: int, clock: Clock) -> dict[str, Any]:
    """Make the tree, kvstore.json last: it is what makes a folder a cache directory. Two processes may both be here."""
    for missing in reversed([layout.root, *layout.root.parents]):
        if not missing.exists():
            fs.make_dir(missing)
    for folder in layout.folders:
        fs.make_dir(folder)
    context = Context(layout, fs, interval, clock, "")
    config = {"format": FORMAT, "interval": interval, "created": clock() / 1e9, "writer": f"kvstore {__version__}"}
    try:
        with publish_lock(layout):
            found = _read_config(fs, layout)
            if found is None:
                _write_file(context, layout.tag, _CACHEDIR_TAG)
                _write_file(context, layout.config, json.dumps(config, indent=2).encode() + b"\n")
                found = config
    finally:
        context.staging.close()
    return found


def _complete(fs: FileSystem, layout: Layout) -> None:
    """Make folders that a copy left out because they were empty. What cannot be written can still be read."""
    for folder in layout.folders:
        if not folder.is_dir():
            with suppress(OSError):
                fs.make_dir(folder)


def _write_file(context: Context, path: Path, data: bytes) -> None:
    """A small file, whole or not at all."""
    fd, staged = context.staging.create()
    try:
        context.fs.write(fd, [data])
        context.fs.sync_file(fd)
    finally:
        os.close(fd)
    context.fs.rename(staged, path)
    context.fs.sync_dir(path.parent)
