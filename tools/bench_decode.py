"""`bench decode`: how fast tokens come while a chunk is published or a full directory collected, over without.

One process decodes with a small model; in every second turn the adapter's writer publishes a chunk of an 8B model's KV
meanwhile, at the pace it has beside an engine at work, or, to compare, at full speed. Only the steps that were made
while the publish ran are counted, and the same steps are made again alone. Then the writer collects a directory of many
nodes that is a twentieth over its budget, while tokens are made again and again from the same prompt on; before and
after it they are made alone.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_decode_gc
from bench_breakeven import MODELS, blas_environment, model_folder
from bench_child import run_child
from bench_decoder import Decoder
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_named, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Panel
from bench_report import Outcome, table
from bench_stats import Sample, paired, rotated
from fast_blas import find
from kvstore import Durability, FileSystem, Store
from kvstore.keys import pack_tokens
from kvstore.layout import FANOUT

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "decode speed while a chunk is being published, and during a collection"

_WARM_UP = 1
_TRIES = 5
_NODES = 16_000
_NODE_BYTES = 17 << 10
"""What a node of make_big_store takes on disk."""
_WAYS = ("paced", "full speed")
"""paced: at the share of its time that the writer takes while the engine says that it is at work."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (default: both)")
    parser.add_argument("--count", type=int, default=2048, help="tokens of the chunk (default: 2048)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument(
        "--nodes", type=int, default=_NODES, help=f"nodes of the directory that is collected (default: {_NODES})"
    )
    parser.add_argument("--collections", type=int, default=3, help="collections of each kind (default: 3; 0: none)")
    parser.add_argument("--alone", type=float, default=4.0, help="seconds alone around each of them (default: 4)")


def run(options: argparse.Namespace) -> Outcome:
    """Decode with each model."""
    shape = shape_of(options)
    size = shape.token_bytes * options.count
    document: dict[str, Any] = {
        "command": "decode",
        "conditions": conditions(options.dir.parent),
        "page_cache": "written files stay in it; each is removed before the next is written",
        "shape": shape.document(),
        "count": options.count,
        "payload_bytes": size,
        "blas": str(find() or "MLX's own"),
        "models": {},
    }
    for name in options.model or list(MODELS):
        with data_folder(options.dir, keep=options.keep) as folder:
            need_disk(folder, 2 * size)
            need_memory(3 * size)
            job = {
                "model": str(model_folder(name, folder)),
                "store": str(folder / "store"),
                "shape": shape.fields(),
                "count": options.count,
                "rounds": options.rounds,
            }
            other = OtherWork()
            found = run_child("bench_decode", job, blas_environment())
        document["models"][name] = {
            "cores_used_by_others": other.cores(),
            "ways": {
                way: {
                    "steps_during_a_publish": turns["steps"],
                    "tokens_a_second": {key: Sample.of(turns[key]).document() for key in ("alone", "publishing")},
                    "publish_seconds": Sample.of(turns["publish"]).document(),
                    "over_alone": paired(turns["publishing"], turns["alone"]).document(),
                }
                for way, turns in found.items()
            },
        }
        if options.collections:
            document["models"][name]["collection"] = _collected(name, options)
    return Outcome(document, tables(document))


