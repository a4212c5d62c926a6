"""A model is probed when it is loaded: one whose restored caches compute something else is served without directory."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from families import build
from family_arguments import POSITIONS
from kvstore import KVStoreError
from kvstore_mlx.opening import open_session
from kvstore_mlx.probe import masks_left_padding, probe, stretches_beyond
from kvstore_mlx.spaces import UnsupportedModelError


class Forgetful:
    """A model with something beside its caches, as far as the adapter can see: each layer's cache has a shadow."""

    def __init__(self, wrong: float) -> None:
        self.wrong = wrong
        self.shadow: dict[int, float] = {}

    def make(self) -> list[KVCache]:
        return [KVCache()]

    def forward(self, tokens, caches):
        (cache,) = caches
        seen = self.shadow.get(id(cache), 0.0) + float(sum(tokens))
        self.shadow[id(cache)] = seen
        keys = mx.ones((1, 1, len(tokens), 4)) * mx.array(tokens)[:, None]
        keys, _ = cache.update_and_fetch(keys, keys)
        return mx.concatenate([keys.sum(axis=(0, 1, 2)), mx.array([100.0 + self.wrong * seen])])


def test_a_model_that_keeps_all_in_its_caches():
    model = Forgetful(wrong=0.0)
    plan = probe(model.make, model.forward)
    assert not plan.stateful
    assert [spec.name for spec in plan.specs] == ["0.keys", "0.values"]


def test_a_model_that_keeps_something_elsewhere():
    model = Forgetful(wrong=1.0)
    with pytest.raises(ValueError, match=r"its restored caches compute other logits \(by 6\)"):
        probe(model.make, model.forward)


def test_logits_that_are_no_numbers():
    model = Forgetful(wrong=float("nan"))
    with pytest.raises(ValueError, match=r"its restored caches compute other logits \(by nan\)"):
        probe(model.make, model.forward)


def test_a_model_that_hides_something_is_refused_with_one_sentence(tmp_path):
    model = build("llama")
    real = type(model).__call__
    seen: dict[int, int] = {}

    class Hiding(type(model)):
        def __call__(self, inputs, cache=None):
            logits = real(self, inputs, cache=cache)
            before = seen.get(id(cache[0]), 0)
            seen[id(cache[0])] = before + inputs.shape[1]
            return logits + (before > 0) * mx.arange(logits.shape[-1])

    model.__class__ = Hiding
    with pytest.raises(UnsupportedModelError, match=r"^its restored caches compute other logits \(by [0-9.]+\)$"):
        open_session(tmp_path / "cache", model, identity={"model": "hiding"})


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    """phi3small adds its mask to the scores: a row knows the tokens after it, which a branch would not have."""
    with pytest.raises(UnsupportedModelError, match=r"^its rows depend on the tokens that follow them \(by [0-9.]+\)$"):
        open_session(tmp_path / "cache", build("phi3small"), identity={"model": "phi3small"})


def test_a_class_without_codec(tmp_path):
    model = build("llama")

    class Own(KVCache):
        pass

    model.make_cache = lambda: [Own() for _ in model.layers]
    with pytest.raises(KVStoreError, match="it uses Own, which cannot be saved yet"):
        open_session(tmp_path / "cache", model, identity={"model": "own"})


def test_a_probe_leaves_nothing_behind():
    """Fresh caches come out of the model afterwards, and its parameters are as they were."""
    model = build("qwen3_next")
    before = mx.array(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)))
    with open_session(None, model):
        pass
    assert mx.array_equal(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)), before).item()


def test_blocks_of_keys_by_place_are_known_at_any_size():
    """minimax_m3_vl as it is published sees all blocks of a short prompt, so that computing would show nothing."""
    model = build("minimax_m3_vl")
    for module in model.modules():
        if hasattr(module, "index_block_size"):
            module.index_block_size, module.index_topk_blocks = 128, 16
    assert not masks_left_padding(model)


def test_a_rope_that_stretches_is_known_by_its_class():
    names = ("internlm2", "internlm2, dynamic", "internlm3", "internlm3, dynamic", "hunyuan")
    limit = POSITIONS
    assert [stretches_beyond(build(name)) for name in names] == [None, limit, None, limit, None]


def test_every_class_of_rope_is_looked_at():
    """One that a new release of mlx-lm brings is noticed here: may a prefix end within a piece of its prefill?"""
    from mlx_lm.models import rope_utils

    assert {name for name in vars(rope_utils) if name.endswith("RoPE")} == {
        "DynamicNTKScalingRoPE",
        "Llama3RoPE",
        "ProportionalRoPE",
        "SuScaledRoPE",
        "YarnRoPE",
    }


def test_a_plan_knows_logits_and_what_a_fourth_token_fills():
    model = build("deepseek_v41")

    def forward(tokens, caches):
        return model(mx.array([tokens]), cache=list(caches))[0, -1]

    plan = probe(lambda: make_prompt_cache(model), forward)
    assert (plan.logits.dtype, plan.logits.shape) == ("F32", (model.args.vocab_size,))
    # A group of four closes.
    assert "1.compress_kv" in {slot.name for slot in plan.later}
