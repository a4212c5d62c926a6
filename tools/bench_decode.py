"""`bench decode`: how fast tokens come while a chunk is published or a full directory collected, over without.

One process decodes with a small model, again and again from the same prompt on. In turns the adapter's writer publishes
a chunk of an 8B model's KV meanwhile, at the pace it has beside an engine at work, or, to compare, at full speed; or it
collects a directory of many nodes that is a twentieth over its budget. Tokens are made alone before and after each of
these, and what a ratio is over is the mean of both, because a machine's speed drifts. Only tokens that were made while
the publish ran count. A publish at the writer's pace takes long enough to be held again and again: a quarter of a
second (or ten tokens) with it and one without take turns, and what its ratio is over are the tokens of the latter.

Before a publish the generation thread copies the chunk out of MLX arrays of that size, as an engine's buffers are, into
memory that the writer made ready as it does while a prompt is computed. One token waits for that copy: this pause is
a figure of its own, and not in the speed.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_decode_gc
from bench_breakeven import MODELS, blas_environment, model_folder
from bench_child import run_child
from bench_decoder import Decoder, Gate, Speed
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_named, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Panel
from bench_report import Outcome, table
from bench_stats import Sample, paired, rotated
from fast_blas import find
from kvstore import Durability, FileSystem, Span, Store
from kvstore.keys import pack_tokens
from kvstore.layout import FANOUT

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "decode speed while a chunk is being published, and during a collection"

_WARM_UP = 1
_TRIES = 5
_READY_S = 60.0
_ROOM = 256
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
    parser.add_argument("--rounds", type=int, default=15, help="rounds of publishes, tiny llama (default: 15)")
    parser.add_argument("--smollm2-rounds", type=int, default=9, help="the same with SmolLM2 (default: 9)")
    parser.add_argument(
        "--between", type=float, default=2.5, help="seconds alone before and after each publish (default: 2.5)"
    )
    parser.add_argument(
        "--nodes", type=int, default=_NODES, help=f"nodes of the directory that is collected (default: {_NODES})"
    )
    parser.add_argument("--collections", type=int, default=3, help="collections of each kind (default: 3; 0: none)")
    parser.add_argument("--alone", type=float, default=4.0, help="the same around each of them (default: 4)")


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
            need_memory(5 * size)
            job = {
                "model": str(model_folder(name, folder)),
                "store": str(folder / "store"),
                "shape": shape.fields(),
                "count": options.count,
                "rounds": options.smollm2_rounds if name == "smollm2" else options.rounds,
                "between": options.between,
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
                    "pause_seconds": Sample.of(turns["pause"]).document(),
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


@dataclass(frozen=True)
class _Server:
    """What a server has: its writer, and buffers of an engine that hold the KV of a chunk."""

    writer: Any
    form: Any
    rows: Any
    size: int
    gate: Gate

    def make_ready(self) -> None:
        """Let the writer touch the memory for the next copy."""
        self.writer.expect(self.size)
        deadline = time.monotonic() + _READY_S
        while self.writer._pool.resident < self.size:  # noqa: SLF001 - nobody else has to know
            if time.monotonic() > deadline:
                raise BenchError("the writer did not make memory ready; is the machine short of it?")
            time.sleep(0.01)

    def publish(self, number: int) -> float:
        """Copy the chunk and queue it, on this thread as a generation's; seconds of that."""
        from kvstore_mlx.buffers import address_phase  # noqa: PLC0415 - imports the engine
        from kvstore_mlx.jobs import Job  # noqa: PLC0415 - as above

        tokens, phase = pack_tokens(prompt(self.rows.count)), address_phase()
        started = time.perf_counter()
        loan = self.writer.lend(self.size)
        data = self.rows.copy(0, self.rows.count, loan)
        # A block that no store has yet. Low bytes of two numbers, so that neither becomes infinite.
        data[0][:1], data[0][2:3] = bytes([number & 0xFF]), bytes([number >> 8 & 0xFF])
        span = Span(0, self.rows.count, self.rows.specs, data, phase=phase)
        if not self.writer.offer(Job(self.form, tokens, [span], loans={0: loan})):
            raise BenchError("the writer's queue has no room for the chunk; publish a smaller --count")
        return time.perf_counter() - started


