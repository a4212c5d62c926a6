"""Remove files in short holds of the publish lock, and only those that are still as they were seen.

How files go; which, is the business of gc. Every removal of a collection passes through here: a dry run is the same
walk with nothing removed.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from kvstore.context import Context
from kvstore.fs import out_of_files
from kvstore.layout import Layout
from kvstore.locks import POLL_S, publish_lock
from kvstore.marking import Marks
from kvstore.scan import HashedFile, NodeFile

__all__ = ["Doomed", "Pause", "Sweeper", "batches", "changed", "in_disk_order", "path_of"]

Pause: TypeAlias = Callable[[str], None]
"""Called with the name of the point that a collection has reached; a test makes something happen there."""

_AT_ONCE = 128
"""Files removed under one hold of the publish lock, at most: about three milliseconds."""

_HOLD_S = 0.005
"""No file more is begun under one hold after this long: a slow disk, or large files that cannot be opened."""

_FREE_S = POLL_S + 0.001
"""The lock is free at least this long between two holds, and at least as long as it was held: those who wait for it ask
every POLL_S, and would otherwise find it always taken."""

_PASSED_OVER = {errno.EACCES, errno.EPERM, errno.EBUSY, errno.EISDIR, errno.ENOTEMPTY, errno.ENOTDIR}
"""What concerns one file only (another user's, or a folder in its place); anything else is the disk's and ends it."""

_T = TypeVar("_T")
_Ready: TypeAlias = tuple[_T, list[int]]
"""An item, and descriptors of what it may remove."""


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
    """Removes files and counts: freed bytes on disk, files skipped because they changed, and those it failed at."""

    def __init__(self, context: Context, pause: Pause, *, dry_run: bool) -> None:
        self._context = context
        self._pause = pause
        self.dry_run = dry_run
        self.freed = 0
        self.skipped = 0
        self.failed = 0
        self._at_once = _at_once()

    def lock(self) -> AbstractContextManager[None]:
        """The publish lock."""
        return nullcontext() if self.dry_run else publish_lock(self._context.layout)

    @contextmanager
    def in_short_holds(
        self, items: Sequence[_T], paths: Callable[[_T], Iterable[Path | str]]
    ) -> Iterator[Iterator[_T]]:
        """Iterate over items with the publish lock held, which is let go now and then; paths: what an item may remove.

        Those files are opened before the lock is taken, and closed when it is free. So under it a file only loses its
        name (0.01 ms); giving its space back is most of a removal (0.08 ms for the smallest file on ext4, 60 ms for
        288 MiB), happens at the close, and is the pause that others need anyway.
        """
        with closing(self._turns(items, paths)) as turns:
            yield turns

    def _turns(self, items: Sequence[_T], paths: Callable[[_T], Iterable[Path | str]]) -> Generator[_T, None, None]:
        todo = deque(items)
        ready: list[_Ready[_T]] = []
        try:
            while todo or ready:
                self._open(todo, paths, ready)
                done = 0
                with self.lock():
                    began = time.monotonic()
                    for item, _ in ready:
                        done += 1
                        yield item
                        if time.monotonic() - began > _HOLD_S:
                            break
                ended = time.monotonic()
                self._close(ready[:done])
                del ready[:done]
                self._pause("batch")
                if not self.dry_run:
                    time.sleep(max(0.0, ended + max(_FREE_S, ended - began) - time.monotonic()))
        finally:
            self._close(ready)

    def _open(self, todo: deque[_T], paths: Callable[[_T], Iterable[Path | str]], ready: list[_Ready[_T]]) -> None:
        """Open the files of the next items, as many as there may be at once."""
        while todo and len(ready) < self._at_once:
            ready.append((todo.popleft(), opened := []))
            for path in () if self.dry_run else paths(ready[-1][0]):
                try:
                    opened.append(self._context.fs.open_fd(path)[0])
                except OSError as error:
                    # What cannot be opened (another user's, gone, a FIFO in its place) is removed all the same.
                    if out_of_files(error):
                        self._make_do(todo, ready)
                        return

    def _make_do(self, todo: deque[_T], ready: list[_Ready[_T]]) -> None:
        """Use half of the descriptors that there were, from now on: others of this process need some."""
        self._at_once = max(1, len(ready) // 2)
        back = ready[self._at_once :]
        del ready[self._at_once :]
        self._close(back)
        todo.extendleft(item for item, _ in reversed(back))

    def _close(self, ready: Iterable[_Ready[_T]]) -> None:
        for _, opened in ready:
            while opened:
                with suppress(OSError):  # It is closed all the same, and nothing was written to it.
                    self._context.fs.close(opened.pop())

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
        """Remove a staging folder and its files; it belongs to nobody, so no lock is needed."""
        try:
            if not self.dry_run:
                for name in os.listdir(path):
                    self._context.fs.unlink(path / name)
                self._context.fs.remove_dir(path)
        except FileNotFoundError:
            return False
        except OSError as error:
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


def path_of(file: Doomed) -> tuple[Path]:
    """For Sweeper.in_short_holds."""
    return (file.path,)


def _at_once() -> int:
    """Files to have open at once. On macOS a process may have 256, and a server's readers need theirs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _AT_ONCE if limit == resource.RLIM_INFINITY else max(1, min(_AT_ONCE, limit // 8))


def changed(file: Doomed) -> bool:
    """Whether a file was touched or replaced since it was looked at. One that is gone is not. Raises OSError."""
    try:
        status = os.lstat(file.path)
    except FileNotFoundError:
        return False
    return (status.st_mtime_ns, status.st_ctime_ns) != (file.mtime_ns, file.ctime_ns)


def in_disk_order(victims: Sequence[int], marks: Marks) -> list[int]:
    """The same victims, last inode first, but children before their parents and states before their KV all the same.

    Neighbours on disk share the metadata that a removal writes: four times as fast on ext4 as in the order of use. A
    child was written after its parent as a rule, so the one order hardly disturbs the other.
    """
    files = {index: marks.nodes[index].file for index in victims}
    # What must go before a file, by the name of a node (for both of its files) or with the kind behind it.
    before: dict[str, list[int]] = {}
    for index, file in files.items():
        before.setdefault(file.namespace + file.parent, []).append(index)
        if file.kind == "state":
            before.setdefault(file.namespace + file.key + "kv", []).append(index)
    order: list[int] = []
    begun: set[int] = set()
    done: set[int] = set()
    for last in sorted(victims, key=lambda index: files[index].inode, reverse=True):
        stack = [last]
        while stack:
            index = stack.pop()
            if index not in begun:
                begun.add(index)
                name = files[index].namespace + files[index].key
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
