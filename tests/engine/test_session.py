"""kvstore_mlx.open: generation with mlx-lm's results, exact hits without a forward pass, loops of one's own."""

from __future__ import annotations

import re
import time
from itertools import islice
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from session_support import PROMPT, decode, forwarded, opener, prompt_of, session_of

import kvstore
import kvstore_mlx
from kvstore.store import Namespace
from kvstore_mlx import session as session_module
from kvstore_mlx.live import Extras
from kvstore_mlx.restoring import Restored


@pytest.fixture
def opened(loaded, tiny_llama, tmp_path):
    return opener(loaded, tiny_llama, tmp_path, interval=128)


class Counting:
    """A model that counts its forward passes."""

    def __init__(self, model) -> None:
        self._model = model
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self._model(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._model, name)


def test_the_answer_is_mlx_lm_s_first_written_and_then_restored(loaded, opened):
    wanted = list(stream_generate(*loaded, PROMPT, max_tokens=12))
    for _ in range(2):
        with opened() as cache:
            answer = list(cache.stream_generate(PROMPT, max_tokens=12))
        assert [each.token for each in answer] == [each.token for each in wanted]
        assert [each.text for each in answer] == [each.text for each in wanted]
        assert answer[-1].finish_reason == wanted[-1].finish_reason
        assert answer[-1].prompt_tokens == wanted[-1].prompt_tokens
        assert answer[-1].generation_tokens == wanted[-1].generation_tokens


def test_logits_are_read_only_where_nothing_is_left_to_compute(opened, monkeypatch):
    """A vocabulary of 150,000 is 600 KB that nobody would look at."""
    with opened() as cache:
        tokens = cache.tokens_of(PROMPT)
        cache.prefill(tokens)
    reads, read = [], Namespace.read_state
    monkeypatch.setattr(Namespace, "read_state", lambda *args: reads.append(1) or read(*args))
    with opened() as cache:
        assert cache.prefill([*tokens, 5]).cached_tokens == len(tokens)
        assert cache.restore([*tokens, 6]).logits is None
        assert reads == []
        assert cache.prefill(tokens).cached_tokens == len(tokens)
        assert cache.restore(tokens).logits is not None
        assert reads == [1, 1]


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_logits_of_a_part_are_not_taken_for_those_of_the_whole(tmp_path, family):
    """Who decodes from them would go on from the wrong token."""
    with session_of(tmp_path / "cache", family) as cache:
        cache.prefill(prompt_of(100))
        cache.flush()
        part = cache.restore(prompt_of(150))
        assert (part.tokens, part.logits) == (100, None)
        assert cache.restore(prompt_of(100)).logits is not None


class Counter:
    """A hook that counts a position, and a logits processor that goes on from it."""

    name = "counter/1"
    at = 0

    def capture(self) -> Extras:
        return Extras({}, {"at": self.at})

    def restore(self, extras) -> None:
        self.at = 0 if extras is None else extras.values["at"]

    def __call__(self, tokens, logits):
        self.at += 1
        forced = mx.full(logits.shape, -1e9)
        forced[:, 10 + self.at] = 0.0
        return forced


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_extras_are_those_of_the_prompt_s_end_whatever_the_answer_did(opened, taken):
    """Saving a prompt only when its first token is out would save what that token did to them: found by review."""
    with opened(extras=(hook := Counter())) as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=5, logits_processors=[hook])
        first = [next(answer).token for _ in range(taken)]
        # Another answer on the same session, in the middle of the first.
        list(cache.stream_generate("something else. " * 20, max_tokens=3, logits_processors=[hook]))
        answer.close()
    assert first == list(range(11, 11 + taken))
    with opened(extras=(hook := Counter())) as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=5, logits_processors=[hook])
        assert [each.token for each in answer] == [11, 12, 13, 14, 15]


