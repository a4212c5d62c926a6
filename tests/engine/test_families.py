"""A model family of each cache class, and the two architectures this project was made for; `make models` runs all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache

from families import build, modules, rows
from family_arguments import UNBUILDABLE
from family_batch import LEFT_OUT, batch, batchable, kept
from family_runs import classes
from family_scenarios import Outcome, resume, write
from kvstore_mlx.buffers import has_non_finite
from kvstore_mlx.codecs.arrays import Arrays
from kvstore_mlx.codecs.rotating import Rotating
from kvstore_mlx.probe import masks_left_padding, masks_padding, probe

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("LD_PRELOAD")),
    reason="a preloaded BLAS rounds by the shape of what it multiplies; test_families_alone.py runs these without it",
)

ROOT = Path(__file__).resolve().parents[2]

BY_CLASS = {
    "llama": {"KVCache"},
    "gemma3_text": {"RotatingKVCache", "KVCache"},
    "mamba2": {"ArraysCache"},
    "llama4": {"ChunkedKVCache", "KVCache"},
    "deepseek_v32": {"CacheList[KVCache, KVCache]"},
    "baichuan_m1": {"CacheList[ArraysCache, RotatingKVCache]", "CacheList[ArraysCache, KVCache]"},
    "deepseek_v41": {"LayerCache"},
}
BAILING = ["bailing_moe", "bailing_moe_linear", "bailing_hybrid", "bailing_moe_v3"]
QWEN = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
IN_ANOTHER_PROCESS = {"bailing_hybrid", "qwen3_5_moe"}
"""Starting an engine takes longer than all of a family's scenarios; `make models` does it for each."""


def as_uninterrupted(outcome: Outcome) -> None:
    """Every scenario gave the tokens and the bits of an uninterrupted run, and none was left out."""
    assert not any(outcome.checks.values()), outcome.checks
    assert outcome.checks
    assert outcome.notes == []


def both(row: str, directory: Path) -> None:
    """Write, then restore by a session that has nothing but the directory, for some in another process."""
    model = build(row)
    as_uninterrupted(write(row, model, directory))
    as_uninterrupted(another_process(row, directory) if row in IN_ANOTHER_PROCESS else resume(row, model, directory))


def another_process(row: str, directory: Path) -> Outcome:
    program = (
        "import dataclasses, json, sys; from pathlib import Path; from families import build;"
        "from family_scenarios import resume;"
        "outcome = resume(sys.argv[1], build(sys.argv[1]), Path(sys.argv[2]));"
        "print(json.dumps(dataclasses.asdict(outcome)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, row, str(directory)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "integration", "tools"))},
        capture_output=True,
        text=True,
        check=True,
    )
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("row", BY_CLASS)
def test_a_family_of_each_cache_class(row, tmp_path):
    assert set(classes(make_prompt_cache(build(row)))) == BY_CLASS[row]
    both(row, tmp_path / "cache")


@pytest.mark.parametrize("row", BAILING)
def test_bailing(row, tmp_path):
    both(row, tmp_path / "cache")


@pytest.mark.parametrize("row", QWEN)
def test_qwen(row, tmp_path):
    both(row, tmp_path / "cache")


@pytest.mark.parametrize(("row", "bits"), [("llama", 4), ("bailing_moe_linear", 4), ("qwen3_5_moe", 8)])
def test_quantized_caches(row, bits, tmp_path):
    model = build(row)
    as_uninterrupted(write(row, model, tmp_path / "cache", (bits, 32)))
    as_uninterrupted(resume(row, model, tmp_path / "cache", (bits, 32)))


def test_a_rope_that_stretches_with_the_prompt(tmp_path, monkeypatch):
    """Its keys depend on where their piece ended, once that is beyond its limit; and the control."""
    row = "internlm3, dynamic"
    model = build(row)
    both(row, tmp_path / "cache")
    for place in ("kvstore_mlx.spaces", "family_scenarios"):
        monkeypatch.setattr(f"{place}.stretches_beyond", lambda _: None)
    write(row, model, tmp_path / "anywhere")
    assert "differ" in resume(row, model, tmp_path / "anywhere").checks["branch of the turn"]


def test_concatenated_caches(tmp_path, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda self: [ConcatenateKVCache() for _ in self.layers])
    outcome = write("llama", model, tmp_path / "cache")
    # mlx-lm's own trim of this class moves a number and no rows, which only the run in memory suffers from.
    assert all("mlx-lm's cache in memory" in note for note in outcome.notes)
    assert not any(outcome.checks.values()), outcome.checks
    as_uninterrupted(resume("llama", model, tmp_path / "cache"))


