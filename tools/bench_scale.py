"""`bench scale`: what depends on the number of files, in a directory of 1,000,000 nodes.

The directory has manifests of their real size and blocks of a few bytes (make_big_store); it takes 17 GB and some
minutes to make, so one that is there already can be named with --store. It is only read, unless gc is among the parts:
gc removes conversations for real, so it comes last and has to be asked for when the directory is not this run's own.

Every measurement is made in a process of its own, which also says how much it had to read from the disk: 0 is what
"warm" means. --cold drops the page cache, with its dentries and inodes, before each of them; that needs root and
Linux, and slows everything else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import bench_scale_parts as parts
from bench_child import run_child
from bench_machine import BenchError, OtherWork, conditions, data_folder, drop_all_caches, need_disk
from bench_plot import Panel
from bench_report import RESULTS, Outcome, table
from bench_scale_figures import Figure, figures
from bench_stats import Sample
from kvstore import DEFAULT_INTERVAL
from kvstore.interpreter import no_full_search_for_cycles
from make_big_store import make

__all__ = ["HELP", "PARTS", "child", "configure", "panels", "run"]

HELP = "lookup, scan, marking, ls, fsck and gc with 1,000,000 nodes"

PARTS = ("lookup", "scan", "marking", "ls", "fsck", "manifests", "data", "gc")

_NODE_BYTES = 17 << 10
"""What a node of make_big_store takes on disk: 12 KiB for its manifest and 4 KiB for its block."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument("--store", type=Path, help="a directory that make_big_store made (default: one is made)")
    parser.add_argument("--nodes", type=int, default=1_000_000, help="nodes of the one that is made (default: 1000000)")
    parser.add_argument("--depth", type=int, default=64, help="chunks a conversation (default: 64)")
    parser.add_argument(
        "--parts", type=_part_list, help=f"some of {','.join(PARTS)} (default: all that change nothing)"
    )
    parser.add_argument("--rounds", type=int, default=25, help="processes that look a prompt up (default: 25)")
    parser.add_argument("--passes", type=int, default=3, help="passes over the whole directory (default: 3)")
    parser.add_argument("--remove", type=int, default=50_000, help="nodes that gc removes (default: 50000)")
    parser.add_argument("--data-mib", type=int, default=2048, help="block data to verify, in MiB (default: 2048)")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each measurement (root)")
    parser.add_argument("--as-is", action="store_true", help="begin at once, without a pass that brings the files in")
    parser.add_argument("--add", action="store_true", help="keep the other parts that the JSON file has already")


def _part_list(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} names other parts than {','.join(PARTS)}")
    return [part for part in PARTS if part in chosen]


def run(options: argparse.Namespace) -> Outcome:
    """Measure the parts, each with the conditions it was measured under."""
    chosen = options.parts or [part for part in PARTS if part != "gc" or options.store is None]
    document: dict[str, Any] = _earlier(options) if options.add else {"command": "scale", "parts": {}}
    with data_folder(options.dir, keep=options.keep) as folder:
        store = options.store or folder / "store"
        if options.store is None:
            need_disk(folder, options.nodes * _NODE_BYTES + (options.data_mib << 20))
            began = time.monotonic()
            make(store, options.nodes, options.depth, DEFAULT_INTERVAL, 7 * 86400, quiet=True)
            document["made_seconds"] = time.monotonic() - began
        document |= {"conditions": conditions(folder), "interval": DEFAULT_INTERVAL, "depth": options.depth}
        for part in chosen:
            nodes = _nodes(store)
            before, other = conditions(folder), OtherWork()
            results = list(_measure(part, options, store, folder))
            if part == "data":
                nodes = _nodes(folder / "data")
            document["parts"][f"{part}, {nodes} nodes" + ", cold" * options.cold] = {
                "part": part,
                "nodes": nodes,
                "date": before["date"],
                "commit": before["commit"],
                "load_average": before["load_average"],
                "cores_used_by_others": other.cores(),
                "page_cache": "dropped" if options.cold else "kept",
                "results": results,
            }
    return Outcome(document, [_table(document)])


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    path = options.out or RESULTS / "scale.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"command": "scale", "parts": {}}
    except ValueError as error:
        raise BenchError(f"{path} cannot be read; leave out --add to write it anew") from error
    return document


