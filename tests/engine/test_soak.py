"""Conversations at once, for a while, beside a collector and restarts: no error, no wrong token, bounded memory."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from engine_support import Server, conversation

WORDS = ["cache", "chunk", "block", "token", "prefix", "manifest", "digest", "rename", "fsync", "prefill", "decode"]
CLIENTS = 6


def history(seed: int, turns: int) -> list[dict]:
    """A conversation of its own, deterministic; a longer one begins with the shorter ones, unless it was edited."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": conversation(1)[0]["content"]}]
    for turn in range(turns):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5, 60)))
        if turn:
            messages.append({"role": "assistant", "content": f"answer {turn} {words[:20]}"})
        messages.append({"role": "user", "content": words})
    if seed % 3 == 0 and turns > 1:
        # The client edits an earlier message: everything after it is another prompt.
        messages[1] = {"role": "user", "content": messages[1]["content"] + " (edited)"}
    return messages


def ask(server: Server, job: tuple[int, int]):
    return server.chat(history(*job), max_tokens=8)


def resident_mib(server: Server) -> float:
    with open(f"/proc/{server.process.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def run(serve, model, directory, seconds: float) -> dict[str, int]:
    """Ask until the time is over; what was asked."""
    plain = serve(model)
    expected: dict[tuple[int, int], list[int]] = {}
    ends = time.monotonic() + seconds
    flags = ("--kv-cache-dir", str(directory), "--kv-cache-size", "6MiB")
    server = serve(model, *flags, "--kv-cache-interval", "256")
    sizes: list[float] = []
    asked = reused = 0
    rounds = 0
    while time.monotonic() < ends or rounds < 2:
        rounds += 1
        jobs = [(random.Random(rounds * 100 + i).randrange(12), 1 + (rounds + i) % 4) for i in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(partial(ask, server), jobs))
        for job, answer in zip(jobs, answers, strict=True):
            if job not in expected:
                expected[job] = ask(plain, job).ids
            assert answer.ids == expected[job], (job, rounds)
            asked += answer.prompt_tokens
            reused += answer.cached_tokens
        collected = subprocess.run(
            [sys.executable, "-m", "kvstore", "gc", str(directory), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in collected.stderr
        sizes.append(resident_mib(server))
        if rounds % 2 == 0:
            server.kill() if rounds % 4 else server.stop()
            assert "Traceback" not in server.log
            server = serve(model, *flags)
    assert server.stop() == 0
    assert "Traceback" not in server.log
    assert reused > 0.2 * asked
    assert max(sizes) < min(sizes) + 400
    return {"requests": rounds * CLIENTS, "prompt_tokens": asked, "reused_tokens": reused}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the server's memory from /proc")
def test_a_little(serve, tiny_llama, tmp_path):
    run(serve, tiny_llama, tmp_path / "cache", 15)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the server's memory from /proc")
def test_ten_minutes(serve, tiny_llama, tmp_path, record_property):
    record_property(
        "what", "A server of a tiny model asked by six clients at once, beside a collector, killed and restarted"
    )
    for each in run(serve, tiny_llama, tmp_path / "cache", 600).items():
        record_property(*each)
