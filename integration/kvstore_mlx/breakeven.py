"""When restoring a prefix pays: measured as the server runs, never assumed.

Pure arithmetic; who measures passes durations and the time in. Two costs are compared, in seconds:

    computing gain tokens     gain * C          C: median seconds a token of the last prefills
    restoring them            F + bytes * B     F, B: a line through the last restores (Theil and Sen: the median of the
                                                slopes between any two of them, then the median of what is left)

bytes are all that the restore reads; gain is only what memory does not have already. So a prefix pays when
F + bytes * B < gain * C, and with b bytes a token no prompt pays that is shorter than F / (C - b * B): the break-even
length. If reading a token costs as much as computing it, none does.

Medians, because a prefill beside another one, a cold disk or a laptop that slept must not decide for the rest of the
day. Measurements are forgotten after an hour: a gate that was shut by a slow disk opens again, is measured, and shuts
again if it must. Until there are _ENOUGH of both kinds, the constant MIN_TOKENS decides: restoring a little too much
costs milliseconds, never to restore would cost everything.

Prefill slows down as a context grows, so C, taken over prompts of all lengths, is too small for long ones. That is on
the side of restoring less, and where it matters, at a few hundred tokens, it is right.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from statistics import median
from typing import NamedTuple

from kvstore_mlx.boundaries import MIN_TOKENS

__all__ = ["BreakEven"]

_KEPT = 24
"""Measurements of each kind; 276 slopes between them take less than a tenth of a millisecond."""

_ENOUGH = 5

_FORGET_S = 3600.0

_NEVER = 1 << 62
"""A break-even length that no prompt reaches."""


class _Restore(NamedTuple):
    at: float
    size: int
    tokens: int
    seconds: float


class BreakEven:
    """What one model's prefills and restores cost on this machine. Used on the generation thread only.

    min_tokens: a fixed length instead of a measured one (--kv-cache-min-tokens N).
    """

    def __init__(self, min_tokens: int | None = None) -> None:
        self._fixed = min_tokens
        self._prefills: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._restores: deque[_Restore] = deque(maxlen=_KEPT)

    def observe_prefill(self, tokens: int, seconds: float, now: float) -> None:
        """A prefill of so many tokens took so long. now: any clock's seconds, the same in all calls.

        Short ones are left out: their time is that of starting, which computing more tokens would not add.
        """
        if tokens >= MIN_TOKENS and 0 < seconds < math.inf:
            self._prefills.append((now, seconds / tokens))

    def observe_restore(self, size: int, tokens: int, seconds: float, now: float) -> None:
        """A restore read size bytes that hold so many tokens, and took so long from its lookup to usable caches."""
        if size > 0 and tokens > 0 and 0 < seconds < math.inf:
            self._restores.append(_Restore(now, size, tokens, seconds))

    def min_tokens(self, now: float) -> int:
        """The break-even length: prompts shorter than this are neither restored nor saved."""
        if self._fixed is not None:
            return max(1, self._fixed)
        costs = self._costs(now)
        if costs is None:
            return MIN_TOKENS
        compute, fixed, byte = costs
        won = compute - byte * median(each.size / each.tokens for each in self._restores)
        if won <= 0:
            return _NEVER
        return max(MIN_TOKENS, min(math.ceil(fixed / won), _NEVER))

    def worth_restoring(self, tokens: int, size: int, now: float) -> bool:
        """Whether to read size bytes for the tokens that need not be computed then.

        size 0: not known; what the last restores read for a token is taken.
        """
        if self._fixed is not None:
            return tokens >= max(1, self._fixed)
        if tokens < MIN_TOKENS:
            return False
        costs = self._costs(now)
        if costs is None:
            return True
        compute, fixed, byte = costs
        if not size:
            size = round(tokens * median(each.size / each.tokens for each in self._restores))
        return fixed + size * byte < tokens * compute

    def worth_saving(self, tokens: int, now: float) -> bool:
        """Whether a prompt of so many tokens, saved and found again, would be restored."""
        return tokens >= self.min_tokens(now)

    def describe(self, now: float) -> str:
        """What is known, for a log line."""
        costs = self._costs(now)
        if self._fixed is not None or costs is None:
            return f"prompts from {self.min_tokens(now)} tokens on are saved and restored"
        compute, fixed, byte = costs
        length = self.min_tokens(now)
        reading = f"{1e-9 / byte:.2f} GB/s" if byte else "at once"
        return f"prefill {1 / compute:.0f} tokens/s, restore {fixed * 1e3:.1f} ms and {reading}: " + (
            "restoring does not pay" if length == _NEVER else f"it pays from {length} tokens on"
        )

    def _costs(self, now: float) -> tuple[float, float, float] | None:
        """C, F and B of this module's formula; None while too little was measured."""
        oldest = now - _FORGET_S
        while self._prefills and self._prefills[0][0] < oldest:
            self._prefills.popleft()
        while self._restores and self._restores[0].at < oldest:
            self._restores.popleft()
        if len(self._prefills) < _ENOUGH or len(self._restores) < _ENOUGH:
            return None
        byte = _slope(self._restores)
        fixed = max(0.0, median(each.seconds - each.size * byte for each in self._restores))
        return median(cost for _, cost in self._prefills), fixed, byte


def _slope(restores: deque[_Restore]) -> float:
    """Seconds a byte. Sizes that are nearly equal say nothing of it, and then all of the time is put down to bytes."""
    slopes = [
        (b.seconds - a.seconds) / (b.size - a.size)
        for a, b in combinations(restores, 2)
        if abs(b.size - a.size) > 0.25 * max(a.size, b.size)
    ]
    whole = median(each.seconds / each.size for each in restores)
    if len(slopes) < _ENOUGH:
        return whole
    return min(max(0.0, median(slopes)), whole)