def _collected(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, options.nodes * _NODE_BYTES)
        job = {
            "model": str(model_folder(name, folder)),
            "store": str(folder / "store"),
            "nodes": options.nodes,
            "rounds": options.collections,
            "alone": options.alone,
        }
        other = OtherWork()
        found = run_child("bench_decode_gc", job, blas_environment())
        return bench_decode_gc.document(found, options.nodes, other.cores())


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode while publishing, then as many steps of the same text alone, in turns."""
    from kvstore_mlx.forms import Form  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.housekeeping import Housekeeping  # noqa: PLC0415 - as above
    from kvstore_mlx.writer import Writer  # noqa: PLC0415 - as above

    decoder = Decoder(job["model"])
    shape = Shape(**job["shape"])
    payload = Payload(shape, job["count"])
    found: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in ("alone", "publishing", "publish", "steps")} for way in _WAYS
    }
    with Store.open(job["store"], interval=job["count"], fs=FileSystem(Durability.BARRIER)) as store:
        layout = store.context.layout
        for folder in FANOUT:
            (layout.blocks / folder).mkdir()
        plan: Any = SimpleNamespace(stateful=False, token_bytes=shape.token_bytes)
        form = Form(plan, store.namespace(INFO))
        writer = Writer(Housekeeping(store, 1 << 50))
        for turn in range(-_WARM_UP, job["rounds"]):
            for way in rotated(_WAYS, turn):
                payload.renew()
                values = _counted(decoder, writer, form, payload, paced=way == "paced")
                if turn >= 0:
                    for name, value in values.items():
                        found[way][name].append(value)
                for path in [*layout.blocks.rglob("*"), *layout.nodes.rglob("*.kv")]:
                    if path.is_file():
                        path.unlink()
        writer.close(60)
    shutil.rmtree(job["store"])
    return found


def _counted(decoder: Decoder, writer: Any, form: Any, payload: Payload, *, paced: bool) -> dict[str, float]:
    """A turn in which at least one token came: on a busy machine that needs another try now and then."""
    for _ in range(_TRIES):
        if (values := _turn(decoder, writer, form, payload, paced=paced)) is not None:
            return values
        payload.renew()
    raise BenchError("not one token came while the chunk was published; publish a larger --count")


def _turn(decoder: Decoder, writer: Any, form: Any, payload: Payload, *, paced: bool) -> dict[str, float] | None:
    from kvstore_mlx.writer import Job  # noqa: PLC0415 - imports the engine

    def step() -> None:
        decoder.step()
        if paced:
            writer.stepped()

    job = Job(form, pack_tokens(prompt(payload.count)), [payload.span(0)])
    decoder.begin()
    step()
    started = time.perf_counter()
    writer.offer(job)
    steps, seconds = 0, 0.0
    while writer.queued:
        step()
        if writer.queued:
            steps, seconds = steps + 1, time.perf_counter() - started
    published = time.perf_counter() - started
    writer.idle()
    if writer.trouble:
        raise BenchError(f"the chunk was not published: {writer.trouble}")
    if not steps:
        return None
    decoder.begin()
    decoder.step()
    began = time.perf_counter()
    for _ in range(steps):
        decoder.step()
    alone = time.perf_counter() - began
    return {"alone": steps / alone, "publishing": steps / seconds, "publish": published, "steps": steps}


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    rows = []
    for name, found in document["models"].items():
        others = found["cores_used_by_others"]
        for way, turns in found["ways"].items():
            speeds = [Sample.of(turns["tokens_a_second"][key]["values"]).text(1, 1) for key in ("alone", "publishing")]
            rows.append(
                [
                    MODELS[name],
                    way,
                    *speeds,
                    Sample.of(turns["over_alone"]["values"]).text(1, 3),
                    Sample.of(turns["publish_seconds"]["values"]).text(1e3, 0),
                    f"{Sample.of(turns['steps_during_a_publish']).median:.0f}",
                    "?" if others is None else f"{others:.2f}",
                ]
            )
    n = max(turns["over_alone"]["n"] for found in document["models"].values() for turns in found["ways"].values())
    made = table(
        f"{document['payload_bytes'] / 1e6:.0f} MB published while decoding, {shape_named(document['shape']).text()}",
        [
            "model",
            "writer",
            "tokens/s alone",
            "tokens/s while publishing",
            "over alone, paired",
            "publish ms",
            "tokens meanwhile",
            "cores used by others",
        ],
        rows,
        f"n = {n}, in turns, median (min to max), durability barrier, BLAS: {Path(document['blas']).name}",
    )
    collections = [
        (MODELS[name], found["collection"]) for name, found in document["models"].items() if "collection" in found
    ]
    if not collections:
        return [made]
    _, first = collections[0]
    return [
        made,
        table(
            f"a collection while decoding, {first['nodes']:,} nodes at first, a twentieth removed each time",
            [
                "model",
                "writer",
                "tokens/s alone",
                "tokens/s while collecting",
                "over alone, paired",
                "collection s",
                "nodes removed",
                "cores used by others",
            ],
            [row for model, found in collections for row in bench_decode_gc.rows(model, found)],
            f"n = {first['ways']['paced']['over_alone']['n']}, in turns, median (min to max), durability barrier, "
            f"BLAS: {Path(document['blas']).name}",
        ),
    ]


def panels(document: dict[str, Any]) -> list[Panel]:
    """Bars of the ratio, a picture for each model."""
    return [
        Panel.of_bars(
            MODELS[name],
            "tokens a second, over alone",
            {
                f"{what}, {way}": Sample.of(turns["over_alone"]["values"])
                for what, part in (("publish", found), ("collection", found.get("collection")))
                if part
                for way, turns in part["ways"].items()
            },
            mark=1,
        )
        for name, found in document["models"].items()
    ]
