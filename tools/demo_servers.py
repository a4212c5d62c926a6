"""The servers of the demo: real ``kvstore serve`` processes, and an OpenAI client that asks them."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from openai import DefaultHttpxClient, OpenAI, OpenAIError

from ports import free_port

__all__ = ["WARM_UP", "Answer", "DemoError", "Reuse", "Server", "parse_reuse", "tail"]

WARM_UP = "Hi"
"""What every server process is asked for one token before anything is timed: its model is then loaded for certain."""

READY_S = 180.0
STOP_S = 120.0
ANSWER_S = 3600.0
"""Without a fast BLAS a prompt takes many minutes."""

_HOST = "127.0.0.1"
_REUSE = re.compile(r"kvstore: reused (\d+) of (\d+) tokens from (\w+) in ([\d.]+) ms \(([^()]*) read\)")


class DemoError(Exception):
    """The demo cannot go on. log is the output of the server that is to blame."""

    def __init__(self, sentence: str, log: Path | None = None) -> None:
        super().__init__(sentence)
        self.log = log


class Reuse(NamedTuple):
    """What a server says about one request: how many of its tokens came from where, how fast, and how much was read."""

    reused: int
    total: int
    source: str
    ms: float
    read: str


@dataclass(frozen=True)
class Answer:
    """One answer as its client saw it. reuse is None when the server has no cache directory."""

    text: str
    ttft_s: float
    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    reuse: Reuse | None


def parse_reuse(log: str, prompt_tokens: int) -> Reuse | None:
    """The last line of a log about a prompt of so many tokens."""
    for reused, total, source, ms, read in reversed(_REUSE.findall(log)):
        if int(total) == prompt_tokens:
            return Reuse(int(reused), int(total), source, float(ms), read)
    return None


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


class Server:
    """One server process, ready for requests inside of its ``with`` and gone after it."""

    def __init__(self, log: Path, model: Path, env: Mapping[str, str], cache: Path | None = None) -> None:
        self.log = log
        self._model = model
        self._env = {**env, "PYTHONUNBUFFERED": "1"}
        self._cache = cache
        self._port = free_port(_HOST)
        self._process: subprocess.Popen[bytes] | None = None
        self._client = OpenAI(
            base_url=f"http://{_HOST}:{self._port}/v1",
            api_key="none",
            max_retries=0,
            timeout=ANSWER_S,
            # A proxy that the environment names must not be asked for this machine.
            http_client=DefaultHttpxClient(trust_env=False),
        )

    def __enter__(self) -> Self:
        arguments = ["--model", str(self._model), "--host", _HOST, "--port", str(self._port)]
        if self._cache is not None:
            arguments += ["--kv-cache-dir", str(self._cache)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
            )
        try:
            self._wait_listening()
            self._warm_up()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._client.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None
        return self._process

    def ask(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Answer:
        """Send a conversation and take the streamed answer, with the times that a client sees."""
        logged = self.log.stat().st_size
        text, first, usage = "", None, None
        started = time.perf_counter()
        try:
            stream = self._client.chat.completions.create(
                model="default_model",
                messages=cast("Any", messages),
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    first = time.perf_counter() if first is None else first
                    text += piece
                usage = chunk.usage or usage
        except OpenAIError as error:
            raise self._failed(f"a request failed: {error}") from error
        ended = time.perf_counter()
        if first is None or usage is None:
            raise self._failed("a server sent an answer without text or without usage")
        details = usage.prompt_tokens_details
        with self.log.open("rb") as log:
            log.seek(logged)
            said = log.read().decode(errors="replace")
        return Answer(
            text=text,
            ttft_s=first - started,
            wall_s=ended - started,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details and details.cached_tokens) or 0,
            reuse=parse_reuse(said, usage.prompt_tokens),
        )

    def peak_memory_mib(self) -> float | None:
        """The most memory that the process has had at once; on other systems than Linux, what it has now."""
        with suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        with suppress(OSError, ValueError):
            listed = subprocess.run(command, capture_output=True, text=True, check=False)
            return int(listed.stdout) / 1024
        return None

    def stop(self) -> int:
        """Ask the process to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise self._failed(f"a server was still running {STOP_S:.0f} s after SIGTERM") from None

    def kill(self) -> None:
        """End the process without a warning; harmless when it has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait_listening(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise self._failed(f"a server ended at its start with exit code {code}")
            connection = http.client.HTTPConnection(_HOST, self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
                # It listens, and will never answer: mlx_lm.server does not end when it cannot load its model.
                raise self._failed("a server could not load its model")
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise self._failed(f"a server was not ready after {READY_S:.0f} s")

    def _warm_up(self) -> None:
        """One token of nothing. A server listens before it has its model; a request waits for it."""
        try:
            self._client.completions.create(model="default_model", prompt=WARM_UP, max_tokens=1, temperature=0)
        except OpenAIError as error:
            raise self._failed(f"a server could not answer its first request: {error}") from error

    def _failed(self, sentence: str) -> DemoError:
        return DemoError(f"{sentence}.", self.log)
