"""A server's log says why no more was reused: in a clause always, with both texts when that was asked for."""

from __future__ import annotations

import logging
import os
import re
from types import SimpleNamespace

import pytest
from core_support import INFO, open_store, prompt, spans
from engine_support import wait_saved
from gc_support import state
from pty_support import KVSTORE, ON_A_TERMINAL, plain, run_at

from kvstore.keys import pack_tokens
from kvstore_mlx.explain import Explainer, clause, nearest_of

TOKENS = prompt(300)
RED, GREEN = "\x1b[31m", "\x1b[32m"


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


@pytest.mark.parametrize("command", [KVSTORE, ON_A_TERMINAL], ids=["file", "terminal"])
def test_a_server_shows_both_texts(serve, tiny_llama, tmp_path, command):
    directory = tmp_path / "kv"
    flags = ("--kv-cache-dir", str(directory), "--kv-cache-explain", "--kv-cache-min-tokens", "64")
    server = serve(tiny_llama, *flags, command=(*command, "serve"))
    first = server.chat(messages("Monday, 3 March"), max_tokens=2)
    server.wait_log("nothing of this model is saved yet")
    wait_saved(server, directory, first.prompt_tokens - 1)
    second = server.chat(messages("Tuesday, 14 March"), max_tokens=2)
    line = server.wait_log(r"kvstore: reused .*; it differs from the nearest saved prompt at token (\d+)")
    at = int(line.rpartition(" ")[2])
    assert second.cached_tokens == at
    shown = server.wait_log(r"(?s)kvstore: at token \d+ of \d+ the prompt differs.*?\n  A date[^\n]*\n")
    rows = plain(shown).splitlines()
    both = [row for row in rows if row.startswith("  both    ")]
    assert both[-1].rstrip().endswith("Today is")
    saved, given, below = rows[1 + len(both) : 4 + len(both)]
    assert saved.startswith("  saved   Mon")
    assert given.startswith("  prompt  Tuesday, 14 March. Cite the line.<|im_end|>↵<|im_start|>user")
    if command is KVSTORE:
        assert re.fullmatch(r" {10}\^\^.*\^", below)
        assert "\x1b" not in server.log
    else:
        assert "^" not in below
        assert f"{RED}Mon" in shown
        assert f"{GREEN}T" in shown
    assert len(server.warnings) == 0


def test_generate_shows_them_too(tiny_llama, tmp_path):
    outputs = []
    for date in ("Monday, 3 March", "Tuesday, 14 March"):
        command = ["generate", "--model", tiny_llama, "--max-tokens", "2", "--prompt", f"{SYSTEM}Today is {date}."]
        command += ["--kv-cache-dir", tmp_path / "kv", "--kv-cache-explain", "--kv-cache-min-tokens", "64"]
        outputs.append(run_at("err", *command))
        assert outputs[-1].code == 0
    assert "the prompt differs from the nearest saved one" in outputs[1].err
    assert f"{GREEN}T" in outputs[1].err
    assert "A date or a time differs" in outputs[1].err
    assert "kvstore:" not in outputs[1].out
    assert "\x1b" not in outputs[1].out


@pytest.fixture
def terminal():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def explained(space, *streams) -> str:
    """The message of a difference when the log is written to these; what a handler of one of them was given."""
    space.publish(TOKENS, spans(TOKENS, 0, 64))
    near = nearest_of(found(space, differ_at(TOKENS, 10)), pack_tokens(differ_at(TOKENS, 10)))
    given: list[str] = []

    class Handler(logging.StreamHandler):
        def emit(self, record):
            given.append(record.getMessage())

    log = logging.getLogger("kvstore")
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [Handler(stream) for stream in streams], False
    log.setLevel(logging.INFO)  # not the attribute: what is enabled is remembered
    try:
        Explainer(lambda: lambda tokens: "".join(f"{token} " for token in tokens)).explain(near)
    finally:
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])
    return given[0]


def test_colours_are_for_terminals_only(space, terminal, tmp_path, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = explained(space, terminal)
    assert f"{RED}" in coloured
    assert f"{GREEN}" in coloured
    with (tmp_path / "log").open("w") as file:
        marked = explained(space, file)
        assert "\x1b" not in marked
        assert "^" in marked
        # One message for all: what is also written to a file has no colours anywhere.
        assert explained(space, terminal, file) == marked
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert explained(space, file) == marked
        monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    without = explained(space, terminal)
    assert "\x1b" not in without
    assert "^" in without
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in explained(space, terminal)
