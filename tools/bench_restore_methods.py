"""The ways to get saved KV into memory that the restore benchmark compares. Runs in children only (see bench_child).

Each method is a closure over what a real reader has before it begins (names of files, a match), timed from there to the
moment when every byte lies in memory. What it read is held until the clock has stopped.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from bench_kv import Shape, block_paths, fill_store, open_match
from bench_machine import PeakMemory, drop_page_cache
from bench_stats import interleaved
from kvstore.populate import populate
from kvstore.scatter import UNIT_BYTES

__all__ = ["METHODS", "POPULATED", "ROOM", "child", "joined"]

ROOM = 256
"""Tokens that a server's restore leaves room for, and the step that mlx-lm's KVCache grows by."""

POPULATED = "raw4_populated"
"""Only in memory that nobody touched; in any other it is raw4."""

METHODS = {
    "store": "kvstore, digests verified",
    "raw1": "raw preadv, 1 thread",
    "raw4": "raw preadv, 4 threads",
    POPULATED: "raw preadv, 4 threads, memory populated as kvstore does",
    "load_prompt_cache": "mlx-lm load_prompt_cache",
    "mx_load_room": f"mx.load + concatenate, room for {ROOM} tokens more as kvstore",
}
"""Every method with its name for people. store may be followed by a number of threads: store4."""

_MOST = 1 << 30
"""Bytes of one call: Linux moves no more than 0x7ffff000, and macOS refuses more than INT_MAX."""

Timed = Callable[[], float]


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """One of three tasks: make the files, measure once in new memory, or measure in turns in memory used before."""
    tasks = {"make": _make, "fresh": _fresh, "touched": _touched}
    return tasks[job["task"]](job)


def _make(job: Mapping[str, Any]) -> dict[str, Any]:
    """A store, and if wanted the same KV as mlx-lm's own file."""
    from kvstore_mlx.buffers import address_phase  # noqa: PLC0415 - imports MLX

    shape = Shape(**job["shape"])
    fill_store(
        Path(job["store"]),
        shape,
        job["tokens"],
        address_phase(),
        job["span"],
        durable=job["cold"],
        interval=job.get("interval"),
    )
    if job["file"]:
        import mlx.core as mx  # noqa: PLC0415
        from mlx_lm.models.cache import save_prompt_cache  # noqa: PLC0415

        from bench_plan import plain_plan  # noqa: PLC0415
        from kvstore_mlx.restoring import Restoring  # noqa: PLC0415

        space, match = open_match(Path(job["store"]), job["tokens"])
        target = Restoring(plain_plan(shape), job["tokens"])
        space.read(match, target.allocate)
        save_prompt_cache(job["file"], target.caches(job["tokens"], None)[0])
        mx.synchronize()
    return {"phase": address_phase()}