@pytest.mark.parametrize("row", ["gemma3_text", "bailing_hybrid"])
def test_a_batch_of_unequal_prompts(row, tmp_path):
    model = build(row)
    assert batchable(model)
    outcome = batch(row, model, tmp_path / "cache")
    as_uninterrupted(outcome)
    assert set(outcome.checks) == {"batch, first write", "batch, restored"}


RIGHT, LEFT = "with longer ones", "beside a longer one"


@pytest.mark.parametrize(
    ("row", "left_out"),
    [
        ("bailing_hybrid", []),
        ("bailing_moe_linear", [RIGHT]),
        # It minds where its blocks of keys lie, not what is computed after them.
        ("minimax_m3_vl", [RIGHT, LEFT]),
    ],
)
def test_what_padding_reaches_is_never_kept(row, left_out, tmp_path, monkeypatch):
    """mlx-lm pads unequal prompts, and some families take the padding for tokens: their batches answer wrongly."""
    model = build(row)
    assert masks_left_padding(model) is (LEFT not in left_out)
    assert masks_padding(model) is (RIGHT not in left_out or LEFT in left_out)
    outcome = kept(row, model, tmp_path / "cache")
    assert outcome.checks == {f"kept, {name}": "" for name in (RIGHT, LEFT)}
    assert outcome.notes == [LEFT_OUT + name for name in left_out]
    if left_out:
        # The control: kept, it would be found again.
        monkeypatch.setattr("kvstore_mlx.padding.Padding.look", lambda *_: set())
        assert "off from" in kept(row, model, tmp_path / "wrong").checks[f"kept, {left_out[-1]}"]


def test_a_model_that_forgets_fails_its_control(tmp_path):
    model = build("mamba2")
    for layer in model.layers:
        layer.mixer.A_log = mx.full(layer.mixer.A_log.shape, 4.0)
    assert "first token" in write("mamba2", model, tmp_path / "cache").checks["control"]


def test_a_state_that_is_restored_wrongly_is_found(tmp_path, monkeypatch):
    """The comparison itself: a ring with its cursor moved, and a recurrent state that is lost."""
    write("gemma3_text", model := build("gemma3_text"), tmp_path / "rotating")
    rebuild = Rotating.rebuild

    def moved(self, cache, tokens, arrays, snapshot):
        rebuild(self, cache, tokens, arrays, snapshot)
        if tokens > 100:
            cache._idx = (cache._idx + 5) % cache.max_size

    monkeypatch.setattr(Rotating, "rebuild", moved)
    assert resume("gemma3_text", model, tmp_path / "rotating").checks["branch inside a chunk"]

    write("mamba2", model := build("mamba2"), tmp_path / "arrays")
    rebuild_arrays = Arrays.rebuild

    def lost(self, cache, tokens, arrays, snapshot):
        rebuild_arrays(self, cache, tokens, arrays, snapshot)
        if tokens > 100:
            cache.cache[-1] = mx.zeros_like(cache.cache[-1])

    monkeypatch.setattr(Arrays, "rebuild", lost)
    assert resume("mamba2", model, tmp_path / "arrays").checks["cut at an interval"]


def test_forbidden_tokens_do_not_make_a_model_unsupported():
    model = build("llama")

    def forward(tokens, caches):
        logits = model(mx.array([tokens]), cache=list(caches))[0, -1]
        return mx.where(mx.arange(logits.size) < 10, -mx.inf, logits)

    assert not probe(lambda: make_prompt_cache(model), forward).stateful


@pytest.mark.parametrize(("dtype", "name"), [(mx.float32, "F32"), (mx.bfloat16, "BF16"), (mx.float16, "F16")])
def test_logits_may_be_minus_infinity_and_nothing_else(dtype, name):
    def refused(*values):
        return has_non_finite(bytes(memoryview(mx.array([0.0, *values, -1.0], dtype)).cast("B")), name, but_minus=True)

    assert not refused(-mx.inf)
    assert refused(mx.inf)
    assert refused(mx.nan, -mx.inf)
    assert refused(-mx.nan)
    assert has_non_finite(bytes(memoryview(mx.array([-mx.inf], dtype)).cast("B")), name)


def test_every_family_has_a_row():
    names = modules()
    assert len(names) > 100
    assert set(names) <= set(rows())
    assert set(UNBUILDABLE) <= set(names)
