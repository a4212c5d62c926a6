"""Tokenizations of whole requests: the same tokens, no tokenizer for a request seen before, never another one's."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from conftest import make_tokenizer
from engine_support import conversation, wait_saved
from mlx_lm.tokenizer_utils import load

from kvstore import Store
from kvstore.tokenizations import Tokenizations
from kvstore_mlx import tokenizing
from kvstore_mlx.tokenizing import TokenizingCache

MESSAGES = conversation(8)
ARGUMENTS = {"add_generation_prompt": True, "tokenize": True, "tools": None}


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    make_tokenizer(folder)
    return load(folder)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "cache") as opened:
        yield opened


class Counting:
    def __init__(self, tokenizer) -> None:
        self.inner = tokenizer
        self.calls = 0

    def apply_chat_template(self, *args, **kwargs):
        self.calls += 1
        return self.inner.apply_chat_template(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def asked(store, tokenizer, *requests, salt: bytes = b"") -> tuple[list, int]:
    """What a server of its own is answered, and how often it had to tokenize."""
    cache = TokenizingCache(store, salt=salt)
    counting = Counting(tokenizer)
    answers = [cache.wrap(counting).apply_chat_template(messages, **kwargs) for messages, kwargs in requests]
    cache.close(10)
    return answers, counting.calls


def entries_of(store) -> list[Path]:
    return [path for path in store.context.layout.tokens.rglob("*") if path.is_file()]


def test_a_request_seen_before_needs_no_tokenizer(store, tokenizer):
    wanted = tokenizer.apply_chat_template(MESSAGES, **ARGUMENTS)
    assert asked(store, tokenizer, (MESSAGES, ARGUMENTS)) == ([wanted], 1)
    assert asked(store, tokenizer, (MESSAGES, ARGUMENTS)) == ([wanted], 0)
    assert type(wanted[0]) is int


@pytest.mark.parametrize(
    "change",
    [
        lambda messages, kwargs: messages[3].update(content=messages[3]["content"] + " "),
        lambda messages, kwargs: messages[3].update(role="tool"),
        lambda messages, kwargs: messages.append({"role": "user", "content": ""}),
        lambda messages, kwargs: kwargs.update(tools=[{"type": "function"}]),
        lambda messages, kwargs: kwargs.update(enable_thinking=False),
        lambda messages, kwargs: kwargs.update(add_generation_prompt=False),
        lambda messages, kwargs: kwargs.update(tools=[{"b": 1, "a": 2}]),
    ],
)
def test_any_other_request_is_another_one(store, tokenizer, change):
    asked(store, tokenizer, (MESSAGES, ARGUMENTS), (MESSAGES, {**ARGUMENTS, "tools": [{"a": 2, "b": 1}]}))
    messages, kwargs = json.loads(json.dumps([MESSAGES, ARGUMENTS]))
    change(messages, kwargs)
    answers, calls = asked(store, tokenizer, (messages, kwargs))
    assert calls == 1
    assert answers == [tokenizer.apply_chat_template(messages, **kwargs)]


def test_another_tokenizer_is_another_scope(store, tokenizer):
    asked(store, tokenizer, (MESSAGES, ARGUMENTS))
    tokenizer._tokenizer.chat_template = tokenizer._tokenizer.chat_template.replace("assistant", "helper")
    answers, calls = asked(store, tokenizer, (MESSAGES, ARGUMENTS))
    assert calls == 1
    assert answers == [tokenizer.apply_chat_template(MESSAGES, **ARGUMENTS)]


def test_tenants_do_not_find_each_other_s(store, tokenizer):
    """Whose request was tokenized before the time it takes would tell."""
    wanted = tokenizer.apply_chat_template(MESSAGES, **ARGUMENTS)
    for count, salt in enumerate((b"", b"mine", b"another"), 1):
        assert asked(store, tokenizer, (MESSAGES, ARGUMENTS), salt=salt) == ([wanted], 1)
        assert len(entries_of(store)) == count
        assert asked(store, tokenizer, (MESSAGES, ARGUMENTS), salt=salt) == ([wanted], 0)


def test_a_stop_does_not_wait_for_a_disk_that_is_stuck(store):
    stuck = threading.Event()

    class Stuck:
        def put(self, *_) -> None:
            stuck.wait(30)

        def trim(self, *_) -> None:
            pass

    cache = TokenizingCache(store)
    cache.save(Stuck(), b"", b"")
    while not cache._waiting.empty():
        time.sleep(0.01)
    for _ in range(tokenizing._QUEUED):
        cache.save(Stuck(), b"", b"")
    assert cache._waiting.full()
    started = time.monotonic()
    cache.close(0.2)
    assert time.monotonic() - started < 5
    stuck.set()


def test_a_bug_is_said_once_a_minute(store, tokenizer, monkeypatch, caplog):
    def put(*_):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Tokenizations, "put", put)
    assert asked(store, tokenizer, *((conversation(turns), ARGUMENTS) for turns in (8, 9, 10)))[1] == 3
    assert caplog.text.count("a tokenization was not saved") == 1


def test_a_template_that_looks_at_the_clock_is_asked_each_time(store, tokenizer):
    tokenizer._tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer._tokenizer.chat_template
    for _ in range(2):
        assert asked(store, tokenizer, (MESSAGES, ARGUMENTS))[1] == 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {**ARGUMENTS, "tokenize": False},
        {**ARGUMENTS, "odd": object()},
        {**ARGUMENTS, "chat_template": "{{ strftime_now('%f') }}"},
    ],
)
def test_what_is_not_plain_or_not_tokenized_passes_through(store, tokenizer, kwargs):
    for _ in range(2):
        answers, calls = asked(store, tokenizer, (MESSAGES, kwargs))
        assert calls == 1
        if "chat_template" not in kwargs:  # which says the microsecond
            assert answers == [tokenizer.apply_chat_template(MESSAGES, **kwargs)]
    assert asked(store, tokenizer, (MESSAGES[:1], ARGUMENTS), (MESSAGES[:1], ARGUMENTS))[1] == 2  # short


def test_their_budget_is_their_own(store, tokenizer, monkeypatch):
    cache = TokenizingCache(store, budget=50_000)
    for number in range(6):
        cache.wrap(tokenizer).apply_chat_template([*MESSAGES, {"role": "user", "content": str(number)}], **ARGUMENTS)
        time.sleep(0.01)
    cache.close(10)
    entries = entries_of(store)
    assert 1 <= len(entries) < 6
    assert sum(path.stat().st_size for path in entries) <= 50_000


def test_a_damaged_entry_and_a_full_disk_cost_a_tokenization(store, tokenizer, monkeypatch):
    wanted = tokenizer.apply_chat_template(MESSAGES, **ARGUMENTS)
    asked(store, tokenizer, (MESSAGES, ARGUMENTS))
    (entry,) = entries_of(store)
    data = bytearray(entry.read_bytes())
    data[200] ^= 1
    entry.write_bytes(data)
    monkeypatch.setattr(tokenizing.Tokenizations, "put", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert asked(store, tokenizer, (MESSAGES, ARGUMENTS)) == ([wanted], 1)


def test_a_server_answers_alike_before_and_after_a_restart(serve, tiny_llama, tmp_path):
    answers = []
    for _ in range(2):
        server = serve(tiny_llama, "--kv-cache-dir", str(tmp_path / "cache"))
        answers.append(server.chat(MESSAGES))
        wait_saved(server, tmp_path / "cache", answers[0].prompt_tokens)
        assert server.stop() == 0
    assert answers[0].ids == answers[1].ids
    assert answers[1].cached_tokens == answers[0].prompt_tokens - 1
    assert [path for path in (tmp_path / "cache" / "objects" / "tokens").rglob("*") if path.is_file()]
