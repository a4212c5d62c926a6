"""The memory tier's traps: an exact hit leaves a token to compute, images and failures of ours never end a request."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from kvstore_mlx.tier import TieredPromptCache

MODEL = ("model", None, None)


class NoSpaces:
    """A model that is served without the directory."""

    phase = 0

    def of(self, model):
        return None


def kv(tokens: int) -> list:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, tokens, 4)), mx.zeros((1, 1, tokens, 4)))
    return [cache]


def recurrent() -> list:
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 4))
    return [cache]


@pytest.fixture
def tier():
    return TieredPromptCache(10, NoSpaces(), None)


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


def test_an_exact_hit_of_a_single_token(tier):
    tier.insert_cache(MODEL, [1], kv(1))
    assert tier.fetch_nearest_cache(MODEL, [1]) == (None, [1])


def test_a_fetched_entry_is_a_copy(tier):
    tier.insert_cache(MODEL, [1, 2, 3, 4], kv(4))
    first, _ = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4])
    first[0].update_and_fetch(mx.ones((1, 1, 9, 4)), mx.ones((1, 1, 9, 4)))
    second, rest = tier.fetch_nearest_cache(MODEL, [1, 2, 3, 4])
    assert (second[0].offset, rest) == (3, [4])


class Broken(NoSpaces):
    def of(self, model):
        return self

    @property
    def namespace(self):
        raise RuntimeError("a bug of ours")


def test_a_bug_of_ours_is_logged_and_the_request_computed(caplog):
    tier = TieredPromptCache(10, Broken(), None)
    assert tier.fetch_nearest_cache(MODEL, [1, 2, 3]) == (None, [1, 2, 3])
    assert "lookup failed, computing instead" in caplog.text


def test_images_are_served_without_the_directory(caplog):
    tier = TieredPromptCache(10, Broken(), None)
    assert tier.fetch_nearest_cache(MODEL, [1, -77, -77, 3]) == (None, [1, -77, -77, 3])
    assert "lookup failed" not in caplog.text
