"""Memory for copies on their way to the disk, used again and again.

A chunk of an 8B model is 288 MiB. New memory for each costs more than the copy itself, because the first touch of a
page is slow (`bench publish` measures both), and all of it is spent on the generation thread. So copies lie in one
region that is as large as what may be queued, handed out first fit: the lowest addresses, which are warm, first. Only
what was ever lent at once is resident, and all of it goes back to the system when nothing was lent for a while.

Plain bytes, no MLX: lent on the generation thread, given back on the writer's.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from kvstore.forks import renew_in_forks

__all__ = ["Loan", "Pool"]

_LINE = 64
_TOUCH_BYTES = 1 << 20


class Loan:
    """Some of a pool's memory, contiguous, until it is given back and nobody looks at it any more.

    Copies are put into it one after the other: take gives the place of the next one.
    """

    def __init__(self, memory: Any) -> None:
        self._view = memoryview(memory).cast("B")
        self._size = self._view.nbytes
        self._taken = 0
        self._parts: list[memoryview] = []

    def take(self, size: int) -> memoryview:
        """The next size bytes; ValueError when so many were not lent."""
        end = self._taken + size
        if end > self._size:
            raise ValueError(f"{size} bytes more than {self._taken} of the {self._size} that were lent")
        part = self._view[self._taken : end]
        self._taken = end
        self._parts.append(part)
        return part

    def give_back(self) -> None:
        """Let others use the memory. The parts can no longer be read: those would be somebody else's bytes.

        What still looks at a part through an object of its own (numpy's) goes on seeing these, and they are lent again
        when that is gone.
        """
        for part in self._parts:
            part.release()
        self._view.release()

    def __del__(self) -> None:
        """For a loan that was forgotten, when copying into it failed."""
        self.give_back()


class Pool:
    """At most limit bytes, lent in pieces. phase: where in a cache line each piece begins (address_phase)."""

    def __init__(self, limit: int, phase: int = 0) -> None:
        self._limit = _lines(limit)
        self._phase = phase % _LINE
        self._region: mmap.mmap | None = None
        self._lent: dict[int, int] = {}
        self._returned: deque[int] = deque()
        self._touched = 0
        self._lock = threading.Lock()
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks. The region is the parent's: what is written to it in one of them is seen in both."""
        self._lock = threading.Lock()
        self._region, self._lent, self._returned, self._touched = None, {}, deque(), 0

    @property
    def lent(self) -> int:
        """Bytes that are lent just now, in whole cache lines."""
        with self._lock:
            self._settle()
            return sum(end - begin for begin, end in self._lent.items())

    @property
    def resident(self) -> int:
        """Bytes that were ever touched since the last trim: what the pool adds to the process at most."""
        return self._touched

    def lend(self, size: int) -> Loan | None:
        """Memory for size bytes; None when that is not there now. Never waits.

        While nothing is lent any size is granted: what is larger than the pool gets memory of its own.
        """
        need = _lines(max(size, 1))
        with self._lock:
            self._settle()
            if need > self._limit and self._lent:
                return None
            try:
                if need > self._limit:
                    region, begin = mmap.mmap(-1, need + _LINE), 0
                else:
                    begin = next((at for at, end in self._gaps() if end - at >= need), -1)
                    if begin < 0:
                        return None
                    region = self._region = self._region or mmap.mmap(-1, self._limit + _LINE)
                    self._touched = max(self._touched, begin + need)
            except OSError:
                return None  # No address space; the caller's next boundary asks again.
            self._lent[begin] = begin + need
        memory = (ctypes.c_ubyte * size).from_buffer(region, begin + self._phase)
        # Whatever looks at the memory, a view of a view too, holds this object: with it goes the last look.
        weakref.finalize(memory, self._returned.append, begin).atexit = False
        return Loan(memory)

    def warm(self, size: int) -> None:
        """Touch what the next size bytes will be lent from, a little at a time, so that the copy need not.

        For another thread than the one that copies, which is not kept from computing: reading zeros lets go of the
        interpreter's lock. Memory that is lent meanwhile is left alone.
        """
        end = min(_lines(size), self._limit)
        at = self._touched
        with suppress(OSError), open("/dev/zero", "rb", buffering=0) as zeros:
            while at < end:
                stop = min(at + _TOUCH_BYTES, end)
                with self._lock:
                    self._settle()
                    self._region = self._region or mmap.mmap(-1, self._limit + _LINE)
                    if not any(begin < stop and at < lent_end for begin, lent_end in self._lent.items()):
                        with memoryview(self._region) as whole, whole[at + self._phase : stop + self._phase] as pages:
                            zeros.readinto(pages)
                    self._touched = max(self._touched, stop)
                at = stop

    def trim(self) -> None:
        """Give all memory back to the system, unless some of it is lent.

        Not under the lock: 900 MiB take half a second, and the generation thread would wait for it to be lent some.
        """
        with self._lock:
            self._settle()
            gone = None
            if not self._lent:
                gone, self._region, self._touched = self._region, None, 0
        del gone  # Without the interpreter's lock, too.

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """What is not lent, lowest first."""
        ranges = [(0, 0), *sorted(self._lent.items()), (self._limit, self._limit)]
        return ((end, begin) for (_, end), (begin, _) in pairwise(ranges))

    def _settle(self) -> None:
        """Note what came back. Under the lock; what comes back does not take it: that may be while it is held."""
        while self._returned:
            del self._lent[self._returned.popleft()]


def _lines(size: int) -> int:
    """Bytes in whole cache lines, so that every loan has the same alignment."""
    return -(-size // _LINE) * _LINE
