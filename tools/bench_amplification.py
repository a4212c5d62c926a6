"""`bench amplification`: bytes written for each byte of new KV while a conversation grows.

The adapter's own recording and writer thread save a conversation of many turns, as the server would; only the engine's
buffers are fakes. Counted are the bytes that the process handed to the system, manifests and what was thrown away
included, where the system tells (Linux); elsewhere what the store counted.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_kv import INFO, Payload, Shape, add_shape, shape_named, shape_of
from bench_machine import BenchError, conditions, data_folder, need_disk, written_by_this_process
from bench_plot import Line, Panel
from bench_report import Outcome, table
from kvstore import Store

__all__ = ["HELP", "Turn", "child", "configure", "conversation", "panels", "run", "tables"]

HELP = "bytes written for each byte of new KV over a conversation"

_SYSTEM_TOKENS = 1500
_QUESTION_TOKENS = (150, 700)
_ANSWER_TOKENS = (80, 400)
_PREFILL_STEP = 2048
"""Tokens that mlx-lm prefills between two looks at its buffers."""
_MOST_TOKENS = _SYSTEM_TOKENS + _QUESTION_TOKENS[1] + _ANSWER_TOKENS[1]


@dataclass(frozen=True)
class Turn:
    """One request: the tokens of its prompt, and of the prompt with its answer."""

    prompt: int
    end: int


def conversation(turns: int, seed: int = 0) -> list[Turn]:
    """Turns of an agent-like conversation: long instructions, then questions and answers of varying length."""
    rng = random.Random(seed)  # noqa: S311 - lengths, not secrets
    made = []
    at = _SYSTEM_TOKENS
    for _ in range(turns):
        prompt = at + rng.randint(*_QUESTION_TOKENS)
        at = prompt + rng.randint(*_ANSWER_TOKENS)
        made.append(Turn(prompt, at))
    return made


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    # An 8B model's layers with a sixteenth of its rows: what is written beside the KV then weighs sixteen times more.
    add_shape(parser, Shape(heads=2, dim=32))
    parser.add_argument("--turns", type=int, default=20, help="requests of the conversation (default: 20)")


def run(options: argparse.Namespace) -> Outcome:
    """Hold one conversation in a process of its own."""
    shape = shape_of(options)
    turns = conversation(options.turns)
    size = shape.token_bytes * turns[-1].end
    document: dict[str, Any] = {
        "command": "amplification",
        "conditions": conditions(options.dir.parent),
        "shape": shape.document(),
        "turns": len(turns),
        "tokens": turns[-1].end,
    }
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, 2 * size)
        fields = shape.fields()
        document |= run_child(
            "bench_amplification", {"store": str(folder / "store"), "shape": fields, "turns": options.turns}
        )
    document["written_over_new"] = document["written_bytes"] / document["new_kv_bytes"]
    document["allocated_over_new"] = document["allocated_bytes"] / document["new_kv_bytes"]
    return Outcome(document, tables(document))


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    overhead = document["written_bytes"] - document["new_kv_bytes"]
    row = [
        f"{document['turns']} turns, {document['tokens']} tokens",
        f"{document['new_kv_bytes'] / 1e6:.1f}",
        f"{document['written_bytes'] / 1e6:.1f}",
        f"{document['written_over_new']:.4f}",
        f"{document['allocated_over_new']:.4f}",
        str(document["nodes"]),
        f"{overhead / max(document['nodes'], 1) / 1024:.1f}",
    ]
    made = table(
        f"bytes written over bytes of new KV, {shape_named(document['shape']).text()}",
        ["conversation", "new KV MB", "written MB", "written / new", "on disk / new", "nodes", "KiB beside KV a node"],
        [row],
        f"counted by {document['counted_by']}; n = 1: nothing in it is random or timed",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curve, of files that have it: older ones do not."""
    turns = document.get("by_turn", [])
    if not turns:
        return []
    size = document["shape"]["token_bytes"]
    whole = [written / (tokens * size) for tokens, written in turns]
    before = [(0, 0), *turns]
    own = [
        (written - earlier) / ((tokens - fewer) * size)
        for (fewer, earlier), (tokens, written) in zip(before, turns, strict=False)
    ]
    numbers = range(1, len(turns) + 1)
    lines = [Line("all turns so far", numbers, whole), Line("this turn alone", numbers, own)]
    return [Panel("bytes written for each byte of new KV", "turn", "ratio", lines)]