def test_the_speed_of_a_prompt_is_its_own(opened):
    with opened() as cache:
        started = time.perf_counter()
        (response,) = cache.stream_generate(PROMPT, max_tokens=1)
        seconds = time.perf_counter() - started
    assert response.prompt_tokens / seconds <= response.prompt_tps < 1e6


def test_processors_see_the_whole_prompt_after_a_restore(loaded, opened):
    processors = make_logits_processors(repetition_penalty=1.8, repetition_context_size=200)
    wanted = [each.token for each in stream_generate(*loaded, PROMPT, max_tokens=12, logits_processors=processors)]
    plain = [each.token for each in stream_generate(*loaded, PROMPT, max_tokens=12)]
    assert wanted != plain  # they matter
    for _ in range(2):
        with opened() as cache:
            answer = cache.stream_generate(PROMPT, max_tokens=12, logits_processors=processors)
            assert [each.token for each in answer] == wanted


def test_an_exact_hit_needs_no_forward_pass(loaded, tiny_llama, tmp_path):
    model = Counting(loaded[0])
    tokens = loaded[1].encode(PROMPT)
    with kvstore_mlx.open(tmp_path, model, loaded[1], path=str(tiny_llama)) as cache:
        first = cache.prefill(tokens)
    with kvstore_mlx.open(tmp_path, model, loaded[1], path=str(tiny_llama)) as cache:
        model.calls = 0
        run = cache.prefill(tokens)
        assert (run.cached_tokens, model.calls) == (len(tokens), 0)
        assert mx.array_equal(run.logits, first.logits).item()
        (response,) = cache.stream_generate(tokens, max_tokens=1)
        assert (response.token, model.calls) == (int(mx.argmax(first.logits)), 0)


def test_what_was_generated_is_saved_however_the_iteration_ends(opened):
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=50)
        tokens = [next(answer).token for _ in range(9)]
        answer.close()
    with opened() as cache:
        run = cache.prefill([*cache.tokens_of(PROMPT), *tokens, 5])
        assert run.cached_tokens == len(run.tokens) - 1


def test_a_loop_of_one_s_own(loaded, opened):
    model, tokenizer = loaded
    tokens = tokenizer.encode(PROMPT)
    with opened() as cache:
        assert cache.restore(tokens) is None
        caches = make_prompt_cache(model)
        logits = model(mx.array([tokens]), cache=caches)[0, -1]
        cache.publish(tokens, caches, logits=logits)
        with pytest.raises(ValueError, match="tokens where"):
            cache.publish(tokens[:-1], caches)
    with opened() as cache:
        restored = cache.restore(tokens)
        assert restored.tokens == len(tokens)
        assert mx.array_equal(restored.logits, logits).item()
        assert [each.offset for each in restored.caches] == [len(tokens)] * 3
        part = cache.restore(tokens[:200])
        assert (part.tokens, part.logits) == (200, None)


def test_what_was_decoded_can_be_left_out(loaded, opened):
    model, tokenizer = loaded
    tokens = tokenizer.encode(PROMPT)
    caches = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    with opened() as cache:
        cache.publish(tokens, caches, decoded=True)
    with opened(exact=True) as cache:
        assert cache.restore(tokens) is None
    with opened() as cache:
        assert cache.restore(tokens).tokens == len(tokens)


def examples(page: str) -> list[str]:
    text = (Path(__file__).resolve().parents[2] / page).read_text()
    return [each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "kvstore_mlx" in each]


@pytest.mark.parametrize("page", ["README.md", "docs/api.md"])
def test_examples_say_the_same_restored(tiny_llama, tmp_path, monkeypatch, capsys, page):
    monkeypatch.chdir(tmp_path)
    answers = []
    for _ in range(2):
        names: dict[str, object] = {}
        for code in examples(page):
            exec(compile(code.replace("mlx-community/Qwen3-8B-4bit", str(tiny_llama)), page, "exec"), names)
        answers.append(re.sub(r"(\d+) of (\d+) tokens were restored", "", capsys.readouterr().out))
    assert answers[0]
    assert answers[0] == answers[1]


