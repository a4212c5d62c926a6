"""Whose turn it is to compute: the steps of one session's answers, on the thread that calls or on one of their own.

An answer is a generator; a step of it is a lookup with its restore, a piece of the prefill, or a token. At any moment
one step of a session is taken, whoever asks.

Answers of an event loop are taken on a thread of their own. Steps on the loop's thread, with a pause between them,
would hold the loop up for seconds at each piece of 2,048 tokens, and mlx-lm leaves the stream that it computes on set
while its generator is suspended: tasks between two tokens would compute on it. One thread, not a pool: MLX's streams
belong to threads, so that what one began lazily no other can finish; and two answers at once would share the processor
only to be slower each.

An answer that nobody closes ends when it is freed: by the collector, maybe, which runs on any thread and in the middle
of anything, within the writer's lock, say. Nothing may be waited for there, nor MLX be used. So a session keeps the
steps, and what a caller iterates over is only a handle. What cannot end at once ends in the next turn of its thread.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

__all__ = ["Taking", "Turns"]

Step = TypeVar("Step")
Outcome = TypeVar("Outcome")

_END: Any = object()


class _ClosedError(Exception):
    """The session was closed, and its answers end."""


class Taking:
    """Whether a step of one answer, or its end, is taken just now (now). Used by who has the turn.

    What is freed together with its session is finalized generator by generator, outside of any turn: at such an end
    nothing may be saved or counted.
    """

    def __init__(self) -> None:
        self._depth = 0

    @property
    def now(self) -> bool:
        """See above."""
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1


class _Thread:
    """A thread, for as long as it lives; its number is another's then."""


@dataclass(eq=False)
class _Answer(Generic[Step]):
    """The steps of one answer. thread gives the one that took the last of them, None when it has ended."""

    steps: Generator[Step | None, None, Any]
    taking: Taking
    thread: Callable[[], _Thread | None] = lambda: None


class _Iteration(Generator[Step, None, None]):
    """What a caller iterates over. Nothing but this is freed when the caller forgets it."""

    def __init__(self, turns: Turns, answer: _Answer[Step]) -> None:
        self._turns = turns
        self._answer = answer

    def send(self, value: None) -> Step:
        """The next step that is not None."""
        del value
        while (step := self._turns.step(self._answer)) is None:
            pass
        if step is _END:
            raise StopIteration
        return step

    def throw(self, *error: Any) -> Step:
        """End the answer, and raise this."""
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        """End the answer in a turn of its thread: now, or on another one when that takes its next."""
        self._turns.end(self._answer)

    def __del__(self) -> None:
        self._turns.drop(self._answer, collected=gc.is_finalized(self))


