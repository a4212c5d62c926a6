"""When restoring a prefix pays: measured as the server runs, never assumed.

Pure arithmetic; who measures passes durations and the time in. Two costs are compared, in seconds:

    computing gain tokens     gain * C          C: median seconds a token of the last prefills
    restoring them            F + bytes * B     F, B: a line through the last restores (Theil and Sen: the median of the
                                                slopes between any two of them, then the median of what is left)

bytes are all that the restore reads: blocks whole, and a boundary state. gain is only what memory does not have
already. A prefix pays when F + bytes * B < gain * C. The break-even length is where that begins to hold of whole
prompts, whose bytes follow from the model. Bytes of past restores are no measure of them: those of a few tokens out of
a large block, or of a large state after few tokens, would make all tokens look as dear as these were.

Medians, because a prefill beside another one, a cold disk or a laptop that slept must not decide for the rest of the
day. Measurements are forgotten after an hour: a gate that was shut by a slow disk opens again, is measured, and shuts
again if it must. Until there are _ENOUGH of both kinds, the constant MIN_TOKENS decides: restoring a little too much
costs milliseconds, never to restore would cost everything.

Prefill slows down as a context grows, so C, taken over prompts of all lengths, is too small for long ones. That is on
the side of restoring less, and where it matters, at a few hundred tokens, it is right.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import combinations
from statistics import median
from typing import NamedTuple

from kvstore.sizes import format_size
from kvstore_mlx.boundaries import MIN_TOKENS

__all__ = ["BreakEven"]

_KEPT = 24
"""Measurements of each kind; 276 slopes between them take less than a tenth of a millisecond."""

_ENOUGH = 5

_FORGET_S = 3600.0

_NEVER = 1 << 24
"""A break-even length that no prompt reaches."""


class _Restore(NamedTuple):
    at: float
    size: int
    tokens: int
    state: int
    seconds: float


class _Costs(NamedTuple):
    """C, F and B of this module's formula. one_size: restores were all nearly as large, so no line goes through them;
    fixed is then what one took, and byte its part of that.
    """

    token: float
    fixed: float
    byte: float
    one_size: bool = False

    def pays(self, gain: int, size: int) -> bool:
        """Whether to read size bytes is quicker than to compute gain tokens.

        From restores of one size it is not known what less or more would take. The least it can be is assumed: what is
        not tried would not be known for an hour.
        """
        read = min(self.fixed, size * self.byte) if self.one_size else self.fixed + size * self.byte
        return read < gain * self.token

    def reading(self) -> str:
        """What a restore takes, in words."""
        if self.one_size:
            return f"{self.fixed * 1e3:.1f} ms for {format_size(self.fixed / self.byte)}"
        return f"{self.fixed * 1e3:.1f} ms and " + (f"{format_size(1 / self.byte)}/s" if self.byte else "at once")


class BreakEven:
    """What one model's prefills and restores cost on this machine. Used on the generation thread only.

    min_tokens: a fixed length instead of a measured one (--kv-cache-min-tokens N). rows: bytes that the blocks of a
    prompt of so many tokens take.
    """

    def __init__(self, min_tokens: int | None = None, rows: Callable[[int], int] = lambda _: 0) -> None:
        self._fixed = min_tokens
        self._rows = rows
        self._prefills: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._restores: deque[_Restore] = deque(maxlen=_KEPT)
        self._found: tuple[_Costs, int] | None = None

    def observe_prefill(self, tokens: int, seconds: float, now: float) -> None:
        """A prefill of so many tokens took so long. now: any clock's seconds, the same in all calls.

        Short ones are left out: their time is that of starting, which computing more tokens would not add.
        """
        if tokens >= MIN_TOKENS and 0 < seconds < math.inf:
            self._prefills.append((now, seconds / tokens))
            self._found = None

    def observe_restore(self, size: int, tokens: int, seconds: float, now: float, state: int = 0) -> None:
        """A restore of so many tokens read size bytes, a state among them, and took so long until caches were usable.

        Without the lookup, whose time is spent before there is anything to decide.
        """
        if size > 0 and tokens > 0 and 0 < seconds < math.inf:
            self._restores.append(_Restore(now, size, tokens, state, seconds))
            self._found = None

    def known(self, now: float) -> bool:
        """Whether what was measured decides."""
        return self._fixed is None and self._learned(now) is not None

    def min_tokens(self, now: float) -> int:
        """The break-even length: prompts shorter than this are neither restored nor saved."""
        if self._fixed is not None:
            return max(1, self._fixed)
        learned = self._learned(now)
        return MIN_TOKENS if learned is None else learned[1]

    def worth_restoring(self, tokens: int, size: int, now: float) -> bool:
        """Whether to read size bytes for the tokens that need not be computed then."""
        if self._fixed is not None:
            return tokens >= max(1, self._fixed)
        if tokens < MIN_TOKENS:
            return False
        learned = self._learned(now)
        return learned is None or learned[0].pays(tokens, size)

    def worth_saving(self, tokens: int, now: float) -> bool:
        """Whether a prompt of so many tokens, saved and found again, would be restored."""
        return self.worth_restoring(tokens, self._size(tokens), now)

    def describe(self, now: float) -> str:
        """What is known, for a log line."""
        learned = None if self._fixed is not None else self._learned(now)
        if learned is None:
            return f"prompts from {self.min_tokens(now)} tokens on are saved and restored"
        costs, length = learned
        return f"prefill {1 / costs.token:.0f} tokens/s, restore {costs.reading()}: " + (
            "restoring does not pay" if length == _NEVER else f"it pays from {length} tokens on"
        )

    def _size(self, tokens: int) -> int:
        """Bytes that a restore of a prompt of so many tokens reads. Its state is taken to be as large as that of the
        restore that was nearest in length: some grow with the tokens, most up to a window.
        """
        nearest = min(self._restores, key=lambda each: abs(each.tokens - tokens), default=None)
        return self._rows(tokens) + (0 if nearest is None else nearest.state)

    def _learned(self, now: float) -> tuple[_Costs, int] | None:
        """The costs and the break-even length; None while too little was measured."""
        oldest = now - _FORGET_S
        while self._prefills and self._prefills[0][0] < oldest:
            self._prefills.popleft()
            self._found = None
        while self._restores and self._restores[0].at < oldest:
            self._restores.popleft()
            self._found = None
        if len(self._prefills) < _ENOUGH or len(self._restores) < _ENOUGH:
            return None
        if self._found is None:
            costs = _costs(median(cost for _, cost in self._prefills), self._restores)
            pays = bisect_left(range(_NEVER), True, MIN_TOKENS, key=lambda count: costs.pays(count, self._size(count)))
            self._found = costs, pays
        return self._found


def _costs(token: float, restores: deque[_Restore]) -> _Costs:
    slopes = [
        (b.seconds - a.seconds) / (b.size - a.size)
        for a, b in combinations(restores, 2)
        if abs(b.size - a.size) > 0.25 * max(a.size, b.size)
    ]
    whole = median(each.seconds / each.size for each in restores)
    if len(slopes) < _ENOUGH:
        return _Costs(token, median(each.seconds for each in restores), whole, one_size=True)
    byte = min(max(0.0, median(slopes)), whole)
    return _Costs(token, max(0.0, median(each.seconds - each.size * byte for each in restores)), byte)
