"""Loops of one's own, which restore, publish and finish by hand."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from session_support import array_of, assert_same, model_of, prompt_of, session_of

FAMILIES = ["llama", "gpt_oss", "jamba"]


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
        cache.publish(tokens, caches, logits=logits, decoded=decoded)
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
            cache.publish(tokens, caches, logits=logits, decoded=True)
            assert cache.flush()
        with session_of(tmp_path / "cache", family, exact=True) as cache:
            assert cache.restore(tokens) is None
        with session_of(tmp_path / "cache", family) as cache:
            restored = cache.restore(tokens)
            assert (0 if restored is None else restored.tokens) == there
