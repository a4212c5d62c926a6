"""The directory is on a drive that is pulled out while a server runs, and plugged in again."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from engine_support import Server, conversation, wait_saved
from pair_support import NO_MEMORY

FLAGS = ("--kv-cache-interval", "256", "--kv-cache-min-tokens", "0", *NO_MEMORY)


def health(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=30) as answer:
        document = json.load(answer)
    assert document["status"] == "ok"
    return document["kv_cache"]


@pytest.mark.parametrize("gone", ["with its mount point", "below its mount point"])
def test_a_drive_goes_and_comes_back(serve, tiny_llama, tmp_path, gone):
    directory = tmp_path / "drive" / "cache"
    moved: tuple[Path, Path] = (directory, tmp_path / "away")
    if gone == "with its mount point":
        moved = (directory.parent, tmp_path / "away")
    directory.parent.mkdir()
    plain = serve(tiny_llama, *NO_MEMORY)
    expected = [plain.chat(conversation(turns)) for turns in (1, 2, 3)]
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)

    def ask(turns: int) -> Any:
        answer = server.chat(conversation(turns))
        assert answer.ids == expected[turns - 1].ids
        return answer

    first = ask(1)
    wait_saved(server, directory, first.prompt_tokens)
    assert health(server)["why"] == ""

    moved[0].rename(moved[1])
    for turns in (1, 2, 1, 3):
        assert ask(turns).cached_tokens == 0
    server.wait_for(lambda: "check that its volume is mounted" in health(server)["why"], "no reason in /health")
    assert "not saved" in health(server)["why"]
    # Nothing was put in its place, which would be in its way now or hidden below it.
    assert not moved[0].exists()

    moved[1].rename(moved[0])
    assert ask(1).cached_tokens == first.prompt_tokens - 1
    second = ask(2)
    assert second.cached_tokens >= first.prompt_tokens - 1
    wait_saved(server, directory, second.prompt_tokens)
    server.wait_for(lambda: health(server)["why"] == "", "still a reason in /health")
    assert ask(2).cached_tokens == second.prompt_tokens - 1
    assert "Traceback" not in server.log
    assert server.stop() == 0
