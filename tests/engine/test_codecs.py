"""Each codec: a cache made of the bytes of another goes on as the other does. (Sliding windows: test_windows.py.)"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_support import Feed, assert_same_future, attention_plan, forward, plan_of, restored
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from kvstore_mlx.codecs import _CODECS, Codec, Snapshot, codec_of, register
from kvstore_mlx.live import Live
from kvstore_mlx.plan import Plan

FUTURES = [(1, 1, 1), (5,), (300, 1, 2), (1, 40, 1)]


def quantized(bits: int = 8, group_size: int = 32) -> QuantizedKVCache:
    return QuantizedKVCache(group_size, bits)


@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize("history", [(3,), (256,), (100, 1, 1, 1), (255, 1), (256, 1, 30)])
@pytest.mark.parametrize(
    "make_one", [KVCache, ConcatenateKVCache, quantized, lambda: quantized(4)], ids=["plain", "concat", "q8", "q4"]
)
def test_rows_go_on_as_before(make_one, history, future):
    plan = attention_plan(lambda: [make_one()])
    assert not plan.stateful
    cache, feed = make_one(), Feed(1)
    for tokens in history:
        forward(cache, feed, tokens)
    (copy,) = restored(plan, [cache], sum(history))
    assert type(copy) is type(cache)
    assert copy.offset == sum(history)
    assert_same_future(copy, cache, future)


@pytest.mark.parametrize("make_one", [KVCache, quantized], ids=["plain", "q8"])
def test_rows_that_were_trimmed_are_left_out(make_one):
    """After a trim the buffer still holds what was cut off."""
    plan = attention_plan(lambda: [make_one()])
    cache = make_one()
    forward(cache, Feed(1), 50)
    cache.trim(20)
    (copy,) = restored(plan, [cache], 30)
    assert_same_future(copy, cache, (1, 4))


def test_mlx_lm_s_trim_of_concatenated_rows_is_seen():
    """It moves the offset and keeps the rows, which the next update would take again."""
    plan = attention_plan(lambda: [ConcatenateKVCache()])
    cache = ConcatenateKVCache()
    forward(cache, Feed(1), 50)
    assert plan.starts([cache], None, 50)
    cache.trim(20)
    with pytest.raises(ValueError, match=r"layers hold \[50\] tokens where 30 were computed"):
        plan.starts([cache], None, 30)
    assert plan.count([ConcatenateKVCache()]) == 0
    with pytest.raises(ValueError, match="not served in batches"):
        plan.starts([cache], 0, 50)


def test_a_cache_that_the_engine_quantized_itself():
    """to_quantized leaves tuples, which the engine replaces by lists at its next growth; both must be read."""
    plan = attention_plan(lambda: [quantized()])
    plain = KVCache()
    forward(plain, Feed(1), 70)
    cache = plain.to_quantized(32, 8)
    (copy,) = restored(plan, [cache], 70)
    assert_same_future(copy, cache, (1, 200, 1))


def test_quantization_settings_are_part_of_the_plan():
    plans = [attention_plan(lambda s=s: [quantized(*s)], Feed(dim=64)).describe() for s in ((8, 32), (4, 32), (8, 64))]
    assert len({repr(plan["caches"]) for plan in plans}) == 3


def test_padding_of_a_batch_is_left_out():
    caches, feeds = [KVCache(), KVCache(), KVCache()], [Feed(1), Feed(2), Feed(3)]
    lengths = (5, 300, 40)
    for cache, feed, tokens in zip(caches, feeds, lengths, strict=True):
        forward(cache, feed, tokens)
    batch = BatchKVCache.merge(caches)
    new = [feed.next(1) for feed in feeds]
    batch.update_and_fetch(*(mx.concatenate([pair[part] for pair in new]) for part in (0, 1)))
    for cache, pair in zip(caches, new, strict=True):
        cache.update_and_fetch(*pair)
    plan = attention_plan(lambda: [KVCache()])
    for index, (cache, tokens) in enumerate(zip(caches, lengths, strict=True)):
        (copy,) = restored(plan, [batch], tokens + 1, index)
        assert_same_future(copy, cache, (1, 7))
        with pytest.raises(ValueError, match="tokens where"):
            _ = Live(plan, [batch], index, tokens).rows


def test_a_padded_step_of_a_batch_that_is_not_finished_is_refused():
    """Right-padded, the rows of the shorter prompts lie elsewhere until the batch is finalized."""
    caches = [KVCache(), KVCache()]
    for number, cache in enumerate(caches):
        forward(cache, Feed(number), 10)
    batch = BatchKVCache.merge(caches)
    batch.prepare(lengths=[4, 1], right_padding=[0, 3])
    batch.update_and_fetch(mx.ones((2, 2, 4, 32)), mx.ones((2, 2, 4, 32)))
    plan = attention_plan(lambda: [KVCache()])
    with pytest.raises(ValueError, match="tokens where 11 were computed"):
        _ = Live(plan, [batch], 1, 11).rows
    batch.finalize()
    assert Live(plan, [batch], 1, 11).rows.count == 11


class TestRecurrent:
    @staticmethod
    def filled(*slots: Any) -> ArraysCache:
        cache = ArraysCache(len(slots))
        cache.cache = list(slots)
        return cache

    def plan(self, slots: int = 3) -> Plan:
        return plan_of(lambda: [ArraysCache(slots)], lambda cache: None)

    def test_every_slot_comes_back(self):
        slots = [mx.array(np.arange(12, dtype=np.float32).reshape(1, 3, 4)), None, mx.ones((1, 2), mx.bfloat16)]
        plan = self.plan()
        assert plan.stateful
        assert plan.specs == ()
        (copy,) = restored(plan, [self.filled(*slots)], 9)
        assert copy.cache[1] is None
        for slot, own in ((0, slots[0]), (2, slots[2])):
            assert copy[slot].dtype == own.dtype
            assert mx.array_equal(copy[slot], own).item()
        assert (copy.left_padding, copy.lengths) == (None, None)

    def test_a_state_does_not_change_with_the_engine(self):
        cache = self.filled(mx.ones((1, 64)), None, None)
        mx.eval(cache.cache[0])
        state = Live(self.plan(), [cache], None, 5).state(decode=False)
        for _ in range(20):
            cache[0] = cache[0] * 2
            mx.eval(cache[0])
        assert np.frombuffer(state.data[0], np.float32).tolist() == [1.0] * 64

    def test_one_of_a_batch(self):
        singles = [self.filled(mx.full((1, 4), float(n)), None, mx.full((1, 2, 3), float(n) + 10)) for n in range(3)]
        batch = ArraysCache(3)
        batch.cache = [mx.concatenate([one[slot] for one in singles]) if slot != 1 else None for slot in range(3)]
        for index in range(3):
            (copy,) = restored(self.plan(), [batch], 7, index)
            assert copy.batch_size == 1
            assert copy[0].tolist() == [[index] * 4]
            assert copy[1] is None
            assert copy[2].tolist() == [[[index + 10.0] * 3] * 2]
        with pytest.raises(ValueError, match="holds 3 sequences"):
            restored(self.plan(), [batch], 7, None)

    def test_what_the_engine_merges_itself(self):
        batch = ArraysCache.merge([self.filled(mx.full((1, 4), float(n)), mx.zeros((1, 2))) for n in range(3)])
        (copy,) = restored(self.plan(2), [batch], 7, 2)
        assert copy[0].tolist() == [[2.0] * 4]

    def test_padding_is_refused(self):
        cache = self.filled(mx.ones((2, 4)), None, None)
        cache.prepare(lengths=[3, 1])
        with pytest.raises(ValueError, match="in the middle of a padded step"):
            restored(self.plan(), [cache], 7, 0)
        cache.finalize()
        assert restored(self.plan(), [cache], 7, 0)
        padded = ArraysCache(3, left_padding=[0, 2])
        padded[0] = mx.ones((2, 4))
        assert restored(self.plan(), [padded], 7, 0)
        with pytest.raises(ValueError, match="padding before its first token"):
            restored(self.plan(), [padded], 7, 1)
        padded.advance(3)
        assert restored(self.plan(), [padded], 7, 1)

    def test_another_number_of_slots_is_refused(self):
        plan, other = self.plan(2), self.plan(3)
        assert plan.describe() != other.describe()
        snapshot = other.snapshot([self.filled(mx.ones((1, 4)), None, None)], None)
        with pytest.raises(ValueError, match="a state holds"):
            plan.rebuild(7, {}, snapshot)


class TestChunked:
    """llama4: rows are dropped at the front between two layers' calls."""

    @pytest.mark.parametrize("history", [(3,), (16,), (20,), (40, 1), (10, 10, 1, 1, 1), (300, 1)])
    @pytest.mark.parametrize("future", [(1, 1, 1), (5,), (20, 1), (300, 1)])
    def test_it_goes_on_as_before(self, history, future):
        plan = attention_plan(lambda: [ChunkedKVCache(16)])
        assert plan.stateful
        cache, feed = ChunkedKVCache(16), Feed(1)
        for tokens in history:
            forward(cache, feed, tokens)
        (copy,) = restored(plan, [cache], sum(history))
        assert (copy.offset, copy.start_position) == (cache.offset, cache.start_position)
        assert_same_future(copy, cache, future)

    def test_after_its_front_was_dropped(self):
        plan = attention_plan(lambda: [ChunkedKVCache(16)])
        cache = ChunkedKVCache(16)
        forward(cache, Feed(1), 40)
        cache.maybe_trim_front()
        assert cache.start_position == 24
        (copy,) = restored(plan, [cache], 40)
        assert copy.start_position == 24
        assert_same_future(copy, cache, (1, 30, 1))

    def test_what_does_not_fit_is_refused(self):
        plan = attention_plan(lambda: [ChunkedKVCache(16)])
        cache = ChunkedKVCache(16)
        forward(cache, Feed(1), 40)
        snapshot = plan.snapshot([cache], None)
        for values in (
            {**snapshot.values, "0.offset": 41},
            {**snapshot.values, "0.start": 1},
            {**snapshot.values, "0.start": -1},
            {**snapshot.values, "0.start": "0"},
            {"0.offset": 40},
        ):
            with pytest.raises(ValueError, match=r"rows|a state holds"):
                plan.rebuild(40, {}, Snapshot(snapshot.tensors, values))
        with pytest.raises(ValueError, match="not served in batches"):
            plan.starts([cache], 0, 40)
        fewer = {**snapshot.tensors, "0.values": snapshot.tensors["0.values"][:, :, 1:]}
        with pytest.raises(ValueError, match=r"tensors of one cache hold \[39, 40\] rows"):
            plan.rebuild(40, {}, Snapshot(fewer, snapshot.values))

    @pytest.mark.parametrize(("tokens", "right"), [(40, True), (35, True), (32, True), (31, False), (26, False)])
    def test_a_trim_to_a_chunk_that_lost_its_first_rows_is_seen(self, tokens, right):
        """mlx-lm trims within the rows that are left; those of 24 to 40 begin in the middle of the chunk of 31."""
        plan = attention_plan(lambda: [ChunkedKVCache(16)])
        cache = ChunkedKVCache(16)
        forward(cache, Feed(1), 40)
        cache.maybe_trim_front()
        assert cache.start_position == 24
        cache.trim(40 - tokens)
        if right:
            assert plan.count([cache]) == tokens
        else:
            with pytest.raises(ValueError, match="a chunk begins at token 16, and its rows at 24"):
                plan.starts([cache], None, tokens)


