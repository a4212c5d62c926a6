"""A server's log says why no more was reused: in a clause always, with both texts when that was asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from core_support import INFO, open_store, prompt, spans
from engine_support import wait_saved
from gc_support import state

from kvstore.keys import pack_tokens
from kvstore_mlx.explain import Explainer, clause, nearest_of

TOKENS = prompt(300)


def differ_at(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], *prompt(len(tokens) - at, 1)]


@pytest.fixture
def space(tmp_path):
    return open_store(tmp_path / "s", interval=64).namespace(INFO)


def found(space, tokens, *, stateful=False, prefill_only=False):
    match = space.lookup(tokens[:-1], trimmable=not stateful, prefill_only=prefill_only)
    return [SimpleNamespace(form=SimpleNamespace(stateful=stateful), match=match)]


def said(space, tokens, reused, *, stateful=False, prefill_only=False) -> str:
    answers = found(space, tokens, stateful=stateful, prefill_only=prefill_only)
    before = space._space.context.counters.snapshot()
    near = nearest_of(answers, pack_tokens(tokens), prefill_only=prefill_only)
    assert space._space.context.counters.snapshot() == before  # looking again is no lookup of a request
    return clause(near, reused, stateful=stateful, prefill_only=prefill_only)


def test_every_reason_has_its_clause(space):
    assert said(space, TOKENS, 0) == "; nothing of this model is saved yet"
    assert clause(None, 0) == ""
    space.publish(TOKENS[:200], spans(TOKENS, 0, 64, 128, 192, 200))
    assert said(space, TOKENS, 200) == "; the rest is new"
    assert said(space, TOKENS, 250) == ""  # memory had more
    assert said(space, TOKENS, 128) == "; 200 tokens match, but not all of them could be read"
    assert said(space, differ_at(TOKENS, 70), 64) == "; it differs from the nearest saved prompt at token 70"
    assert said(space, differ_at(TOKENS, 10), 0) == "; it differs from the nearest saved prompt at token 10"
    assert said(space, TOKENS[:150], 149) == ""
    text = "; 200 tokens match, but no state to go on from is saved after token "
    assert said(space, TOKENS, 0, stateful=True) == text + "0"
    space.publish_state(TOKENS[:128], state(1))
    assert said(space, TOKENS, 128, stateful=True) == text + "128"


def test_what_was_decoded_is_left_out_on_purpose(space):
    decoded = spans(TOKENS, 0, 64, 128)
    object.__setattr__(decoded[1], "decode", True)
    space.publish(TOKENS[:128], decoded)
    text = "; 128 tokens match, but the others were decoded (--kv-cache-exact)"
    assert said(space, TOKENS, 64, prefill_only=True) == text


def test_a_tokenizer_that_fails_is_the_callers_to_guard(space):
    space.publish(TOKENS, spans(TOKENS, 0, 64))
    near = nearest_of(found(space, differ_at(TOKENS, 10)), pack_tokens(differ_at(TOKENS, 10)))

    def broken() -> None:
        raise ValueError("no model is loaded")

    with pytest.raises(ValueError, match="no model"):
        Explainer(broken).explain(near)
    Explainer(broken).explain(None)


SYSTEM = "You are a careful reviewer of code, brief and right. " * 3


def messages(date: str, *more: str) -> list[dict]:
    return [
        {"role": "system", "content": f"{SYSTEM}Today is {date}. Cite the line."},
        *({"role": "user", "content": text} for text in ("What is a hash chain?", *more)),
    ]


def test_a_server_shows_both_texts(serve, tiny_llama, tmp_path):
    directory = tmp_path / "kv"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), "--kv-cache-explain", "--kv-cache-min-tokens", "64")
    first = server.chat(messages("Monday, 3 March"), max_tokens=2)
    assert "nothing of this model is saved yet" in server.log
    wait_saved(server, directory, first.prompt_tokens - 1)
    second = server.chat(messages("Tuesday, 14 March"), max_tokens=2)
    line = server.wait_log(r"kvstore: reused .*; it differs from the nearest saved prompt at token (\d+)")
    at = int(line.rpartition(" ")[2])
    assert second.cached_tokens == at
    shown = server.wait_log(r"(?s)kvstore: at token \d+ of \d+ the prompt differs.*?\n  A date[^\n]*\n")
    rows = shown.splitlines()
    assert rows[1].startswith("  both    ")
    assert rows[1].endswith("Today is")
    saved, given, marks = rows[2:5]
    assert saved.startswith("  saved   Mon")
    assert given.startswith("  prompt  Tuesday, 14 March. Cite the line.<|im_end|>↵<|im_start|>user")
    assert re.fullmatch(r" {10}\^\^.*\^", marks)
    assert len(server.warnings) == 0


def test_generate_shows_them_too(tiny_llama, tmp_path):
    directory = tmp_path / "kv"
    outputs = []
    for date in ("Monday, 3 March", "Tuesday, 14 March"):
        command = [sys.executable, "-m", "kvstore", "generate", "--model", str(tiny_llama), "--max-tokens", "2"]
        command += ["--prompt", f"{SYSTEM}Today is {date}.", "--kv-cache-dir", str(directory)]
        command += ["--kv-cache-explain", "--kv-cache-min-tokens", "64"]
        outputs.append(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True))
    assert "the prompt differs from the nearest saved one" in outputs[1].stderr
    assert "A date or a time differs" in outputs[1].stderr
    assert "kvstore:" not in outputs[1].stdout
