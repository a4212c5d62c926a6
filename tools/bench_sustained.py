"""`bench sustained`: recorded requests of coding agents, replayed against a server with a directory that gets full.

The trace (in --traces or $KVSTORE_TRACES; see docs/admission.md) says how long each request was and
which of its token blocks it shares with others; here every recorded block of 64 tokens is a few letters of its own, a
token each, so lengths shrink and what is shared stays. Sessions are dealt to --lanes that ask at once, each its
requests one after the other without the pauses of the people in between: so prompts are computed in batches, and beside
the answers of others. The server has a tiny model, little memory of its own for prompts, and a budget that it has to
collect within.

Answers are of a few tokens. What is measured is time to the first token, where it came from, the server's memory, and
the bytes written.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import random
import re
import string
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bench_child import run_child
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, table
from bench_servers import TINY_LLAMA, Server
from bench_stats import Sample
from fast_blas import find
from kvstore.sizes import format_size, parse_size
from replay_trace import AGENT, PAUSE_S, sessions

__all__ = ["HELP", "configure", "panels", "run", "tables"]

HELP = "recorded agents against a server, for some minutes: hit rate, TTFT, memory, bytes written"

_COLUMNS = ("at", "prompt_tokens", "cached_tokens", "first_token", "resident_bytes", "written_bytes", "directory_bytes")
_WINDOWS = 10
_PROMPTS_IN_MEMORY = "2"
_ANSWER_TOKENS = 16
_LOOK_S = 1.0
"""The directory is walked so often at most: it is work that the server has to wait for."""
_SEED = 7
"""As tools/replay_trace.py shuffles the sessions."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    default = os.environ.get("KVSTORE_TRACES")
    parser.add_argument(
        "--traces", type=Path, default=default and Path(default), metavar="DIR", help="default: $KVSTORE_TRACES"
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--lanes", type=int, default=4, help="requests at once, each of another session (default: 4)")
    parser.add_argument("--block-tokens", type=int, default=2, help="tokens for 64 recorded ones (default: 2)")
    parser.add_argument("--interval", type=int, default=64, help="tokens a chunk (default: 64)")
    parser.add_argument("--size", default="64MiB", help="budget of the directory (default: 64MiB)")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a prompt, at most (default: 4096)")


def run(options: argparse.Namespace) -> Outcome:
    """Replay until the time is over, or the trace."""
    if options.traces is None or not (options.traces / AGENT).is_file():
        raise BenchError(f"give --traces DIR with {AGENT} or set KVSTORE_TRACES; docs/admission.md says what it is")
    document: dict[str, Any] = {
        "command": "sustained",
        "conditions": conditions(options.dir.parent),
        "page_cache": "warm",
        "model": TINY_LLAMA,
        "blas": str(find() or "MLX's own"),
        "trace": AGENT,
        "lanes": options.lanes,
        "answer_tokens": _ANSWER_TOKENS,
        "block_tokens": options.block_tokens,
        "interval": options.interval,
        "budget_bytes": parse_size(options.size),
        "longest": options.longest,
    }
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, 2 * document["budget_bytes"])
        run_child("bench_servers", {"folder": str(folder / "model")})
        other = OtherWork()
        rows = _replay(folder, options)
        document["cores_used_by_others"] = other.cores()
    if not rows:
        raise BenchError("not one request was answered; give it more --minutes")
    document["requests"] = {name: [row[at] for row in rows] for at, name in enumerate(_COLUMNS)}
    return Outcome(document, tables(document))


