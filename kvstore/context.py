"""What every operation on one open cache directory shares: paths, system calls, clock, counters, staging.

Passed down explicitly, so that a test can run any operation with its own clock and file system.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

from kvstore import macos
from kvstore.forks import renew_in_forks
from kvstore.fs import FileSystem
from kvstore.keys import Key, root_key
from kvstore.layout import NAME_KEY_BYTES, Layout
from kvstore.namespace import NamespaceInfo
from kvstore.pacing import Pace

__all__ = ["FUTURE_NS", "Clock", "Context", "Counters", "Owner", "Space", "Staging", "remove_staged", "this_process"]

_MAX_RECENT = 16384
"""Manifests remembered as used: hundreds of long prompts, a few megabytes."""

Clock: TypeAlias = Callable[[], int]
"""Nanoseconds since the epoch, as time.time_ns gives them."""

FUTURE_NS = 3600 * 10**9
"""A time this far ahead of the clock may still be a true one: two machines' clocks differ, and a collection goes by the
time of its beginning. One further ahead says nothing: it is from before the clock was set back."""


@dataclass(eq=False)
class Counters:
    """What happened since the directory was opened; every silent fallback of the read and write paths counts here.

    A fork goes on from what its parent had counted.
    """

    lookups: int = 0
    hits: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    damaged: int = 0
    missing: int = 0
    published_nodes: int = 0
    written_bytes: int = 0
    failed_publishes: int = 0
    saved_tokens: int = 0
    refused_prompts: int = 0
    collected_nodes: int = 0
    collected_bytes: int = 0
    _refused: dict[str, int] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks."""
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def refuse(self, reason: str) -> None:
        """Count a prompt that is not written from some point on. The reason has its name from whoever refused it."""
        with self._lock:
            self.refused_prompts += 1
            self._refused[reason] = self._refused.get(reason, 0) + 1

    def refused(self) -> dict[str, int]:
        """Prompts that were not written from some point on, by reason."""
        with self._lock:
            return dict(self._refused)

    def snapshot(self) -> dict[str, int]:
        """All counters at one moment."""
        with self._lock:
            return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}


@dataclass(frozen=True)
class Owner:
    """The process that a staging folder belongs to, as its name says: ``<host>.<boot>.<pid>.<8 hex>``."""

    host: str
    boot: str
    pid: int

    @staticmethod
    def parse(folder: str) -> Owner | None:
        """The owner in a folder name, or None when the name is not one of ours."""
        match = re.fullmatch(r"([a-z0-9_-]{1,40})\.([0-9a-f]{1,32})\.([0-9]{1,10})\.[0-9a-f]{8}", folder)
        return Owner(match[1], match[2], int(match[3])) if match else None

    def surely_gone(self) -> bool:
        """Whether the owner cannot be running: same host, and another boot or no such process.

        A process of another host (a shared volume) is never surely gone; its folder is reclaimed by age alone.
        """
        me = this_process()
        if self.host != me.host:
            return False
        if self.boot != me.boot:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def this_process() -> Owner:
    """This process as an owner."""
    host = re.sub(r"[^a-z0-9_-]", "_", platform.node().lower())[:40] or "localhost"
    return Owner(host, _boot(), os.getpid())


@cache
def _boot() -> str:
    """What tells this run of the system from those before it, whose process numbers mean nothing any more; "0" where
    nothing does.
    """
    try:
        if sys.platform == "darwin":
            found = macos.boot_session()
        else:
            found = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return "0"
    digits = found.strip().replace("-", "").lower()
    return digits if re.fullmatch("[0-9a-f]{1,32}", digits) else "0"


