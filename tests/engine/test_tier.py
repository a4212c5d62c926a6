"""The memory tier's traps: an exact hit leaves a token to compute, images and failures of ours never end a request."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cache_support import Feed, attention_plan, forward
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from kvstore import NamespaceInfo, Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.engine import recording_stream_generate
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.guard import Failures
from kvstore_mlx.tier import TieredPromptCache

MODEL = ("model", None, None)
DRAFTED = ("model", None, "draft")


class NoSpaces:
    """A model that is served without the directory."""

    phase = 0

    def of(self, model):
        return None


class OneSpace(NoSpaces):
    def __init__(self, space: ModelSpace) -> None:
        self.space = space

    def of(self, model):
        return self.space


def kv(tokens: int) -> list[Any]:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, tokens, 4)), mx.zeros((1, 1, tokens, 4)))
    return [cache]


def recurrent() -> list[Any]:
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 4))
    return [cache]


@pytest.fixture
def tier():
    return TieredPromptCache(10, NoSpaces(), None, Saving())


def test_an_exact_hit_of_a_trimmable_cache_leaves_one_token(tier):
    tier.insert_cache(MODEL, [1, 2, 3, 4], kv(4))
    caches, rest = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4])
    assert rest == [4]
    assert caches[0].offset == 3


def test_an_exact_hit_of_a_recurrent_cache_falls_back(tier):
    tier.insert_cache(MODEL, [1, 2, 3, 4], recurrent())
    assert tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4]) == (None, [1, 2, 3, 4])
    tier.insert_cache(MODEL, [1, 2], recurrent())
    caches, rest = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4])
    assert rest == [3, 4]
    assert caches is not None


def test_an_exact_hit_that_mlx_lm_cannot_cut(tier):
    """Its trim of a ConcatenateKVCache moves the offset and keeps the row: the token would be there twice."""
    cache = ConcatenateKVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 4, 4)), mx.zeros((1, 1, 4, 4)))
    tier.insert_cache(MODEL, [1, 2, 3, 4], [cache])
    assert tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4]) == (None, [1, 2, 3, 4])
    # In a longer prompt all of it is of use.
    caches, rest = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4, 5])
    assert (caches[0].keys.shape[2], rest) == (4, [5])


class TestWithADraftModel:
    """The caches of both are cut to the tokens that both were shown."""

    def held(self, tier, caches: list[Any], tokens: list[int]) -> list[int]:
        tier.insert_cache(DRAFTED, tokens, caches)
        found, rest = tier.fetch_nearest_cache(DRAFTED, [*tokens, 99])
        return tokens[: len(tokens) + 1 - len(rest)] if found is not None else []

    def test_both_are_cut(self, tier):
        caches = [*kv(9), *kv(7)]
        assert self.held(tier, caches, list(range(8))) == list(range(7))
        assert [cache.offset for cache in caches] == [7, 7]

    def test_lists_of_caches(self, tier):
        """deepseek_v32: a CacheList says nowhere how many tokens it holds."""
        caches = [CacheList(*kv(9), *kv(9)), *kv(8)]
        assert self.held(tier, caches, list(range(9))) == list(range(8))
        assert [leaf.offset for leaf in caches[0].caches] == [8, 8]

    @pytest.mark.parametrize("make", [ArraysCache, ConcatenateKVCache, RotatingKVCache, ChunkedKVCache])
    def test_what_cannot_be_cut_is_not_kept(self, tier, make):
        cache = make() if make is ConcatenateKVCache else make(4)
        if make is ArraysCache:
            cache[0] = mx.zeros((1, 4))
        else:
            cache.update_and_fetch(mx.zeros((1, 1, 9, 4)), mx.zeros((1, 1, 9, 4)))
        if make is ChunkedKVCache:
            # What speculation took back lies in the chunk before the rows that are left.
            cache.maybe_trim_front()
            cache.trim(2)
        assert self.held(tier, [cache, *kv(7)], list(range(8))) == []


def test_an_exact_hit_of_a_single_token(tier):
    tier.insert_cache(MODEL, [1], kv(1))
    assert tier.fetch_nearest_cache(MODEL, [1]) == (None, [1])


def test_a_fetched_entry_is_a_copy(tier):
    tier.insert_cache(MODEL, [1, 2, 3, 4], kv(4))
    first, _ = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4])
    first[0].update_and_fetch(mx.ones((1, 1, 9, 4)), mx.ones((1, 1, 9, 4)))
    second, rest = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4])
    assert (second[0].offset, rest) == (3, [4])


@pytest.mark.parametrize(("first", "seen"), [(1, [1, 2, 3, 4]), (-1, [4])])
def test_processors_of_a_request_that_nobody_records_see_what_memory_had(tier, first, seen):
    """But for images, whose places have no tokens."""
    shown = []

    def generate(*, prompt, logits_processors, **_):
        for processor in logits_processors:
            processor(mx.array(prompt), mx.zeros((1, 9)))
        yield from ()

    tier.insert_cache(MODEL, [first, 2, 3], kv(3))
    caches, rest = tier.fetch_nearest_cache(MODEL, [first, 2, 3, 4])
    stream = recording_stream_generate(generate, tier, None)
    processors = [lambda tokens, logits: shown.append(tokens.tolist()) or logits]
    list(stream(prompt=rest, prompt_cache=caches, logits_processors=processors))
    assert shown == [seen]


class Broken(NoSpaces):
    stateful, most, ids, label, row_bytes = False, None, ("broken",), "broken", 1
    error: Exception = RuntimeError("a bug of ours")

    def of(self, model):
        return self

    @property
    def usable(self):
        raise self.error


def test_a_bug_of_ours_is_logged_and_the_request_computed(caplog):
    tier = TieredPromptCache(10, Broken(), None, Saving())
    assert tier.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
    assert "lookup failed, computing instead" in caplog.text
    assert "a bug of ours" in caplog.text
    assert tier.take_recording() is None


@pytest.mark.parametrize(
    ("error", "said"), [(MemoryError(), "not enough memory"), (OSError(24, "too many files"), "too many files")]
)
def test_what_the_machine_lacks_is_no_bug_of_ours(caplog, monkeypatch, error, said):
    monkeypatch.setattr(Broken, "error", error)
    tier = TieredPromptCache(10, Broken(), None, Saving())
    assert tier.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])

    def save() -> None:
        raise error

    tier.failures.guarded(save)
    looked, saved = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert looked.startswith("kvstore: lookup failed, computing instead: ")
    assert saved.startswith("kvstore: not saved: ")
    assert said in looked
    assert said in saved
    assert "bug" not in caplog.text


def test_a_store_that_fails_each_request_is_said_once_a_minute(caplog, monkeypatch):
    """A volume that is gone must not fill the log, nor keep what else goes wrong out of it."""
    now = [0.0]
    tier = TieredPromptCache(10, Broken(), None, Saving())
    tier.failures = Failures(lambda: now[0])

    def requests(*errors: Exception) -> list[str]:
        caplog.clear()
        for error in errors * 5:
            monkeypatch.setattr(Broken, "error", error)
            tier.fetch_nearest_cache(MODEL, [1, 2, 3])
        return [record.getMessage().rpartition(": ")[2] for record in caplog.records]

    gone, full, bug = OSError(5, "it is gone"), OSError(28, "it is full"), RuntimeError("a bug of ours")
    assert requests(gone) == ["[Errno 5] it is gone"]
    assert requests(full, gone) == ["[Errno 28] it is full"]
    assert len(requests(bug, full)) == 1
    assert "a bug of ours" in caplog.text
    now[0] = 61.0
    assert len(requests(gone, full, bug)) == 3


def test_images_are_served_without_the_directory(caplog):
    tier = TieredPromptCache(10, Broken(), None, Saving())
    assert tier.fetch_nearest_cache(MODEL, [1, -77, -77, 3]) == (None, [1, -77, -77, 3])
    assert "lookup failed" not in caplog.text
    assert tier.take_recording() is None


class TestWithADirectory:
    @pytest.fixture
    def store(self, tmp_path):
        with Store.open(tmp_path / "cache", interval=128) as opened:
            yield opened

    def tier_of(self, store, writer, make, saving=None) -> tuple[TieredPromptCache, Form]:
        form = Form(attention_plan(make), store.namespace(NamespaceInfo({"model": make().__repr__()[:20]})))
        return TieredPromptCache(10, OneSpace(ModelSpace((form,), "m")), writer, saving or Saving()), form

    def save(self, tier, make, tokens: list[int], generated: int = 0) -> list[Any]:
        """A request from its lookup to its end, computed without an engine."""
        caches, rest = tier.fetch_nearest_cache(MODEL, tokens)
        recording = tier.take_recording()
        assert tier.take_recording() is None  # It is of one request.
        caches = make() if caches is None else caches
        for cache in caches:
            forward(cache, Feed(1), len(rest) + generated)
        tier.expect(caches, recording)
        tier.insert_cache(MODEL, tokens + [9] * generated, caches)
        assert tier._writer.drain(10)
        return caches

    def test_what_is_not_in_memory_comes_from_disk(self, store, writer):
        def make():
            return [KVCache(), KVCache()]

        tier, form = self.tier_of(store, writer, make)
        tokens = list(range(1, 301))
        self.save(tier, make, tokens)
        assert form.namespace.lookup(tokens).count == 300
        again, _ = self.tier_of(store, writer, make)
        caches, rest = again.fetch_nearest_cache(MODEL, tokens)
        assert [cache.offset for cache in caches] == [299, 299]
        assert rest == tokens[-1:]
        # A memory that reaches as far is asked first.
        again.insert_cache(MODEL, tokens[:250], self.trimmed(caches, 250))
        _, rest = again.fetch_nearest_cache(MODEL, tokens[:251])
        assert len(rest) == 1

    @staticmethod
    def trimmed(caches, tokens):
        for cache in caches:
            cache.trim(cache.offset - tokens)
        return caches

    def test_a_cache_that_nobody_recorded_is_not_saved(self, store, writer):
        def make():
            return [KVCache(), KVCache()]

        tier, form = self.tier_of(store, writer, make)
        tokens = list(range(1, 301))
        tier.fetch_nearest_cache(MODEL, tokens)
        caches = make()
        for cache in caches:
            forward(cache, Feed(1), 300)
        tier.insert_cache(MODEL, tokens, caches)
        assert writer.drain(10)
        assert form.namespace.lookup(tokens).count == 0

    def test_layers_of_another_length_than_their_tokens_are_not_saved(self, store, writer, caplog):
        def make():
            return [KVCache(), KVCache()]

        tier, form = self.tier_of(store, writer, make)
        tokens = list(range(1, 301))
        tier.fetch_nearest_cache(MODEL, tokens)
        caches = make()
        for cache, count in zip(caches, (300, 299), strict=True):
            forward(cache, Feed(1), count)
        tier.expect(caches, tier.take_recording())
        tier.insert_cache(MODEL, tokens, caches)
        assert writer.drain(10)
        assert form.namespace.lookup(tokens).count == 0
        assert "not saved: layers hold [299, 300] tokens where 300 were computed" in caplog.text

    def test_a_cache_in_memory_that_was_trimmed_too_far_is_left_out(self, store, writer, caplog):
        """mlx-lm trims a ChunkedKVCache no further than what is left of it, and says nothing."""

        def make():
            return [ChunkedKVCache(16)]

        tier, _ = self.tier_of(store, writer, make)
        caches = make()
        forward(caches[0], Feed(1), 300)
        caches[0].maybe_trim_front()
        tier.insert_cache(MODEL, list(range(300)), caches)
        caches, rest = tier.fetch_nearest_cache(MODEL, [*range(200), 7])
        assert (caches, len(rest)) == (None, 201)
        assert "a cache in memory was left out" in caplog.text
        # Within what is left it is as good as any, but in a chunk whose first rows are gone (those from 272 on).
        caches, rest = tier.fetch_nearest_cache(MODEL, [*range(295), 7])
        assert (caches[0].offset, len(rest)) == (295, 1)
        assert tier.fetch_nearest_cache(MODEL, [*range(286), 7])[0] is None

    @pytest.mark.parametrize("shared", [120, 149, 150, 200])
    def test_quantized_caches_that_were_cut_below_their_start_are_left_out(self, store, writer, shared, caplog):
        """mlx-lm's memory would go on quantized where --quantized-kv-start says plain, and that would be saved."""

        def quantized():
            return [QuantizedKVCache(32, 4)]

        plain, later = attention_plan(lambda: [KVCache()]), attention_plan(quantized)
        forms = tuple(
            Form(plan, store.namespace(NamespaceInfo({"form": plan is plain})), 0 if plan is plain else 150)
            for plan in (plain, later)
        )
        tier = TieredPromptCache(10, OneSpace(ModelSpace(forms, "m")), writer, Saving())
        caches = quantized()
        forward(caches[0], Feed(1), 300)
        tier.insert_cache(MODEL, list(range(300)), caches)
        caches, rest = tier.fetch_nearest_cache(MODEL, [*range(shared), 7, 8])
        if shared < 150:
            assert (caches, len(rest)) == (None, shared + 2)
            assert f"{shared} tokens are quantized, which an engine does from 150 on" in caplog.text
        else:
            assert (caches[0].offset, rest) == (shared, [7, 8])
        # The exact hit of one token more than the start is cut below it, too.
        tier.insert_cache(MODEL, list(range(1000, 1150)), [self.filled(quantized, 150)])
        assert tier.fetch_nearest_cache(MODEL, list(range(1000, 1150)))[0] is None

    @staticmethod
    def filled(make, tokens: int) -> Any:
        (cache,) = make()
        forward(cache, Feed(1), tokens)
        return cache

    def test_a_rope_that_stretches_is_not_cut_beyond_its_limit_in_memory_either(self, store, writer):
        def make():
            return [KVCache()]

        form = Form(attention_plan(make), store.namespace(NamespaceInfo({"model": "stretches"})), most=200)
        tier = TieredPromptCache(10, OneSpace(ModelSpace((form,), "m")), writer, Saving())
        tier.insert_cache(MODEL, list(range(300)), [self.filled(make, 300)])
        for shorter in ([*range(150), 7], list(range(300)), [7], []):
            assert tier.fetch_nearest_cache(MODEL, shorter)[0] is None
        for more in (1, 20):
            caches, rest = tier.fetch_nearest_cache(MODEL, list(range(300 + more)))
            assert (caches[0].offset, len(rest)) == (300, more)
        assert caches[0] is not tier.fetch_nearest_cache(MODEL, list(range(301)))[0][0]
        # One that never was longer is like any other.
        tier.insert_cache(MODEL, list(range(1000, 1200)), [self.filled(make, 200)])
        caches, rest = tier.fetch_nearest_cache(MODEL, [*range(1000, 1150), 7])
        assert (caches[0].offset, rest) == (150, [7])
        caches, rest = tier.fetch_nearest_cache(MODEL, list(range(1000, 1200)))
        assert (caches[0].offset, rest) == (199, [1199])

    @pytest.mark.parametrize(("generated", "saved"), [(0, 200), (1, 0)])
    def test_nothing_is_saved_of_caches_beyond_the_limit(self, store, writer, generated, saved):
        def make():
            return [KVCache()]

        tier, form = self.tier_of(store, writer, make)
        form.most = 200
        self.save(tier, make, list(range(200)), generated)
        assert form.namespace.lookup(list(range(200))).count == saved

    def test_boundaries_of_a_model_that_needs_them(self, store, writer):
        def make():
            return [ChunkedKVCache(16)]

        tokens = list(range(1, 601))
        for every, expected in ((1, [128, 256, 384, 512, 599]), (2, [256, 512, 599]), (0, [599])):
            tier, _ = self.tier_of(store, writer, make, Saving(every))
            assert tier.needs_boundaries(MODEL)
            tier.announce(tokens, [300])
            tier.fetch_nearest_cache(MODEL, tokens)
            assert tier.take_recording().boundaries == sorted({*expected, 300})
            # What was announced is of that prompt alone.
            tier.fetch_nearest_cache(MODEL, tokens[:-1])
            assert 300 not in tier.take_recording().boundaries

    def test_a_model_that_needs_none_has_none(self, store, writer):
        tier, _ = self.tier_of(store, writer, lambda: [KVCache()])
        assert not tier.needs_boundaries(MODEL)
        tier.announce(list(range(600)), [300])
        tier.fetch_nearest_cache(MODEL, list(range(600)))
        assert tier.take_recording().boundaries == []

    def test_a_form_with_trouble_is_neither_read_nor_written(self, store, writer):
        def make():
            return [KVCache()]

        tier, form = self.tier_of(store, writer, make)
        tokens = list(range(1, 301))
        self.save(tier, make, tokens)
        fresh, form = self.tier_of(store, writer, make)
        form.trouble = "the disk lies"
        assert fresh.fetch_nearest_cache(MODEL, tokens) == (None, tokens)
        assert fresh.take_recording() is None
