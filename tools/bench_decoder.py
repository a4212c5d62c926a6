"""A model that makes one token after the other, for benchmarks of what runs beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Decoder"]

_PROMPT = 512
_VOCABULARY = 250
_AGAIN = 32
"""Tokens after which speed begins at the prompt's end again: a growing context makes each slower than the last, and a
long measurement would have more of the slow ones than a short one that it is compared with."""


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
    ) -> tuple[int, float]:
        """How many steps are made while something goes on, and their seconds; stepped is called after each.

        begun is called after a first step that does not count, and its time does not count either.
        """
        steps, spent = 0, 0.0
        self.begin()
        self.step()
        begun()
        started = time.perf_counter()
        while going_on():
            self.step()
            stepped()
            if going_on():
                steps, spent = steps + 1, time.perf_counter() - started
            if steps % _AGAIN == 0:
                self.begin()
        return steps, spent

    def alone(self, seconds: float) -> float:
        """Tokens a second with nothing beside, for so long and one token at least."""
        end = time.perf_counter() + seconds
        steps, spent = self.speed(lambda: time.perf_counter() < end)
        if steps:
            return steps / spent
        started = time.perf_counter()
        self.step()
        return 1 / (time.perf_counter() - started)
