"""Whose turn it is to compute: the steps of one session's answers, on the thread that calls or on one of their own.

An answer is a generator; a step of it is a lookup with its restore, a piece of the prefill, or a token. At any moment
one step of a session is taken, whoever asks.

Answers of an event loop are taken on a thread of their own. Steps on the loop's thread, with a pause between them,
would hold the loop up for seconds at each piece of 2,048 tokens, and mlx-lm leaves the stream that it computes on set
while its generator is suspended: tasks between two tokens would compute on it. One thread, not a pool: MLX's streams
belong to threads, so that what one began lazily no other can finish; and two answers at once would share the processor
only to be slower each.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

__all__ = ["Turns", "outcome"]

Step = TypeVar("Step")
Outcome = TypeVar("Outcome")

_END: Any = object()


def outcome(steps: Generator[Any, None, Outcome]) -> Outcome:
    """Take all steps; what the generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # Outcome, which StopIteration does not say


class _ClosedError(Exception):
    """The session was closed, and its answers end."""


class Turns:
    """The turns of one session. taken: held while a step is; a thread that has it may take it again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.taken = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._making = threading.Lock()
        self._open: set[Generator[Any, None, Any]] = set()

    def here(self, steps: Generator[Step, None, Outcome]) -> Generator[Step, None, Outcome]:
        """The same steps, on the thread that asks for them."""
        try:
            while True:
                with self.taken:
                    try:
                        step = next(steps)
                    except StopIteration as end:
                        return end.value  # type: ignore[no-any-return]  # as above
                yield step
        finally:
            with self.taken:
                steps.close()

    async def apart(self, steps: Generator[Step, None, Any]) -> AsyncGenerator[Step, None]:
        """The same steps, on the thread of their own, while the event loop of the caller goes on.

        Whoever is cancelled, or closes this, waits until the step under way is done, and what it left is saved or
        given up on the thread that made it. When the session is closed the steps end, without an error.
        """
        thread = self._apart()
        self._open.add(steps)
        state = _random_state()
        try:
            with suppress(_ClosedError):
                await _queued(thread, mx.random.seed, state)
                while (step := await _queued(thread, self._step, steps)) is not _END:
                    yield step
        finally:
            if steps in self._open:
                # Queued at once, behind the step under way: a second cancellation ends the waiting and nothing else.
                with suppress(_ClosedError):
                    await asyncio.shield(_queued(thread, self._end, steps))

    def close(self) -> None:
        """End what is left of answers, on their thread, and the thread."""
        with self._making:
            thread, self._thread = self._thread, None
        if thread is not None:
            for steps in list(self._open):
                thread.submit(self._end, steps)
            thread.shutdown()

    def _apart(self) -> ThreadPoolExecutor:
        # Not within a turn, which the event loop would have to wait for.
        with self._making:
            if self._thread is None:
                # What was made lazily by this thread (a model's weights, tables of its rope) no other could compute.
                mx.eval([leaf for _, leaf in tree_flatten(self._model) if isinstance(leaf, mx.array)])
                self._thread = ThreadPoolExecutor(1, "kvstore-answers")
            return self._thread

    def _step(self, steps: Generator[Step, None, Any]) -> Step:
        with self.taken:
            return next(steps, _END)

    def _end(self, steps: Generator[Any, None, Any]) -> None:
        self._open.discard(steps)
        with self.taken:
            steps.close()


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