def prompts(traces: Path, lanes: int, block_tokens: int, longest: int) -> list[Iterator[str]]:
    """The texts that each lane asks for, in order: equal recorded blocks are equal letters.

    A session goes to the lane that would be free first, by the recorded times.
    """
    recorded = list(sessions(traces))
    random.Random(_SEED).shuffle(recorded)  # noqa: S311 - the same order every time
    free = [(0.0, lane) for lane in range(lanes)]
    dealt: list[list[_Request]] = [[] for _ in range(lanes)]
    for number, requests, block in recorded:
        start, lane = heapq.heappop(free)
        dealt[lane] += [(number, min(tokens // block, len(ids)), ids) for _, tokens, ids in requests]
        heapq.heappush(free, (start + requests[-1][0] + PAUSE_S, lane))
    return [_texts(requests, block_tokens, longest) for requests in dealt]


_Request: TypeAlias = tuple[int, int, Sequence[int]]


def _texts(requests: Sequence[_Request], block_tokens: int, longest: int) -> Iterator[str]:
    for number, count, ids in requests:
        if text := "".join(_letters(number, each, block_tokens) for each in ids[: min(count, longest // block_tokens)]):
            yield text


def _letters(session: int, block: int, count: int) -> str:
    rng = random.Random(f"{session} {block}")  # noqa: S311 - the same each time is what is wanted
    return "".join(rng.choices(string.ascii_letters, k=count))


def _replay(folder: Path, options: argparse.Namespace) -> list[tuple[float, ...]]:
    store = folder / "store"
    flags = [
        *("--kv-cache-dir", str(store), "--kv-cache-size", options.size, "--kv-cache-interval", str(options.interval)),
        *("--prompt-cache-size", _PROMPTS_IN_MEMORY),
    ]
    lanes = prompts(options.traces, options.lanes, options.block_tokens, options.longest)
    with Server(folder / "server.log", folder / "model", flags) as server:
        return replayed(lanes, _Watched(server, store), options.minutes * 60)


@dataclass
class _Watched:
    """A server, with what it has used so far. rows: of all lanes, in the order in which answers ended."""

    server: Server
    store: Path
    rows: list[tuple[float, ...]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _size: int = 0
    _looked: float = -math.inf

    def ask(self, prompt: str) -> None:
        """Ask, from any thread, and note the answer."""
        answer = self.server.ask(prompt, _ANSWER_TOKENS)
        first = round(answer.first_token, 5)
        with self._lock:
            at = time.monotonic() - self.began
            if at - self._looked >= _LOOK_S:
                self._size, self._looked = _size(self.store), at
            used = _memory(self.server.process), _written(self.server.process), self._size
            self.rows.append((round(at, 2), answer.prompt_tokens, answer.cached_tokens, first, *used))


def replayed(lanes: Sequence[Iterator[str]], watched: _Watched, seconds: float) -> list[tuple[float, ...]]:
    """What each lane asks on a thread of its own, until the time is over. An error in one lane ends all of them."""
    over = threading.Event()

    def run(lane: Iterator[str]) -> None:
        for prompt in lane:
            if over.is_set() or time.monotonic() - watched.began > seconds:
                return
            watched.ask(prompt)

    with ThreadPoolExecutor(len(lanes)) as pool:
        running = [pool.submit(run, lane) for lane in lanes]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            over.set()
    for each in [*ended, *running]:
        each.result()
    return watched.rows


def _memory(process: int) -> int:
    """Resident bytes of a process; 0 where nothing tells."""
    return 1024 * _field(process, "status", r"^VmRSS:\s+(\d+) kB")


def _written(process: int) -> int:
    """Bytes that a process handed to the system so far; 0 where nothing tells."""
    return _field(process, "io", r"^wchar: (\d+)$")


def _field(process: int, name: str, pattern: str) -> int:
    with suppress(OSError):
        found = re.search(pattern, Path(f"/proc/{process}/{name}").read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _size(store: Path) -> int:
    """Bytes that a directory takes on disk, while others add to it and remove from it."""
    total = 0
    for folder, _, names in os.walk(store):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def windows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests in ten parts of equal time, each part summed up; every request is in one of them."""
    found = document["requests"]
    last = found["at"][-1]
    parts: dict[int, list[tuple[float, ...]]] = {}
    for row in zip(*(found[name] for name in _COLUMNS), strict=True):
        # The last one's share is 1 exactly; ten times a tenth of it is not always itself.
        number = math.ceil(_WINDOWS * (row[0] / last)) if last else 1
        parts.setdefault(max(1, number), []).append(row)
    return [{"end": number * last / _WINDOWS, **summary(rows)} for number, rows in parts.items()]


def summary(rows: Sequence[tuple[float, ...]]) -> dict[str, Any]:
    """Requests, tokens that were in a cache over all tokens, TTFT, and what memory and disk were in the end."""
    seconds = sorted(row[3] for row in rows)
    return {
        "n": len(rows),
        "hit": sum(row[2] for row in rows) / sum(row[1] for row in rows),
        "ttft": Sample.of(seconds).median,
        "ttft_95": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
        "resident": max(row[4] for row in rows),
        "written": rows[-1][5],
        "directory": rows[-1][6],
    }


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    found = document["requests"]
    whole = summary(list(zip(*(found[name] for name in _COLUMNS), strict=True)))
    parts = [(f"{each['end'] / 60:.1f}", each) for each in windows(document)]
    rows = [
        [
            label,
            str(each["n"]),
            f"{each['hit']:.3f}",
            f"{each['ttft'] * 1e3:.0f}",
            f"{each['ttft_95'] * 1e3:.0f}",
            f"{each['resident'] / 2**20:.0f}",
            f"{each['written'] / 2**20:.0f}",
            f"{each['directory'] / 2**20:.0f}",
        ]
        for label, each in [*parts, ("all", whole)]
    ]
    others = document["cores_used_by_others"]
    made = table(
        f"recorded agents for {found['at'][-1] / 60:.1f} minutes, {_manner(document)}, "
        f"{document['block_tokens']} tokens for 64, budget {format_size(document['budget_bytes'])}",
        [
            "until minute",
            "requests",
            "token hit rate",
            "TTFT ms, median",
            "TTFT ms, 95 %",
            "most memory MiB",
            "written so far MiB",
            "directory MiB",
        ],
        rows,
        f"a llama of {document['model']['num_hidden_layers']} layers, chunks of {document['interval']} tokens, prompts "
        f"of {document['longest']} tokens at most; the server keeps {_PROMPTS_IN_MEMORY} prompts in memory; "
        f"BLAS: {Path(document['blas']).name}, other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def _manner(document: dict[str, Any]) -> str:
    """How requests were made: older files hold those of one lane after the other's, with answers of a token."""
    if "answer_tokens" in document:
        return f"{document['lanes']} requests at once, answers of {document['answer_tokens']} tokens"
    return f"{document['lanes']} sessions in turns, one request at a time, answers of one token"


def panels(document: dict[str, Any]) -> list[Panel]:
    """Hit rate, time to the first token, memory and disk over time."""
    parts = windows(document)
    minutes = [each["end"] / 60 for each in parts]

    def line(label: str, name: str, scale: float = 1) -> Line:
        return Line(label, minutes, [each[name] * scale for each in parts])

    mib = 1 / 2**20
    return [
        Panel("tokens that were in a cache", "minutes", "of all tokens", [line("hit rate", "hit")]),
        Panel("time to the first token", "minutes", "ms", [line("median", "ttft", 1e3), line("95 %", "ttft_95", 1e3)]),
        Panel(
            "memory and disk", "minutes", "MiB", [line("memory", "resident", mib), line("directory", "directory", mib)]
        ),
        Panel("bytes written", "minutes", "MiB", [line("so far", "written", mib)]),
    ]
