"""A model that makes one token after the other, for benchmarks of what runs beside it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Decoder", "Gate", "Speed"]

_PROMPT = 512
_VOCABULARY = 250
_AGAIN = 32
"""Tokens after which speed begins at the prompt's end again: a growing context makes each slower than the last, and a
long measurement would have more of the slow ones than a short one that it is compared with."""


_SLICE_S = 0.25
"""Beside work that can be held, this long with it and this long without it in turns. A virtual machine's speed wanders
by a fifth within seconds: of windows of 2.5 s one minute says 5 % too much or too little, of these 1 to 2 % (standard
errors of the mean ratio of neighbours)."""

_SLICE_STEPS = 10
"""And this many tokens at least."""


class Speed(NamedTuple):
    """Tokens, and the seconds that they took."""

    steps: int
    seconds: float

    def a_second(self) -> float:
        """Tokens a second."""
        return self.steps / self.seconds


class Gate:
    """Holds work on another thread between two pieces of it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def hold(self) -> None:
        """Let nothing through."""
        self._open.clear()

    def release(self) -> None:
        """Let everything through."""
        self._open.set()

    def wait(self) -> None:
        """Called where the work may be held."""
        self._open.wait()

    def sleep(self, seconds: float) -> None:
        """A rest of the work's own, that ends when it is not held."""
        time.sleep(seconds)
        self.wait()


class Decoder:
    """A model behind a prompt."""

    def __init__(self, path: str) -> None:
        import mlx.core as mx  # noqa: PLC0415
        from mlx_lm import load  # noqa: PLC0415 - imports the engine
        from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - as above

        self._mx = mx
        self._model = load(path)[0]
        self._caches = make_prompt_cache(self._model)
        text = mx.arange(1, _PROMPT + 1)[None] % _VOCABULARY
        self._first = self._token = mx.argmax(self._model(text, cache=self._caches)[0, -1])
        mx.eval(self._token)

    def step(self) -> None:
        """One token."""
        self._token = self._mx.argmax(self._model(self._token[None, None], cache=self._caches)[0, -1])
        self._mx.eval(self._token)

    def begin(self) -> None:
        """Back to the end of the prompt: the next steps are the same ones again."""
        self._token = self._first
        for cache in self._caches:
            cache.trim(cache.offset - _PROMPT)

    def speed(
        self,
        going_on: Callable[[], bool],
        stepped: Callable[[], None] = lambda: None,
        begun: Callable[[], None] = lambda: None,
        at_most: float = math.inf,
    ) -> Speed:
        """How many steps are made while something goes on, and their seconds; stepped is called after each.

        begun is called after a first step that does not count, and its time does not count either. None begins after
        at_most seconds.
        """
        steps, spent = 0, 0.0
        self.begin()
        self.step()
        begun()
        started = time.perf_counter()
        while going_on() and time.perf_counter() - started < at_most:
            self.step()
            stepped()
            if going_on():
                steps, spent = steps + 1, time.perf_counter() - started
            if steps % _AGAIN == 0:
                self.begin()
        return Speed(steps, spent)

    def beside(
        self, gate: Gate, going_on: Callable[[], bool], stepped: Callable[[], None], begun: Callable[[], None]
    ) -> tuple[Speed, Speed]:
        """Steps while some work goes on, in short turns with it and, while it is held, without; begun begins it."""
        self.begin()
        self.step()
        started = time.perf_counter()
        self.step()
        slice_s = max(_SLICE_S, _SLICE_STEPS * (time.perf_counter() - started))
        alone = Speed(0, 0.0)
        try:
            with_it = self.speed(going_on, stepped, begun, slice_s)
            while going_on():
                gate.hold()
                alone = _sum(alone, self.speed(going_on, stepped, at_most=slice_s))
                gate.release()
                with_it = _sum(with_it, self.speed(going_on, stepped, at_most=slice_s))
        finally:
            gate.release()
        return with_it, alone

    def alone(self, seconds: float) -> float:
        """Tokens a second with nothing beside, for so long and one token at least."""
        end = time.perf_counter() + seconds
        steps, spent = self.speed(lambda: time.perf_counter() < end)
        if steps:
            return steps / spent
        started = time.perf_counter()
        self.step()
        return 1 / (time.perf_counter() - started)


def _sum(one: Speed, other: Speed) -> Speed:
    return Speed(one.steps + other.steps, one.seconds + other.seconds)
