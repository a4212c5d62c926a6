"""`bench lookup`: the first lookup of a process that has just started, at several depths of a conversation.

A store holds no index, so the first lookup has to be as good as any. Files are warm in the page cache; the store has
many nodes that are none of the prompt's business.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_machine import OtherWork, conditions, data_folder, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, count_list, table
from bench_stats import Sample, rotated
from kvstore import DEFAULT_INTERVAL, NamespaceInfo, Store, pack_tokens
from kvstore.keys import unpack_tokens
from make_big_store import conversation_tokens, make

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "first lookup of a fresh process, 1 to 64 chunks deep"

_NODE_BYTES = 17 << 10
"""What a node of make_big_store takes on disk: 12 KiB for its manifest and 4 KiB for its block."""
_PARTS = ("open", "pack", "lookup")


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument("--depths", type=count_list, default=[1, 16, 64], help="chunks (default: 1,16,64)")
    parser.add_argument("--nodes", type=int, default=6400, help="nodes in the store (default: 6400)")
    parser.add_argument("--rounds", type=int, default=9, help="processes a depth (default: 9)")


def run(options: argparse.Namespace) -> Outcome:
    """Make a store, then start processes that look a prompt up."""
    depth = max(options.depths)
    nodes = max(options.nodes, depth)
    document: dict[str, Any] = {
        "command": "lookup",
        "conditions": conditions(options.dir.parent),
        "page_cache": "warm",
        "nodes": nodes,
        "interval": DEFAULT_INTERVAL,
        "results": {},
    }
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, nodes * _NODE_BYTES)
        make(folder / "store", nodes, depth, DEFAULT_INTERVAL, 86400, quiet=True)
        other = OtherWork()
        found: dict[str, list[dict[str, float]]] = {str(depth): [] for depth in options.depths}
        for turn in range(-1, options.rounds):
            for name in rotated(list(found), turn):
                result = run_child("bench_lookup", {"store": str(folder / "store"), "depth": int(name)})
                if turn >= 0:
                    found[name].append(result)
    document["cores_used_by_others"] = other.cores()
    document["results"] = {
        name: {part: Sample.of(each[part] for each in results).document() for part in _PARTS}
        for name, results in found.items()
    }
    return Outcome(document, tables(document))


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    rows = [
        [f"{name} chunks", *(Sample.of(parts[part]["values"]).text(1e3) for part in ("lookup", "pack", "open"))]
        for name, parts in document["results"].items()
    ]
    n = next(iter(document["results"].values()))["lookup"]["n"]
    made = table(
        f"first lookup of a fresh process, {document['nodes']} nodes, {document['interval']} tokens a chunk",
        ["depth", "lookup ms", "tokens to bytes ms", "opening the store ms"],
        rows,
        f"n = {n} processes each, median (min to max), page cache warm",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves."""
    labels = {"lookup": "lookup", "pack": "tokens to bytes", "open": "opening the store"}
    depths = sorted(map(int, document["results"]))
    lines = [
        Line.of(label, depths, [Sample.of(document["results"][str(depth)][part]["values"]) for depth in depths], 1e3)
        for part, label in labels.items()
    ]
    return [Panel("first lookup of a fresh process", "chunks", "ms", lines, log_x=True)]


def child(job: Mapping[str, Any]) -> dict[str, float]:
    """One first lookup. The prompt goes on for a token after the last chunk that is saved."""
    packed = b"".join(conversation_tokens(0, chunk, DEFAULT_INTERVAL) for chunk in range(job["depth"]))
    tokens = [*unpack_tokens(packed), 1]
    started = time.perf_counter()
    space = Store.open(Path(job["store"]), create=False).namespace(NamespaceInfo({"model": "big"}))
    opened = time.perf_counter()
    text = pack_tokens(tokens)
    packed_at = time.perf_counter()
    match = space.lookup(text)
    done = time.perf_counter()
    if match.count != len(tokens) - 1:
        raise AssertionError(f"{match.count} of {len(tokens) - 1} tokens were found")
    return {"open": opened - started, "pack": packed_at - opened, "lookup": done - packed_at}
