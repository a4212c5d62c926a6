"""Folders of a cache directory, read for all that is in them: what a scan of a million files spends its time in.

Folders are read relative to their descriptor, and files come out as plain tuples (5 us a file). Reads only, opens no
file, follows no link. What vanishes meanwhile is passed over; OSError is raised for anything else that cannot be seen.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvstore.fs import allocated_bytes

__all__ = ["File", "Tally", "count_foreign", "entries", "files", "tree"]

_BATCH = 64
"""Files between two rests."""

File: TypeAlias = tuple[str, int, int, int, int, int]
"""Name, size, allocated bytes, mtime, ctime and inode; times in nanoseconds since the epoch."""


@dataclass(slots=True)
class Tally:
    """What a pass adds up on its way. allocated: bytes on disk, folders included. foreign: files that are not ours.

    hidden: folders of manifests, among the foreign, that only a lookup where case is folded would find. files: regular
    ones in the folders that are ours; told: called with that number, a folder at a time. rest: called every few files.
    """

    allocated: int = 0
    foreign: int = 0
    hidden: int = 0
    files: int = 0
    told: Callable[[int], None] = field(default=lambda _: None, repr=False, compare=False)
    rest: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)


def files(folder: Path, tally: Tally) -> list[File]:
    """A folder's regular files. Anything else is foreign.

    The loop that a scan consists of: a list, because a generator's turn a file would cost as much as the rest; and
    names with a stat each, because a directory entry, which keeps what it was told, takes a tenth longer.
    """
    found = []
    total, is_regular, look = 0, stat.S_ISREG, os.lstat
    with _opened(folder, tally) as fd:
        for names in _batches(fd, tally.rest):
            for name in names:
                try:
                    seen = look(name, dir_fd=fd)
                except FileNotFoundError:
                    continue
                if is_regular(seen.st_mode):
                    allocated = seen.st_blocks * 512
                    total += allocated
                    found.append((name, seen.st_size, allocated, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino))
                else:
                    _count_as_foreign(folder / name, seen, tally)
    tally.allocated += total
    tally.files += len(found)
    tally.told(tally.files)
    return found


def _batches(fd: int | None, rest: Callable[[], None]) -> Iterator[list[str]]:
    """The names in a folder, with a chance to rest before each few of them; none without a folder."""
    names = [] if fd is None else os.listdir(fd)
    for at in range(0, len(names), _BATCH):
        rest()
        yield names[at : at + _BATCH]


@contextmanager
def _opened(folder: Path, tally: Tally) -> Iterator[int | None]:
    """A folder's descriptor, relative to which a stat walks one name instead of seven; None when the folder vanished.
    It is counted itself.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        tally.allocated += allocated_bytes(os.fstat(fd))
        yield fd
    finally:
        os.close(fd)


def entries(folder: Path, tally: Tally) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder, which itself is counted; none when it vanished. Raises OSError before the first."""
    with _opened(folder, tally) as fd:
        if fd is not None:
            with os.scandir(fd) as found:
                yield from found


def count_foreign(entry: os.DirEntry[str], above: Path, tally: Tally) -> None:
    """Count what is not ours, with all that is below it."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        tally.foreign += 1
        return
    _count_as_foreign(above / entry.name, status, tally)


def _count_as_foreign(path: Path, status: os.stat_result, tally: Tally) -> None:
    tally.foreign += 1
    tally.allocated += tree(path) if stat.S_ISDIR(status.st_mode) else allocated_bytes(status)


def tree(root: Path, rest: Callable[[], None] = lambda: None) -> int:
    """Allocated bytes of a folder and all below it, by a stack: the depth of a foreign tree is not ours to trust."""
    tally = Tally()
    stack = [root]
    while stack:
        folder = stack.pop()
        rest()
        for entry in _readable(folder, tally):
            try:
                if entry.is_dir(follow_symlinks=False):
                    stack.append(folder / entry.name)
                else:
                    tally.allocated += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return tally.allocated


def _readable(folder: Path, tally: Tally) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder; none when this user may not look. An external drive has such folders of the system's own,
    and nothing of ours is in them: where something is, the pass over our own folders raises.
    """
    with suppress(PermissionError):
        yield from entries(folder, tally)
