"""How much of its time a background write takes, so that what runs beside it does not feel it.

Hashing and writing a chunk of hundreds of megabytes takes a core and the memory's bandwidth for a tenth of a second,
and an engine that decodes on the same machine feels it in every token of that time. Cut in slices with a rest after
every few, the same work is spread over seconds (`bench decode`). A low priority does not do that: it gives way to who
waits for a core, not to who waits for memory or for the processor's caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from kvstore.interpreter import short_turns
from kvstore.keys import Buffer, flat

__all__ = ["Pace", "Rest", "paced", "slices"]

_SLICE = 1 << 20
"""Bytes between two rests: half a millisecond of work at most, and a multiple of every element. What is written is then
hashed, and must still be in the processor's cache: with half as much or twice as much a publish takes 5 to 8 % longer.
"""

_WORTH_A_REST_S = 0.0015
"""Processor time of work that goes on without a rest. Each end of a rest is a thread that wakes, on a core that slept,
and wants the interpreter's lock: what runs beside it feels that about as much as the slice of work that follows. With
seven slices at a time instead of one a publish costs the tokens beside it 1 % instead of 3 % (`bench decode`)."""

_LONGEST_REST_S = 0.25
"""However long the work seems to have taken: on a machine that is short of everything a chunk would take minutes."""

_LOOK_AGAIN_S = 0.05
"""A rest is over so soon after it is no longer wanted."""

_T = TypeVar("_T")


def slices(part: Buffer) -> Iterator[memoryview]:
    """A buffer's bytes in pieces between which one may rest."""
    view = flat(part)
    for at in range(0, view.nbytes, _SLICE):
        yield view[at : at + _SLICE]


def _batches(parts: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """All bytes in batches of one slice, whatever parts they are of: a file that is written so is written at multiples
    of it, which the page cache has larger pieces for (6 % of a publish).
    """
    batch: list[memoryview] = []
    room = _SLICE
    for part in parts:
        view = flat(part)
        while view.nbytes:
            piece, view = view[:room], view[room:]
            batch.append(piece)
            room -= piece.nbytes
            if not room:
                yield batch
                batch, room = [], _SLICE
    if batch:
        yield batch


def paced(items: Iterable[_T], rest: Callable[[], None], every: int = 64) -> Iterator[_T]:
    """The same items, with a chance to rest before each of so many."""
    for number, item in enumerate(items):
        if not number % every:
            rest()
        yield item


class Pace:
    """The pace of one open directory's publishes.

    share is asked between batches, on the thread that writes, for the part of its time that the work may take: 1 never
    rests, and nor does a library that nobody decodes beside, which gives none.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.share: Callable[[], float] | None = None
        self._sleep = sleep

    def batches(self, parts: Iterable[Buffer]) -> Iterator[list[memoryview]]:
        """All bytes in batches of a slice at most, with a rest before the next one is handed out."""
        rest = None
        for batch in _batches(parts):
            if rest is None:
                rest = self.resting()
            else:
                rest()
            yield batch

    def turns(self) -> AbstractContextManager[None]:
        """For a piece of work: short turns with the interpreter's other threads while it goes at full speed.

        Beside a thread that never waits each call that lets go of the interpreter's lock, two a batch, would take 5 ms
        to get it back (kvstore.interpreter).
        """
        return short_turns() if self.share is None or self.share() >= 1 else nullcontext()

    def resting(self, longest: float = _LONGEST_REST_S) -> Rest:
        """What is to be called between pieces of work: see Rest. longest: seconds of one rest."""
        return Rest(self, longest)

    def rest(self, worked: float, longest: float) -> float:
        """Rest as long as the share asks, which may change meanwhile: nobody sleeps on while somebody waits. How long
        it was.
        """
        rested = 0.0
        while self.share is not None and (left := min(worked * (1 / self.share() - 1), longest) - rested) > 0:
            nap = min(left, _LOOK_AGAIN_S)
            self._sleep(nap)
            rested += nap
        return rested


class Rest:
    """To be called between pieces of work, on one thread: it rests for what was done since it was made or called last.

    That is measured in processor time: while a full disk makes the work wait, it disturbs nobody. seconds: of all rests
    so far.
    """

    def __init__(self, pace: Pace, longest: float) -> None:
        self._pace = pace
        self._longest = longest
        self._began = time.thread_time()
        self.seconds = 0.0

    def __call__(self) -> None:
        """Rest if there is reason to."""
        worked = time.thread_time() - self._began
        if worked >= _WORTH_A_REST_S:
            self.seconds += self._pace.rest(worked, self._longest)
            self._began = time.thread_time()