def test_the_example_of_a_loop_of_one_s_own_restores(loaded, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *_, code = examples("docs/api.md")
    found = []
    for _ in range(2):
        names = {"kvstore_mlx": kvstore_mlx, "model": loaded[0], "tokenizer": loaded[1], "path": str(tiny_llama)}
        exec(compile(code, "docs/api.md", "exec"), names)
        found.append((names["known"], names["tokens"]))
    prompt = loaded[1].encode("Why do caches lie? " * 40)
    assert [known for known, _ in found] == [0, len(prompt) - 1]
    wanted = [each.token for each in stream_generate(*loaded, prompt, max_tokens=20)]
    assert [tokens for _, tokens in found] == [[*prompt, *wanted]] * 2


def test_mistakes_are_told(loaded, opened, tmp_path):
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        kvstore_mlx.opne  # noqa: B018
    with opened() as cache, pytest.raises(ValueError, match="at least one token"):
        cache.prefill([])
    with kvstore_mlx.open(tmp_path / "other", loaded[0]) as cache, pytest.raises(ValueError, match="no tokenizer"):
        next(cache.stream_generate(PROMPT))


@pytest.mark.parametrize("limit", [0, -2])
def test_no_tokens_are_a_mistake_as_in_mlx_lm(loaded, opened, limit):
    """And not an answer without end."""
    if limit == 0:
        with pytest.raises(ValueError, match="must be non-zero"):
            next(stream_generate(*loaded, PROMPT, max_tokens=limit))
    with opened() as cache, pytest.raises(ValueError, match=f"at least 1, or -1 for no limit, not {limit}"):
        next(cache.stream_generate(PROMPT, max_tokens=limit))


def test_no_limit_is_that_of_mlx_lm(loaded, opened):
    wanted = [each.token for each in islice(stream_generate(*loaded, PROMPT, max_tokens=-1), 300)]
    with opened() as cache:
        answer = [each.token for each in islice(cache.stream_generate(PROMPT, max_tokens=-1), 300)]
    assert len(answer) > 256 or answer[-1] in loaded[1].eos_token_ids
    assert answer == wanted


def test_what_is_cheaper_to_compute_is_neither_restored_nor_saved(opened):
    tokens = list(range(1, 201))
    with opened() as cache:
        cache.prefill(tokens)
    with opened(min_tokens=300) as cache:
        run = cache.prefill([*tokens, 5])
        assert (run.cached_tokens, run.recording) == (0, None)
        assert cache.prefill(list(range(2, 302))).recording is not None
    with opened(min_tokens=150) as cache:
        assert cache.prefill([*tokens, 6]).cached_tokens == len(tokens)


def test_what_is_cheaper_is_measured_when_asked(opened):
    prompts = [[number, *range(1, 201)] for number in range(1, 20)]
    with opened() as cache:
        for prompt in prompts:
            cache.prefill(prompt)
    with opened(min_tokens=None) as cache:
        for prompt in prompts[:-1]:
            cache.prefill([*prompt, 5, *range(1, 100)])
        gate = cache._gate
        assert "tokens/s" in gate.text, "both were measured"
        # Reading turned out slow: the next one is computed.
        for _ in range(30):
            gate.restored(Restored(201, [], 0, 1 << 20, 60.0))
        assert cache.prefill([*prompts[-1], 6]).cached_tokens == 0
        assert cache.prefill(prompts[-1]).cached_tokens == 0, "nor one of which nothing is left to compute"


def test_unless_told_otherwise_it_is_measured(loaded, tiny_llama, tmp_path):
    prompts = [[number, *range(1, 201)] for number in range(1, 8)]
    for _ in range(2):
        with kvstore_mlx.open(tmp_path, *loaded, path=str(tiny_llama), interval=128) as cache:
            for prompt in prompts:
                cache.prefill(prompt)
            for _ in range(6):
                cache._gate.prefilled(200, 1.0)
            # Restores of the same prompts, with nothing left to compute, are what is measured.
            known = cache._gate._measured.known(time.monotonic())
    assert known
    assert [restored.tokens for restored in cache._gate._measured._restores][:5] == [201] * 5


@pytest.mark.parametrize("off", ["plain", "quantized"])
@pytest.mark.parametrize("tokens", [90, 220])
def test_a_form_that_cannot_be_saved_is_no_error(tmp_path, off, tokens):
    """A prompt has one form while it is short and another when it is long; one of them is off."""
    prompt = prompt_of(tokens)
    with session_of(tmp_path / "cache", "llama", kv_bits=8, kv_group_size=32, quantized_kv_start=100) as cache:
        forms = dict(zip(("plain", "quantized"), cache._space.forms, strict=True))
        forms[off].trouble = "the disk lies"
        run = cache.prefill(prompt)
        ids, _ = decode(cache, run, 4)
        cache.finish(run, forwarded(prompt, ids))
        cache.publish(forwarded(prompt, ids), run.caches, decoded=True)
        assert cache.flush()
        found = {name: form.namespace.lookup(prompt).count for name, form in forms.items()}
        assert found[off] == 0
        has = "plain" if tokens == 90 else "quantized"
        assert found[has] == (0 if has == off else tokens)


def test_a_session_whose_only_form_is_off_computes(tmp_path):
    prompt = prompt_of(200)
    with session_of(tmp_path / "cache", "llama") as cache:
        (form,) = cache._space.forms
        form.trouble = "the disk lies"
        run = cache.prefill(prompt)
        cache.publish(prompt, run.caches, logits=run.logits)
        assert run.recording is None
        assert cache.restore(prompt) is None
        assert cache.flush()
        assert form.namespace.lookup(prompt).count == 0


def test_writes_are_bounded_when_asked(opened):
    with opened(write_limit="4KiB") as cache:
        cache.prefill(list(range(1, 201)))
        cache.flush()
        assert cache._writer._housekeeping.refused
    with opened() as cache:
        assert cache.prefill(list(range(1, 201))).cached_tokens == 0, "a chunk larger than the limit is never written"
    with pytest.raises(kvstore.KVStoreError, match="size"):
        opened(write_limit="much")


@pytest.mark.parametrize("how", ["one token", "end of text", "client", "sampler", "prefill"])
def test_a_request_that_ended_slows_no_writing_however_it_did(loaded, opened, monkeypatch, how):
    """Found by review: one that ended at its first token left the writer at a hundredth of its speed for 30 s."""

    def failing(*_, **__):
        raise ZeroDivisionError

    with opened() as cache:
        writer = cache._writer
        if how == "end of text":
            monkeypatch.setattr(type(loaded[1]), "eos_token_ids", set(range(1 << 16)), raising=False)
        if how == "prefill":
            monkeypatch.setattr(session_module, "prefill", failing)
        answer = cache.stream_generate(
            PROMPT, max_tokens=1 if how == "one token" else 8, sampler=failing if how == "sampler" else None
        )
        if how in {"sampler", "prefill"}:
            with pytest.raises(ZeroDivisionError):
                next(answer)
        else:
            next(answer)
            assert writer._share() < 1.0, "while it goes on"
            if how == "client":
                answer.close()
            else:
                assert list(answer) == []
        assert writer._share() == 1.0


def test_an_answer_that_saves_nothing_slows_the_writer_too(opened):
    """The end of another one has it go at full speed, and it went on so beside this one's tokens."""
    with opened() as cache:
        answer = cache.stream_generate([5] * 20, max_tokens=4)
        next(answer)
        cache._writer.idle()
        assert cache._writer._share() == 1.0
        next(answer)
        assert cache._writer._share() < 1.0
        answer.close()
