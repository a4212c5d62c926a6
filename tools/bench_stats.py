"""Numbers of a benchmark: samples, ratios of paired samples, and the order in which methods take turns.

Pure: nothing here measures, prints or opens anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Sample", "break_even", "interleaved", "paired", "rotated"]


@dataclass(frozen=True)
class Sample:
    """What repeated measurements of one thing gave, in the order they were made."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one value")

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """A sample of any numbers."""
        return cls(tuple(float(value) for value in values))

    @property
    def n(self) -> int:
        """How many measurements."""
        return len(self.values)

    @property
    def median(self) -> float:
        """The middle one; of an even number the mean of the two in the middle."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    def document(self) -> dict[str, Any]:
        """As it goes into a JSON file: the raw values too, so that nobody has to believe the median."""
        return {"n": self.n, "median": self.median, "min": self.low, "max": self.high, "values": list(self.values)}

    def text(self, scale: float = 1, digits: int = 2) -> str:
        """``median (min to max)``, for people."""
        median, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})"


def paired(over: Sequence[float], under: Sequence[float]) -> Sample:
    """The ratios of measurements that were made in the same round.

    The median of these, not the ratio of two medians: what slows a machine down for a second slows both of a pair.
    """
    return Sample.of(a / b for a, b in zip(over, under, strict=True))


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names, begun at another one each turn, so that none is always measured after the same one."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def break_even(lengths: Sequence[int], over: Sequence[float]) -> float | None:
    """The shortest length from which on restoring is the faster one, at every longer one that was measured too.

    over: restored over disabled. Between two measured lengths it is where a straight line reaches 1. The shortest
    measured length says no more than that it pays there already; None when it does not pay at the longest.
    """
    if over[-1] >= 1:
        return None
    first = next((at for at in range(len(over), 0, -1) if over[at - 1] >= 1), 0)
    if first == 0:
        return float(lengths[0])
    before, after = over[first - 1], over[first]
    return lengths[first - 1] + (lengths[first] - lengths[first - 1]) * (before - 1) / (before - after)


def interleaved(methods: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """What each method returns, round by round; the first warm_up rounds are thrown away."""
    names = list(methods)
    measured: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, rounds):
        for name in rotated(names, turn):
            value = methods[name]()
            if turn >= 0:
                measured[name].append(value)
    return measured
