"""--kv-cache-exact: neither directory nor memory has anything that was decoded, and each turn is reused."""

from __future__ import annotations

from typing import Any

import pytest
from cache_support import Feed, attention_plan, forward
from mlx_lm.models.cache import ArraysCache, KVCache

from kvstore import NamespaceInfo, Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.tier import TieredPromptCache
from kvstore_mlx.writer import Writer

MODEL = ("model", None, None)
PROMPT = list(range(1, 301))
ANSWER = [9] * 150


class OneSpace:
    phase = 0

    def __init__(self, space: ModelSpace) -> None:
        self.of = lambda _model: space


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "cache", interval=128) as opened:
        yield opened


@pytest.fixture
def writer(store):
    made = Writer(Housekeeping(store, 1 << 30))
    yield made
    made.close(10)


def make() -> list[Any]:
    return [KVCache(), KVCache()]


@pytest.fixture
def form(store):
    return Form(attention_plan(make), store.namespace(NamespaceInfo({"model": "m"})))


@pytest.fixture
def tier(form, writer):
    return TieredPromptCache(10, OneSpace(ModelSpace((form,), "m")), writer, Saving(prefill_only=True))


def turn(tier, tokens: list[int]) -> int:
    """A request with its answer, computed without an engine; tokens that were reused."""
    caches, rest = tier.fetch_nearest_cache(MODEL, tokens)
    recording = tier.take_recording()
    caches = make() if caches is None else caches
    assert [cache.offset for cache in caches] == [len(tokens) - len(rest)] * 2
    for cache in caches:
        forward(cache, Feed(1), len(rest) + len(ANSWER))
    tier.expect(caches, recording)
    tier.insert_cache(MODEL, tokens + ANSWER, caches)
    assert tier._writer.drain(10)
    return len(tokens) - len(rest)


def test_memory_and_directory_end_with_the_prompt(tier, form):
    assert turn(tier, PROMPT) == 0
    assert form.namespace.lookup(PROMPT + ANSWER).count == len(PROMPT) - 1
    more = [*PROMPT, *ANSWER, *range(50, 90)]
    assert turn(tier, more) == len(PROMPT) - 1  # from memory
    found = form.namespace.lookup(more, prefill_only=True)
    assert found.count == len(more) - 1
    assert turn(tier, [*more, *ANSWER, 5]) == len(more) - 1


def test_what_nobody_followed_is_not_kept_in_memory(tier):
    """Where its prompt ends is not known then."""
    caches = make()
    for cache in caches:
        forward(cache, Feed(1), 200)
    tier.insert_cache(MODEL, PROMPT[:200], caches)
    assert tier.fetch_nearest_cache(MODEL, PROMPT)[0] is None


def test_a_cache_that_cannot_be_cut_is_not_kept_in_memory(tier):
    assert tier.fetch_nearest_cache(MODEL, PROMPT)[0] is None
    caches = [ArraysCache(1)]
    tier.expect(caches, tier.take_recording())
    tier.insert_cache(MODEL, PROMPT + ANSWER, caches)
    assert tier.fetch_nearest_cache(MODEL, PROMPT + ANSWER)[0] is None


def test_parts_of_prompts_are(tier):
    caches = make()
    for cache in caches:
        forward(cache, Feed(1), 200)
    tier.insert_cache(MODEL, PROMPT[:200], caches, cache_type="user")
    _, rest = tier.fetch_nearest_cache(MODEL, PROMPT)
    assert len(rest) == 100


def test_without_it_answers_are_kept(form, writer):
    tier = TieredPromptCache(10, OneSpace(ModelSpace((form,), "m")), writer, Saving())
    turn(tier, PROMPT)
    assert form.namespace.lookup(PROMPT + ANSWER).count == len(PROMPT + ANSWER)
    assert turn(tier, [*PROMPT, *ANSWER, 5]) == len(PROMPT + ANSWER)
