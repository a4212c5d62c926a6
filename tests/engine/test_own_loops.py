"""Loops of one's own, which restore, publish and finish by hand."""

from __future__ import annotations

import time

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from session_support import array_of, assert_same, model_of, prompt_of, session_of

FAMILIES = ["llama", "gpt_oss", "jamba", "mamba"]


def forward(model, caches, tokens):
    """The logits after the last of these tokens."""
    logits = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_published_comes_back_whole(tmp_path, family, decoded):
    """Found by review: with decoded tokens in it neither logits nor states were saved."""
    model, tokens = model_of(family), prompt_of(100)
    caches = make_prompt_cache(model)
    logits = forward(model, caches, tokens)
    with session_of(tmp_path / "cache", family) as cache:
        cache.publish(tokens, caches, logits=logits, decoded=decoded, count=100)
        assert cache.flush()
        restored = cache.restore(tokens)
        assert restored.tokens == len(tokens)
        assert_same([array_of(restored.logits)], [array_of(logits)])
        assert_same([array_of(forward(model, restored.caches, [5]))], [array_of(forward(model, caches, [5]))])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_session_neither_saves_nor_restores_what_was_decoded(tmp_path, family):
    model, tokens = model_of(family), prompt_of(100)
    caches = make_prompt_cache(model)
    logits = forward(model, caches, tokens)
    for saving, there in ((True, 0), (False, 100)):
        with session_of(tmp_path / "cache", family, exact=saving) as cache:
            cache.publish(tokens, caches, logits=logits, decoded=True, count=100)
            assert cache.flush()
        with session_of(tmp_path / "cache", family, exact=True) as cache:
            assert cache.restore(tokens) is None
        with session_of(tmp_path / "cache", family) as cache:
            restored = cache.restore(tokens)
            assert (0 if restored is None else restored.tokens) == there


UNCOUNTED = ["mamba", "mamba2", "rwkv7"]


@pytest.mark.parametrize("family", UNCOUNTED)
def test_what_no_layer_counts_is_saved_only_when_the_caller_counts(tmp_path, family):
    """Found by review: tokens that were never forwarded were restored, and what was computed from there was wrong."""
    model, tokens = model_of(family), prompt_of(100)
    caches = make_prompt_cache(model)
    forward(model, caches, tokens)
    with session_of(tmp_path / "cache", family) as cache:
        for given in (tokens, [*tokens, 7]):
            with pytest.raises(ValueError, match="no layer of this model counts its tokens"):
                cache.publish(given, caches)
        with pytest.raises(ValueError, match="100 tokens were counted where 101 are given"):
            cache.publish([*tokens, 7], caches, count=100)
        assert cache.flush()
        assert cache.restore([*tokens, 7]) is None
        cache.publish(tokens, caches, count=100)
        assert cache.flush()
        restored = cache.restore([*tokens, 7])
        assert restored.tokens == 100
        assert_same([array_of(forward(model, restored.caches, [7]))], [array_of(forward(model, caches, [7]))])
        assert cache.failures == 0


@pytest.mark.parametrize("family", UNCOUNTED)
def test_nor_is_what_was_generated(tmp_path, family):
    model, tokens = model_of(family), prompt_of(100)
    with session_of(tmp_path / "cache", family) as cache:
        run = cache.prefill(tokens)
        assert cache.flush()
        forward(model, run.caches, [7])
        for held in (tokens, [*tokens, 7], [*tokens, 7, 8]):
            with pytest.raises(ValueError, match="no layer of this model counts its tokens"):
                cache.finish(run, held)
        with pytest.raises(ValueError, match="101 tokens were counted where 102 are given"):
            cache.finish(run, [*tokens, 7, 8], count=101)
        assert cache.flush()
        assert cache.restore([*tokens, 7, 8]).tokens == 100
        cache.finish(run, [*tokens, 7], count=101)
        assert cache.flush()
        assert cache.restore([*tokens, 7, 8]).tokens == 101


def test_a_count_is_compared_with_what_layers_count_too(tmp_path):
    model, tokens = model_of("llama"), prompt_of(100)
    caches = make_prompt_cache(model)
    forward(model, caches, tokens)
    with session_of(tmp_path / "cache", "llama") as cache:
        for given, count, words in ((tokens, 99, "99 tokens were counted"), ([*tokens, 7], 101, "tokens where 101")):
            with pytest.raises(ValueError, match=words):
                cache.publish(given, caches, count=count)
        cache.publish(tokens, caches, count=100)
        assert cache.flush()
        assert cache.restore(tokens).tokens == 100


def test_without_a_directory_no_count_is_wanted():
    model, tokens = model_of("mamba"), prompt_of(100)
    with session_of(None, "mamba") as cache:
        run = cache.prefill(tokens)
        forward(model, run.caches, [7])
        cache.finish(run, [*tokens, 7])
        cache.publish([*tokens, 7], run.caches)


@pytest.mark.parametrize("known", [False, True])
def test_a_prefill_that_is_never_finished_slows_no_writing_for_long(tmp_path, known):
    """Found by review: it did for half a minute, also where nothing was left to compute."""
    tokens = prompt_of(100)
    if known:
        with session_of(tmp_path / "cache", "llama") as cache:
            cache.prefill(tokens)
    with session_of(tmp_path / "cache", "llama") as cache:
        writer = cache._writer
        assert cache.prefill(tokens).cached_tokens == (len(tokens) if known else 0)
        assert writer._share() < 1.0, "a first token may be chosen"
        writer._monotonic = lambda: time.monotonic() + 2
        assert writer._share() == 1.0


@pytest.mark.parametrize("saved", [False, True])
def test_what_is_restored_by_hand_is_wanted_whether_it_is_there_or_not(tmp_path, saved):
    """A full directory took it for as cold as its files, and a prompt that it had refused never got warmer."""
    tokens = prompt_of(200)
    with session_of(tmp_path / "cache", "llama") as cache:
        if saved:
            cache.prefill(tokens)
            assert cache.flush()
        names = cache._space.forms[0].namespace.names(tokens)
        warmth = cache._writer._housekeeping._warmth
        warmth._uses.clear()
        assert (cache.restore(tokens) is not None) == saved
        assert len(names) == 3
        assert set(names) <= set(warmth._uses)
