"""Sixteen conversations at once, beside gc and fsck: no error, no wrong token, bounded memory, flat latency.

The right answers are mlx_lm.server's, asked for one at a time beforehand, with nothing saved. Conversations are
finite in number and greedy, so each of them is met many times: computed, restored in part, restored whole, and again
after a collection took it away.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import TINY_LLAMA
from engine_support import Answer, Server

from kvstore_mlx.refusals import Refusal

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the server's memory from /proc")

CLIENTS = 16
WORDS = ["cache", "chunk", "block", "token", "prefix", "manifest", "digest", "rename", "fsync", "prefill", "decode"]
SYSTEM = {"role": "system", "content": "You review code. Be brief, be right, cite the line. " * 8}

TOLERANCE = 2e-4
"""Log-probabilities in batches of other shapes differ by less (test_openai_client.py): tokens this close are a tie."""

TOKEN_BYTES = 4 * 2 * TINY_LLAMA["num_hidden_layers"] * TINY_LLAMA["num_key_value_heads"] * TINY_LLAMA["head_dim"]

STEADY = 1.25
"""The server's processor time in the last third of a run over that in the first, for the same work (growth): what grows
with the requests served, the files there or the threads that ever were would be many times as much by then. Neighbours
on two cores take little part in it."""

STEADY_LATENCY = 1.6
"""The same of the time that requests take: neighbours make a third half as slow again."""

PARTS = 30
"""Parts of a run that are compared: of ten minutes, some hundreds of requests each."""

# Memory holds two conversations, so the others come from disk.
SERVER = ("--prompt-cache-size", "2")
CACHE = ("--kv-cache-interval", "256", "--kv-cache-min-tokens", "0")
FOLDERS = 3 << 20
"""Bytes that the directory takes without a prompt, when all its folders are made."""


@dataclass(frozen=True)
class Right:
    """One prompt and mlx_lm.server's answer to it. size: bytes of their KV."""

    messages: list[dict]
    ids: list[int]
    logprobs: list[float]
    size: int


class Request(NamedTuple):
    """One that was answered: when it ended, the seconds it took, and the tokens of its prompt that were computed."""

    ended: float
    took: float
    computed: int


class Span(NamedTuple):
    """A part of the time: requests, tokens computed, seconds they took together, processor seconds of the server."""

    requests: int
    computed: int
    took: float
    worked: float


@dataclass
class Tally:
    """What the clients saw."""

    requests: list[Request] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    ties: int = 0
    longest: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, answer: Answer, began: float, *, tie: bool) -> None:
        with self.lock:
            now = time.monotonic()
            self.requests.append(Request(now, now - began, answer.prompt_tokens - answer.cached_tokens))
            self.prompt_tokens += answer.prompt_tokens
            self.reused_tokens += answer.cached_tokens
            self.ties += tie
            self.longest = max(self.longest, answer.prompt_tokens + len(answer.ids))


def ask(server: Server, messages: list[dict], **more: int) -> Answer:
    return server.chat(messages, max_tokens=8, **more)


def conversation(server: Server, client: int, number: int, turns: int) -> list[Right]:
    """The turns of one conversation, each with the answers to those before in it."""
    rng = random.Random(client * 1000 + number)
    messages, found = [SYSTEM], []
    for turn in range(turns):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(10, 60)))
        messages = [*messages, {"role": "user", "content": f"{turn}: {words}"}]
        answer = ask(server, messages)
        found.append(Right(messages, answer.ids, answer.logprobs, answer.prompt_tokens * TOKEN_BYTES))
        messages = [*messages, {"role": "assistant", "content": answer.text}]
    return found


def is_tie(plain: Server, expected: Right, answer: Answer) -> bool:
    """False for the right tokens, True when they part where two were equally likely; anything else is a wrong token.

    Log-probabilities must be right too: a model this small often says the same of different prompts. Which tokens were
    likely mlx_lm.server is asked when it matters: where it lists them it does not say which it chose.
    """
    ids = answer.ids
    if ids == expected.ids:
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
        return False
    at = next(at for at, pair in enumerate(zip(ids, expected.ids, strict=False)) if pair[0] != pair[1])
    likely = ask(plain, expected.messages, top_logprobs=4).likely[at]
    least = max(likely.values()) - TOLERANCE
    assert likely.get(ids[at], -1e9) > least, f"token {at} of {ids} is wrong: {expected.ids}, {likely}"
    assert likely.get(expected.ids[at], -1e9) > least
    return True


def patiently(server: Server, messages: list[dict]) -> Answer:
    """For mlx_lm.server itself, which cuts off whoever finds five others waiting to be accepted."""
    for _ in range(50):
        with suppress(ConnectionError, urllib.error.URLError):
            return ask(server, messages)
    raise AssertionError("no connection in fifty tries")


