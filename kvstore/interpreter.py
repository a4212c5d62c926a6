"""Two settings of the interpreter that all threads share, changed while it matters: turns, and the search for cycles.

A restore wants short turns. Reading and hashing let go of the interpreter's lock at each run of a head, because the
file's order is another than the memory's: 576 times for a chunk of an 8B model. Beside a thread that computes in
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
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TURN_S", "no_full_search_for_cycles", "short_turns"]

TURN_S = 0.0001

_lock = threading.Lock()
_inside = 0
_before = _ours = 0.0

_passes = 0
_thresholds = (0, 0, 0)
_NEVER = (1 << 31) - 1


@contextmanager
def short_turns() -> Iterator[None]:
    """For the time of its ``with``, which several threads may be in at once; it is the whole process's setting."""
    global _inside, _before, _ours  # noqa: PLW0603 - the setting is global, and so is the number of those who want it
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = sys.getswitchinterval()
            _set(min(TURN_S, _before))
            _ours = sys.getswitchinterval()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            # Who set another one meanwhile knows why.
            if not _inside and sys.getswitchinterval() == _ours:
                _set(_before)


@contextmanager
def no_full_search_for_cycles() -> Iterator[None]:
    """For the time of its ``with``, which several threads may be in at once. What it made is better gone by its end.

    (From Python 3.14 on a search is done in small parts anyway.)
    """
    global _passes, _thresholds  # noqa: PLW0603 - as above
    with _lock:
        _passes += 1
        if _passes == 1:
            _thresholds = gc.get_threshold()
            gc.set_threshold(*_thresholds[:2], _NEVER)
    try:
        yield
    finally:
        with _lock:
            _passes -= 1
            if not _passes and gc.get_threshold() == (*_thresholds[:2], _NEVER):
                gc.set_threshold(*_thresholds)


def _set(seconds: float) -> None:
    """The interpreter cuts to whole microseconds, so that what it gives back would become shorter each time."""
    sys.setswitchinterval(seconds + 5e-7)
