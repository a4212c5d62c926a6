"""--kv-bits: plain caches until a length, quantized ones after it, and bytes of the two never meet.

How a quantized prefill is cut changes what it computes far beyond rounding (a piece sees itself unquantized), so these
compare with runs that were cut alike, and then every bit counts.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine_support import Server, conversation, wait_saved
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from model_support import make_family
from session_support import array_of, assert_same, decode, forwarded, prompt_of, session_of

LENGTH = 200


@pytest.mark.parametrize("start", [0, 100, 1000], ids=["from the start", "inside", "never reached"])
@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("llama", 8), ("lfm2", 8)])
def test_every_bit_of_a_restored_prefix(tmp_path, family, bits, start):
    more: dict[str, Any] = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    plain = session_of(None, family, **more)
    prompt = prompt_of(LENGTH)
    with session_of(tmp_path / "cache", family, **more) as session:
        written = session.prefill(prompt)
        expected = plain.prefill(prompt)
        ours, theirs = decode(session, written, 5), decode(plain, expected, 5)
        assert ours[0] == theirs[0]
        assert_same(ours[1], theirs[1])
        attention = [cache for cache in written.caches if type(cache) in {KVCache, QuantizedKVCache}]
        assert {type(cache) for cache in attention} == {KVCache if start > LENGTH else QuantizedKVCache}
        session.finish(written, forwarded(prompt, ours[0]))
        assert session.flush()

    with session_of(tmp_path / "cache", family, **more) as session:
        # An exact hit, a branch before and one after the length where quantization begins, and an appended turn.
        for tokens, least in (
            (prompt, LENGTH),
            ([*prompt[:80], 5, 6, 7], 64),
            ([*prompt[:170], 5, 6, 7], 128),
            ([*forwarded(prompt, ours[0]), 5, 6, 7], LENGTH + 5),
        ):
            run = session.prefill(tokens)
            assert run.cached_tokens >= (least if start != 100 or least > 100 else 0)
            if run.cached_tokens <= LENGTH:
                # Beyond it the reference would have to decode as well.
                reference = plain.prefill(tokens, [run.cached_tokens])
                restored = decode(session, run, 4), decode(plain, reference, 4)
                assert restored[0][0] == restored[1][0]
                assert_same(restored[0][1], restored[1][1])
                assert [type(cache) for cache in run.caches] == [type(cache) for cache in reference.caches]


def test_an_appended_turn_goes_on_from_the_very_caches(tmp_path):
    """What was decoded is restored as it was: the next turn computes what it would have with the caches in memory."""
    more: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    prompt = prompt_of(LENGTH)
    plain = session_of(None, "llama", **more)
    with session_of(tmp_path / "cache", "llama", **more) as session:
        run = session.prefill(prompt)
        answer, _ = decode(session, run, 5)
        session.finish(run, forwarded(prompt, answer))
        session.flush()
        tail = [5, 6, 7]
        from kvstore_mlx.prefill import prefill

        kept = prefill(
            plain._model,
            run.caches,
            [*forwarded(prompt, answer), *tail],
            [(LENGTH + 5, LENGTH + 7), (LENGTH + 7, LENGTH + 8)],
            after=lambda _: None,
            quantization=plain._quantization,
        )
        again = session.prefill([*forwarded(prompt, answer), *tail])
        assert again.cached_tokens == LENGTH + 5
        assert_same([array_of(again.logits)], [array_of(kept)])


def test_plain_and_quantized_never_meet(tmp_path):
    """A shorter prompt must not get the quantized rows of a longer one, nor a server with other settings any."""
    prompt = prompt_of(LENGTH)
    settings = [
        {},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 100},
        {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 100},
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
    ]
    for more in settings:
        with session_of(tmp_path / "cache", "llama", **more) as session:
            assert session.prefill(prompt).cached_tokens == 0
            session.flush()
    with session_of(tmp_path / "cache", "llama", **settings[1]) as session:
        # An uninterrupted run of 90 tokens has plain caches still.
        run = session.prefill([*prompt[:80], 5, 6, 7])
        assert {type(cache) for cache in run.caches} == {KVCache}
        reference = session_of(None, "llama", **settings[1]).prefill([*prompt[:80], 5, 6, 7], [run.cached_tokens])
        assert mx.array_equal(run.logits, reference.logits).item()
        assert np.isfinite(array_of(run.logits)).all()


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", ("--kv-bits", "4", "--kv-group-size", "32", "--quantized-kv-start", "0")),
        ("lfm2", ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "300")),
    ],
    ids=["4 bits, all", "8 bits, later, hybrid"],
)
def test_a_server_across_a_restart(serve, tmp_path, family, flags):
    model = make_family(tmp_path / "model", family)
    directory = tmp_path / "cache"
    # Cut alike: a model with states stops at each chunk border, one without at each prefill step.
    flags = (*flags, "--prefill-step-size", "256", "--prompt-cache-size", "0")
    cached = (*flags, "--kv-cache-dir", str(directory), "--kv-cache-interval", "256")
    server = serve(model, *cached)
    written = server.chat(conversation(1))
    if family == "llama":
        assert written.ids == serve(model, *flags).chat(conversation(1)).ids
    assert written.cached_tokens == 0
    wait_saved(server, directory, written.prompt_tokens + len(written.ids) - 1)
    repeated = server.chat(conversation(1))
    assert server.stop() == 0
    assert "caching is off" not in server.log
    assert not server.warnings
    again: Server = serve(model, *cached)
    restored = again.chat(conversation(1))
    for answer in (repeated, restored):
        assert (answer.ids, answer.logprobs) == (written.ids, written.logprobs)
        assert answer.cached_tokens == answer.prompt_tokens - 1
    grown = again.chat(conversation(2))
    assert grown.cached_tokens >= written.prompt_tokens - 1
    assert "Traceback" not in again.log