def _fresh(job: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement in memory that this process has never touched."""
    method = _method(job["method"], job)
    _chill(job)
    peak = PeakMemory()
    seconds = method()
    return {"seconds": seconds, "extra_peak": peak.above(Shape(**job["shape"]).token_bytes * job["tokens"])}


def _touched(job: Mapping[str, Any]) -> dict[str, Any]:
    """All methods in turns, with memory that they used the round before.

    touched_new_bytes: what a method touched for the first time after the warm-up, at most; large numbers say that the
    system took memory away in between, and that the figures are not what they claim.
    """
    if any(not name.startswith("raw") for name in job["methods"]):
        import mlx.core as mx  # noqa: PLC0415 - not where only raw reads are measured

        mx.set_cache_limit(1 << 40)

    new: dict[str, list[int]] = {name: [] for name in job["methods"]}

    def measured(name: str) -> Timed:
        method = _method(name, job)

        def cooled() -> float:
            _chill(job)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            seconds = method()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            new[name].append(faults * resource.getpagesize())
            return seconds

        return cooled

    # Two rounds of warm-up: in the second every method takes the place in memory that it keeps.
    seconds = interleaved({name: measured(name) for name in job["methods"]}, job["rounds"], warm_up=2)
    return {"seconds": seconds, "touched_new_bytes": max(max(values[2:]) for values in new.values())}


def _chill(job: Mapping[str, Any]) -> None:
    if job["cold"]:
        _, match = open_match(Path(job["store"]), job["tokens"])
        drop_page_cache([*block_paths(match), *([Path(job["file"])] if job["file"] else [])])


def _method(name: str, job: Mapping[str, Any]) -> Timed:
    if not name.startswith("raw"):
        from kvstore_mlx.buffers import address_phase  # noqa: PLC0415 - imports MLX

        # What a server does at its start: MLX makes its threads at the first use of a reader, not in the measurement.
        address_phase()
    if name.startswith("store"):
        return _store(Path(job["store"]), job["tokens"], Shape(**job["shape"]), int(name[5:] or 0))
    _, match = open_match(Path(job["store"]), job["tokens"])
    paths = block_paths(match)
    if name.startswith("raw"):
        return _raw(paths, int(name[3]), _read_populated if name == POPULATED else _read)
    if name == "mx_load_room":
        return _mx_load(paths, [spec.name for spec in Shape(**job["shape"]).specs])
    return _load_prompt_cache(job["file"])


def _store(path: Path, tokens: int, shape: Shape, threads: int) -> Timed:
    """Namespace.read into the buffers of a restore with the room that the server gives it."""
    from bench_plan import plain_plan  # noqa: PLC0415 - imports MLX and mlx-lm
    from kvstore_mlx.restoring import Restoring  # noqa: PLC0415 - as above

    space, match = open_match(path, tokens)
    plan = plain_plan(shape)
    more = (threads,) if threads else ()

    def run() -> float:
        started = time.perf_counter()
        target = Restoring(plan, tokens + ROOM)
        restored = space.read(match, target.allocate, *more)
        seconds = time.perf_counter() - started
        if restored.tokens != tokens:
            raise AssertionError(f"{restored.tokens} of {tokens} tokens were restored")
        return seconds

    return run


def _raw(paths: Sequence[Path], threads: int, read: Callable[[_Piece], None]) -> Timed:
    """The same files, whole, one after the other into plain memory: what the machine can do.

    Pages of memory and of the file begin together, the best case for a copy. The memory is kept for the next call.
    """
    # The system's calls are found at the first use, which is no part of the measurement.
    populate([memoryview(bytearray(UNIT_BYTES))])
    sizes = [path.stat().st_size for path in paths]
    places = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    memory: mmap.mmap | None = None

    def run() -> float:
        nonlocal memory
        started = time.perf_counter()
        if memory is None:
            memory = mmap.mmap(-1, sum(places), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        view = memoryview(memory)
        work: list[_Piece] = []
        with ExitStack() as stack:
            at = 0
            for path, size, place in zip(paths, sizes, places, strict=True):
                fd = os.open(path, os.O_RDONLY)
                stack.callback(os.close, fd)
                # Shares of equal size, so that one file keeps all threads busy too.
                step = size if threads == 1 else -(-size // threads // mmap.PAGESIZE) * mmap.PAGESIZE
                work += [(fd, view[at + i : at + min(i + step, size)], i) for i in range(0, size, step)]
                at += place
            if threads == 1:
                for piece in work:
                    read(piece)
            else:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(read, work))
        return time.perf_counter() - started

    return run


_Piece: TypeAlias = tuple[int, memoryview, int]


def _read(piece: _Piece) -> None:
    fd, view, at = piece
    while view.nbytes:
        got = os.preadv(fd, [view[:_MOST]], at)
        if not got:
            raise AssertionError("a file became shorter while it was read")
        view, at = view[got:], at + got


def _read_populated(piece: _Piece) -> None:
    """A piece, whose memory gets its pages as much at a time as in a restore, right before they are filled."""
    fd, view, at = piece
    for begin in range(0, view.nbytes, UNIT_BYTES):
        part = view[begin : begin + UNIT_BYTES]
        populate([part])
        _read((fd, part, at + begin))


def _load_prompt_cache(file: str) -> Timed:
    """mlx-lm's own file of the same KV, evaluated: it loads lazily."""
    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm.models.cache import load_prompt_cache  # noqa: PLC0415

    def run() -> float:
        started = time.perf_counter()
        caches = load_prompt_cache(file)
        mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
        return time.perf_counter() - started

    return run


def _mx_load(paths: Sequence[Path], names: Sequence[str]) -> Timed:
    """MLX's own reader on the same blocks, joined a tensor at a time so that no more than one is there twice.

    With the room that a restore leaves: without it an engine would copy all of it at its first token.
    """
    import mlx.core as mx  # noqa: PLC0415

    def run() -> float:
        started = time.perf_counter()
        blocks: list[Any] = [mx.load(str(path), format="safetensors") for path in paths]
        arrays = [joined([block.pop(name) for block in blocks], ROOM) for name in names]
        seconds = time.perf_counter() - started
        del arrays
        return seconds

    return run


def joined(parts: Sequence[Any], room: int) -> Any:
    """The rows of several blocks as an array that KVCache goes on with in place: grown by room as it grows its own."""
    import mlx.core as mx  # noqa: PLC0415

    heads, _, *inner = parts[0].shape
    more = mx.zeros((1, heads, room, *inner), parts[0].dtype)
    array = mx.concatenate([*(part[None] for part in parts), more], axis=2)
    mx.eval(array)
    return array