def _measure(part: str, options: argparse.Namespace, store: Path, folder: Path) -> Any:
    """What each process found. Warm: one that is not counted goes first, and brings the files in."""
    jobs = _jobs(part, options, store, folder)
    if not options.cold and not options.as_is and part != "gc":
        _one(jobs[0] if part != "lookup" else {"part": "scan", "store": str(store)})
    for job in jobs:
        if options.cold:
            drop_all_caches()
        yield {"job": {key: job[key] for key in job if key != "store"}, **_one(job)}


def _one(job: Mapping[str, Any]) -> dict[str, Any]:
    return run_child("bench_scale", job)


def _jobs(part: str, options: argparse.Namespace, store: Path, folder: Path) -> list[dict[str, Any]]:
    """One job a process."""
    base = {"part": part, "store": str(store)}
    if part == "lookup":
        # Conversations from all over the directory, whole chunks and something behind them in turns.
        count, rounds = _conversations(store, options.depth), options.rounds
        return [
            {**base, "number": turn * (count - 1) // (2 * rounds), "depth": options.depth, "rest": (turn % 2) * 300}
            for turn in range(2 * rounds)
        ]
    if part in {"fsck", "manifests"}:
        return [{**base, "jobs": jobs} for jobs in (1, 2) for _ in range(options.passes)]
    if part == "data":
        parts.make_data(folder / "data", options.data_mib << 20)
        return [{**base, "store": str(folder / "data"), "jobs": jobs} for jobs in (1, 2) for _ in range(options.passes)]
    if part == "gc":
        return [{**base, "remove": options.remove, "depth": options.depth} for _ in range(options.passes)]
    return [base] * options.passes


def _nodes(store: Path) -> int:
    """How many manifests a directory has."""
    return sum(len(files) for _, _, files in os.walk(store / "objects" / "nodes"))


def _conversations(store: Path, depth: int) -> int:
    """How many whole conversations a directory of make_big_store has; its last one may be shorter."""
    if (nodes := _nodes(store)) < 2 * depth:
        raise BenchError(f"{store} has {nodes} nodes, less than two conversations; name a larger one")
    return nodes // depth


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement, with what it read from the disk and the memory it took.

    Under the setting that the commands run under (a lookup is an engine's, but searches for no cycles here, either).
    """
    before = _read_bytes()
    with no_full_search_for_cycles():
        result = parts.MEASURE[job["part"]](job)
    return {**result, "read_bytes": _read_bytes() - before, "peak_bytes": parts.peak_memory()}


def _read_bytes() -> int:
    """Bytes that this process and the children it waited for fetched from a disk; 0 where nothing tells."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return 0


def _table(document: Mapping[str, Any]) -> Any:
    rows = [
        [
            each.what,
            f"{each.nodes:,}",
            each.cache,
            str(each.sample.n),
            f"{each.text()} {each.unit}",
            each.target_text(),
            each.verdict(),
        ]
        for each in figures(document)
    ]
    columns = ["", "nodes", "page cache", "n", "median (min to max)", "target", ""]
    return table("a directory of many nodes", columns, rows)


def panels(document: Mapping[str, Any]) -> list[Panel]:
    """Bars of the largest directory's figures, but for a dropped page cache, and how all stand to their targets."""
    found = figures(document)
    largest = max((each.nodes for each in found), default=0)
    chosen = [each for each in found if not each.cache.startswith("dropped") and each.nodes > 0.9 * largest]
    made = []
    for title, unit in (("what a request waits for", "ms"), ("what walks over all files", "s")):
        # The first of those that were measured more than once: the others are as the directory was found.
        samples = {each.what: each.sample for each in reversed(chosen) if each.unit == unit}
        if samples:
            samples = dict(reversed(samples.items()))
            made.append(Panel.of_bars(title, f"{unit}, {largest:,} nodes", samples, log=unit == "ms"))
    targets = {f"{each.what}, {each.nodes:,}": _of_target(each) for each in found if each.verdict()}
    return [*made, Panel.of_bars("of its target; up to 1 it is met", "", targets, mark=1)] if targets else made


def _of_target(figure: Figure) -> Sample:
    if figure.at_most is not None:
        return Sample.of(value / figure.at_most for value in figure.sample.values)
    assert figure.at_least is not None
    return Sample.of(figure.at_least / value for value in figure.sample.values)