class Turns:
    """The turns of one session."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._taken = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._making = threading.Lock()
        self._open: set[_Answer[Any]] = set()
        self._begun: set[_Answer[Any]] = set()
        self._dropped: deque[_Answer[Any]] = deque()
        self._threads = threading.local()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn of whoever asks, who may have one already. What was dropped of this thread's ends first."""
        with self._taken:
            self._end_dropped()
            yield

    def outcome(self, steps: Generator[Any, None, Outcome]) -> Outcome:
        """Take all steps, on the thread that asks; what the generator returns."""
        while True:
            with self.turn():
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]  # Outcome, which StopIteration does not say

    def here(self, steps: Generator[Step | None, None, Any], taking: Taking) -> Generator[Step, None, None]:
        """The same steps but those that are None, on the thread that asks for them."""
        return _Iteration(self, _Answer(steps, taking))

    def step(self, answer: _Answer[Step]) -> Step | None:
        """The next step of an answer; _END when there is none."""
        answer.thread = weakref.ref(self._current)
        with self.turn():
            self._begun.add(answer)
            try:
                with answer.taking:
                    return next(answer.steps, _END)
            finally:
                self._forget_ended(answer)

    def end(self, answer: _Answer[Any]) -> None:
        """End an answer that is left; see _Iteration.close."""
        if answer not in self._begun:
            answer.steps.close()
        elif answer.thread() is self._current:
            self._close(answer)
        else:
            self._dropped.append(answer)

    def drop(self, answer: _Answer[Any], *, collected: bool) -> None:
        """End an answer that nobody can take any more: now, where that is safe, or in the next turn of its thread.

        Called by a finalizer. collected: by the collector's, and not because the last reference went.
        """
        if answer not in self._begun or sys.is_finalizing():
            return
        safe = not collected and answer.thread() is self._current and not _within_us()
        if safe and self._taken.acquire(blocking=False):
            try:
                self._close(answer)
            finally:
                self._taken.release()
        else:
            self._dropped.append(answer)

    def tidy(self, *, last: bool = False) -> None:
        """End what was dropped of this thread's; last: there will be no other turn for the others'."""
        if self._dropped:
            with self._taken:
                self._end_dropped(last=last)

    def _end_dropped(self, *, last: bool = False) -> None:
        for _ in range(len(self._dropped)):
            answer = self._dropped.popleft()
            thread = answer.thread()
            # Whatever they raise there is nobody to be told, as with any finalizer.
            if thread is self._current:
                with suppress(Exception):
                    self._close(answer)
            elif thread is None or last:
                # What MLX began on a thread no other can compute, nor end its streams.
                self._begun.discard(answer)
                with suppress(Exception):
                    answer.steps.close()
            else:
                self._dropped.append(answer)

    def _close(self, answer: _Answer[Any]) -> None:
        with self._taken:
            try:
                with answer.taking:
                    answer.steps.close()
            finally:
                self._forget_ended(answer)

    def _forget_ended(self, answer: _Answer[Any]) -> None:
        """Not by what was raised: after an interrupt before a step there is an answer to be ended still."""
        if inspect.getgeneratorstate(answer.steps) == inspect.GEN_CLOSED:
            self._begun.discard(answer)

    @property
    def _current(self) -> _Thread:
        """The thread that asks."""
        try:
            return self._threads.current  # type: ignore[no-any-return]  # which is untyped
        except AttributeError:
            self._threads.current = _Thread()
            return self._threads.current  # type: ignore[no-any-return]  # as above

    async def apart(self, steps: Generator[Step | None, None, Any], taking: Taking) -> AsyncGenerator[Step, None]:
        """The same steps but those of None, on the thread of their own, while the event loop of the caller goes on.

        Whoever is cancelled, or closes this, waits until the step under way is done, and what it left is saved or
        given up on the thread that made it. When the session is closed the steps end, without an error.
        """
        answer = _Answer(steps, taking)
        thread = self._apart()
        self._open.add(answer)
        state = _random_state()
        try:
            with suppress(_ClosedError):
                await _queued(thread, mx.random.seed, state)
                while (step := await _queued(thread, self._next, answer)) is not _END:
                    if step is not None:
                        yield step
        finally:
            if answer in self._open:
                # Queued at once, behind the step under way: a second cancellation ends the waiting and nothing else.
                with suppress(_ClosedError):
                    await asyncio.shield(_queued(thread, self._end, answer))

    def close(self) -> None:
        """End what is left of answers, on their thread, and the thread."""
        with self._making:
            thread, self._thread = self._thread, None
        if thread is not None:
            for answer in list(self._open):
                thread.submit(self._end, answer)
            thread.shutdown()
        self.tidy(last=True)

    def _apart(self) -> ThreadPoolExecutor:
        # Not within a turn, which the event loop would have to wait for.
        with self._making:
            if self._thread is None:
                # What was made lazily by this thread (a model's weights, tables of its rope) no other could compute.
                mx.eval([leaf for _, leaf in tree_flatten(self._model) if isinstance(leaf, mx.array)])
                self._thread = ThreadPoolExecutor(1, "kvstore-answers")
            return self._thread

    def _next(self, answer: _Answer[Step]) -> Step | None:
        with self.turn(), answer.taking:
            return next(answer.steps, _END)

    def _end(self, answer: _Answer[Any]) -> None:
        self._open.discard(answer)
        self._close(answer)


def _within_us() -> bool:
    """Whether code of ours, which may hold a lock, is what was interrupted by a finalizer that calls Turns.drop."""
    frame = inspect.currentframe()
    for _ in (_within_us, Turns.drop, _Iteration.__del__):
        frame = frame and frame.f_back
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in {"kvstore", "kvstore_mlx"}:
            return True
        frame = frame.f_back
    return False


def _queued(thread: ThreadPoolExecutor, call: Callable[..., Outcome], argument: Any) -> asyncio.Future[Outcome]:
    """What the thread will have called, when it has; _ClosedError where it takes no more."""
    try:
        return asyncio.wrap_future(thread.submit(call, argument))
    except RuntimeError as error:
        raise _ClosedError from error


def _random_state() -> int:
    """What the random numbers of this thread go on from, as a seed for another's. No other call gets the same."""
    state: Any = mx.random.state  # a sequence of one key, which its stub does not say
    high, low = state[0].tolist()
    mx.eval(mx.random.uniform())
    return int(high) << 32 | int(low)
