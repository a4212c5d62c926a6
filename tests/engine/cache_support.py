"""The engine's caches without an engine: filled by hand, taken apart and put together, and compared by what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList

from kvstore_mlx.live import Live
from kvstore_mlx.plan import Plan
from kvstore_mlx.probe import _copied

HEADS, DIM = 2, 32


class Feed:
    """Keys and values that never repeat, so that a row in a wrong place shows. Two feeds of a seed give the same."""

    def __init__(self, seed: int = 0, heads: int = HEADS, dim: int = DIM, value_dim: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._heads, self._dim, self._value_dim = heads, dim, dim if value_dim is None else value_dim

    def next(self, tokens: int, batch: int = 1) -> tuple[mx.array, mx.array]:
        return tuple(
            mx.array(self._rng.standard_normal((batch, self._heads, tokens, dim), np.float32))
            for dim in (self._dim, self._value_dim)
        )


def forward(cache: Any, feed: Feed, tokens: int) -> list[mx.array]:
    """What a step of the engine gets from an attention cache: its rows and its mask."""
    masks = []
    if hasattr(cache, "make_mask"):
        masks = [cache.make_mask(tokens, return_array=True, window_size=window) for window in (None, 5)]
    if hasattr(cache, "maybe_trim_front"):
        cache.maybe_trim_front()
    keys, values = cache.update_and_fetch(*feed.next(tokens))
    found = [*keys, *values] if isinstance(keys, tuple | list) else [keys, values]
    found += [mask for mask in masks if isinstance(mask, mx.array)]
    mx.eval(found)
    # Copies: a view of a cache makes its next update copy it, which is not how the engine meets it.
    return [mx.array(np.array(array)) for array in found]


def plan_of(make: Callable[[], list[Any]], fill: Callable[[Any], object]) -> Plan:
    """The plan of caches that fill has put three tokens into."""
    filled = make()
    for cache in filled:
        fill(cache)
    return Plan.of(make, filled)


def attention_plan(make: Callable[[], list[Any]], feed: Feed | None = None) -> Plan:
    """The plan of caches of attention layers."""

    def fill(cache: Any) -> None:
        for leaf in cache.caches if type(cache) is CacheList else [cache]:
            fill(leaf) if type(leaf) is CacheList else leaf.update_and_fetch(*(feed or Feed()).next(3))

    return plan_of(make, fill)


def restored(plan: Plan, caches: Sequence[Any], tokens: int, index: int | None = None) -> list[Any]:
    """New caches, made of the bytes that would be written of these."""
    return _copied(plan, Live(plan, caches, index, tokens))


def assert_same_future(ours: Any, theirs: Any, steps: Iterable[int], seed: int = 99) -> None:
    """Both give the engine the same tensors in every further step."""
    own, other = Feed(seed), Feed(seed)
    for number, tokens in enumerate(steps):
        got, expected = forward(ours, own, tokens), forward(theirs, other, tokens)
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape, (number, tokens)
            assert a.dtype == b.dtype
            assert mx.array_equal(a, b).item(), (number, tokens)
