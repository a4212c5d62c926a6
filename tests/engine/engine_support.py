"""What the engine tests share: a real server in a process of its own, a client, conversations."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.manifest import decode
from ports import free_port

READY_S = 60


def polls(seconds: float) -> Iterator[int]:
    """A waiting loop, a turn every 50 ms. Counted, not timed: a machine that stands still for a while fails no test."""
    for number in range(max(1, round(seconds / 0.05))):
        yield number
        time.sleep(0.05)


class Server:
    """`kvstore serve` (or another command) as a subprocess; its log is a file."""

    def __init__(
        self, log: Path, model: Path | str, *flags: str, command=("-m", "kvstore", "serve"), with_model: bool = True
    ) -> None:
        self.port = free_port()
        self.log_file = log
        named = ["--model", str(model)] if with_model else []
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *command, *named, "--port", str(self.port), *flags],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def warnings(self) -> list[str]:
        """Warnings in the log but that of the place: tests keep directories in temporary folders, or in memory."""
        found = [line for line in self.log.splitlines() if "WARNING" in line]
        return [line for line in found if "is a temporary folder" not in line and "is in memory" not in line]

    def wait_ready(self) -> Server:
        for _ in polls(READY_S):
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    answer.read()
                    return self
            except OSError:
                pass
        raise AssertionError(f"the server was not ready after {READY_S} s:\n{self.log}")

    def post(self, path: str, body: dict, timeout: float = 300) -> dict:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)

    def chat(self, messages: list[dict], max_tokens: int = 12, *, timeout: float = 120, **more) -> Answer:
        body = {"messages": messages, "max_tokens": max_tokens, "logprobs": True, **more}
        return Answer(self.post("/v1/chat/completions", body, timeout))

    def wait_log(self, pattern: str, timeout: float = 30) -> str:
        for _ in polls(timeout):
            if found := re.search(pattern, self.log):
                return found[0]
        raise AssertionError(f"no {pattern!r} in the log:\n{self.log}")

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        """Wait until something is so; its log says what happened when it does not become so."""
        for _ in polls(timeout):
            if condition():
                return
        raise AssertionError(f"{what}:\n{self.log}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


class Answer:
    """What a test looks at in a response.

    ids and logprobs are of the tokens that were chosen. A server that was asked for top_logprobs lists likely tokens at
    each place, in no order, and does not say which it chose: they are of the likeliest then, and likely has them all.
    """

    def __init__(self, body: dict) -> None:
        self.body = body
        (self.choice,) = body["choices"]
        self.text = self.choice["message"]["content"]
        places = self.choice["logprobs"]["content"]
        self.likely = [{each["id"]: each["logprob"] for each in place.get("top_logprobs", [place])} for place in places]
        self.ids = [max(place, key=place.__getitem__) for place in self.likely]
        self.logprobs = [max(place.values()) for place in self.likely]
        self.prompt_tokens = body["usage"]["prompt_tokens"]
        self.cached_tokens = body["usage"].get("prompt_tokens_details", {}).get("cached_tokens")


def conversation(turns: int, topic: str = "hash chains") -> list[dict]:
    """A conversation of about 900 byte tokens a turn; a longer one begins with the shorter ones."""
    messages = [{"role": "system", "content": "You review code. Be brief, be right, cite the line. " * 8}]
    for turn in range(turns):
        if turn:
            messages.append({"role": "assistant", "content": f"Understood, turn {turn}."})
        messages.append({"role": "user", "content": f"{turn}: explain {topic} and why they matter to a cache. " * 9})
    return messages


def wait_saved(server: Server, directory: Path, tokens: int, timeout: float = 30) -> None:
    """Wait until the writer thread has published a prefix of at least this many tokens."""
    found: list[int] = []
    for _ in polls(timeout):
        found = [decode(path.read_bytes()).end for path in (directory / "objects" / "nodes").rglob("*.kv")]
        if found and max(found) >= tokens:
            return
    raise AssertionError(f"only {max(found, default=0)} of {tokens} tokens were saved:\n{server.log}")