class _Files(FileSystem):
    """Files that are not synced while the work is held."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(Durability.BARRIER)
        self._gate = gate

    def sync_file(self, fd: int) -> None:
        """Wait, if held, and sync."""
        self._gate.wait()
        super().sync_file(fd)


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode while publishing, in turns of both ways, and alone before, between and after."""
    from kvstore_mlx.forms import Form  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.housekeeping import Housekeeping  # noqa: PLC0415 - as above
    from kvstore_mlx.writer import Writer  # noqa: PLC0415 - as above

    decoder = Decoder(job["model"])
    shape = Shape(**job["shape"])
    rows = _rows(shape, job["count"])
    found: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in ("alone", "publishing", "publish", "pause", "steps")} for way in _WAYS
    }
    gate = Gate()
    with Store.open(job["store"], interval=job["count"], fs=_Files(gate)) as store:
        store.context.pace._sleep = gate.sleep  # noqa: SLF001 - nobody else has to hold a writer
        layout = store.context.layout
        for folder in FANOUT:
            (layout.blocks / folder).mkdir()
        plan: Any = SimpleNamespace(stateful=False, token_bytes=shape.token_bytes)
        writer = Writer(Housekeeping(store, 1 << 50))
        server = _Server(writer, Form(plan, store.namespace(INFO)), rows, shape.token_bytes * job["count"], gate)
        number = 0
        for turn in range(-_WARM_UP, job["rounds"]):
            server.make_ready()
            before = decoder.alone(job["between"])
            for way in rotated(_WAYS, turn):
                for _ in range(_TRIES):
                    number += 1
                    server.make_ready()
                    values = _turn(decoder, server, number, paced=way == "paced")
                    for path in [*layout.blocks.rglob("*"), *layout.nodes.rglob("*.kv")]:
                        if path.is_file():
                            path.unlink()
                    after = decoder.alone(job["between"])
                    if values is not None:
                        break
                    # Not one token came: on a busy machine that needs another try now and then.
                    before = after
                else:
                    raise BenchError("not one token came while the chunk was published; publish a larger --count")
                if turn >= 0:
                    for name, value in {"alone": (before + after) / 2, **values}.items():
                        found[way][name].append(value)
                before = after
        writer.close(60)
    shutil.rmtree(job["store"])
    return found


def _rows(shape: Shape, count: int) -> Any:
    """An engine's buffers with so many tokens, and room for more."""
    from kvstore_mlx.buffers import Filling  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.live import Rows  # noqa: PLC0415 - as above

    filling = Filling({spec.name: (spec.dtype, (1, spec.outer, count + _ROOM, *spec.inner)) for spec in shape.specs})
    memory = list(filling.memory().values())
    for view, data in zip(memory, Payload(shape, count + _ROOM).data, strict=True):
        view[:] = data
    del view, memory
    arrays = list(filling.arrays().values())
    return Rows(shape.specs, arrays, [0] * len(arrays), 0, count)


def _turn(decoder: Decoder, server: _Server, number: int, *, paced: bool) -> dict[str, float] | None:
    """A publish beside tokens; None when not one of them came meanwhile."""
    writer = server.writer
    started = pause = 0.0

    def begun() -> None:
        nonlocal started, pause
        if paced:
            writer.stepped()
        pause = server.publish(number)
        started = time.perf_counter()

    if paced:
        beside, alone = decoder.beside(server.gate, lambda: writer.queued > 0, writer.stepped, begun)
    else:
        beside, alone = decoder.speed(lambda: writer.queued > 0, begun=begun), Speed(0, 0.0)
    published = time.perf_counter() - started - alone.seconds
    writer.idle()
    writer.drain(_READY_S)
    if writer.trouble:
        raise BenchError(f"the chunk was not published: {writer.trouble}")
    if not beside.steps:
        return None
    found = {"publishing": beside.a_second(), "publish": published, "pause": pause, "steps": beside.steps}
    return {**found, "alone": alone.a_second()} if alone.steps else found


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
                    Sample.of(turns["pause_seconds"]["values"]).text(1e3, 0),
                    Sample.of(turns["publish_seconds"]["values"]).text(1e3, 0),
                    str(turns["over_alone"]["n"]),
                    f"{Sample.of(turns['steps_during_a_publish']).median:.0f}",
                    "?" if others is None else f"{others:.2f}",
                ]
            )
    made = table(
        f"{document['payload_bytes'] / 1e6:.0f} MB published while decoding, {shape_named(document['shape']).text()}",
        [
            "model",
            "writer",
            "tokens/s alone",
            "tokens/s while publishing",
            "over alone, paired",
            "one token's pause for the copy, ms",
            "publish ms",
            "n",
            "tokens meanwhile",
            "cores used by others",
        ],
        rows,
        "in turns, alone before and after each publish, or between pieces of a paced one, median (min to max), "
        f"durability barrier, BLAS: {Path(document['blas']).name}",
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
