"""`bench fsync`: what each durability policy costs a publish, for small and large ones.

The policies (kvstore.Durability): none leaves it to the system when bytes reach the medium; barrier puts data there
before the name that makes them visible; full puts all of it there before the publish returns. Beside them stand
os.write of the same bytes with and without fdatasync. On Linux barrier and full are the same calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_kv import Payload, Shape, add_shape, shape_named, shape_of
from bench_machine import OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Line, Panel
from bench_publish import into_used_pages, publisher, raw_writer
from bench_report import Outcome, count_list, table
from bench_stats import Sample, interleaved, paired
from kvstore import Durability

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "what the durability policies cost a publish"

_RAW = {"raw": "os.write", "raw_synced": "os.write + fdatasync"}
_LABELS = {**{policy.value: f"kvstore, {policy.value}" for policy in Durability}, **_RAW}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument(
        "--counts", type=count_list, default=[64, 256, 1024, 2048], help="tokens of a publish (default: 64 to 2048)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure every policy and size in turns, in one process."""
    shape = shape_of(options)
    size = shape.token_bytes * sum(options.counts)
    document: dict[str, Any] = {
        "command": "fsync",
        "conditions": conditions(options.dir.parent),
        "page_cache": "written files stay in it; each is removed before the next is written",
        "shape": shape.document(),
        "counts": sorted(options.counts),
    }
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, 2 * size)
        need_memory(2 * size)
        job = {
            "folder": str(folder),
            "shape": shape.fields(),
            "counts": document["counts"],
            "rounds": options.rounds,
        }
        other = OtherWork()
        seconds = run_child("bench_fsync", job)
        document["cores_used_by_others"] = other.cores()
    document["seconds"] = {
        name: {count: Sample.of(values).document() for count, values in each.items()} for name, each in seconds.items()
    }
    document["over_none"] = {
        name: {count: paired(values, seconds["none"][count]).document() for count, values in each.items()}
        for name, each in seconds.items()
        if name in set(Durability) - {Durability.NONE}
    }
    return Outcome(document, tables(document))


def child(job: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Seconds by method and by tokens of the publish."""
    folder, shape = Path(job["folder"]), Shape(**job["shape"])
    found: dict[str, dict[str, list[float]]] = {name: {} for name in _LABELS}
    for count in job["counts"]:
        payload = Payload(shape, count)
        methods = {
            policy.value: publisher(folder / f"store-{count}-{policy.value}", payload, policy) for policy in Durability
        }
        methods |= {name: raw_writer(folder / "raw", payload, sync=name == "raw_synced") for name in _RAW}
        for name, values in interleaved(into_used_pages(folder, payload, methods), job["rounds"]).items():
            found[name][str(count)] = values
    return found


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    counts = [str(count) for count in document["counts"]]
    rows = [
        [_LABELS[name], *(Sample.of(each[count]["values"]).text(1e3, 1) for count in counts)]
        for name, each in document["seconds"].items()
    ]
    rows += [
        [f"{name} over none, paired", *(Sample.of(each[count]["values"]).text() for count in counts)]
        for name, each in document["over_none"].items()
    ]
    others = document["cores_used_by_others"]
    made = table(
        f"ms of a publish by durability, {shape_named(document['shape']).text()}",
        ["policy", *(f"{count} tokens" for count in counts)],
        rows,
        f"n = {document['seconds']['none'][counts[0]]['n']} in turns, median (min to max), "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves."""
    lines = [
        Line.of(
            _LABELS[name],
            document["counts"],
            [Sample.of(each[str(count)]["values"]) for count in document["counts"]],
            1e3,
        )
        for name, each in document["seconds"].items()
    ]
    return [Panel("publish by durability", "tokens of the publish", "ms", lines, log_x=True, log_y=True)]