class FakeLive:
    """An engine's caches of count tokens. What they hold is never looked at, only how much."""

    def __init__(self, payload: Payload, count: int) -> None:
        self.count = count
        self.rows = self
        self.specs = payload.shape.specs
        self._payload = payload

    def copy(self, first: int, end: int, _into: Any = None) -> list[bytes]:
        """See kvstore_mlx.live.Rows."""
        self._payload.renew()
        sizes = [spec.span_bytes(end - first) for spec in self._payload.shape.specs]
        return [bytes(data[:size]) for data, size in zip(self._payload.data, sizes, strict=True)]


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Hold the conversation, and count."""
    from kvstore_mlx.housekeeping import Housekeeping  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.writer import Writer  # noqa: PLC0415

    shape = Shape(**job["shape"])
    payload = Payload(shape, _MOST_TOKENS)
    path = Path(job["store"])
    with Store.open(path) as store:
        writer = Writer(Housekeeping(store, 1 << 50))
        before = written_by_this_process()
        end = 0
        by_turn = []
        for turn in conversation(job["turns"]):
            _request(store, writer, payload, turn, known=end)
            end = turn.end
            by_turn.append((end, _written(store, before)))
        if not writer.close(600):
            raise BenchError("the disk was too slow to write the conversation in ten minutes")
        counted = store.counters.snapshot()
        written = _written(store, before)
        found = store.namespace(INFO).lookup(range(end)).count
        if found != end:
            raise AssertionError(f"only {found} of {end} tokens were saved")
    files = [file.stat() for file in path.rglob("*")]
    return {
        "new_kv_bytes": shape.token_bytes * end,
        "written_bytes": written,
        "by_turn": by_turn,
        "counted_by": "the store" if before is None else "the system (wchar)",
        "counted_by_store_bytes": counted["written_bytes"],
        "allocated_bytes": sum(status.st_blocks * 512 for status in files),
        "nodes": counted["published_nodes"],
    }


def _written(store: Store, before: int | None) -> int:
    """Bytes written so far: what the system counted since before, or else the store."""
    after = written_by_this_process()
    if before is None or after is None:
        return store.counters.snapshot()["written_bytes"]
    return after - before


def _request(store: Store, writer: Any, payload: Payload, turn: Turn, known: int) -> None:
    """What the server does with one request whose earlier turns are in memory still."""
    from bench_plan import plain_plan  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.forms import Form  # noqa: PLC0415 - as above
    from kvstore_mlx.recording import Recording  # noqa: PLC0415 - as above

    namespace = store.namespace(INFO)
    form = Form(plain_plan(payload.shape), namespace)
    tokens = list(range(turn.prompt))

    class Space:
        def look(self, _caches: Any, _index: Any, exactly: int) -> tuple[Form, Any]:
            return form, FakeLive(payload, exactly)

    saved = {form: namespace.lookup(tokens[:-1]).border}
    space: Any = Space()
    recording = Recording(space, writer, tokens, saved=saved, known=known, decoded=known > 0)
    for done in _steps(known, turn.prompt - 1):
        if recording.wants(done):
            recording.reached([], None, done)
    recording.first_token([], None, turn.prompt)
    recording.finished([], turn.end, range(turn.end))
    if not writer.drain(600):
        raise BenchError("the disk was too slow to write a turn in ten minutes")


def _steps(first: int, end: int) -> Iterator[int]:
    """Where the prefill of tokens first to end can be looked at."""
    return itertools.chain(range(first + _PREFILL_STEP, end, _PREFILL_STEP), (end,))
