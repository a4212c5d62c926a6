"""What is restored, and when rather nothing is: damage, states of other makers, prefixes too short for a form."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from session_support import array_of, assert_same, decode, forwarded, prompt_of, session_of

from kvstore import NamespaceInfo, Span, TensorSpec
from kvstore.keys import pack_tokens
from kvstore.manifest import decode as decode_manifest
from kvstore.states import State, StateTensor
from kvstore_mlx.restoring import longest

PROMPT = prompt_of(200)


def save(directory: Path, family: str, prompt: list[int] = PROMPT, answer: int = 0, **more: Any) -> list[int]:
    """Save a prompt, and what is answered to it; all tokens that were forwarded."""
    with session_of(directory, family, **more) as session:
        run = session.prefill(prompt)
        tokens = list(prompt)
        if answer:
            tokens = forwarded(prompt, decode(session, run, answer)[0])
            session.finish(run, tokens, count=len(tokens))
        assert session.flush()
    return tokens


def ends(directory: Path, kind: str) -> list[int]:
    """Where nodes or states end, in tokens."""
    files = (directory / "objects" / "nodes").rglob(f"*.{kind}")
    return sorted({decode_manifest(path.read_bytes()).end for path in files})


class TestFlags:
    """states, exact and strict, as open_session and `kvstore serve` take them."""

    @pytest.mark.parametrize(
        ("states", "expected"),
        [(1, [64, 128, 192, 199, 200]), (2, [128, 199, 200]), (3, [192, 199, 200]), (0, [199, 200])],
    )
    def test_states_are_thinned(self, tmp_path, states, expected):
        save(tmp_path / "cache", "bailing_moe_linear", states=states)
        assert ends(tmp_path / "cache", "state") == expected
        # Rows are all there, for a server that wants more states.
        assert max(ends(tmp_path / "cache", "kv")) == 200

    def test_a_thinned_prompt_is_resumed_where_a_state_is(self, tmp_path):
        save(tmp_path / "cache", "bailing_moe_linear", states=2)
        with session_of(tmp_path / "cache", "bailing_moe_linear") as session:
            run = session.prefill([*PROMPT[:180], 5, 6])
            assert run.cached_tokens == 128
            reference = session_of(None, "bailing_moe_linear", states=2).prefill([*PROMPT[:180], 5, 6], [192])
            assert np.abs(array_of(run.logits) - array_of(reference.logits)).max() < 1e-4

    @pytest.mark.parametrize("family", ["llama", "bailing_moe_linear", "gemma3_text"])
    def test_exact_leaves_out_what_was_decoded(self, tmp_path, family):
        tokens = [*save(tmp_path / "cache", family, answer=6), 5, 6, 7]
        with session_of(tmp_path / "cache", family) as session:
            assert session.prefill(tokens).cached_tokens == len(tokens) - 3
            session.flush()
        tokens = [*save(tmp_path / "exact", family, answer=6, exact=True), 5, 6, 7]
        plain = session_of(None, family, exact=True)
        with session_of(tmp_path / "exact", family, exact=True) as session:
            run = session.prefill(tokens)
            assert run.cached_tokens == len(PROMPT)
            reference = plain.prefill(tokens, [len(PROMPT) - 1, len(PROMPT)])
            assert_same([array_of(run.logits)], [array_of(reference.logits)])
            session.flush()
        # What it computed anew is a prefill's, and there for the next one.
        with session_of(tmp_path / "exact", family, exact=True) as session:
            assert session.prefill([*tokens, 8]).cached_tokens >= len(tokens) - 1

    @pytest.mark.parametrize("family", ["llama", "bailing_moe_linear"])
    def test_exact_reuses_each_turn_of_a_conversation(self, tmp_path, family):
        """Answers that cross a chunk border: had they been saved, no prefill could ever take their place."""
        tokens, before = prompt_of(200), 0
        for turn in range(4):
            with session_of(tmp_path / "cache", family, exact=True) as session:
                run = session.prefill(tokens)
                assert run.cached_tokens == before
                before = len(tokens)
                answer, _ = decode(session, run, 80)
                held = forwarded(tokens, answer)
                session.finish(run, held)
            tokens = [*held, *prompt_of(30, seed=turn + 9)]
        with session_of(tmp_path / "cache", family, exact=True) as session:
            assert session.prefill(tokens).cached_tokens == before
        with session_of(tmp_path / "cache", family, exact=True) as session:
            assert session.prefill(tokens).cached_tokens == len(tokens)

    def test_strict_tells_prefill_steps_apart(self, tmp_path):
        save(tmp_path / "cache", "llama", strict=True)
        for more, hits in (({"strict": True}, True), ({"strict": True, "prefill_step": 32}, False), ({}, False)):
            with session_of(tmp_path / "cache", "llama", **more) as session:
                assert (session.prefill(PROMPT).cached_tokens > 0) is hits

    def test_without_it_they_are_shared(self, tmp_path):
        save(tmp_path / "cache", "llama")
        with session_of(tmp_path / "cache", "llama", prefill_step=32) as session:
            assert session.prefill(PROMPT).cached_tokens == len(PROMPT)


class TestDamage:
    def damage(self, directory: Path, kind: str, number: int) -> None:
        """Flip the last byte of what the number-th node or state of the prompt consists of."""
        found = [decode_manifest(path.read_bytes()) for path in (directory / "objects" / "nodes").rglob(f"*.{kind}")]
        digest = sorted(found, key=lambda manifest: manifest.end)[number].blocks[0].digest.hex()
        (block,) = (directory / "objects" / "blocks").rglob(digest)
        data = bytearray(block.read_bytes())
        data[-1] ^= 1
        block.write_bytes(data)

    @pytest.mark.parametrize("family", ["bailing_moe_linear", "gemma3_text", "deepseek_v41"])
    def test_a_damaged_state_is_passed_by(self, tmp_path, family):
        """The one before it is used, and the damaged one is written again."""
        directory = tmp_path / "cache"
        save(directory, family)
        self.damage(directory, "state", -1)
        self.damage(directory, "state", -2)
        reference = session_of(None, family).prefill(PROMPT)
        for expected in (192, 200):
            with session_of(directory, family) as session:
                run = session.prefill(PROMPT)
                assert run.cached_tokens == expected
                assert_same([array_of(run.logits)], [array_of(reference.logits)], 1e-4)
                session.flush()

    def test_no_quantized_rows_below_the_length_where_they_begin(self, tmp_path):
        """An uninterrupted run would have plain caches there, and other bits after them."""
        more = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 100}
        directory = tmp_path / "cache"
        save(directory, "llama", **more)
        for path in (directory / "objects" / "nodes").rglob("*.kv"):
            manifest = decode_manifest(path.read_bytes())
            for ref in manifest.blocks:
                if ref.first == 64:
                    (block,) = (directory / "objects" / "blocks").rglob(ref.digest.hex())
                    data = bytearray(block.read_bytes())
                    data[-1] ^= 1
                    block.write_bytes(data)
        reference = session_of(None, "llama", **more)
        with session_of(directory, "llama", **more) as session:
            # (Longer than what was saved: an exact hit that fails is looked up again, which finds the damage first.)
            run = session.prefill([*PROMPT, 5, 6])
            assert run.cached_tokens < 100
            # The plain form has the first tokens too, and may be used.
            expected = reference.prefill([*PROMPT, 5, 6], [run.cached_tokens])
            assert_same([array_of(run.logits)], [array_of(expected.logits)])
            assert {type(cache) for cache in run.caches} == {QuantizedKVCache}


def changed(state: State, names: str, shape: Any, dtype: str | None = None) -> State:
    """A state whose tensors of these names have another shape, and the beginning of their bytes."""
    tensors = [
        replace(tensor, shape=shape(tensor), dtype=dtype or tensor.dtype) if tensor.name.startswith(names) else tensor
        for tensor in state.tensors
    ]
    data = [bytes(memoryview(old).cast("B")[: new.nbytes]) for new, old in zip(tensors, state.data, strict=True)]
    return State(tuple(tensors), data, state.values)


class TestForeignStates:
    """Whole by its digests, in the right namespace, and nothing that this model writes."""

    def replaced(self, tmp_path, change, caplog) -> None:
        directory = tmp_path / "cache"
        with session_of(directory, "gemma3_text") as session:
            (form,) = session._space.forms
            run = session.prefill(PROMPT)
            session.flush()
            # Another writer's directory, with the rows of this one.
            namespace = form.namespace
            caches = run.caches
        other = tmp_path / "other"
        with session_of(other, "gemma3_text") as session:
            (form,) = session._space.forms
            from kvstore_mlx.live import Live

            live = Live(form.plan, caches, None, len(PROMPT))
            tokens = pack_tokens(PROMPT)
            for first in range(0, len(PROMPT), 64):
                end = min(first + 64, len(PROMPT))
                form.namespace.publish(
                    tokens[: end * 4], [Span(first, end - first, live.rows.specs, live.rows.copy(first, end))]
                )
            form.namespace.publish_state(tokens, change(live.state(decode=False, logits=run.logits)))
            assert namespace.id == form.namespace.id
            with caplog.at_level(logging.WARNING):
                again = session.prefill(PROMPT)
            reference = session_of(None, "gemma3_text").prefill(PROMPT)
            assert_same([array_of(again.logits)], [array_of(reference.logits)], 1e-4)
            session.flush()

    def test_the_right_one(self, tmp_path, caplog):
        self.replaced(tmp_path, lambda state: state, caplog)
        assert "does not fit" not in caplog.text

    @pytest.mark.parametrize(
        "change",
        [
            lambda s: State(s.tensors[1:], s.data[1:], s.values),
            lambda s: State(
                (*s.tensors, StateTensor("9.keys", "F32", (1,))), [*s.data, bytes(4)], {**s.values, "0.cursor": 3000}
            ),
            lambda s: State(s.tensors, s.data, {**s.values, "0.offset": 199}),
            lambda s: State(s.tensors, s.data, {}),
            lambda s: State([replace(t, dtype="I32") for t in s.tensors], s.data, s.values),
            lambda s: State(
                [replace(t, shape=(1, t.shape[1] * 2, t.shape[2], t.shape[3] // 2)) for t in s.tensors[:-1]]
                + [s.tensors[-1]],
                s.data,
                s.values,
            ),
            lambda s: changed(s, "0.values", lambda t: (1, t.shape[1], t.shape[2] - 1, t.shape[3])),
            lambda s: changed(s, "0.", lambda t: (1, t.shape[1], t.shape[2] - 1, t.shape[3])),
            lambda s: changed(s, "logits", lambda t: (t.shape[0] - 1,)),
            lambda s: changed(s, "logits", lambda t: (1, *t.shape)),
            lambda s: changed(s, "logits", lambda t: t.shape, "I32"),
        ],
        ids=[
            "a tensor less",
            "a cursor outside",
            "another offset",
            "no values",
            "another dtype",
            "other heads",
            "a value row less",
            "a row less",
            "a logit less",
            "logits of another rank",
            "logits of another dtype",
        ],
    )
    def test_is_a_miss(self, tmp_path, caplog, change):
        self.replaced(tmp_path, change, caplog)
        assert "does not fit the model" in caplog.text

    def test_rows_of_other_shapes(self, tmp_path, caplog):
        with session_of(tmp_path / "cache", "llama") as session:
            (form,) = session._space.forms
            specs = tuple(TensorSpec(spec.name, "F16", spec.outer, spec.inner) for spec in form.plan.specs)
            data = [bytes(spec.span_bytes(64)) for spec in specs]
            form.namespace.publish(pack_tokens(PROMPT[:64]), [Span(0, 64, specs, data)])
            with caplog.at_level(logging.WARNING):
                run = session.prefill(PROMPT)
            assert run.cached_tokens == 0
            assert "does not fit the model" in caplog.text
            assert mx.array_equal(run.logits, session_of(None, "llama").prefill(PROMPT).logits).item()


@pytest.mark.parametrize(
    ("family", "shared"), [("llama", 200), ("llama", 100), ("mamba", 200), ("bailing_moe_linear", 200)]
)
def test_what_a_restore_reads_is_known_before_and_counted_after(tmp_path, family, shared):
    """A state too, and all of a block of which half matches."""
    save(tmp_path / "cache", family, interval=256)
    prompt = [*PROMPT[:shared], 5, 6]
    with session_of(tmp_path / "cache", family, interval=256) as session:
        found = longest(session._fetching._find(pack_tokens(prompt)))
        restored = session._fetching._read(found, len(prompt))
        assert restored.tokens == found.count == shared
        assert session._store.counters.snapshot()["restored_bytes"] == restored.size
    blocks = tmp_path / "cache" / "objects" / "blocks"
    files = sorted(path.stat().st_size for path in blocks.rglob("*") if path.is_file())
    # Headers of blocks are not known before.
    headers = 4096
    assert 0 <= restored.size - found.size < headers
    if shared == 100:
        assert found.size > found.form.plan.token_bytes * 190
    if family == "llama":
        assert restored.state_size == 0, "logits in the middle of a prompt are for nobody"
    else:
        assert restored.state_size in files
    assert (restored.size > restored.state_size) == bool(found.form.plan.specs)


def test_what_is_restored_has_room(tmp_path):
    """The engine does not copy its caches at the first token after a restore."""
    save(tmp_path / "cache", "llama")
    with session_of(tmp_path / "cache", "llama") as session:
        run = session.prefill([*PROMPT, 5])
        assert all(type(cache) is KVCache and cache.keys.shape[2] >= len(PROMPT) + 200 for cache in run.caches)


def test_namespaces_of_two_weights_never_meet(tmp_path):
    save(tmp_path / "cache", "llama")
    with session_of(tmp_path / "cache", "llama", salt=b"another") as session:
        assert session.prefill(PROMPT).cached_tokens == 0
    assert NamespaceInfo({"a": 1}).fingerprint != NamespaceInfo({"a": 2}).fingerprint
