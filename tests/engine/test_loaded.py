"""What lies in memory counts, whatever the files say that it came from."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from session_support import array_of, assert_same, prompt_of

import kvstore_mlx
from kvstore_mlx import spaces
from kvstore_mlx.loaded import loaded_digest
from kvstore_mlx.spaces import UnsupportedModelError

PROMPT = prompt_of(200)


def scaled(path):
    model, _ = load(path)
    for layer in model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.k_proj.weight * 1.5
    return model


def with_adapter(path):
    model, _ = load(path)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.k_proj"]})
    return model


def as_bfloat16(path):
    model, _ = load(path)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    return model


CHANGES = {
    "settings given to load": lambda path: load(path, model_config={"rope_theta": 5.0})[0],
    "weights changed": scaled,
    "an adapter": with_adapter,
    "another dtype": as_bfloat16,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_finds_nothing_of_its_files_model(change, tiny_llama, tmp_path):
    path = str(tiny_llama)
    with kvstore_mlx.open(tmp_path / "c", load(path)[0], path=path, interval=64) as session:
        session.prefill(PROMPT)
    with kvstore_mlx.open(tmp_path / "c", load(path)[0], path=path) as session:
        assert session.prefill([*PROMPT, 5, 6]).cached_tokens == len(PROMPT)
    changed = change(path)
    with kvstore_mlx.open(tmp_path / "c", changed, path=path) as session:
        run = session.prefill([*PROMPT, 7, 8])
    with kvstore_mlx.open(None, changed, path=path, interval=64) as session:
        wanted = session.prefill([*PROMPT, 7, 8])
    assert run.cached_tokens == 0
    assert_same([array_of(run.logits)], [array_of(wanted.logits)])


def test_it_is_the_same_in_another_process(tiny_llama):
    program = (
        "import sys\nfrom mlx_lm import load\nfrom kvstore_mlx.loaded import loaded_digest\n"
        "print(loaded_digest(load(sys.argv[1])[0]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tiny_llama)], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == loaded_digest(load(str(tiny_llama))[0])


@dataclass
class Settings:
    """As a model may keep them: with something that is no JSON."""

    other: object


def test_settings_that_json_does_not_know_have_no_addresses():
    first, second = (SimpleNamespace(parameters=dict, args=Settings(object())) for _ in range(2))
    assert loaded_digest(first) == loaded_digest(second)


def test_ranks_of_a_distributed_model_are_refused(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(spaces.mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    model = load(str(tiny_llama))[0]
    with pytest.raises(UnsupportedModelError, match="distributed over several processes"):
        kvstore_mlx.open(tmp_path / "c", model, path=str(tiny_llama))
