"""Remove files in short holds of the publish lock (kvstore.holds), and only those that are still as they were seen.

How files go; which, is the business of gc. Every removal of a collection passes through here: a dry run is the same
walk with nothing removed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, TypeAlias, TypeVar

from kvstore.context import Context, remove_staged
from kvstore.fs import allocated_bytes
from kvstore.holds import ShortHolds
from kvstore.layout import Layout
from kvstore.locks import publish_lock
from kvstore.marking import Marks
from kvstore.pacing import paced
from kvstore.scan import HashedFile, NodeFile

__all__ = ["Doomed", "Pause", "Sweeper", "batches", "changed", "in_disk_order", "path_of"]

Pause: TypeAlias = Callable[[str], None]
"""Called with the name of the point that a collection has reached; a test makes something happen there."""

_PASSED_OVER = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EISDIR, errno.ENOTEMPTY, errno.ENOTDIR}
"""What concerns one file only (another user's, or a folder in its place); anything else is the disk's and ends it."""

_T = TypeVar("_T")


class Doomed(NamedTuple):
    """A file to remove, if its times are still those that were seen."""

    path: Path
    allocated: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def node(layout: Layout, file: NodeFile) -> Doomed:
        """A manifest."""
        return Doomed(file.path(layout), file.allocated, file.mtime_ns, file.ctime_ns)

    @staticmethod
    def hashed(folder: Path, file: HashedFile) -> Doomed:
        """A block or a tokenization."""
        name = file.name
        return Doomed(Path(f"{folder}/{name[:2]}/{name}"), file.allocated, file.mtime_ns, file.ctime_ns)


class Sweeper:
    """Removes files and counts: freed bytes on disk, files skipped because they changed, and those it failed at.

    told: called with freed bytes after each hold of the lock, and rest then, too: never while it is held.
    """

    def __init__(
        self,
        context: Context,
        pause: Pause,
        *,
        dry_run: bool,
        told: Callable[[int], None] = lambda _: None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._pause = pause
        self._told = told
        self._rest = rest
        self.dry_run = dry_run
        self.freed = 0
        self.skipped = 0
        self.failed = 0
        self._holds = ShortHolds(context.fs, None if dry_run else self.lock, self._between)

    def lock(self) -> AbstractContextManager[None]:
        """The publish lock."""
        return nullcontext() if self.dry_run else publish_lock(self._context.layout)

    def in_short_holds(
        self, items: Sequence[_T], paths: Callable[[_T], Iterable[Path | str]]
    ) -> AbstractContextManager[Iterator[_T]]:
        """Iterate over items with the publish lock held now and then; paths: the files that an item may remove."""
        return self._holds.over(items, paths)

    def _between(self) -> None:
        self._pause("batch")
        self._told(self.freed)
        self._rest()

    def remove(self, file: Doomed) -> bool:
        """Remove a file that did not change, with the lock held. True when it is gone, whoever removed it."""
        if not self.dry_run:
            try:
                if changed(file):
                    self.skipped += 1
                    return False
                self._context.fs.unlink(file.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                self.fail(error)
                return False
            if self._context.damaged:
                self._context.damaged.discard(file.path)
        self.freed += file.allocated
        return True

    def remove_all(self, files: Sequence[Doomed]) -> int:
        """Remove files that nothing refers to; how many went."""
        with self.in_short_holds(files, path_of) as held:
            return sum(self.remove(file) for file in held)

    def remove_folder(self, path: Path, allocated: int) -> bool:
        """Remove a staging folder and its files, or what of it can go; it belongs to nobody, so no lock is needed."""
        before = _files_in(path)
        try:
            if not self.dry_run:
                remove_staged(self._context.fs, path)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.freed += before - _files_in(path)
            self.fail(error)
            return False
        self.freed += allocated
        return True

    def sync(self, folder: Path) -> None:
        """Make removals in a folder durable."""
        if not self.dry_run:
            self._context.fs.sync_dir(folder)

    def fail(self, error: OSError) -> None:
        """Count what could not be removed; raises the error when it is not about that file alone."""
        if error.errno not in _PASSED_OVER:
            raise error
        self.failed += 1


def _files_in(folder: Path) -> int:
    """Bytes on disk of the files in a folder; 0 when somebody else removes it."""
    try:
        with os.scandir(folder) as entries:
            inside = [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return 0
    return sum(allocated_bytes(status) for status in inside if S_ISREG(status.st_mode))


def path_of(file: Doomed) -> tuple[Path]:
    """For Sweeper.in_short_holds."""
    return (file.path,)


def changed(file: Doomed) -> bool:
    """Whether a file was touched or replaced since it was looked at. One that is gone is not. Raises OSError."""
    try:
        status = os.lstat(file.path)
    except FileNotFoundError:
        return False
    return (status.st_mtime_ns, status.st_ctime_ns) != (file.mtime_ns, file.ctime_ns)


def in_disk_order(victims: Sequence[int], marks: Marks, rest: Callable[[], None] = lambda: None) -> list[int]:
    """The same victims, last inode first, but children before their parents and states before their KV all the same.

    Neighbours on disk share the metadata that a removal writes: four times as fast on ext4 as in the order of use. A
    child was written after its parent as a rule, so the one order hardly disturbs the other. rest is called every few.
    """
    files = {index: marks.nodes[index].file for index in victims}
    # What must go before a file, by the name of a node (for both of its files) or with the kind behind it.
    before: dict[str, list[int]] = {}
    for index, file in paced(files.items(), rest):
        before.setdefault(file.above, []).append(index)
        if file.kind == "state":
            before.setdefault(file.place + "kv", []).append(index)
    order: list[int] = []
    begun: set[int] = set()
    done: set[int] = set()
    for last in paced(sorted(victims, key=lambda index: files[index].inode, reverse=True), rest):
        stack = [last]
        while stack:
            index = stack.pop()
            if index not in begun:
                begun.add(index)
                name = files[index].place
                first = (*before.get(name, ()), *before.get(name + files[index].kind, ()))
                # What has begun is done, or waits for this one: names can be forged into a circle.
                stack += [index, *(each for each in first if each not in begun)]
            elif index not in done:
                done.add(index)
                order.append(index)
    return order


def batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """Items in runs of at most size."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
