"""What the engine computes by itself: a prompt in pieces, greedy tokens, caches kept in memory. Nothing of kvstore."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

__all__ = [
    "ROUNDING",
    "STEP",
    "STEPS",
    "Answer",
    "Quantized",
    "Uninterrupted",
    "classes",
    "difference",
    "greedy",
    "pieces",
    "quantizes",
    "tokens_of",
]

STEP = 96
"""Longest piece of a prefill. Not a divisor of the store's interval, so that chunks end within pieces."""

ROUNDING = 1e-3
"""Largest difference of a logit, over the largest, that other kernels make. (A wrong row makes a tenth and more.)"""

STEPS = 0.05
"""The same of quantized caches, of which other kernels' last bits move single numbers by a whole step."""

Quantized = tuple[int, int] | None
"""Bits and group size of --kv-bits."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the logits ``[tokens, vocabulary]`` that each was chosen from."""

    tokens: list[int]
    logits: np.ndarray[Any, Any]

    def same(self, other: Answer) -> bool:
        """Every token and every bit of the logits (some families forbid tokens by minus infinity)."""
        return self.tokens == other.tokens and np.array_equal(self.logits, other.logits)

    def near(self, other: Answer, rounding: float) -> bool:
        """Every token, and logits that differ by no more than this part of the largest."""
        finite = np.isfinite(other.logits)
        with np.errstate(invalid="ignore"):
            far = np.abs(self.logits - other.logits)[finite].max()
        return self.tokens == other.tokens and bool(far <= rounding * np.abs(other.logits[finite]).max())


def difference(ours: Answer, theirs: Answer) -> str:
    """Where two answers differ, in a few words."""
    if ours.tokens != theirs.tokens:
        first = next(at for at, pair in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if len({*pair}) > 1)
        return f"token {first} differs"
    with np.errstate(invalid="ignore"):
        return f"logits differ by {np.nanmax(np.abs(ours.logits - theirs.logits)):.1e}"


def tokens_of(seed: int, count: int, vocabulary: int = 150) -> list[int]:
    """Random tokens, none of them 0, which some families take for padding."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, vocabulary, count)]


def pieces(first: int, end: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    """How tokens first .. end are prefilled: in steps, also cut at the given counts and before the last token."""
    stops = sorted({cut for cut in (*cuts, end - 1, end) if first < cut <= end})
    while first < end:
        last = min(first + STEP, next(stop for stop in stops if stop > first))
        yield first, last
        first = last


def forward(model: Any, caches: list[Any], tokens: Sequence[int], quantized: Quantized = None) -> Any:
    """One call of the model, as mlx-lm's generate_step makes it. The logits after the last token."""
    logits = model(mx.array([list(tokens)]), cache=caches)[0, -1]
    if quantized is not None:
        maybe_quantize_kv_cache(caches, 0, quantized[1], quantized[0])
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def greedy(model: Any, caches: list[Any], logits: Any, count: int, quantized: Quantized = None) -> Answer:
    """The next tokens; all but the last are forwarded."""
    tokens, rows = [], []
    for place in range(count):
        rows.append(np.array(logits.astype(mx.float32)))
        tokens.append(int(mx.argmax(logits)))
        if place < count - 1:
            logits = forward(model, caches, tokens[-1:], quantized)
    return Answer(tokens, np.stack(rows))


class Uninterrupted:
    """A run whose caches stay in memory, and copies of them at the end of each piece."""

    def __init__(self, model: Any, quantized: Quantized = None) -> None:
        self._model = model
        self.quantized = quantized
        self.caches: list[Any] = make_prompt_cache(model)
        self.count = 0
        self.logits: Any = None
        self.kept: dict[int, list[Any]] = {}

    def prefill(self, tokens: Sequence[int], cuts: Iterable[int], keep: Sequence[int] = ()) -> Uninterrupted:
        """Go on with these tokens of a whole prompt; caches are copied at the counts of keep."""
        for first, last in pieces(self.count, len(tokens), cuts):
            self.logits = forward(self._model, self.caches, tokens[first:last], self.quantized)
            self.count = last
            if last in keep:
                self.kept[last] = copy.deepcopy(self.caches)
        return self

    def answer(self, count: int) -> Answer:
        """Greedy tokens from here on; the run is behind them afterwards."""
        found = greedy(self._model, self.caches, self.logits, count, self.quantized)
        self.count += count - 1
        return found

    def resumed(self, count: int) -> Uninterrupted:
        """Another run, from a copy of these caches: as kept at this count, or else trimmed to it by mlx-lm."""
        other = Uninterrupted(self._model, self.quantized)
        if count in self.kept:
            other.caches = copy.deepcopy(self.kept[count])
        else:
            other.caches = copy.deepcopy(self.caches)
            trim_prompt_cache(other.caches, self.count - count)
        other.count = count
        return other


def classes(caches: Sequence[Any]) -> dict[str, int]:
    """Names of cache classes, those of a CacheList in brackets, with how many there are."""

    def name(cache: Any) -> str:
        own = type(cache).__name__
        return f"{own}[{', '.join(name(inner) for inner in cache.caches)}]" if own == "CacheList" else own

    return dict(Counter(name(cache) for cache in caches))


def quantizes(model: Any, bits: int) -> str:
    """Why mlx-lm itself cannot run this model with quantized caches; empty when it can."""
    try:
        Uninterrupted(model, (bits, 32)).prefill(tokens_of(1, 20), []).answer(2)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0].split('. ')[0].rstrip('.')}"
    return ""
