"""What an engine attaches to a boundary comes back with it: the worked example of docs/extras.md."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from kvstore_mlx.live import Extras
from kvstore_mlx.opening import open_session

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))

from prerouter import PreroutedModel, PrerouterExtras

INTERVAL = 64
ARGUMENTS = llama.ModelArgs(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=96,
    num_attention_heads=2,
    num_key_value_heads=1,
    rms_norm_eps=1e-5,
    vocab_size=128,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def model():
    mx.random.seed(3)
    made = PreroutedModel(ARGUMENTS)
    mx.eval(made.parameters())
    return made


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 7 + i * i * 31 + i) % 128 for i in range(count)]


def session(directory, model, extras="own"):
    hook = PrerouterExtras(model) if extras == "own" else extras
    return open_session(directory, model, identity={"m": 1}, interval=INTERVAL, prefill_step=INTERVAL, extras=hook)


def decoded(model, run, count: int = 10) -> tuple[list[int], mx.array]:
    """Greedy tokens after a prefill, and the logits after the last one."""
    tokens, logits = [], run.logits
    for _ in range(count):
        tokens.append(int(mx.argmax(logits).item()))
        logits = model(mx.array([tokens[-1:]]), cache=run.caches)[0, -1]
    return tokens, logits


def equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())


def test_a_restored_prompt_is_routed_as_if_it_had_never_stopped(tmp_path, model):
    tokens = prompt(1, 200)
    with session(None, model) as plain:
        run = plain.prefill(tokens)
        wanted, wanted_after = run.logits, decoded(model, run)
    with session(tmp_path, model) as first:
        assert first.stateful
        assert equal(first.prefill(tokens).logits, wanted)
    with session(tmp_path, model) as again:
        run = again.prefill(tokens)
        assert run.cached_tokens == 200
        assert equal(run.logits, wanted)
        answer, logits = decoded(model, run)
        assert answer == wanted_after[0]
        assert equal(logits, wanted_after[1])


@pytest.mark.parametrize("shared", [64, 65, 128, 191])
def test_a_branch_is_resumed_at_a_boundary_with_its_extras(tmp_path, model, shared):
    with session(tmp_path, model) as saving:
        saving.prefill(prompt(1, 200))
    other = [*prompt(1, 200)[:shared], *prompt(2, 40)]
    with session(tmp_path, model) as branch:
        run = branch.prefill(other)
    assert run.cached_tokens == shared // INTERVAL * INTERVAL
    with session(None, model) as plain:
        reference = plain.prefill(other, cuts=[run.cached_tokens])
    assert equal(run.logits, reference.logits)


def test_the_control_without_extras_is_routed_otherwise(tmp_path, model):
    """The same restore with the pending prediction thrown away gives other logits: the test above can fail."""

    class Forgetful(PrerouterExtras):
        def restore(self, extras: Extras | None) -> None:
            super().restore(None)

    with session(tmp_path, model) as saving:
        saving.prefill(prompt(1, 200))
    other = [*prompt(1, 200)[:128], 5]
    with session(None, model) as plain:
        wanted = plain.prefill(other, cuts=[128]).logits
    with session(tmp_path, model) as right:
        assert equal(right.prefill(other).logits, wanted)
    with pytest.raises(Exception, match="its restored caches compute other logits"):
        session(tmp_path, model, Forgetful(model))


def test_another_version_of_extras_is_another_namespace(tmp_path, model):
    with session(tmp_path, model) as saving:
        saving.prefill(prompt(1, 200))

    class Newer(PrerouterExtras):
        name = "prerouter/2"

    with session(tmp_path, model, Newer(model)) as newer:
        assert newer.prefill(prompt(1, 200)).cached_tokens == 0
    with pytest.raises(Exception, match="its restored caches compute other logits"):
        session(tmp_path, model, None)
