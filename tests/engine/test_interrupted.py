"""An answer that is cut off by an exception inside the engine (Ctrl-C, a logits processor) leaves nothing wrong behind.

Recurrent layers do not count their tokens: a state that saw one token too many, or in some layers only, looks whole.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager

import mlx.core as mx
import pytest
from model_support import make_family
from session_support import array_of, assert_same, model_of, prompt_of, session_of

PROMPT = prompt_of(150, seed=3)
AFTER = 6
"""Calls of a processor, or of a layer with one token, before it raises."""

TOLERANCE = 1e-4
"""Pieces of other lengths, and decode instead of prefill, change the last bits; a state a token ahead 1 to 60 %."""


class Words:
    """As much of a tokenizer as an answer needs."""

    eos_token_ids = ()
    bos_token = None

    class detokenizer:  # noqa: N801 - a stand-in for an attribute
        last_segment = ""

        @staticmethod
        def add_token(_token): ...

        @staticmethod
        def finalize(): ...


def interrupting_processor():
    calls = iter(range(AFTER))

    def processor(_tokens, logits):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return logits

    return processor


@contextmanager
def interrupting_layer(model):
    """The first layer has seen a token when the interrupt comes, the others have not."""
    first, kind = model.layers[0], type(model.layers[0])
    original, calls = kind.__call__, iter(range(AFTER))

    def call(self, x, *args, **kwargs):
        out = original(self, x, *args, **kwargs)
        if self is first and x.shape[1] == 1 and next(calls, None) is None:
            raise KeyboardInterrupt
        return out

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def until_interrupted(responses):
    got = []
    try:
        got.extend(response.token for response in responses)
    except KeyboardInterrupt:
        return got
    raise AssertionError("nothing interrupted it")


def answer_until_interrupted(session, **more):
    session._wrapped = Words
    got = until_interrupted(session.stream_generate(PROMPT, max_tokens=20, **more))
    assert got
    return got


def assert_right_after(directory, family, got):
    """The next turn is what an uninterrupted run computes, and goes on from the prompt at least."""
    tokens = [*PROMPT, *got, 5, 6, 7]
    with session_of(directory, family) as session:
        run = session.prefill(tokens)
    with session_of(None, family) as session:
        wanted = session.prefill(tokens, [run.cached_tokens])
    assert run.cached_tokens >= len(PROMPT) - 1
    assert_same([array_of(run.logits)], [array_of(wanted.logits)], TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_5_moe", "bailing_moe_linear"])
def test_a_processor_raises(family, tmp_path):
    with session_of(tmp_path / "c", family) as session:
        got = answer_until_interrupted(session, logits_processors=[interrupting_processor()])
    assert_right_after(tmp_path / "c", family, got)


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_5_moe", "bailing_moe_linear"])
def test_the_interrupt_comes_between_two_layers(family, tmp_path):
    with session_of(tmp_path / "c", family) as session, interrupting_layer(model_of(family)):
        got = answer_until_interrupted(session)
    assert_right_after(tmp_path / "c", family, got)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5_moe"])
def test_who_stops_listening_keeps_what_was_said(family, tmp_path):
    """Closed at a response, the caches are whole: all of it is saved."""
    with session_of(tmp_path / "c", family) as session:
        session._wrapped = Words
        responses = session.stream_generate(PROMPT, max_tokens=20)
        got = [next(responses).token for _ in range(AFTER)]
        responses.close()
    tokens = [*PROMPT, *got, 5, 6, 7]
    with session_of(tmp_path / "c", family) as session:
        run = session.prefill(tokens)
    assert run.cached_tokens == len(PROMPT) + AFTER
    with session_of(None, family) as session:
        wanted = session.prefill(tokens, [run.cached_tokens])
    assert_same([array_of(run.logits)], [array_of(wanted.logits)], TOLERANCE)


def test_kvstore_generate_is_interrupted(tmp_path):
    from mlx_lm import load

    from kvstore import Store
    from kvstore_mlx.flags import CacheArguments
    from kvstore_mlx.local import Cached
    from kvstore_mlx.opening import open_session
    from kvstore_mlx.spaces import Settings
    from kvstore_mlx.versions import check_versions

    generate = importlib.import_module("mlx_lm.generate")
    path = str(make_family(tmp_path / "model", "rwkv7"))
    model, tokenizer = load(path)
    cached = Cached(
        Store.open(tmp_path / "c", interval=64),
        (path, None, None),
        Settings(check_versions()),
        CacheArguments(directory=str(tmp_path / "c"), min_tokens=1),
    )
    got = until_interrupted(
        cached.responses(
            generate.stream_generate,
            model,
            tokenizer,
            mx.array(PROMPT),
            max_tokens=20,
            logits_processors=[interrupting_processor()],
        )
    )
    cached.close()
    tokens = [*PROMPT, *got, 5, 6, 7]
    with open_session(tmp_path / "c", model, path=path) as session:
        run = session.prefill(tokens)
    with open_session(None, model, path=path, interval=64) as session:
        wanted = session.prefill(tokens, [run.cached_tokens])
    assert run.cached_tokens >= 64
    assert_same([array_of(run.logits)], [array_of(wanted.logits)], TOLERANCE)