class TestCompressed:
    """deepseek_v41's own class: a window, closed groups, index keys and the open group."""

    @staticmethod
    def step(cache: LayerCache, feed: Feed, tokens: int) -> mx.array:
        (keys, values) = feed.next(tokens)
        window = cache.update_window(keys[:, 0])
        rows = values[:, 1]
        pending = rows if cache.pending_kv is None else mx.concatenate([cache.pending_kv, rows], axis=1)
        full = pending.shape[1] // 4 * 4
        cache.pending_kv = pending[:, full:]
        cache.pending_gate = pending[:, full:] * 2
        if full:
            groups = pending[:, :full].reshape(1, full // 4, 4, -1).mean(axis=2)
            old = cache.compress_kv
            cache.compress_kv = groups if old is None else mx.concatenate([old, groups], axis=1)
        return mx.concatenate(
            [window, cache.pending_kv, *([] if cache.compress_kv is None else [cache.compress_kv])], 1
        )

    @pytest.mark.parametrize("history", [(2,), (4,), (7, 1, 1), (30, 1), (8,)])
    def test_it_goes_on_as_before(self, history):
        plan = plan_of(lambda: [LayerCache(8)], lambda cache: self.step(cache, Feed(), 3))
        assert plan.stateful
        cache, feed = LayerCache(8), Feed(1)
        for tokens in history:
            self.step(cache, feed, tokens)
        (copy,) = restored(plan, [cache], sum(history))
        assert (copy.compress_kv is None) == (cache.compress_kv is None)
        assert copy.index_k is None
        assert copy.pending_kv.shape == cache.pending_kv.shape  # Of no rows, when a group has just closed.
        ours, theirs = Feed(9), Feed(9)
        for tokens in (1, 5, 1, 20):
            assert mx.array_equal(self.step(copy, ours, tokens), self.step(cache, theirs, tokens)).item()
        assert copy.offset == cache.offset

    def test_what_does_not_fit_is_refused(self):
        plan = plan_of(lambda: [LayerCache(8)], lambda cache: self.step(cache, Feed(), 3))
        cache = LayerCache(8)
        self.step(cache, Feed(), 9)
        snapshot = plan.snapshot([cache], None)
        with pytest.raises(ValueError, match="holds 9 tokens instead of 8"):
            plan.rebuild(8, {}, snapshot)
        tensors = snapshot.tensors
        for other in (
            {"0.window": tensors["0.window"][:, 1:]},
            {"0.pending_gate": tensors["0.pending_gate"][:, 1:]},
            {"0.pending_kv": tensors["0.pending_kv"][:, 1:], "0.pending_gate": tensors["0.pending_gate"][:, 1:]},
            {"0.index_k": tensors["0.compress_kv"][:, 1:]},
            {"0.compress_kv": None},
        ):
            with pytest.raises(ValueError, match=r"rows|groups"):
                plan.rebuild(9, {}, Snapshot({**tensors, **other}, snapshot.values))
        with pytest.raises(ValueError, match="not served in batches"):
            plan.starts([cache], 0, 9)


class TestLists:
    @staticmethod
    def make() -> list[Any]:
        return [CacheList(KVCache(), CacheList(ArraysCache(1), KVCache())), KVCache()]

    @staticmethod
    def fill(caches: list[Any], tokens: int, seed: int = 1) -> list[Any]:
        feed = Feed(seed)
        for cache in (caches[0][0], caches[0][1][1], caches[1]):
            forward(cache, feed, tokens)
        caches[0][1][0][0] = mx.full((1, 3), float(tokens))
        return caches

    def test_lists_in_lists(self):
        plan = Plan.of(self.make, self.fill(self.make(), 3))
        assert [leaf.name for leaf in plan.leaves] == ["0.0", "0.1.0", "0.1.1", "1"]
        assert plan.stateful
        caches = self.fill(self.make(), 21)
        copies = restored(plan, caches, 21)
        assert type(copies[0]) is CacheList
        assert copies[0][1][0][0].tolist() == [[21.0] * 3]
        for of in (lambda made: made[0][0], lambda made: made[0][1][1], lambda made: made[1]):
            assert_same_future(of(copies), of(caches), (1, 9))

    def test_one_of_a_batch(self):
        plan = Plan.of(self.make, self.fill(self.make(), 3))
        singles = [self.fill(self.make(), tokens, seed=tokens) for tokens in (9, 30)]
        batch = [type(singles[0][layer]).merge([single[layer] for single in singles]) for layer in range(2)]
        for index, tokens in enumerate((9, 30)):
            copies = restored(plan, batch, tokens, index)
            assert copies[0][1][0][0].tolist() == [[tokens] * 3]
            assert_same_future(copies[0][1][1], singles[index][0][1][1], (1, 9))
            assert_same_future(copies[1], singles[index][1], (1, 9))


def test_layers_without_values():
    """A zero-size tensor is in no block and comes back by its shape (multi-head latent attention)."""

    def filled(tokens: int, seed: int = 0) -> KVCache:
        cache = KVCache()
        cache.update_and_fetch(*Feed(seed, value_dim=0).next(tokens))
        return cache

    plan = Plan.of(lambda: [KVCache()], [filled(3)])
    assert [spec.name for spec in plan.specs] == ["0.keys"]
    assert [part.stored for part in plan.parts] == [True, False]
    cache = filled(40, 1)
    (copy,) = restored(plan, [cache], 40)
    for tokens in (1, 300):
        own, other = Feed(tokens, value_dim=0), Feed(tokens, value_dim=0)
        got, expected = copy.update_and_fetch(*own.next(tokens)), cache.update_and_fetch(*other.next(tokens))
        assert mx.array_equal(got[0], expected[0]).item()
        assert got[1].shape == expected[1].shape
        assert BatchKVCache.merge([copy]).values.shape == (1, 2, copy.offset, 0)


def test_a_subclass_needs_a_codec_of_its_own():
    class Own(KVCache):
        pass

    assert codec_of(KVCache()) is not None
    assert codec_of(Own()) is None


def test_a_registered_class(monkeypatch):
    monkeypatch.setattr("kvstore_mlx.codecs._CODECS", dict(_CODECS))

    class Own(KVCache):
        pass

    codec = codec_of(KVCache())
    assert codec is not None
    register(Own, codec)
    assert codec_of(Own()) is codec
    with pytest.raises(ValueError, match=r"Own has a codec"):
        register(Own, codec)
    with pytest.raises(ValueError, match=r"mlx_lm.models.cache.KVCache has a codec"):
        register(KVCache, codec)
    plan = attention_plan(lambda: [Own()])
    cache = Own()
    forward(cache, Feed(1), 20)
    (copy,) = restored(plan, [cache], 20)
    assert type(copy) is Own
    assert_same_future(copy, cache, (1, 5))


def test_every_class_of_the_engine_is_known_or_left_out_on_purpose():
    """A cache class that a new release of mlx-lm brings is noticed here."""
    from mlx_lm.models import cache as engine

    classes = {name for name, value in vars(engine).items() if isinstance(value, type) and name.endswith("Cache")}
    known = {name.rpartition(".")[2] for name in _CODECS}
    assert classes - known == {"_BaseCache", "LRUPromptCache"}
    for codec in _CODECS.values():
        checked: Codec = codec
        assert len(set(checked.rows)) == len(checked.rows)
