"""--kv-cache-states, --kv-cache-exact and --kv-cache-strict reach the server; what they do is in test_restoring.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_support import Server, wait_saved
from model_support import make_family
from pair_support import NO_MEMORY

from kvstore.manifest import decode

MESSAGES = [{"role": "user", "content": "Explain hash chains, and why they matter to a cache. " * 14}]
STRICT = ("--kv-cache-strict", "--kv-cache-states", "2", "--kv-cache-exact")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_family(tmp_path_factory.mktemp("flags") / "model", "bailing_moe_linear")


def start(serve, model: Path, directory: Path, *flags: str) -> Server:
    return serve(model, *NO_MEMORY, "--kv-cache-dir", str(directory), "--kv-cache-interval", "128", *flags)


def test_flags_reach_the_server(serve, model, tmp_path):
    directory = tmp_path / "cache"
    server = start(serve, model, directory, *STRICT, "--prefill-step-size", "256")
    written = server.chat(MESSAGES, max_tokens=4)
    # Exact: the answer is left out.
    wait_saved(server, directory, written.prompt_tokens - 1)
    assert server.stop() == 0
    nodes = (directory / "objects" / "nodes").rglob("*.state")
    states = {decode(path.read_bytes()).end for path in nodes}
    # Every second of the borders at 128, 256, …; the others belong to the prompt's end and the answer's.
    assert {256, 512} <= states
    assert not {128, 384, 640} & states
    described = [json.loads(path.read_text()) for path in (directory / "namespaces").glob("*.json")]
    assert [each["description"]["strict"]["prefill_step"] for each in described] == [256]

    again = start(serve, model, directory, *STRICT, "--prefill-step-size", "256")
    restored = again.chat(MESSAGES, max_tokens=4)
    assert (restored.ids, restored.logprobs) == (written.ids, written.logprobs)
    assert restored.cached_tokens == restored.prompt_tokens - 1
    assert again.stop() == 0

    # Another prefill step is another namespace, for a strict server only.
    other = start(serve, model, directory, *STRICT, "--prefill-step-size", "512")
    assert other.chat(MESSAGES, max_tokens=4).cached_tokens == 0
    assert other.stop() == 0


def test_only_the_ends_of_prompts_and_answers(serve, model, tmp_path):
    directory = tmp_path / "cache"
    server = start(serve, model, directory, "--kv-cache-states", "0")
    written = server.chat(MESSAGES, max_tokens=4)
    wait_saved(server, directory, written.prompt_tokens + 3)
    assert server.stop() == 0
    states = {decode(path.read_bytes()).end for path in (directory / "objects" / "nodes").rglob("*.state")}
    assert written.prompt_tokens - 1 in states
    assert not {end for end in states if end % 128 == 0}