class Staging:
    """This process's folder below tmp/, made at the first write and removed at close.

    A fork of the process takes a folder of its own: both would give their files the same numbers, and whoever closes
    first would remove what the other writes.
    """

    def __init__(self, layout: Layout, fs: FileSystem) -> None:
        self._layout = layout
        self._fs = fs
        self._folder: Path | None = None
        self._next = 0
        self._lock = threading.Lock()
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks."""
        self._lock = threading.Lock()
        self._folder = None

    def create(self) -> tuple[int, Path]:
        """A new empty file to write, and its path. A folder that somebody cleaned away is made again."""
        with self._lock:
            self._next += 1
            if self._folder is None:
                me = this_process()
                # Known before it is made: if that fails halfway (made and not synced), close still removes it.
                self._folder = self._layout.tmp / f"{me.host}.{me.boot}.{me.pid}.{secrets.token_hex(4)}"
                self._fs.make_dir(self._folder)
            path = self._folder / f"{self._next:x}"
            try:
                return self._fs.create(path), path
            except FileNotFoundError:
                self._fs.make_dir(self._folder)
                return self._fs.create(path), path

    def discard(self, path: Path) -> None:
        """Remove a staged file that will not be published."""
        with suppress(OSError):
            self._fs.unlink(path)

    def close(self) -> None:
        """Remove the folder with anything that a failed write left in it."""
        with self._lock:
            folder, self._folder = self._folder, None
            if folder is None:
                return
            with suppress(OSError):
                remove_staged(self._fs, folder)


def remove_staged(fs: FileSystem, folder: Path, is_staged: Callable[[str], object] = lambda _name: True) -> None:
    """Remove a staging folder. A name that cannot go (a folder that a file server made) keeps the folder, and nothing
    else in it: the first OSError of such a name is raised when all were tried.
    """
    stuck: OSError | None = None
    for name in filter(is_staged, os.listdir(folder)):
        try:
            fs.unlink(folder / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            stuck = stuck or error
    if stuck is not None:
        raise stuck
    fs.remove_dir(folder)


@dataclass(eq=False)
class _Reads:
    """Manifests that threads read just now, by who reads them."""

    held: dict[object, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks: those threads are the parent's."""
        self.held.clear()


@dataclass(frozen=True)
class Context:
    """One open cache directory.

    damaged: block and manifest paths that this process found damaged. They stay where they are until a publish holds
    the right bytes and replaces them; a reader never changes the directory (a copy into it may still be under way).
    recent: manifests that this process looked up, restored or published, and when; a collection leaves the newest
    alone, and those that it reads just now. (By their paths as strings, because a lookup notes each.) pace: how much of
    its time a publish may take.
    """

    layout: Layout
    fs: FileSystem
    interval: int
    clock: Clock
    writer: str
    counters: Counters = field(default_factory=Counters)
    damaged: set[Path] = field(default_factory=set)
    recent: dict[str, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    _reads: _Reads = field(default_factory=_Reads)

    def note_use(self, paths: Iterable[str]) -> None:
        """Remember that this process used manifests just now; the oldest are forgotten beyond some thousands."""
        now = self.clock()
        for path in paths:
            self.recent.pop(path, None)
            self.recent[path] = now
        if len(self.recent) > _MAX_RECENT:
            for oldest in list(self.recent)[: _MAX_RECENT // 2]:
                self.recent.pop(oldest, None)

    @contextmanager
    def reading(self, paths: Iterable[str]) -> Iterator[None]:
        """Manifests that are read here, with what they name: used from now until a while after, however long it takes.

        Blocks are opened some at a time, and those that are not open yet have only their names to live by.
        """
        held = frozenset(paths)
        me = object()
        try:
            # In here: an interrupt before the try would keep them from every collection of this process.
            self._reads.held[me] = held
            self.note_use(held)
            yield
        finally:
            try:
                self.note_use(held)
            finally:
                self._reads.held.pop(me, None)

    def is_read(self, path: Path) -> bool:
        """Whether some thread reads what a manifest names just now."""
        return any(str(path) in held for held in self._reads.held.copy().values())

    def last_use(self, path: Path, now_ns: int) -> int:
        """When this process used a manifest; 0 when it did not, or at a time that says nothing now (FUTURE_NS)."""
        used = self.recent.get(str(path), 0)
        return used if used <= now_ns + FUTURE_NS else 0

    @cached_property
    def staging(self) -> Staging:
        """Where this process writes files before they get their names."""
        return Staging(self.layout, self.fs)


@dataclass(frozen=True)
class Space:
    """One namespace of one open cache directory."""

    context: Context
    info: NamespaceInfo

    @cached_property
    def fingerprint(self) -> bytes:
        """All 32 bytes of the namespace's fingerprint."""
        return self.info.fingerprint

    @cached_property
    def id(self) -> str:
        """The namespace's folder name."""
        return self.fingerprint[:NAME_KEY_BYTES].hex()

    @cached_property
    def nodes(self) -> str:
        """The folder of this namespace's manifests, as the string that lookups put names behind."""
        return str(self.context.layout.nodes / self.id)

    @cached_property
    def root(self) -> Key:
        """The key of the empty prefix."""
        return root_key(self.fingerprint, self.context.interval)
