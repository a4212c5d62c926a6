"""`bench gc`: a collection that removes half of a directory, by the number of its nodes.

Two parts: looking (every name and time, then every manifest: marking) and removing, manifests first, then the blocks
that nobody names any more. Blocks are of a few bytes: what is measured is the cost of files, not of their size. Each
collection has a directory and a process of its own. `bench scale` has the same for a million nodes.
"""

from __future__ import annotations

import argparse
import shutil
from typing import Any

from bench_child import run_child
from bench_machine import OtherWork, conditions, data_folder, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, count_list, table
from bench_stats import Sample
from kvstore import DEFAULT_INTERVAL
from make_big_store import make

__all__ = ["HELP", "configure", "panels", "run", "tables"]

HELP = "marking and removing half of a directory of some thousand nodes"

_NODE_BYTES = 17 << 10
"""What a node of make_big_store takes on disk."""
_PARTS = {"look": "marking", "plan": "planning", "remove": "removing"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument(
        "--nodes", type=count_list, default=[2000, 8000, 32000], help="nodes of a directory (default: 2000,8000,32000)"
    )
    parser.add_argument("--depth", type=int, default=16, help="chunks a conversation (default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="directories of each size (default: 5)")


def run(options: argparse.Namespace) -> Outcome:
    """Make, collect, remove, again and again."""
    sizes = sorted(options.nodes)
    document: dict[str, Any] = {
        "command": "gc",
        "conditions": conditions(options.dir.parent),
        "page_cache": "warm",
        "interval": DEFAULT_INTERVAL,
        "depth": options.depth,
        "nodes": sizes,
    }
    found: dict[str, list[dict[str, Any]]] = {str(nodes): [] for nodes in sizes}
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, max(sizes) * _NODE_BYTES)
        other = OtherWork()
        for turn in range(options.rounds):
            for nodes in sizes:
                store = folder / f"store-{nodes}-{turn}"
                make(store, nodes, options.depth, DEFAULT_INTERVAL, 7 * 86400, quiet=True)
                job = {"part": "gc", "store": str(store), "remove": nodes // 2, "depth": options.depth}
                found[str(nodes)].append(run_child("bench_scale", job))
                if not options.keep:
                    shutil.rmtree(store)
        document["cores_used_by_others"] = other.cores()
    document["files"] = {nodes: [each["files"] for each in results] for nodes, results in found.items()}
    document["seconds"] = {
        nodes: {part: Sample.of(each[part] for each in results).document() for part in _PARTS}
        for nodes, results in found.items()
    }
    document["peak_bytes"] = {
        nodes: Sample.of(each["peak_bytes"] for each in results).document() for nodes, results in found.items()
    }
    return Outcome(document, tables(document))


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    rows = []
    for nodes, parts in document["seconds"].items():
        files = document["files"][nodes]
        marked = Sample.of(int(nodes) / value for value in parts["look"]["values"])
        removed = Sample.of(count / value for count, value in zip(files, parts["remove"]["values"], strict=True))
        times = [Sample.of(parts[part]["values"]).text(1e3, 1) for part in _PARTS]
        peak = Sample.of(document["peak_bytes"][nodes]["values"]).median
        rows.append(
            [
                f"{int(nodes):,}",
                *times,
                f"{marked.median:,.0f}",
                f"{max(files):,}",
                f"{removed.median:,.0f}",
                f"{peak / 2**20:.0f}",
            ]
        )
    others = document["cores_used_by_others"]
    made = table(
        "a collection that removes half of a directory",
        [
            "nodes",
            "marking ms",
            "planning ms",
            "removing ms",
            "manifests marked /s",
            "files removed",
            "files removed /s",
            "peak MiB",
        ],
        rows,
        f"n = {len(next(iter(document['files'].values())))} directories and processes each, median (min to max), page "
        f"cache {document['page_cache']}, other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves."""
    sizes = document["nodes"]
    lines = [
        Line.of(label, sizes, [Sample.of(document["seconds"][str(nodes)][part]["values"]) for nodes in sizes])
        for part, label in _PARTS.items()
    ]
    return [Panel("removing half of a directory", "nodes", "s", lines, log_x=True, log_y=True)]
