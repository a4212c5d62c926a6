"""Two servers of the same models: one with a cache directory and one without, whose every answer is a first run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from engine_support import Answer, Server

from kvstore.manifest import decode

INTERVAL = 128
NO_MEMORY = ("--prompt-cache-size", "0")
"""mlx_lm.server keeps no prompts then: what is reused comes from disk, and the other server reuses nothing."""

TOLERANCE = 2e-4
"""What kernels may make of pieces of other lengths, in a log-probability."""


class Pair:
    """A server with a directory, restarted at will, and one without."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model, self.starts = folder, model, 0
        self.directory = folder / "cache"
        self.plain = Server(folder / "plain.log", model, *NO_MEMORY).wait_ready()
        self.server = self.start()
        self.first: dict[str, Answer] = {}

    def start(self) -> Server:
        self.starts += 1
        flags = ("--kv-cache-dir", str(self.directory), "--kv-cache-interval", str(INTERVAL), "--log-level", "INFO")
        # What is cheaper to compute on a machine that is busy elsewhere must not decide.
        flags = (*flags, "--kv-cache-min-tokens", "0")
        return Server(self.folder / f"{self.starts}.log", self.model, *NO_MEMORY, *flags).wait_ready()

    def stop(self) -> None:
        """Stop in order, and see that nothing of ours was logged that a user would have to read."""
        assert self.server.stop() == 0
        gone = re.findall(r"^(?:BrokenPipeError|ConnectionResetError)", self.server.log, re.MULTILINE)
        assert self.server.log.count("Traceback") == len(gone), self.server.log
        # (mlx_lm.server has warnings of its own.)
        assert not [line for line in self.server.warnings if "kvstore" in line]

    def restart(self) -> None:
        """Another process on the same directory."""
        self.stop()
        self.server = self.start()

    def close(self) -> None:
        """End both."""
        try:
            self.stop()
        finally:
            self.server.kill()
            self.plain.kill()

    def expected(self, request: dict[str, Any]) -> Answer:
        """What the plain server answers, asked once."""
        key = json.dumps(request, sort_keys=True)
        if key not in self.first:
            self.first[key] = self.plain.chat(**request)
        return self.first[key]

    def ask(self, **request: Any) -> Answer:
        """Ask the server with a directory, and compare its answer with the plain one's."""
        answer = self.server.chat(**request)
        assert_same(answer, self.expected(request))
        return answer

    def ask_and_wait(self, **request: Any) -> Answer:
        """As ask, and wait until its prompt and answer are saved. (An engine may be one token ahead of its answer.)"""
        before = self.files()
        answer = self.ask(**request)
        end = answer.prompt_tokens + len(answer.ids)
        self.wait(before, end - 1, end)
        return answer

    def wait(self, before: set[Path], *tokens: int) -> None:
        """Wait for a state after exactly so many tokens, one of these numbers, that was not among files before.

        (Another conversation, or another model, may have one of as many.)
        """

        def there() -> bool:
            return any(decode(path.read_bytes()).end in tokens for path in self.files() - before)

        self.server.wait_for(there, f"no new state after {tokens} tokens")

    def files(self) -> set[Path]:
        """All states that are saved."""
        return set((self.directory / "objects" / "nodes").rglob("*.state"))


def assert_same(answer: Answer, expected: Answer) -> None:
    """The same tokens, and log-probabilities that differ by no more than kernels do for pieces of other lengths."""
    assert answer.ids == expected.ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
    assert answer.choice["message"] == expected.choice["message"]
    assert answer.choice["finish_reason"] == expected.choice["finish_reason"]
