"""A model that calls a tool, and goes on with its result: the same through a cache directory, computed and restored.

Its embeddings and its head are a chain of tokens: greedy decoding says one call, token for token, after a question, and
one word after a result. Its layers are random and weaker than that: no token depends on the prompt, but
log-probabilities do, so that a wrong restore shows.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from client_support import TOOLS, ask, client_of, near, reused, seen
from conftest import TINY_LLAMA, make_model
from engine_support import Server, polls
from pair_support import NO_MEMORY, TOLERANCE
from tokenizers import AddedToken, Tokenizer

CALL = ["<tool_call>", '{"name":"read_file",', '"arguments":{"path":', '"keys.py"}}', "</tool_call>"]
"""Tokens of their own, without spaces, which mlx-lm's detokenizer would look for in another alphabet."""

SAYS = ["\n", *CALL, "<|im_end|>"], ["=", *"done.", "<|im_end|>"]
"""What follows what: after the end of a prompt, and after that of one whose last message is a tool's."""

# mlx-lm takes a template with <tool_call> and tool_call.name for that of a model whose calls are JSON.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for each in message.tool_calls or [] %}{% set tool_call = each.function %}"
    '<tool_call>{"name":"{{ tool_call.name }}","arguments":{{ tool_call.arguments | tojson(separators=(",", ":")) }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if messages[-1].role == 'tool' %}={% endif %}{% endif %}"
)

QUESTION = [{"role": "user", "content": "What does the file of keys define, and what is it for? " * 4}]
RESULT = "def chunk_key(previous, tokens): ..."


def make_calling(folder: Path) -> Path:
    """A tiny llama that says SAYS, and nothing else that anybody planned."""
    make_model(folder, TINY_LLAMA)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CALL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    vocabulary = tokenizer.get_vocab_size()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))

    weights = mx.load(str(folder / "model.safetensors"))
    mx.random.seed(1)
    embedding = mx.random.normal((vocabulary, config["hidden_size"]))
    head = 0.01 * mx.random.normal(embedding.shape)
    for chain in SAYS:
        ids = [tokenizer.encode(token, add_special_tokens=False).ids for token in chain]
        assert all(len(each) == 1 for each in ids)
        for (before,), (after,) in pairwise(ids):
            head[after] += 0.18 * embedding[before]
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """Of mlx_lm.server itself, of one of ours without a directory and of one with: its client and its server."""
    folder = tmp_path_factory.mktemp("calls")
    model = make_calling(folder / "model")
    cache = ("--kv-cache-dir", str(folder / "kv"), "--kv-cache-interval", "64", "--kv-cache-min-tokens", "0")
    servers = [
        Server(folder / "theirs.log", model, *NO_MEMORY, command=("-m", "mlx_lm", "server")),
        Server(folder / "off.log", model, *NO_MEMORY),
        Server(folder / "on.log", model, *NO_MEMORY, *cache),
    ]
    try:
        yield [(client_of(server.wait_ready()), server) for server in servers]
    finally:
        for server in servers:
            server.kill()


def request(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "tools": TOOLS, "max_tokens": 20, "logprobs": True, **more}


def told(completion: Any) -> dict[str, Any]:
    """All that a program sees of an answer, but the ids of calls, which are random."""
    document = seen(completion)
    for choice in document["choices"]:
        for call in (choice.get("message") or choice["delta"])["tool_calls"] or []:
            assert call.pop("id")
    return document


def after_call(message: Any) -> list[Any]:
    """The conversation when the tool has been called: its message as the client gives it back, and the result."""
    (call,) = message.tool_calls
    assert call.function.name == "read_file"
    assert json.loads(call.function.arguments) == {"path": "keys.py"}
    answer = {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump()]}
    return [*QUESTION, answer, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]


def test_a_call_and_what_comes_after_its_result(clients):
    (theirs, _), (off, _), (on, server) = clients
    expected = ask(theirs, **request(QUESTION))
    assert expected.choices[0].finish_reason == "tool_calls"
    then = ask(theirs, **request(after_call(expected.choices[0].message)))
    assert then.choices[0].message.content == "done."
    assert then.choices[0].finish_reason == "stop"

    for client in (off, on):
        answer = ask(client, **request(QUESTION))
        assert told(answer) == near(told(expected))
        # The prompt, the call and all are there: what is new is the end of its message, and the result.
        shared = answer.usage.prompt_tokens + len(CALL)
        for _ in polls(20):
            following = ask(client, **request(after_call(answer.choices[0].message)))
            assert told(following) == near(told(then))
            if client is off or reused(following) >= shared:
                break
        else:
            raise AssertionError(f"{reused(following)} of {shared} tokens were reused:\n{server.log}")
    for _ in polls(20):
        again = ask(on, **request(QUESTION))
        assert told(again) == near(told(expected))
        if reused(again) == again.usage.prompt_tokens - 1:
            break
    else:
        raise AssertionError(f"{reused(again)} of {again.usage.prompt_tokens} tokens were reused:\n{server.log}")
    assert server.warnings == []


def test_a_streamed_call(clients):
    (theirs, _), (off, _), (on, _) = clients
    expected = [told(event) for event in ask(theirs, **request(QUESTION, stream=True))]
    calls = [call for event in expected for call in event["choices"][0]["delta"]["tool_calls"] or []]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "read_file")]
    for client in (off, on, on):
        assert [told(event) for event in ask(client, **request(QUESTION, stream=True))] == near(expected)


def test_the_model_looks_at_its_whole_prompt(clients):
    """The control: else a wrong restore would not show."""
    (theirs, _), *_ = clients
    changed = [{**QUESTION[0], "content": "Z" + QUESTION[0]["content"][1:]}]
    (one,), (other,) = (told(ask(theirs, **request(messages)))["choices"] for messages in (QUESTION, changed))
    assert one["message"] == other["message"]
    apart = [
        abs(a["logprob"] - b["logprob"])
        for a, b in zip(one["logprobs"]["content"], other["logprobs"]["content"], strict=True)
    ]
    assert max(apart) > 10 * TOLERANCE, apart
