"""`bench publish`: one chunk of KV into the store, against os.write of the same bytes.

Twice: as it leaves the process (no fdatasync on either side, durability none), and as it reaches the medium (fdatasync,
and the store's barrier: data before the name, folders synced too). The folders of the store are there already, as in
any that has been used for a while, and every block is one that it does not have.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_of
from bench_machine import OtherWork, PeakMemory, conditions, data_folder, need_disk, need_memory
from bench_report import Outcome, table
from bench_stats import Sample, interleaved, paired
from kvstore import Durability, FileSystem, NamespaceInfo, Span, Store
from kvstore.layout import FANOUT

__all__ = ["HELP", "child", "configure", "run"]

HELP = "publish of one chunk against os.write, and the memory it takes"

METHODS = {
    "store": "kvstore, no fdatasync",
    "raw": "os.write",
    "store_synced": "kvstore, durability barrier",
    "raw_synced": "os.write + fdatasync",
    "copy": "the copy out of the engine's buffers before it",
}
_PAIRS = (("store", "raw"), ("store_synced", "raw_synced"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--count", type=int, default=2048, help="tokens of the chunk (default: 2048)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--memory-rounds", type=int, default=3, help="processes whose memory is measured (default: 3)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure speed in one process and memory in processes of their own."""
    shape = shape_of(options)
    size = shape.token_bytes * options.count
    found = conditions(options.dir.parent)
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, 2 * size)
        need_memory(4 * size)
        fields = {"layers": shape.layers, "heads": shape.heads, "dim": shape.dim, "dtype": shape.dtype}
        job = {"folder": str(folder), "shape": fields, "count": options.count, "rounds": options.rounds}
        other = OtherWork()
        seconds = run_child("bench_publish", {**job, "task": "speed"})["seconds"]
        others = other.cores()
        memory = [run_child("bench_publish", {**job, "task": "memory"}) for _ in range(options.memory_rounds)]
    document: dict[str, Any] = {
        "command": "publish",
        "conditions": found,
        "shape": shape.document(),
        "count": options.count,
        "payload_bytes": size,
        "page_cache": "written files stay in it; each is removed before the next is written",
        "cores_used_by_others": others,
        "seconds": {name: Sample.of(values).document() for name, values in seconds.items()},
        "over": {name: paired(seconds[raw], seconds[name]).document() for name, raw in _PAIRS},
        "extra_peak_bytes": {
            name: Sample.of(each[name] for each in memory).document() for name in ("publish", "copy_and_publish")
        },
    }
    return Outcome(document, [_table(document)])


def _table(document: dict[str, Any]) -> Any:
    size = document["payload_bytes"]
    rows = []
    for name, label in METHODS.items():
        sample = Sample.of(document["seconds"][name]["values"])
        over = document["over"].get(name)
        gbs = f"{size / sample.median / 1e9:.2f}"
        rows.append([label, sample.text(1e3, 1), gbs, Sample.of(over["values"]).text() if over else ""])
    extra = {name: each["median"] / 2**20 for name, each in document["extra_peak_bytes"].items()}
    others = document["cores_used_by_others"]
    return table(
        f"publish, {document['count']} tokens of {document['shape']['token_bytes'] / 1024:g} KiB",
        ["method", "ms, median (min to max)", "GB/s", "of the raw speed"],
        rows,
        f"n = {document['seconds']['store']['n']}, extra peak memory of a publish {extra['publish']:.1f} MiB, "
        f"with the copy before it {extra['copy_and_publish']:.1f} MiB, "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure speed, or memory."""
    return {"speed": _speed, "memory": _memory}[job["task"]](job)


def _speed(job: Mapping[str, Any]) -> dict[str, Any]:
    folder, shape = Path(job["folder"]), Shape(**job["shape"])
    payload = Payload(shape, job["count"])
    methods = {
        "store": _store(folder / "store", payload, Durability.NONE),
        "raw": _raw(folder / "raw", payload, sync=False),
        "store_synced": _store(folder / "store-synced", payload, Durability.BARRIER),
        "raw_synced": _raw(folder / "raw", payload, sync=True),
        "copy": _copy(payload),
    }
    return {"seconds": interleaved(methods, job["rounds"])}


def _store(path: Path, payload: Payload, durability: Durability) -> Callable[[], float]:
    store = Store.open(path, interval=max(16, payload.count), fs=FileSystem(durability=durability))
    space = store.namespace(INFO)
    layout = store.context.layout
    for name in FANOUT:
        (layout.blocks / name).mkdir()
    tokens = prompt(payload.count)

    def run() -> float:
        payload.renew()
        span = payload.span(0)
        started = time.perf_counter()
        published = space.publish(tokens, [span])
        seconds = time.perf_counter() - started
        if published.nodes != 1:
            raise AssertionError("the chunk was in the store already")
        for file in [*layout.blocks.rglob("*"), *layout.nodes.rglob("*.kv")]:
            if file.is_file():
                file.unlink()
        return seconds

    return run


def _raw(path: Path, payload: Payload, *, sync: bool) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for part in payload.data:
                rest = part
                while rest.nbytes:
                    rest = rest[os.write(fd, rest) :]
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        seconds = time.perf_counter() - started
        path.unlink()
        return seconds

    return run


def _copy(payload: Payload) -> Callable[[], float]:
    """What the generation thread does before the writer's thread publishes: rows out of MLX arrays."""
    rows = _rows(payload)

    def run() -> float:
        started = time.perf_counter()
        copied = rows.copy(0, payload.count)
        seconds = time.perf_counter() - started
        if len(copied) != len(payload.shape.specs):
            raise AssertionError("not every tensor was copied")
        return seconds

    return run


def _rows(payload: Payload) -> Any:
    """The payload in an engine's buffers."""
    import mlx.core as mx  # noqa: PLC0415

    from kvstore_mlx.buffers import empty  # noqa: PLC0415 - imports MLX
    from kvstore_mlx.live import Rows  # noqa: PLC0415

    shapes = {spec.name: (spec.dtype, (1, spec.outer, payload.count, *spec.inner)) for spec in payload.shape.specs}
    arrays = empty(shapes)
    for array, data in zip(arrays.values(), payload.data, strict=True):
        memoryview(array).cast("B")[:] = data
    mx.eval(list(arrays.values()))
    return Rows(payload.shape.specs, list(arrays.values()), [0] * len(arrays), 0, payload.count)


def _memory(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a publish adds to the peak of a process that has the KV already, without and with the copy of it."""
    shape, count = Shape(**job["shape"]), job["count"]
    payload = Payload(shape, count)
    rows = _rows(payload)
    result = {}
    with Store.open(Path(job["folder"]) / f"store-{os.getpid()}", interval=max(16, count)) as store:
        tokens = prompt(count)
        for name, data in (("publish", None), ("copy_and_publish", rows)):
            payload.renew()
            span = payload.span(0)
            peak = PeakMemory()
            if data is not None:
                span = Span(0, count, shape.specs, data.copy(0, count))
            store.namespace(NamespaceInfo({"model": name})).publish(tokens, [span])
            result[name] = peak.above(0)
            del span
    return result
