"""Hold the publish lock for milliseconds, however much is to be done under it.

A file that loses its name gives its space back at once, unless somebody has it open: most of a removal (0.08 ms for the
smallest file on ext4, 60 ms for 288 MiB), of which others should not have to wait for the end. So files are opened
before the lock is taken, and closed when it is free; under it a name goes in 0.01 ms.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

from kvstore.fs import FileSystem, out_of_files
from kvstore.locks import POLL_S

__all__ = ["ShortHolds", "kept_open"]

_AT_ONCE = 128
"""Files opened for one hold, at most: removing them takes about three milliseconds."""

_HOLD_S = 0.005
"""No item more is begun under one hold after this long: a slow disk, or large files that cannot be opened."""

_FREE_S = POLL_S + 0.001
"""The lock is free at least this long between two holds, and at least as long as it was held: those who wait for it ask
every POLL_S, and would otherwise find it always taken."""

_T = TypeVar("_T")
_Ready: TypeAlias = tuple[_T, list[int]]
"""An item, and descriptors of what loses its name by it."""


@contextmanager
def kept_open(fs: FileSystem, path: Path) -> Iterator[None]:
    """Keep a file open that is about to lose its name: to be entered before the lock is taken.

    What cannot be opened (another user's, gone, a FIFO in its place) gives its space back under the lock.
    """
    try:
        fd = fs.open_fd(path)[0]
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # It is closed all the same, and nothing was written to it.
            fs.close(fd)


class ShortHolds:
    """Work through items under a lock that is let go now and then. lock: takes it; None to do the same without it, and
    with nothing opened: a dry run. between: called when it is free.
    """

    def __init__(
        self,
        fs: FileSystem,
        lock: Callable[[], AbstractContextManager[None]] | None,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        self._fs = fs
        self._lock = lock
        self._between = between
        self.at_once = _at_once()

    @contextmanager
    def over(self, items: Sequence[_T], paths: Callable[[_T], Iterable[Path | str]]) -> Iterator[Iterator[_T]]:
        """Iterate over items with the lock held. paths: the files that may lose their names by an item."""
        with closing(self._turns(items, paths)) as turns:
            yield turns

    def _turns(self, items: Sequence[_T], paths: Callable[[_T], Iterable[Path | str]]) -> Generator[_T, None, None]:
        todo = deque(items)
        ready: list[_Ready[_T]] = []
        try:
            while todo or ready:
                self._open(todo, paths, ready)
                done = 0
                with nullcontext() if self._lock is None else self._lock():
                    began = time.monotonic()
                    for item, _ in ready:
                        done += 1
                        yield item
                        if time.monotonic() - began > _HOLD_S:
                            break
                ended = time.monotonic()
                self._close(ready[:done])
                del ready[:done]
                self._between()
                if self._lock is not None:
                    time.sleep(max(0.0, ended + max(_FREE_S, ended - began) - time.monotonic()))
        finally:
            self._close(ready)

    def _open(self, todo: deque[_T], paths: Callable[[_T], Iterable[Path | str]], ready: list[_Ready[_T]]) -> None:
        """Open the files of the next items, as many as there may be at once."""
        while todo and len(ready) < self.at_once:
            ready.append((todo.popleft(), opened := []))
            for path in () if self._lock is None else paths(ready[-1][0]):
                try:
                    opened.append(self._fs.open_fd(path)[0])
                except OSError as error:
                    # As in kept_open.
                    if out_of_files(error):
                        self._make_do(todo, ready)
                        return

    def _make_do(self, todo: deque[_T], ready: list[_Ready[_T]]) -> None:
        """Use half of the descriptors that there were, from now on: others of this process need some."""
        self.at_once = max(1, len(ready) // 2)
        back = ready[self.at_once :]
        del ready[self.at_once :]
        self._close(back)
        todo.extendleft(item for item, _ in reversed(back))

    def _close(self, ready: Iterable[_Ready[_T]]) -> None:
        for _, opened in ready:
            while opened:
                with suppress(OSError):  # As in kept_open.
                    self._fs.close(opened.pop())


def _at_once() -> int:
    """Files to have open at once. On macOS a process may have 256, and a server's readers need theirs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _AT_ONCE if limit == resource.RLIM_INFINITY else max(1, min(_AT_ONCE, limit // 8))
