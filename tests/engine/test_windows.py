"""Sliding windows: the ring's order, cursor and kept tokens survive, before it is full, when it is, and in a batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cache_support import Feed, assert_same_future, attention_plan, forward, restored
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

from kvstore_mlx.codecs import Snapshot
from kvstore_mlx.plan import Plan

WINDOW = 8
FUTURES = [(1,) * 20, (3, 1, 1), (20, 1, 1), (1, 4, 1, 9, 1)]


def plan_for(window: int, keep: int = 0) -> Plan:
    return attention_plan(lambda: [RotatingKVCache(window, keep)])


@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize(
    "history",
    [
        (3,),  # Not full.
        (3, 1, 1),  # Not full, in a buffer with spare rows.
        (8,),  # Just full.
        (7, 1),
        (30,),  # A prefill much longer than the window leaves more rows than it.
        (30, 1),
        (30, *[1] * 5),  # The cursor in the middle of the ring.
        (30, *[1] * 11),  # Around, and again.
        (5, 9),
        (9, 9, 1),
        (1,) * 19,
    ],
    ids=str,
)
@pytest.mark.parametrize("keep", [0, 4])
def test_it_goes_on_as_before(keep, history, future):
    plan = plan_for(WINDOW, keep)
    assert plan.stateful
    cache, feed = RotatingKVCache(WINDOW, keep), Feed(1)
    for tokens in history:
        forward(cache, feed, tokens)
    (copy,) = restored(plan, [cache], sum(history))
    assert (copy.offset, copy.keep, copy.max_size) == (cache.offset, keep, WINDOW)
    assert copy.keys.shape[2] == min(WINDOW, cache.offset)
    assert_same_future(copy, cache, future)


@pytest.mark.parametrize("history", [(10, 1), (256, 1), (290, *[1] * 20), (300, 1), (500, 1, 1)], ids=str)
def test_a_window_larger_than_a_step_of_growth(history):
    """Its buffer grows by 256 rows, so it has spare ones for long."""
    plan = plan_for(300)
    cache, feed = RotatingKVCache(300), Feed(1)
    for tokens in history:
        forward(cache, feed, tokens)
    (copy,) = restored(plan, [cache], sum(history))
    assert_same_future(copy, cache, (1, 1, 40, 1, 300, 1))


def test_a_window_that_was_trimmed():
    plan = plan_for(32)
    cache = RotatingKVCache(32)
    forward(cache, Feed(1), 20)
    cache.trim(5)
    (copy,) = restored(plan, [cache], 15)
    assert_same_future(copy, cache, (1, 4, 30, 1))


def test_a_state_is_no_larger_than_the_window():
    """What a long prefill leaves beyond the window would be dropped by the next step; 8 of 30 rows are enough."""
    cache = RotatingKVCache(WINDOW)
    forward(cache, Feed(1), 30)
    assert cache.keys.shape[2] == 30
    snapshot = plan_for(WINDOW).snapshot([cache], None)
    assert snapshot.tensors["0.keys"].shape[2] == WINDOW


def single_and_batch(lengths: list[int], window: int = WINDOW) -> tuple[list[Any], list[Feed], Any]:
    caches, feeds = [RotatingKVCache(window) for _ in lengths], [Feed(seed) for seed in range(len(lengths))]
    for cache, feed, tokens in zip(caches, feeds, lengths, strict=True):
        forward(cache, feed, tokens)
    return caches, feeds, BatchRotatingKVCache.merge(caches)


@pytest.mark.parametrize("lengths", [[3, 6, 5], [3, 30, 8], [9, 40, 20]], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 3, 13])
def test_one_of_a_batch_after_decoding(lengths, steps):
    """Bytes of any sequence of a batch make the cache that it would have alone."""
    caches, feeds, batch = single_and_batch(lengths)
    for _ in range(steps):
        new = [feed.next(1) for feed in feeds]
        batch.update_and_fetch(*(mx.concatenate([pair[part] for pair in new]) for part in (0, 1)))
        for cache, pair in zip(caches, new, strict=True):
            cache.update_and_fetch(*pair)
    for index, (cache, tokens) in enumerate(zip(caches, lengths, strict=True)):
        (copy,) = restored(plan_for(WINDOW), [batch], tokens + steps, index)
        assert copy.offset == cache.offset
        # The ring's order may be another one; what it holds is not.
        assert in_order(copy) == in_order(cache)
        with pytest.raises(ValueError, match="tokens where"):
            restored(plan_for(WINDOW), [batch], tokens + steps + 1, index)


def in_order(cache: RotatingKVCache) -> list[Any]:
    """The last rows of a window, in the order of their tokens."""
    rows = cache._temporal_order(cache.keys)[:, :, -min(cache.max_size, cache.offset) :]
    return rows.tolist()


def test_one_of_a_batch_after_a_padded_prefill():
    caches, feeds, batch = single_and_batch([4, 12, 3])
    new = [feed.next(tokens) for feed, tokens in zip(feeds, (6, 2, 11), strict=True)]
    padded = [
        mx.concatenate([mx.pad(pair[part], [(0, 0), (0, 0), (0, 11 - pair[part].shape[2]), (0, 0)]) for pair in new])
        for part in (0, 1)
    ]
    batch.prepare(lengths=[6, 2, 11], right_padding=[5, 9, 0])
    batch.update_and_fetch(*padded)
    for index, tokens in enumerate((10, 14)):
        with pytest.raises(ValueError, match="tokens where"):
            restored(plan_for(WINDOW), [batch], tokens, index)
    batch.finalize()
    for cache, pair in zip(caches, new, strict=True):
        cache.update_and_fetch(*pair)
    for index, cache in enumerate(caches):
        (copy,) = restored(plan_for(WINDOW), [batch], cache.offset, index)
        assert in_order(copy) == in_order(cache)
        assert_same_future(copy, cache, (1, 1, 20))


def test_what_does_not_fit_is_refused():
    plan = plan_for(WINDOW)
    cache = RotatingKVCache(WINDOW)
    forward(cache, Feed(1), 30)
    snapshot = plan.snapshot([cache], None)
    assert plan.rebuild(30, {}, snapshot)
    for tokens, values in (
        (29, snapshot.values),
        (30, {**snapshot.values, "0.cursor": WINDOW + 1}),
        (30, {**snapshot.values, "0.cursor": -1}),
        (30, {**snapshot.values, "0.cursor": 1.5}),
        (30, {"0.offset": 30}),
    ):
        with pytest.raises(ValueError, match=r"window|a state holds"):
            plan.rebuild(tokens, {}, Snapshot(snapshot.tensors, values))
    short = {name: array[:, :, :5] for name, array in snapshot.tensors.items()}
    with pytest.raises(ValueError, match="window of 8 holds 5 rows"):
        plan.rebuild(30, {}, Snapshot(short, snapshot.values))
    fewer = {**snapshot.tensors, "0.values": short["0.values"]}
    with pytest.raises(ValueError, match=r"tensors of one cache hold \[5, 8\] rows"):
        plan.rebuild(30, {}, Snapshot(fewer, snapshot.values))
    # A window of another size has other classes' bytes for the plan, so its namespace is another one.
    assert plan_for(WINDOW).describe() != plan_for(16).describe() != plan_for(16, 4).describe()
