"""A server where MLX's memory must not be used in place: the same answers, from the same directory."""

from __future__ import annotations

import pytest
from engine_support import conversation, wait_saved

from kvstore_mlx.selfcheck import SAFE_ENV

FLAGS = ("--kv-cache-interval", "256", "--kv-cache-min-tokens", "64")


@pytest.mark.parametrize(("writes", "reads"), [("1", "1"), ("0", "1"), ("1", "0")])
def test_a_restart_on_the_safe_path_gives_the_same_numbers(serve, tiny_llama, tmp_path, monkeypatch, writes, reads):
    """What one path wrote the other reads: the bytes are the same."""
    directory = tmp_path / "cache"
    monkeypatch.setenv(SAFE_ENV, writes)
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    written = server.chat(conversation(1))
    wait_saved(server, directory, written.prompt_tokens - 1 + len(written.ids))
    server.kill()
    assert ("MLX's memory is not used in place" in server.log) == (writes == "1")

    monkeypatch.setenv(SAFE_ENV, reads)
    again = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    restored = again.chat(conversation(1))
    assert restored.cached_tokens == restored.prompt_tokens - 1
    assert (restored.ids, restored.logprobs) == (written.ids, written.logprobs)
    assert "from disk" in again.log
    assert ("MLX's memory is not used in place" in again.log) == (reads == "1")
