"""What a namespace is made of: everything that changes KV bytes, and nothing else (issue: two models never meet)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_support import attention_plan
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvstore_mlx import fingerprint
from kvstore_mlx.fingerprint import Quantization, describe, identity_of
from kvstore_mlx.plan import Plan

VERSIONS = {"mlx": "1", "mlx-lm": "2"}


def plan(*extra: Any, dtype: Any = mx.float32) -> Plan:
    def make() -> list[Any]:
        return [KVCache(), *(cache for one in extra for cache in one())]

    if dtype is mx.float32:
        return attention_plan(make)
    filled = make()
    for cache in filled:
        cache.update_and_fetch(mx.zeros((1, 2, 3, 32), dtype), mx.zeros((1, 2, 3, 32), dtype))
    return Plan.of(make, filled)


PLAN = plan()


def digest(identity: Any = None, own_plan: Plan = PLAN, versions: Any = VERSIONS, **more: Any) -> bytes:
    info = describe(identity or {"model": "m"}, own_plan, versions, label=more.pop("label", "name"), **more)
    return info.fingerprint


QUANTIZED = Quantization(8, 32, 100)

CHANGES: dict[str, dict[str, Any]] = {
    "another model": {"identity": {"model": "n"}},
    "an adapter": {"identity": {"model": "m", "adapter": "a"}},
    "another mlx": {"versions": {**VERSIONS, "mlx": "1.1"}},
    "another mlx-lm": {"versions": {**VERSIONS, "mlx-lm": "2.1"}},
    "another cache class": {"own_plan": plan(lambda: [RotatingKVCache(8)])},
    "another window": {"own_plan": plan(lambda: [RotatingKVCache(9)])},
    "another number of layers": {"own_plan": plan(lambda: [KVCache()])},
    "another dtype": {"own_plan": plan(dtype=mx.bfloat16)},
    "quantized later": {"quantization": QUANTIZED},
    "quantized": {"quantization": QUANTIZED, "quantized": True},
    "bits": {"quantization": replace(QUANTIZED, bits=4)},
    "group size": {"quantization": replace(QUANTIZED, group_size=64)},
    "quantized start": {"quantization": replace(QUANTIZED, start=0)},
    "salt": {"salt": b"mine"},
    "another salt": {"salt": b"yours"},
    "another prefill step, quantized": {"quantization": QUANTIZED, "quantized": True, "prefill_step": 512},
    "strict": {"strict": True},
    "another prefill step, strict": {"strict": True, "prefill_step": 512},
    "extras": {"extras": "prerouter/1"},
    "other extras": {"extras": "prerouter/2"},
}


def test_each_change_is_another_namespace():
    found = {name: digest(**change) for name, change in CHANGES.items()}
    assert len({*found.values(), digest()}) == len(CHANGES) + 1


def test_the_layout_is_in(monkeypatch):
    before = digest()
    monkeypatch.setattr(fingerprint, "LAYOUT", fingerprint.LAYOUT + 1)
    assert digest() != before


def test_the_kind_of_device_counts_only_when_strict(monkeypatch):
    plain, strict = digest(), digest(strict=True)
    monkeypatch.setattr(
        fingerprint.mx, "default_device", lambda: type("Device", (), {"type": type("Type", (), {"name": "other"})})
    )
    assert digest() == plain
    assert digest(strict=True) != strict


def test_what_is_not_in():
    """The label is for people, and no path, host or port is asked for at all."""
    assert digest(label="another name") == digest()
    assert digest(identity={"model": "m"}) == digest()
    assert set(describe({}, PLAN, VERSIONS, label="").description) == {
        "engine",
        "layout",
        "versions",
        "caches",
        "rows",
        "state",
    }


class TestFiles:
    @pytest.fixture
    def copy(self, tiny_llama, tmp_path):
        """A folder that may be changed, beside one that says what it was."""
        return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))

    def identity(self, model, adapter=None, draft=None) -> str:
        return json.dumps(identity_of(str(model), adapter and str(adapter), draft and str(draft)), sort_keys=True)

    def config(self, folder: Path, **changes: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    def test_a_copy_or_another_name_is_the_same(self, tiny_llama, copy):
        base = self.identity(tiny_llama)
        assert self.identity(copy) == base
        assert self.identity(copy.rename(copy.with_name("elsewhere"))) == base
        assert copy.name not in base

    def test_what_does_not_change_kv(self, tiny_llama, copy):
        base = self.identity(tiny_llama)
        (copy / "tokenizer_config.json").write_text('{"chat_template": "another"}')
        (copy / "generation_config.json").write_text('{"temperature": 2.0}')
        (copy / "README.md").write_text("another")
        self.config(copy, _name_or_path="elsewhere", transformers_version="9")
        assert self.identity(copy) == base

    @pytest.mark.parametrize(
        "change",
        [
            {"rope_theta": 5.0},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"max_position_embeddings": 1},
            {"sliding_window": 128},
            {"quantization": {"bits": 4, "group_size": 64}},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_what_of_the_configuration_changes_kv(self, tiny_llama, copy, change):
        self.config(copy, **change)
        assert self.identity(copy) != self.identity(tiny_llama)

    def test_weights(self, tiny_llama, copy):
        weights = copy / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        assert self.identity(copy) != self.identity(tiny_llama)

    def test_an_adapter_and_its_content(self, tiny_llama, copy, tmp_path):
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        (adapter / "adapters.safetensors").write_bytes(b"lora")
        (adapter / "adapter_config.json").write_text("{}")
        found = {self.identity(copy), self.identity(copy, adapter)}
        (adapter / "adapters.safetensors").write_bytes(b"LORA")
        found.add(self.identity(copy, adapter))
        (adapter / "adapter_config.json").write_text('{"scale": 2}')
        found.add(self.identity(copy, adapter))
        assert len(found) == 4

    def test_a_draft_model(self, tiny_llama, copy):
        with_draft = self.identity(tiny_llama, draft=copy)
        assert with_draft != self.identity(tiny_llama)
        assert self.identity(tiny_llama, draft=tiny_llama) == with_draft
        self.config(copy, rope_theta=5.0)
        assert self.identity(tiny_llama, draft=copy) != with_draft
        # Which of the two is which matters.
        assert self.identity(copy, draft=tiny_llama) != self.identity(tiny_llama, draft=copy)

    def test_code_that_a_model_brings(self, copy):
        (copy / "own.py").write_text("one")
        before = self.identity(copy)
        self.config(copy, model_file="own.py")
        brought = self.identity(copy)
        (copy / "own.py").write_text("two")
        assert len({before, brought, self.identity(copy)}) == 3
