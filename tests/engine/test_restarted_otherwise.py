"""One directory, and a server that is restarted with other flags each time: the right tokens, and nothing raised."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from engine_support import conversation, wait_saved
from pair_support import NO_MEMORY

FLAGS = ("--kv-cache-interval", "256", "--kv-cache-min-tokens", "0")
SMALL = "2MiB"
"""Less than three conversations, more than one."""


def test_flags_and_budget_change_at_restarts(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    topics = ["hash chains", "ropes and windows", "what an answer costs"]
    prompts = [*(conversation(2, topic) for topic in topics), conversation(1, "something new")]
    plain = serve(tiny_llama, *NO_MEMORY)
    expected = [plain.chat(prompt).ids for prompt in prompts]
    plain.kill()

    def session(*flags: str, asked: Sequence[int] = range(3), wait: bool = False) -> list[int]:
        """Ask some of the prompts of a server with these flags: how many tokens of each it had to compute."""
        server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS, *NO_MEMORY, *flags)
        answers = [server.chat(prompts[number]) for number in asked]
        assert [answer.ids for answer in answers] == [expected[number] for number in asked], flags
        if wait:
            wait_saved(server, directory, max(answer.prompt_tokens for answer in answers))
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=30) as told:
            health = json.load(told)["kv_cache"]
        assert (health["on"], health["why"]) == (True, ""), flags
        assert server.stop() == 0
        assert "Traceback" not in server.log, flags
        assert server.warnings == [], flags
        return [answer.prompt_tokens - answer.cached_tokens for answer in answers]

    assert min(session(wait=True)) > 1000
    # Of the others a part may have come from the first one's, which nobody notes as computed by a prefill.
    assert session("--kv-cache-exact")[0] == 1
    assert session("--prefill-step-size", "100", "--kv-cache-durability", "full") == [1, 1, 1]
    assert session("--kv-cache-durability", "none", "--kv-cache-states", "4", "--kv-cache-report") == [1, 1, 1]

    # A budget for less than is there: what was not used within seconds goes, and nothing new comes. With room again,
    # all is saved.
    before = nodes(directory)
    assert session("--kv-cache-size", SMALL, asked=[3, 0])[0] > 1
    assert nodes(directory) <= before
    session("--kv-cache-size", "1GiB", asked=range(4))
    assert session("--kv-cache-size", "1GiB", asked=range(4)) == [1, 1, 1, 1]


def nodes(directory: Path) -> set[Path]:
    return set((directory / "objects" / "nodes").rglob("*.kv"))
