"""Two servers with two models of one name and shape on one directory, both at work: neither meets the other's KV."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import TINY_LLAMA, make_model
from engine_support import Answer, Server, conversation
from pair_support import NO_MEMORY, TOLERANCE

from kvstore.manifest import decode

TOPICS = ["hash chains", "what an answer costs"]
TURNS = [(topic, turns) for turns in (1, 2) for topic in TOPICS]
FLAGS = ("--kv-cache-interval", "256", "--kv-cache-min-tokens", "0", *NO_MEMORY)


@pytest.fixture(scope="module")
def models(tiny_llama, tmp_path_factory) -> list[Any]:
    return [tiny_llama, make_model(tmp_path_factory.mktemp("models") / tiny_llama.name, TINY_LLAMA, seed=1)]


def ask_all(server: Server, **more: Any) -> dict[tuple[str, int], Answer]:
    return {(topic, turns): server.chat(conversation(turns, topic), **more) for topic, turns in TURNS}


def assert_same(answers: dict[tuple[str, int], Answer], expected: dict[tuple[str, int], Answer]) -> None:
    assert {key: answer.ids for key, answer in answers.items()} == {key: each.ids for key, each in expected.items()}
    for key, answer in answers.items():
        assert answer.logprobs == pytest.approx(expected[key].logprobs, abs=TOLERANCE)


def at_once(servers: list[Server]) -> list[dict[tuple[str, int], Answer]]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask_all, servers))


def saved(directory) -> dict[str, int]:
    """The longest prefix of each namespace."""
    found: dict[str, int] = {}
    for path in (directory / "objects" / "nodes").rglob("*.kv"):
        space = path.parents[1].name
        found[space] = max(found.get(space, 0), decode(path.read_bytes()).end)
    return found


def all_saved(directory, tokens: int) -> bool:
    found = saved(directory)
    return len(found) == 2 and min(found.values()) >= tokens


def test_two_servers_at_once(serve, models, tmp_path):
    directory = tmp_path / "cache"
    with_model = [{"model": str(model)} for model in models]
    plain = serve(models[0], *NO_MEMORY)
    expected = [ask_all(plain, **each) for each in with_model]
    plain.kill()
    # They are told apart by what they say; else a prefix of the other's would not show.
    assert all(expected[0][key].logprobs != pytest.approx(expected[1][key].logprobs, abs=0.01) for key in expected[0])

    flags = ("--kv-cache-dir", str(directory), *FLAGS)
    servers = [serve(model, *flags) for model in models]
    for answers, right in zip(at_once(servers), expected, strict=True):
        assert_same(answers, right)
    longest = max(answer.prompt_tokens for answer in expected[0].values())
    for server in servers:
        server.wait_for(lambda: all_saved(directory, longest), f"{longest} tokens are not saved")
        assert server.stop() == 0
        assert server.warnings == []
    assert len(saved(directory)) == 2

    # Each restores its own.
    servers = [serve(model, *flags) for model in models]
    for answers, right in zip(at_once(servers), expected, strict=True):
        assert_same(answers, right)
        assert [each.prompt_tokens - each.cached_tokens for each in answers.values()] == [1] * len(TURNS)
    for server in servers:
        assert server.stop() == 0

    # And so does one server that is asked for either by turns.
    server = serve(models[0], *flags)
    for topic in TOPICS:
        for model, right in zip(with_model, expected, strict=True):
            answer = server.chat(conversation(2, topic), **model)
            assert_same({(topic, 2): answer}, {(topic, 2): right[topic, 2]})
            assert answer.prompt_tokens - answer.cached_tokens == 1
    assert "Traceback" not in server.log
