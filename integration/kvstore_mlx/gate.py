"""What a server and a session ask before they read or save a prompt, and tell when they have read or computed one.

The arithmetic is kvstore_mlx.breakeven's. Here are what it is about (a model's prompts), the clock, and the line in the
log that says from how many tokens on restoring pays: once it is known, and again when that halved or doubled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvstore_mlx.breakeven import BreakEven
from kvstore_mlx.forms import ModelSpace
from kvstore_mlx.restoring import Found, Restored

__all__ = ["Gate"]

log = logging.getLogger("kvstore")


class Gate:
    """The break-even of one model's prompts. Used on the generation thread, but for text.

    min_tokens: a length of the user's own instead of what is measured.
    """

    def __init__(
        self, space: ModelSpace, min_tokens: int | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.label = space.label
        self._measured = BreakEven(min_tokens, space.row_bytes)
        self._monotonic = monotonic
        self._said = 0
        self.text = self._measured.describe(monotonic())
        """What decides, in words: what was measured, or while that is too little, a constant."""

    def worth_restoring(self, found: Found, in_memory: int = 0) -> bool:
        """Whether to read what was found is quicker than to compute what memory lacks of it."""
        return self._measured.worth_restoring(found.count - in_memory, found.size, self._monotonic())

    def worth_saving(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens would be restored if it came again. Asked once for each prompt."""
        now = self._monotonic()
        self._say(now)
        return self._measured.worth_saving(tokens, now)

    def restored(self, restored: Restored) -> None:
        """A prompt was restored."""
        state, now = restored.state_size, self._monotonic()
        self._measured.observe_restore(restored.size, restored.tokens, restored.seconds, now, state)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of prompts, in so many seconds of its own: waiting is none of them."""
        self._measured.observe_prefill(tokens, seconds, self._monotonic())

    def _say(self, now: float) -> None:
        self.text = self._measured.describe(now)
        if self._measured.known(now):
            length = self._measured.min_tokens(now)
            if not self._said or not self._said / 2 <= length <= self._said * 2:
                self._said = length
                log.info("kvstore: %s: %s", self.label, self.text)