def talk(server: Server, plain: Server, own: list[list[Right]], ends: float, tally: Tally) -> None:
    """One client: its conversations, turn after turn, over and over, and twice at least."""
    rounds = 0
    while rounds < 2 or time.monotonic() < ends:
        for turn in (turn for turns in own for turn in turns):
            began = time.monotonic()
            if rounds >= 2 and began >= ends:
                return
            answer = (patiently if server is plain else ask)(server, turn.messages)
            tally.add(answer, began, tie=is_tie(plain, turn, answer))
        rounds += 1


def processor(server: Server) -> float:
    """Seconds of a processor's time that the server has taken."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(server: Server) -> int:
    """Bytes of memory that the server has."""
    with open(f"/proc/{server.process.pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024


@contextmanager
def every(seconds: float, do: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Something done over and over meanwhile; what it raised."""
    over, raised = threading.Event(), []

    def loop() -> None:
        while not over.wait(seconds):
            try:
                do()
            except BaseException as error:
                raised.append(error)
                return

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield raised
    finally:
        over.set()
        thread.join()
    assert not raised, raised


def command(*arguments: str | Path) -> dict[str, Any]:
    """What a command says of the directory. The only failure allowed: the server itself collects just then."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *map(str, arguments), "--json"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    document = json.loads(done.stdout) if done.stdout else {}
    assert done.returncode == 0 or document.get("busy"), done.stdout + done.stderr
    return document


def load(
    server: Server, plain: Server, all_of_them: list[list[list[Right]]], seconds: float
) -> tuple[Tally, list[tuple[float, int]], list[tuple[float, float]]]:
    """All clients at once for so long: what they saw, and the server's memory and processor time meanwhile."""
    tally, memory, worked = Tally(), [], []
    ends = time.monotonic() + seconds

    def look() -> None:
        now = time.monotonic()
        memory.append((now, resident(server)))
        worked.append((now, processor(server)))

    with (
        every(0.25, look),
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        for each in [pool.submit(talk, server, plain, own, ends, tally) for own in all_of_them]:
            each.result()
    return tally, memory, worked


def spans(requests: list[Request], worked: list[tuple[float, float]]) -> list[Span]:
    """The time in parts of equal length. worked: processor seconds so far, several times a second."""
    begin, end = worked[0][0], worked[-1][0]
    cuts = [begin + each * (end - begin) / PARTS for each in range(PARTS + 1)]
    spent = [min(worked, key=lambda pair: abs(pair[0] - cut))[1] for cut in cuts]
    found = []
    for (since, until), (before, after) in zip(pairwise(cuts), pairwise(spent), strict=True):
        own = [each for each in requests if since < each.ended <= until]
        took, computed = sum(each.took for each in own), sum(each.computed for each in own)
        found.append(Span(len(own), computed, took, after - before))
    return found


def growth(parts: list[Span], cost: Callable[[Span], float]) -> float:
    """What the same work costs in the last third of the parts, over what it costs in the first.

    How much of a prompt has to be computed changes in the course of a run, with what the collections leave, and moves
    the cost of a request by more than any bound worth having. So a price a request and a price a computed token are
    fitted to all parts (least squares), and the thirds are compared by what they cost over what they should have. No
    price is below nothing: with one, work that becomes less could explain any cost that grows.
    """
    work = np.array([(each.requests, each.computed) for each in parts], float)
    paid = np.array([cost(each) for each in parts])
    due = min((work[:, of] @ prices for of, prices in _prices(work, paid)), key=lambda due: ((paid - due) ** 2).sum())
    third = len(parts) // 3
    return float(paid[-third:].sum() / due[-third:].sum() / (paid[:third].sum() / due[:third].sum()))


def _prices(work: Any, paid: Any) -> Iterator[tuple[list[int], Any]]:
    """Least squares by both columns of the work, and by each alone, where all prices are above nothing."""
    for of in ([0, 1], [0], [1]):
        prices = np.linalg.lstsq(work[:, of], paid, rcond=None)[0]
        if (prices >= 0).all():
            yield of, prices


def thirds(pairs: list[tuple[float, float]]) -> list[float]:
    """The medians of the first, second and last third of the time."""
    first, last = pairs[0][0], pairs[-1][0]
    cut: list[list[float]] = [[], [], []]
    for at, value in pairs:
        cut[min(2, int(3 * (at - first) / (last - first)))].append(value)
    return [statistics.median(values) for values in cut]


@dataclass(frozen=True)
class Course:
    """When requests ended, and the server's memory and processor seconds so far, several times a second."""

    requests: list[Request]
    memory: list[tuple[float, float]]
    worked: list[tuple[float, float]]


def run(
    serve, model: Path, directory: Path, seconds: float, conversations: int, turns: int
) -> tuple[dict[str, Any], Course]:
    """The whole test but for what needs a long run; its figures, and its course."""
    plain = serve(model, *SERVER)
    idle = resident(plain)
    with ThreadPoolExecutor(2) as pool:
        jobs = [[pool.submit(conversation, plain, c, n, turns) for n in range(conversations)] for c in range(CLIENTS)]
        expected = [[each.result() for each in own] for own in jobs]
    every_one = [turn for own in expected for turns in own for turn in turns]
    assert len({tuple(round(each, 3) for each in turn.logprobs) for turn in every_one}) == len(every_one)
    _, without, _ = load(plain, plain, expected, max(6.0, seconds / 10))

    # Less than all of it is kept by the server's own collections, and still less by those of the command.
    whole = sum(turns[-1].size for own in expected for turns in own)
    budget, collected = (str(FOLDERS + int(share * whole)) for share in (0.7, 0.5))
    server = serve(model, *SERVER, "--kv-cache-dir", str(directory), "--kv-cache-size", budget, *CACHE)
    added = resident(server) - idle
    collections, checks = [], []
    with (
        every(1.0, lambda: collections.append(command("gc", directory, "--size", collected))),
        every(1.0, lambda: checks.append(command("fsck", directory))),
    ):
        tally, memory, worked = load(server, plain, expected, seconds)
    # Where all that fits is in use at once, or the command collects, what is new is not saved, and the log says so.
    said = (Refusal.FULL.value, Refusal.BUSY.value)
    assert [line for line in server.warnings if not any(each in line for each in said)] == []
    assert "Traceback" not in server.log
    peak, plain_peak = (max(size for _, size in sizes) for sizes in (memory, without))
    assert server.stop() == 0
    assert command("fsck", directory, "--read-data")["errors"] == 0

    assert tally.reused_tokens > 0.3 * tally.prompt_tokens
    assert tally.ties <= 1 + len(tally.requests) // 100
    assert len(collections) > 1
    assert len(checks) > 1
    # What the same load takes without a directory, what a directory adds before there is any, and for each conversation
    # that is under way two copies of all its rows: restored ones, and those that wait to be written.
    assert peak < plain_peak + max(0, added) + 2 * CLIENTS * tally.longest * TOKEN_BYTES
    figures = {
        "requests": len(tally.requests),
        "prompt_tokens": tally.prompt_tokens,
        "reused_tokens": tally.reused_tokens,
        "longest": tally.longest,
        "ties": tally.ties,
        "collections": len(collections),
        "collected_nodes": sum(each["nodes"] for each in collections),
        "checks": len(checks),
        "memory_mib_peak": round(peak / 2**20),
        "memory_mib_peak_without": round(plain_peak / 2**20),
    }
    return figures, Course(tally.requests, memory, worked)


def trends(course: Course) -> dict[str, Any]:
    """What grew in a run that has requests in each of its thirds, as a short one on a busy machine may not have."""
    latency = thirds([(each.ended, each.took) for each in course.requests])
    parts = spans(course.requests, course.worked)
    return {
        "latency_ms_first": round(latency[0] * 1e3),
        "latency_ms_last": round(latency[-1] * 1e3),
        "latency_growth": round(growth(parts, lambda part: part.took), 3),
        "processor_growth": round(growth(parts, lambda part: part.worked), 3),
        "memory_thirds": [round(size) for size in thirds(course.memory)],
    }


HIT_RATES = {
    "changing": lambda rng, each: rng.randrange(20, 120) * (2 if each < PARTS // 3 else 1),
    "rising": lambda rng, each: 100 - 40 * each / PARTS,
    "falling": lambda rng, each: 60 + 40 * each / PARTS,
}


@pytest.mark.parametrize("grows", [0.0, 3.0])
@pytest.mark.parametrize("computed", HIT_RATES.values(), ids=HIT_RATES)
def test_growth_is_seen_through_a_changing_hit_rate(computed, grows):
    """Costs that follow the work alone are steady, however it changes; it does not hide four times the cost, either."""
    rng = random.Random(1)
    parts = []
    for each in range(PARTS):
        requests = rng.randrange(200, 400)
        tokens = round(requests * computed(rng, each))
        cost = (0.03 * requests + 0.0004 * tokens) * rng.uniform(0.95, 1.05) * (1 + grows * each / PARTS)
        parts.append(Span(requests, tokens, cost, cost))
    found = growth(parts, lambda part: part.worked)
    assert (found > STEADY) if grows else found == pytest.approx(1.0, abs=0.05)


def test_a_little(serve, tiny_llama, tmp_path):
    run(serve, tiny_llama, tmp_path / "cache", 20, conversations=1, turns=2)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_ten_minutes(serve, tiny_llama, tmp_path, record_property):
    record_property("what", "Sixteen conversations at once with one server of a tiny model, beside gc and fsck")
    figures, course = run(serve, tiny_llama, tmp_path / "cache", 600, conversations=3, turns=4)
    figures |= trends(course)
    for each in figures.items():
        record_property(*each)
    assert figures["collected_nodes"] > 0  # what is younger than a minute it leaves alone
    assert figures["processor_growth"] < STEADY
    assert figures["latency_growth"] < STEADY_LATENCY
    # Nothing is kept of a request for good: less than one more copy of what sixteen conversations hold at once.
    held = figures["memory_thirds"]
    assert held[2] - held[1] < CLIENTS * figures["longest"] * TOKEN_BYTES
