"""The openai client as agents use it: against a server with a directory it sees what mlx_lm.server answers.

Both keep no prompts in memory, so what the first reuses comes from disk; each request is sent to it twice at least.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from client_support import TOOLS, Clients, near, openai, reused, seen
from client_support import ask as ask_client
from conftest import TEMPLATE, TINY_LLAMA, make_model
from engine_support import Server, polls
from pair_support import NO_MEMORY

PROMPT = [{"role": "user", "content": "Explain hash chains, and why a cache of prefixes needs them. " * 5}]

# Random weights call nothing: tools are in the prompt, and so are calls and their results. See test_tool_calls.py.
TOOL_TEMPLATE = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + TEMPLATE.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for each in message.tool_calls or [] %}{% set tool_call = each.function %}"
    "<tool_call>{{ tool_call.name }} {{ tool_call.arguments | tojson }}</tool_call>{% endfor %}",
)

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "log-probabilities": {"logprobs": True},
    "top log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "a stop word": {"stop": ["e", "zz"]},
    "a seed": {"seed": 7, "temperature": 0.9},
    "a seed, again and otherwise": {"seed": 8, "temperature": 0.9, "top_p": 0.8},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4},
    "a biased token": {"logit_bias": {"70": 5.0}},
    "tools": {"tools": TOOLS},
    "a tool's answer": {
        "tools": TOOLS,
        "messages": [
            *PROMPT,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "read_file", "arguments": '{"path": "keys.py"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "def chunk_key(previous, tokens): ..."},
        ],
    },
    "parts of text": {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is a cache? " * 20}]}]},
    "one token": {"max_tokens": 1},
}

REFUSED: dict[str, dict[str, Any]] = {
    "an image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                ],
            }
        ]
    },
    "a temperature below zero": {"temperature": -1},
    "more log-probabilities than there may be": {"logprobs": True, "top_logprobs": 500},
    "no number of tokens": {"max_tokens": -1},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    model = make_model(folder / "model", TINY_LLAMA)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TOOL_TEMPLATE}))
    cache = ("--kv-cache-dir", str(folder / "kv"), "--kv-cache-interval", "64", "--kv-cache-min-tokens", "0")
    # mlx_lm.server lists the hub's cache, and cannot when there is none.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    servers = [
        Server(folder / "ours.log", model, *NO_MEMORY, *cache),
        Server(folder / "theirs.log", model, *NO_MEMORY, command=("-m", "mlx_lm", "server")),
    ]
    try:
        yield Clients(*(server.wait_ready() for server in servers))
    finally:
        monkeypatch.undo()
        for server in servers:
            server.kill()


def ask(client: Any, **request: Any) -> Any:
    return ask_client(client, **{"messages": PROMPT, "max_tokens": 8, **request})


def streamed(stream: Any) -> list[dict[str, Any]]:
    return [seen(chunk) for chunk in stream]


@pytest.mark.parametrize("request_name", REQUESTS)
def test_an_answer_is_the_same_computed_and_restored(both, request_name):
    request = REQUESTS[request_name]
    expected = ask(both.theirs, **request)
    assert seen(ask(both.ours, **request)) == near(seen(expected))
    for _ in polls(20):
        again = ask(both.ours, **request)
        assert seen(again) == near(seen(expected))
        assert again.usage.completion_tokens == expected.usage.completion_tokens
        if reused(again) == expected.usage.prompt_tokens - 1:
            break
    else:
        raise AssertionError(
            f"{reused(again)} of {expected.usage.prompt_tokens} tokens were reused:\n{both.server.log}"
        )


@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_stream_is_the_same_event_for_event(both, request_name):
    request = {**REQUESTS[request_name], "stream": True}
    expected = streamed(ask(both.theirs, **request))
    assert len(expected) > 1 or request.get("max_tokens") == 1
    assert streamed(ask(both.ours, **request)) == near(expected)


def test_the_end_of_a_stream_says_what_was_used(both):
    request = {"stream": True, "stream_options": {"include_usage": True}}
    ask(both.ours)
    last = [list(ask(client, **request))[-1] for client in (both.ours, both.theirs)]
    ours, theirs = (chunk.usage for chunk in last)
    assert ours.prompt_tokens == theirs.prompt_tokens
    assert ours.completion_tokens == theirs.completion_tokens


@pytest.mark.parametrize("request_name", REFUSED)
def test_what_is_refused_is_refused_alike(both, request_name):
    answers = []
    for client in (both.ours, both.theirs):
        with pytest.raises(openai.APIStatusError) as error:
            ask(client, **REFUSED[request_name])
        answers.append((error.value.status_code, error.value.response.content))
    assert answers[0] == answers[1]
    assert 400 <= answers[0][0] < 500


def test_text_completions_are_the_same(both):
    request = {"model": "default_model", "prompt": "a cache of keys and values is " * 12, "max_tokens": 12}
    expected = seen(both.theirs.completions.create(**request))
    assert [seen(both.ours.completions.create(**request)) for _ in range(2)] == [near(expected)] * 2


def test_models_are_the_same(both):
    assert [each.id for each in both.ours.models.list()] == [each.id for each in both.theirs.models.list()]


def test_eight_conversations_at_once(both):
    topics = [f"topic {number}" for number in range(8)]

    def first(client: Any, topic: str) -> str:
        return (
            ask(
                client,
                messages=[{"role": "user", "content": f"{topic}: why does it matter to a cache? " * 9}],
                max_tokens=6,
            )
            .choices[0]
            .message.content
        )

    expected = [first(both.theirs, topic) for topic in topics]
    assert len(set(expected)) > 1
    for _ in range(2):
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda topic: first(both.ours, topic), topics)) == expected


def test_cancelled_streams_leave_nothing_wrong(both):
    request = {
        "messages": [{"role": "user", "content": "Cancelled streams: what stays of them? " * 9}],
        "max_tokens": 40,
    }
    expected = ask(both.theirs, **request)
    for events in (0, 1, 3):
        stream = ask(both.ours, **request, stream=True)
        for _, _chunk in zip(range(events), stream, strict=False):
            pass
        stream.close()
        assert seen(ask(both.ours, **request)) == near(seen(expected))
    assert both.server.process.poll() is None
