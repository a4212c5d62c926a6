"""Two settings of the interpreter that all threads share, changed while it matters: turns, and the search for cycles.

A restore wants short turns. Reading and hashing let go of the interpreter's lock at each run of a head, because the
file's order is another than the memory's: 864 times for a chunk of an 8B model. Beside a thread that computes in
Python, as one that parses requests does, each of them costs a turn of that thread's: 5 ms, unless
`sys.setswitchinterval` says otherwise.

A pass over a whole directory wants no search for cycles among all objects: it makes a tuple a file and no cycle, and
each such search walks all of them with the lock held, 1.4 s at 240,000 nodes, in which no other thread runs. The young
objects are searched as ever, because beside an engine at work a pass rests and takes minutes.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvstore.forks import renew_in_forks

__all__ = ["TURN_S", "no_full_search_for_cycles", "short_turns"]

TURN_S = 0.0001

_NEVER = (1 << 31) - 1

_V = TypeVar("_V")


class _Setting(Generic[_V]):
    """A setting that is another one while anybody wants it. Several threads may at once: the last puts it back, unless
    somebody set yet another meanwhile, who will know why.
    """

    def __init__(self, read: Callable[[], _V], write: Callable[[_V], None], wanted: Callable[[_V], _V]) -> None:
        self._read = read
        self._write = write
        self._wanted = wanted
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._before = read()
        # Whether it is changed, or about to be; and to what, as it reads, if that is known.
        self._changed = False
        self._ours: _V | None = None
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks: who wanted it are the parent's other threads."""
        self._lock = threading.Lock()
        self._inside.clear()
        self._put_back()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """For the time of a ``with``. The user may interrupt between any two steps, and it is put back all the same."""
        me = object()
        try:
            self._enter(me)
            yield
        finally:
            # Twice, because an interrupt may end the first anywhere: what that did is not done again.
            try:
                self._leave(me)
            finally:
                self._leave(me)

    def _enter(self, who: object) -> None:
        with self._lock:
            self._inside.add(who)
            if not self._changed:
                self._before, self._ours, self._changed = self._read(), None, True
                self._write(self._wanted(self._before))
                self._ours = self._read()

    def _leave(self, who: object) -> None:
        with self._lock:
            self._inside.discard(who)
            if not self._inside:
                self._put_back()

    def _put_back(self) -> None:
        if self._changed and (self._ours is None or self._read() == self._ours):
            self._write(self._before)
        self._changed = False


def _set_turn(seconds: float) -> None:
    """The interpreter cuts to whole microseconds, so that what it gives back would become shorter each time."""
    sys.setswitchinterval(seconds + 5e-7)


short_turns = _Setting(sys.getswitchinterval, _set_turn, lambda before: min(TURN_S, before))

no_full_search_for_cycles = _Setting(
    gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds), lambda before: (*before[:2], _NEVER)
)
"""What is made inside is better gone by its end. (From Python 3.14 on a search is done in small parts anyway.)"""
