"""`bench publish`: one chunk of KV into the store, against os.write of the same bytes, and what it takes to get it.

Twice: as it leaves the process (no fdatasync on either side, durability none), and as it reaches the medium (fdatasync,
and the store's barrier: data before the name, folders synced too). The folders of the store are there already, as in
any that has been used for a while, and every block is one that it does not have.

A virtual machine may have to ask its host for memory that was free for some seconds, which takes ten times as long as
writing to it. So before each that is measured as many bytes are written to another file, which is removed: both find
pages in the page cache that were used just now.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench_child import run_child
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_of
from bench_machine import OtherWork, PeakMemory, conditions, data_folder, need_disk, need_memory
from bench_plot import Panel
from bench_report import Outcome, table
from bench_stats import Sample, interleaved, paired
from kvstore import Durability, FileSystem, NamespaceInfo, Span, Store
from kvstore.layout import FANOUT

__all__ = ["HELP", "child", "configure", "into_used_pages", "panels", "publisher", "raw_writer", "run", "tables"]

HELP = "publish of one chunk against os.write, and the memory it takes"

METHODS = {
    "store": "kvstore, no fdatasync",
    "raw": "os.write",
    "store_synced": "kvstore, durability barrier",
    "raw_synced": "os.write + fdatasync",
    "copy": "the copy out of the engine's buffers before it, into the writer's pool",
    "copy_new": "the same into memory as malloc has it",
    "update": "the engine's next update of its buffers",
    "update_pinned": "the same while MLX keeps the old ones, as a publish without a copy needs",
}
_PAIRS = (("store", "raw"), ("store_synced", "raw_synced"))
_ENGINE = {
    "copy": "copy into the pool",
    "copy_new": "copy into new memory",
    "update": "next update of the buffers",
    "update_pinned": "the same, old ones kept",
}
"""What the engine's thread pays, in the few words that fit beside a bar."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--count", type=int, default=2048, help="tokens of the chunk (default: 2048)")
    parser.add_argument(
        "--held", type=int, default=8192, help="tokens that the engine's buffers hold, this chunk last (default: 8192)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--memory-rounds", type=int, default=3, help="processes whose memory is measured (default: 3)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure speed in one process and memory in processes of their own."""
    shape = shape_of(options)
    size = shape.token_bytes * options.count
    held = max(options.held, options.count)
    found = conditions(options.dir.parent)
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, 2 * size)
        need_memory(4 * size + 2 * shape.token_bytes * held)
        fields = shape.fields()
        job = {"folder": str(folder), "shape": fields, "count": options.count, "held": held, "rounds": options.rounds}
        other = OtherWork()
        seconds = run_child("bench_publish", {**job, "task": "speed"})["seconds"]
        others = other.cores()
        memory = [run_child("bench_publish", {**job, "task": "memory"}) for _ in range(options.memory_rounds)]
    document: dict[str, Any] = {
        "command": "publish",
        "conditions": found,
        "shape": shape.document(),
        "count": options.count,
        "held": held,
        "payload_bytes": size,
        "page_cache": "written files stay in it; each is removed before the next is written, into pages used just now",
        "cores_used_by_others": others,
        "seconds": {name: Sample.of(values).document() for name, values in seconds.items()},
        "over": {name: paired(seconds[raw], seconds[name]).document() for name, raw in _PAIRS},
        "extra_peak_bytes": {
            name: Sample.of(each[name] for each in memory).document() for name in ("publish", "copy_and_publish")
        },
    }
    return Outcome(document, tables(document))


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    size = document["payload_bytes"]
    rows = []
    for name, label in METHODS.items():
        sample = Sample.of(document["seconds"][name]["values"])
        over = document["over"].get(name)
        gbs = f"{size / sample.median / 1e9:.2f}"
        rows.append([label, sample.text(1e3, 1), gbs, Sample.of(over["values"]).text() if over else ""])
    extra = {name: each["median"] / 2**20 for name, each in document["extra_peak_bytes"].items()}
    others = document["cores_used_by_others"]
    made = table(
        f"publish, {document['count']} tokens of {document['shape']['token_bytes'] / 1024:g} KiB, "
        f"of {document['held']} in the engine's buffers",
        ["method", "ms, median (min to max)", "GB/s", "of the raw speed"],
        rows,
        f"n = {document['seconds']['store']['n']}, extra peak memory of a publish {extra['publish']:.1f} MiB, "
        f"with the copy before it {extra['copy_and_publish']:.1f} MiB, "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """Bars: the speed of what writes, and what the engine's thread waits for."""
    seconds = {name: Sample.of(each["values"]) for name, each in document["seconds"].items()}
    size = document["payload_bytes"] / 1e9
    written = {METHODS[name]: Sample.of(size / value for value in seconds[name].values) for name in sum(_PAIRS, ())}
    paid = {label: seconds[name] for name, label in _ENGINE.items()}
    return [
        Panel.of_bars(f"a chunk of {size * 1e3:.0f} MB written", "GB/s", written),
        Panel.of_bars("on the engine's thread", "ms", paid, 1e3, log=True),
    ]


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure speed, or memory."""
    return {"speed": _speed, "memory": _memory}[job["task"]](job)


def _speed(job: Mapping[str, Any]) -> dict[str, Any]:
    folder, shape = Path(job["folder"]), Shape(**job["shape"])
    payload = Payload(shape, job["count"])
    methods = {
        "store": publisher(folder / "store", payload, Durability.NONE),
        "raw": raw_writer(folder / "raw", payload, sync=False),
        "store_synced": publisher(folder / "store-synced", payload, Durability.BARRIER),
        "raw_synced": raw_writer(folder / "raw", payload, sync=True),
    }
    seconds = interleaved(into_used_pages(folder, payload, methods), job["rounds"])
    # Apart, for what it leaves behind: a gigabyte of memory that was just given back.
    return {"seconds": {**seconds, **interleaved(_engine(payload, job["held"]), job["rounds"])}}


def into_used_pages(
    folder: Path, payload: Payload, methods: Mapping[str, Callable[[], float]]
) -> dict[str, Callable[[], float]]:
    """The same methods, each right after as many bytes went into a file that is gone again."""
    before = raw_writer(folder / "before", payload, sync=False)

    def after(method: Callable[[], float]) -> float:
        before()
        return method()

    return {name: partial(after, method) for name, method in methods.items()}


def publisher(path: Path, payload: Payload, durability: Durability) -> Callable[[], float]:
    """Publishes the payload as one chunk that the store does not have, then removes it; seconds of the publish."""
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


def raw_writer(path: Path, payload: Payload, *, sync: bool) -> Callable[[], float]:
    """Writes the payload with os.write, then removes it; seconds of the writing."""

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


def _engine(payload: Payload, held: int) -> dict[str, Callable[[], float]]:
    """What the generation thread pays: the copy before a publish, or else an update of buffers that MLX must keep."""
    import mlx.core as mx  # noqa: PLC0415

    from kvstore_mlx.buffers import address_phase  # noqa: PLC0415
    from kvstore_mlx.pool import Pool  # noqa: PLC0415

    rows, first = _rows(payload, held), held - payload.count
    size = payload.shape.token_bytes * payload.count
    pool = Pool(size + (1 << 20), address_phase())
    one = mx.zeros((1, payload.shape.heads, 1, payload.shape.dim), rows.arrays[0].dtype)
    mx.eval(one)

    def copy() -> float:
        started = time.perf_counter()
        loan = pool.lend(size)
        assert loan is not None
        copied = rows.copy(first, held, loan)
        seconds = time.perf_counter() - started
        assert len(copied) == len(payload.shape.specs)
        loan.give_back()
        return seconds

    def copy_new() -> float:
        started = time.perf_counter()
        copied = rows.copy(first, held)
        seconds = time.perf_counter() - started
        assert len(copied) == len(payload.shape.specs)
        return seconds

    def update() -> float:
        started = time.perf_counter()
        for array in rows.arrays:
            array[..., :1, :] = one
        mx.eval(rows.arrays)
        return time.perf_counter() - started

    def update_pinned() -> float:
        kept = [array[..., first:, :] for array in rows.arrays]
        mx.eval(kept)
        seconds = update()
        del kept
        return seconds

    return {"copy": copy, "copy_new": copy_new, "update": update, "update_pinned": update_pinned}


def _rows(payload: Payload, held: int) -> Any:
    """An engine's buffers that hold so many tokens: the payload again and again."""
    import mlx.core as mx  # noqa: PLC0415

    from kvstore_mlx.buffers import empty  # noqa: PLC0415 - imports MLX
    from kvstore_mlx.live import Rows  # noqa: PLC0415

    shapes = {spec.name: (spec.dtype, (1, spec.outer, held, *spec.inner)) for spec in payload.shape.specs}
    arrays = empty(shapes)
    for array, data in zip(arrays.values(), payload.data, strict=True):
        memoryview(array).cast("B")[:] = np.resize(np.frombuffer(data, np.uint8), array.nbytes).data
    mx.eval(list(arrays.values()))
    return Rows(payload.shape.specs, list(arrays.values()), [0] * len(arrays), 0, held)


def _memory(job: Mapping[str, Any]) -> dict[str, Any]:
    """What a publish adds to the peak of a process that has the KV already, without and with the copy of it."""
    from kvstore_mlx.buffers import address_phase  # noqa: PLC0415 - imports MLX
    from kvstore_mlx.pool import Pool  # noqa: PLC0415

    shape, count = Shape(**job["shape"]), job["count"]
    payload = Payload(shape, count)
    rows = _rows(payload, job["held"])
    result = {}
    with Store.open(Path(job["folder"]) / f"store-{os.getpid()}", interval=max(16, count)) as store:
        tokens = prompt(count)
        pool = Pool(shape.token_bytes * count + (1 << 20), address_phase())
        for name in ("publish", "copy_and_publish"):
            payload.renew()
            span = payload.span(0)
            peak = PeakMemory()
            if name == "copy_and_publish":
                loan = pool.lend(span.payload_bytes)
                assert loan is not None
                span = Span(0, count, shape.specs, rows.copy(job["held"] - count, job["held"], loan))
            store.namespace(NamespaceInfo({"model": name})).publish(tokens, [span])
            result[name] = peak.above(0)
    return result
