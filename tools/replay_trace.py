"""Replay recorded requests over admission policies: token hit rate and chunks written.

    python tools/replay_trace.py --traces DIR
    python tools/replay_trace.py --traces DIR --write docs/admission.md

DIR (or the environment variable KVSTORE_TRACES) holds coding-agent-sessions.jsonl.gz and
mooncake-conversation.jsonl.gz, as docs/admission.md describes; they are no part of this repository. The adaptive policy
is kvstore.admission itself, so what is measured here is what runs.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from page import markers, put
from replay_policies import POLICIES, SECOND, Request, Result, replay

AGENT = "coding-agent-sessions.jsonl.gz"
CONVERSATION = "mooncake-conversation.jsonl.gz"
CONVERSATION_BLOCK = 512
PAUSE_S = 60.0
"""Between the sessions of a lane."""

MARKERS = markers("replay-table")


class Paths:
    """Numbers for prefixes of whole chunks: equal prefixes, equal numbers."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, space: object, ids: Sequence[int], tokens: int, block: int) -> tuple[int, ...]:
        """The path of a prompt that is so many blocks of block tokens; ids are of one space only."""
        each = self._interval // block
        path: list[int] = []
        above: object = space
        for at in range(0, min(tokens // self._interval, len(ids) // each) * each, each):
            number = self._known.setdefault((above, *ids[at : at + each]), len(self._known))
            path.append(number)
            above = number
        return tuple(path)


def sessions(traces: Path) -> Iterator[tuple[int, list[tuple[float, int, list[int]]], int]]:
    """For each recorded session its number, its requests (seconds, input tokens, block ids), and tokens a block."""
    with gzip.open(traces / AGENT, "rt") as file:
        for line in file:
            session = json.loads(line)
            ids: list[int] = []
            requests = []
            for seconds, tokens, _, kept, new in session["requests"]:
                ids = ids[:kept] + new
                requests.append((seconds, tokens, ids))
            yield session["session"], requests, session["block_tokens"]


def agents(traces: Path, lanes: int, interval: int, seed: int) -> list[Request]:
    """Sessions one after the other on so many lanes: shuffled, each on the lane that is free first."""
    paths = Paths(interval)
    recorded = [
        [(seconds, tokens, paths.of(f"session {number}", ids, tokens, block)) for seconds, tokens, ids in requests]
        for number, requests, block in sessions(traces)
    ]
    random.Random(seed).shuffle(recorded)  # noqa: S311 - the same order every time
    free = [(0.0, lane) for lane in range(lanes)]
    timed = []
    for requests in recorded:
        start, lane = heapq.heappop(free)
        timed += [(start + seconds, lane, tokens, path) for seconds, tokens, path in requests]
        heapq.heappush(free, (start + requests[-1][0] + PAUSE_S, lane))
    timed.sort(key=lambda each: each[:2])
    return [Request(int(seconds * SECOND), tokens, path) for seconds, _, tokens, path in timed]


def conversation(traces: Path, interval: int) -> list[Request]:
    """The requests of a chat service at their own times."""
    paths = Paths(interval)
    requests = []
    with gzip.open(traces / CONVERSATION, "rt") as file:
        for line in file:
            each = json.loads(line)
            tokens = each["input_length"]
            path = paths.of("all", each["hash_ids"], tokens, CONVERSATION_BLOCK)
            requests.append(Request(each["timestamp"] * 10**6, tokens, path))
    return requests


def measure(options: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, Result]]]:
    """For each trace and capacity what each policy does."""
    for lanes in options.lanes:
        requests = agents(options.traces, lanes, options.interval, options.seed)
        for capacity in options.capacities:
            yield f"coding agent, {lanes} at once", capacity, _all(requests, capacity, options)
    requests = conversation(options.traces, options.interval)
    for capacity in options.conversation_capacities:
        yield "chat service", capacity, _all(requests, capacity, options)


def _all(requests: Sequence[Request], capacity: int, options: argparse.Namespace) -> dict[str, Result]:
    return {name: replay(requests, capacity, POLICIES[name](requests), options.interval) for name in options.policies}


def table(rows: Iterable[tuple[str, int, dict[str, Result]]], policies: Sequence[str]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| requests | room for | {' | '.join(policies)} |"
    yield "|---|---|" + "---|" * len(policies)
    for title, capacity, results in rows:
        cells = (f"{results[name].hit:.3f} / {results[name].written:,}" for name in policies)
        yield f"| {title} | {capacity:,} | {' | '.join(cells)} |"


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("KVSTORE_TRACES")
    parser.add_argument(
        "--traces", type=Path, default=default and Path(default), metavar="DIR", help="default: $KVSTORE_TRACES"
    )
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 16], help="sessions of agents at once")
    parser.add_argument("--capacities", type=int, nargs="+", default=[64, 256], metavar="CHUNKS")
    parser.add_argument(
        "--conversation-capacities", type=int, nargs="*", default=[64, 1024, 8192], metavar="CHUNKS", help="may be none"
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--interval", type=int, default=2048, metavar="TOKENS", help="tokens a chunk")
    parser.add_argument("--seed", type=int, default=7, help="shuffles the sessions of agents")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between this file's markers")
    options = parser.parse_args(argv)
    if options.traces is None:
        parser.error("give --traces DIR or set KVSTORE_TRACES")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it where it was asked for."""
    options = options_of(argv)
    lines = []
    try:
        for line in table(measure(options), options.policies):
            print(line, flush=True)
            lines.append(line)
    except FileNotFoundError as error:
        print(f"{error.filename} is not there; see --help", file=sys.stderr)
        return 1
    if options.write is not None and not put(options.write, MARKERS, "\n".join(lines) + "\n"):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
