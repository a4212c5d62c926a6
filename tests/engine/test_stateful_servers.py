"""Servers of models that are resumed at boundary states only: sliding windows, delta nets, chunks, compressed groups.

One server without a directory and one with serve all of them, each model named in its requests. Neither keeps prompts
in memory (``--prompt-cache-size 0``): every request of the one is a first run, and every reuse of the other is from
disk.
"""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_support import wait_saved
from model_support import make_family
from pair_support import INTERVAL, NO_MEMORY, TOLERANCE, Pair, assert_same

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "short window": ("gemma3_text", {"sliding_window": 48}),
    "long window": ("gemma3_text", {"sliding_window": 400}),
    "delta nets": ("qwen3_5", {}),
    "linear": ("bailing_moe_linear", {}),
    "chunked": ("llama4", {"attention_chunk_size": 96}),
    "compressed": ("deepseek_v41", {}),
}
BATCHED = ["short window", "delta nets"]

FAILING = """
from mlx_lm import server
from kvstore.cli import main

make = server.make_logits_processors

def failing(bias, *more):
    left = int(bias.pop(90, 0)) if bias else 0

    def processor(tokens, logits):
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("a processor fails")
        return logits

    return [*make(bias, *more), processor]

server.make_logits_processors = failing
main()
"""
"""A server on which a bias of n for token 90 makes a request fail at its n-th token."""

SYSTEM = {
    "role": "system",
    "content": "You review code. Be brief, be right, cite the line. Never guess what you can look up.",
}


def messages(turns: int, topic: str = "hash chains") -> list[dict[str, str]]:
    """About 200 byte tokens of system text and first question, and 150 with each turn."""
    made = [SYSTEM]
    for turn in range(turns):
        if turn:
            made.append({"role": "assistant", "content": f"Understood, turn {turn}."})
        made.append({"role": "user", "content": f"{turn}: explain {topic} and why they matter to a cache. " * 2})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stateful")


@pytest.fixture(scope="module")
def models(folder) -> dict[str, str]:
    made = {}
    for name, (family, more) in MODELS.items():
        made[name] = str(make_family(folder / name.replace(" ", "-"), family, **more))
    return made


@pytest.fixture(scope="module")
def pair(folder, models):
    made = Pair(folder, models["short window"])
    yield made
    made.close()


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation(pair, models, name):
    model = models[name]
    topic = name  # Prompts of each model are of other lengths, so that their states are told apart.
    first = {"messages": messages(1, topic), "model": model}
    written = pair.ask_and_wait(**first)
    assert written.cached_tokens == 0
    repeated = pair.ask(**first)
    assert repeated.cached_tokens == repeated.prompt_tokens - 1
    # The state before the last token leads to the same bits.
    assert repeated.logprobs == written.logprobs

    second = {"messages": messages(2, topic), "model": model}
    appended = pair.ask_and_wait(**second)
    # The whole first prompt but the last token of it, whatever the answer was.
    assert appended.cached_tokens == written.prompt_tokens - 1

    edited = [*messages(2, topic)[:-1], {"role": "user", "content": "Something else entirely, please."}]
    branch = pair.ask(messages=edited, model=model)
    # The last message alone is new.
    assert written.prompt_tokens < branch.cached_tokens < branch.prompt_tokens
    assert branch.prompt_tokens - branch.cached_tokens < 80

    inside = [SYSTEM, {"role": "user", "content": "0: explain something else " * 3}]
    other = pair.ask(messages=inside, model=model)
    # A chunk border, or the end of the system text.
    assert 0 < other.cached_tokens <= written.prompt_tokens
    alone = pair.ask(messages=messages(2, topic), model=model, seed=1)
    assert alone.cached_tokens == alone.prompt_tokens - 1


@pytest.mark.parametrize("name", MODELS)
def test_the_first_character_matters(pair, models, name):
    """The control: these models look at their whole prompt, so a prefix that is not the prompt's would show."""
    asked = {"messages": messages(2, name), "model": models[name], "max_tokens": 2}
    changed = [{**SYSTEM, "content": "Z" + SYSTEM["content"][1:]}, *messages(2, name)[1:]]
    ours, theirs = pair.expected(asked), pair.expected({**asked, "messages": changed})
    assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) > 20 * TOLERANCE


def test_after_a_restart(pair, models):
    pair.restart()
    for name, model in models.items():
        answer = pair.ask(messages=messages(2, name), model=model)
        assert answer.cached_tokens == answer.prompt_tokens - 1, name


