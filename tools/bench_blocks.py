"""`bench blocks`: what the interval (tokens a chunk, and so of a block) changes: restore, publish and lookup.

Small chunks waste little at a prompt's end and cost a file, a name and two system calls each; large ones the other way
round. Every store holds the same KV of one prompt; only how it is cut differs.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_named, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Line, Panel
from bench_report import Outcome, count_list, table
from bench_restore import KEEP_MEMORY
from bench_stats import Sample, paired
from kvstore import Durability, FileSystem, NamespaceInfo, Store, pack_tokens
from kvstore.keys import unpack_tokens
from kvstore.layout import FANOUT
from make_big_store import conversation_tokens, make

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "restore, publish and lookup with intervals of 256 to 4,096 tokens"

_CONVERSATIONS = 4
"""Of the lookup's store, beside the one that is looked up."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument(
        "--intervals",
        type=count_list,
        default=[256, 512, 1024, 2048, 4096],
        help="tokens a chunk (default: 256 to 4096, doubling)",
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="prompt that is published and restored (default: 4096)"
    )
    parser.add_argument("--lookup-tokens", type=int, default=131072, help="prompt that is looked up (default: 131072)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure each interval in processes of its own, in turns."""
    shape, intervals = shape_of(options), sorted(options.intervals)
    if any(options.tokens % interval or options.lookup_tokens % interval for interval in intervals):
        raise BenchError("--tokens and --lookup-tokens must be multiples of every interval")
    size = shape.token_bytes * options.tokens
    document: dict[str, Any] = {
        "command": "blocks",
        "conditions": conditions(options.dir.parent),
        "page_cache": "warm",
        "shape": shape.document(),
        "tokens": options.tokens,
        "lookup_tokens": options.lookup_tokens,
        "payload_bytes": size,
        "intervals": intervals,
    }
    found: dict[str, dict[int, list[Any]]] = {}
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, (len(intervals) + 1) * size)
        need_memory(4 * size)
        jobs = {interval: _prepared(folder, shape, interval, options) for interval in intervals}
        other = OtherWork()
        for turn in range(-1, options.rounds):
            for interval in (intervals[at % len(intervals)] for at in range(turn, turn + len(intervals))):
                for name, value in _once(jobs[interval]).items():
                    values = found.setdefault(name, {each: [] for each in intervals})[interval]
                    if turn >= 0:
                        values.append(value)
        document["cores_used_by_others"] = other.cores()
    document["seconds"] = {
        name: {str(interval): Sample.of(values).document() for interval, values in each.items()}
        for name, each in found.items()
    }
    document["restore_over_raw"] = {
        str(interval): paired(found["raw"][interval], found["restore"][interval]).document() for interval in intervals
    }
    return Outcome(document, tables(document))


def _prepared(folder: Path, shape: Shape, interval: int, options: argparse.Namespace) -> dict[str, Any]:
    job = {
        "task": "make",
        "store": str(folder / f"store-{interval}"),
        "file": "",
        "tokens": options.tokens,
        "shape": shape.fields(),
        "cold": False,
        "span": 0,
        "interval": interval,
        "names": str(folder / f"names-{interval}"),
        "new": str(folder / "new"),
        "depth": options.lookup_tokens // interval,
    }
    run_child("bench_restore_methods", job)
    make(Path(job["names"]), job["depth"] * (1 + _CONVERSATIONS), job["depth"], interval, 86400, quiet=True)
    return job


def _once(job: dict[str, Any]) -> dict[str, float]:
    """Restore, a raw read of the same files, a publish of each durability, and a first lookup."""
    task = {**job, "task": "touched", "methods": ["store", "raw1"], "rounds": 1}
    read = run_child("bench_restore_methods", task, KEEP_MEMORY)["seconds"]
    seconds = {"restore": read["store"][0], "raw": read["raw1"][0]}
    for policy in (Durability.NONE, Durability.BARRIER):
        found = run_child("bench_blocks", {**job, "task": "publish", "durability": policy.value})
        seconds[f"publish_{policy.value}"] = found["seconds"]
    seconds["lookup"] = run_child("bench_blocks", {**job, "task": "lookup"})["seconds"]
    return seconds


