"""The openai client as the tests use it, and what of an answer two servers must agree upon."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Server
from pair_support import TOLERANCE

openai = pytest.importorskip("openai")

VOLATILE = {"id", "created", "usage"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the repository.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120)


class Clients:
    """One server with a directory and one without, and a client of each."""

    def __init__(self, ours: Server, theirs: Server) -> None:
        self.server = ours
        self.ours, self.theirs = client_of(ours), client_of(theirs)


def ask(client: Any, **request: Any) -> Any:
    return client.chat.completions.create(**{"model": "default_model", **request})


def seen(completion: Any) -> dict[str, Any]:
    """All that a program can see of an answer, but times, and what of it was reused."""
    return {key: value for key, value in completion.model_dump().items() if key not in VOLATILE}


def near(value: Any) -> Any:
    """The same, with log-probabilities that differ by no more than kernels do for pieces of other lengths."""
    if isinstance(value, dict):
        return {key: near(each) for key, each in value.items()}
    if isinstance(value, list):
        return [near(each) for each in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


def reused(completion: Any) -> int:
    return completion.usage.prompt_tokens_details.cached_tokens