@pytest.mark.parametrize("name", BATCHED)
def test_four_at_once_of_unequal_lengths(pair, models, name):
    """They are right-padded in the engine's buffers while they are prefilled; none of the padding may be kept."""
    requests = [
        {"messages": messages(1, f"{name} {topic}"), "model": models[name], "max_tokens": 8 + number}
        for number, topic in enumerate(("a", "bb " * 30, "ccc " * 60, "dddd " * 12))
    ]
    for request in requests:
        pair.expected(request)
    before = pair.files()
    with ThreadPoolExecutor(len(requests)) as pool:
        written = list(pool.map(lambda request: pair.ask(**request), requests))
    assert [answer.cached_tokens < 160 for answer in written] == [True] * 4
    for answer, request in zip(written, requests, strict=True):
        pair.wait(before, answer.prompt_tokens - 1)
        restored = pair.ask(**request)
        assert restored.cached_tokens == restored.prompt_tokens - 1


@pytest.mark.parametrize(("name", "more"), [("short window", {}), ("delta nets", {"seed": 3}), ("chunked", {})])
def test_a_cancelled_request_keeps_its_boundaries(pair, models, name, more):
    body = {"messages": messages(6, f"cancelled {name}"), "model": models[name], "max_tokens": 3000, "stream": True}
    before = pair.files()
    connection = http.client.HTTPConnection("127.0.0.1", pair.server.port, timeout=60)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({**body, **more}), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    while b"data: " not in response.readline():
        pass
    response.close()
    connection.close()
    saved = INTERVAL * 5
    pair.wait(before, saved)
    answer = pair.ask(messages=messages(6, f"cancelled {name}"), model=models[name], max_tokens=4)
    assert answer.cached_tokens >= saved


def test_a_failed_request_keeps_its_boundaries_and_nothing_of_its_answer(pair, models, serve, tmp_path):
    """Alone, for a batch that fails takes mlx_lm.server's generation thread with it."""
    name = "delta nets"
    directory, request = tmp_path / "cache", {"messages": messages(6, "failed"), "max_tokens": 8, "seed": 3}
    flags = (*NO_MEMORY, "--kv-cache-dir", str(directory), "--kv-cache-interval", str(INTERVAL))
    server = serve(models[name], *flags, command=("-c", FAILING, "serve"))
    # (mlx_lm.server then closes the connection.)
    with pytest.raises(ConnectionError):
        server.chat(**request, logit_bias={"90": 4})
    assert "a processor fails" in server.log
    saved = INTERVAL * 5
    wait_saved(server, directory, saved)
    answer = server.chat(**request)
    assert answer.cached_tokens >= saved
    assert_same(answer, pair.expected({**request, "model": models[name]}))
    assert server.stop() == 0
    again = serve(models[name], *flags).chat(**request)
    assert again.cached_tokens == again.prompt_tokens - 1
    assert again.logprobs == answer.logprobs


@pytest.mark.parametrize("name", ["short window", "delta nets", "compressed"])
@pytest.mark.parametrize("path", ["batched", "alone"])
def test_logit_processors_see_the_whole_prompt(pair, models, name, path):
    """Of a restored prompt the engine computes one token, and its processors must know the others all the same."""
    request = {
        "messages": messages(1, f"{path} {name}"),
        "model": models[name],
        "repetition_penalty": 1.7,
        "repetition_context_size": 300,
        "logit_bias": {"80": 4.0, "90": -100.0},
        **({"seed": 5} if path == "alone" else {}),
    }
    written = pair.ask_and_wait(**request)
    restored = pair.ask(**request)
    assert restored.cached_tokens == restored.prompt_tokens - 1
    # They matter: without them the answer is another one.
    without = {key: value for key, value in request.items() if key not in {"repetition_penalty", "logit_bias"}}
    assert pair.expected(without).ids != written.ids


def test_stop_words_and_samplers(pair, models):
    model = models["delta nets"]
    request = {"messages": messages(1, "stop words"), "model": model, "max_tokens": 30}
    text = pair.ask_and_wait(**request).text
    word = next(char for char in text[4:] if char.isascii() and char.isprintable())
    stopped = pair.ask(**request, stop=[word])
    assert stopped.choice["finish_reason"] == "stop"
    assert len(stopped.ids) < 30
    assert stopped.cached_tokens == stopped.prompt_tokens - 1
    # With a seed, temperature gives the same sample however much was reused.
    sampled = {**request, "temperature": 0.8, "seed": 11, "top_logprobs": 3}
    for _ in range(2):
        assert pair.ask(**sampled).cached_tokens > 0