def child(job: Mapping[str, Any]) -> dict[str, float]:
    """One publish of a whole prompt, or one first lookup."""
    return {"seconds": (_publish if job["task"] == "publish" else _lookup)(job)}


def _publish(job: Mapping[str, Any]) -> float:
    """A prompt chunk by chunk, as its prefill gets there, into a directory whose folders are there already."""
    interval, path = job["interval"], Path(job["new"])
    payload = Payload(Shape(**job["shape"]), interval)
    seconds = 0.0
    with Store.open(path, interval=interval, fs=FileSystem(durability=Durability(job["durability"]))) as store:
        space, text = store.namespace(INFO), prompt(job["tokens"])
        for folder in FANOUT:
            (store.context.layout.blocks / folder).mkdir(exist_ok=True)
        for first in range(0, job["tokens"], interval):
            payload.renew()
            span = payload.span(first)
            started = time.perf_counter()
            published = space.publish(text[: first + interval], [span])
            seconds += time.perf_counter() - started
            if published.nodes != 1:
                raise AssertionError("a chunk was in the store already")
    shutil.rmtree(path)
    return seconds


def _lookup(job: Mapping[str, Any]) -> float:
    packed = b"".join(conversation_tokens(0, chunk, job["interval"]) for chunk in range(job["depth"]))
    tokens = pack_tokens([*unpack_tokens(packed), 1])
    space = Store.open(Path(job["names"]), create=False).namespace(NamespaceInfo({"model": "big"}))
    started = time.perf_counter()
    match = space.lookup(tokens)
    seconds = time.perf_counter() - started
    if match.count != job["depth"] * job["interval"]:
        raise AssertionError(f"{match.count} tokens were found")
    return seconds


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    size, seconds = document["payload_bytes"], document["seconds"]
    rows = []
    for interval in map(str, document["intervals"]):
        samples = {name: Sample.of(each[interval]["values"]) for name, each in seconds.items()}
        speeds = [
            f"{size / samples[name].median / 1e9:.2f}" for name in ("restore", "raw", "publish_none", "publish_barrier")
        ]
        over = Sample.of(document["restore_over_raw"][interval]["values"])
        rows.append([interval, speeds[0], speeds[1], over.text(), *speeds[2:], samples["lookup"].text(1e3)])
    others = document["cores_used_by_others"]
    made = table(
        f"by interval, {document['tokens']} tokens, {shape_named(document['shape']).text()}; "
        f"lookup of {document['lookup_tokens']} tokens",
        [
            "tokens a chunk",
            "restore GB/s",
            "raw preadv GB/s",
            "restore over raw, paired",
            "publish GB/s",
            "with barrier GB/s",
            "first lookup ms",
        ],
        rows,
        f"n = {seconds['restore'][str(document['intervals'][0])]['n']} processes each (restores in touched memory), "
        f"median (min to max), page cache {document['page_cache']}, "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves: speeds, and the lookup."""
    intervals, seconds, size = document["intervals"], document["seconds"], document["payload_bytes"]

    def line(label: str, name: str) -> Line:
        speeds = [[size / value / 1e9 for value in seconds[name][str(each)]["values"]] for each in intervals]
        return Line.of(label, intervals, [Sample.of(values) for values in speeds])

    lookups = [Sample.of(seconds["lookup"][str(each)]["values"]) for each in intervals]
    return [
        Panel(
            "restore and publish",
            "tokens a chunk",
            "GB/s",
            [
                line("restore", "restore"),
                line("raw preadv", "raw"),
                line("publish", "publish_none"),
                line("publish with barrier", "publish_barrier"),
            ],
            log_x=True,
        ),
        Panel(
            f"first lookup of {document['lookup_tokens']} tokens",
            "tokens a chunk",
            "ms",
            [Line.of("lookup", intervals, lookups, 1e3)],
            log_x=True,
        ),
    ]
