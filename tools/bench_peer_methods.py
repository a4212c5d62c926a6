"""How each peer of `bench peers` saves a growing conversation and loads it. Runs in children only (see bench_child).

A method is a Peer: save(arrays, end) is timed and gets the engine's arrays ``[1, heads, end, dim]``, one a tensor;
load() is timed in a new process and returns one array a tensor.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench_kv import INFO, Payload, Shape, open_match, prompt
from bench_machine import PeakMemory, written_by_this_process
from bench_peer_sqlite import SqliteBlocks
from kvstore import Durability, FileSystem, Span, Store

__all__ = ["child"]

_IOV = 1024
"""Pieces of one pwritev."""


@dataclass(frozen=True)
class Job:
    """What is saved where."""

    folder: Path
    shape: Shape
    tokens: int
    step: int


Save = Callable[[Sequence[Any], int], None]
Load = Callable[[], Sequence[Any]]


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """All saves of one conversation, or one load."""
    what = Job(Path(job["folder"]), Shape(**job["shape"]), job["tokens"], job["step"])
    save, load = _PEERS[job["peer"]](what)
    return _save(what, save) if job["task"] == "save" else _load(what, load, job)


def _save(job: Job, save: Save) -> dict[str, Any]:
    import mlx.core as mx  # noqa: PLC0415

    whole = _engine(job)
    seconds, extra = 0.0, 0
    before = written_by_this_process()
    for end in range(job.step, job.tokens + 1, job.step):
        # What the engine holds by then. Made outside of the measurement: it is not the peer's work.
        arrays = [mx.contiguous(array[..., :end, :]) for array in whole]
        mx.eval(arrays)
        mx.clear_cache()
        peak = PeakMemory()
        started = time.perf_counter()
        save(arrays, end)
        seconds += time.perf_counter() - started
        extra = max(extra, peak.above(0))
    after = written_by_this_process()
    written = after - before if before is not None and after is not None else _size(job.folder)
    return {
        "save": seconds,
        "save_extra": extra,
        "written": written,
        "digests": [_digest(whole[0]), _digest(whole[-1])],
    }


def _load(job: Job, load: Load, found: Mapping[str, Any]) -> dict[str, Any]:
    import mlx.core as mx  # noqa: PLC0415 - as a server does at its start

    mx.eval(mx.zeros(1))
    peak = PeakMemory()
    started = time.perf_counter()
    arrays = load()
    seconds = time.perf_counter() - started
    extra = peak.above(job.shape.token_bytes * job.tokens)
    if found["peer"] != "raw" and [_digest(arrays[0], job), _digest(arrays[-1], job)] != found["digests"]:
        raise AssertionError("what was loaded is not what was saved")
    return {"load": seconds, "load_extra": extra}


def _engine(job: Job) -> list[Any]:
    """The engine's arrays of the whole conversation."""
    from kvstore_mlx.buffers import empty  # noqa: PLC0415 - imports MLX

    payload = Payload(job.shape, job.tokens)
    arrays = empty({spec.name: (spec.dtype, (1, spec.outer, job.tokens, *spec.inner)) for spec in job.shape.specs})
    for array, data in zip(arrays.values(), payload.data, strict=True):
        memoryview(array).cast("B")[:] = data
    return list(arrays.values())


def _digest(array: Any, job: Job | None = None) -> str:
    """Of a tensor's bytes, without the room behind its tokens that a restore leaves for the answer."""
    flat = np.frombuffer(memoryview(array).cast("B"), np.uint8)
    if job is not None:
        row = job.shape.token_bytes // len(job.shape.specs) // job.shape.heads
        flat = np.ascontiguousarray(flat.reshape(job.shape.heads, -1, row)[:, : job.tokens])
    return xxhash.xxh3_128_hexdigest(flat.data)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _numpy(array: Any) -> Any:
    """An engine's array without a copy, bf16 and f16 as the 16-bit words they are: numpy has no bf16."""
    view = memoryview(array)
    words = np.uint16 if view.itemsize == 2 else np.uint32
    return np.frombuffer(view.cast("B"), words).reshape(array.shape)


def _names(job: Job) -> list[str]:
    return [spec.name for spec in job.shape.specs]


def _kvstore(job: Job) -> tuple[Save, Load]:
    """The adapter's way: rows copied out of the engine's buffers, published, and restored into new ones."""
    from bench_plan import plain_plan  # noqa: PLC0415 - imports MLX and mlx-lm
    from kvstore_mlx.buffers import address_phase  # noqa: PLC0415 - as above
    from kvstore_mlx.live import Rows  # noqa: PLC0415 - as above
    from kvstore_mlx.pool import Pool  # noqa: PLC0415 - as above
    from kvstore_mlx.restoring import Restoring  # noqa: PLC0415 - as above

    path, phase, specs = job.folder / "store", address_phase(), job.shape.specs
    pool = Pool(job.shape.token_bytes * job.step + (1 << 20), phase)
    space = Store.open(path, fs=FileSystem(durability=Durability.NONE)).namespace(INFO)

    def save(arrays: Sequence[Any], end: int) -> None:
        first = end - job.step
        loan = pool.lend(job.shape.token_bytes * job.step)
        rows = Rows(specs, list(arrays), [0] * len(arrays), 0, end).copy(first, end, loan)
        space.publish(prompt(end), [Span(first, job.step, specs, rows, phase=phase)])
        if loan is not None:
            loan.give_back()

    def load() -> Sequence[Any]:
        space, match = open_match(path, job.tokens)
        target = Restoring(plain_plan(job.shape), job.tokens)
        if space.read(match, target.allocate).tokens != job.tokens:
            raise AssertionError("not all tokens were restored")
        caches = target.caches(job.tokens, None)[0]
        return [array for cache in caches for array in (cache.keys, cache.values)]

    return save, load


def _raw(job: Job) -> tuple[Save, Load]:
    """The new rows at the end of one file, and the file into plain memory."""
    path = job.folder / "raw"

    def save(arrays: Sequence[Any], end: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        at = os.fstat(fd).st_size
        pieces = [head[end - job.step : end] for array in arrays for head in _numpy(array)[0]]
        for first in range(0, len(pieces), _IOV):
            wanted = sum(piece.nbytes for piece in pieces[first : first + _IOV])
            if os.pwritev(fd, pieces[first : first + _IOV], at) != wanted:
                raise AssertionError("a write was cut short")
            at += wanted
        os.close(fd)

    def load() -> Sequence[Any]:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        at = 0
        while at < size:
            at += os.preadv(fd, [memoryview(memory)[at : at + (1 << 30)]], at)
        os.close(fd)
        return [memory]

    return save, load


def _mlx_lm(job: Job) -> tuple[Save, Load]:
    path = str(job.folder / "prompt-cache.safetensors")

    def save(arrays: Sequence[Any], end: int) -> None:
        from mlx_lm.models.cache import KVCache, save_prompt_cache  # noqa: PLC0415

        caches = []
        for keys, values in zip(arrays[::2], arrays[1::2], strict=True):
            cache = KVCache()
            cache.keys, cache.values, cache.offset = keys, values, end
            caches.append(cache)
        save_prompt_cache(path, caches)

    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm.models.cache import load_prompt_cache  # noqa: PLC0415 - not a part of the load

    def load() -> Sequence[Any]:
        arrays = [array for cache in load_prompt_cache(path) for array in (cache.keys, cache.values)]
        mx.eval(arrays)
        return arrays

    return save, load


def _safetensors_numpy(job: Job) -> tuple[Save, Load]:
    from safetensors.numpy import load_file, save_file  # noqa: PLC0415 - optional

    path, names = str(job.folder / "kv.safetensors"), _names(job)

    def save(arrays: Sequence[Any], _end: int) -> None:
        save_file(dict(zip(names, map(_numpy, arrays), strict=True)), path)

    def load() -> Sequence[Any]:
        found = load_file(path)
        return [found[name] for name in names]

    return save, load


def _safetensors_mlx(job: Job) -> tuple[Save, Load]:
    """As 16-bit words: its way through numpy has no bf16."""
    import mlx.core as mx  # noqa: PLC0415
    from safetensors.mlx import load_file, save_file  # noqa: PLC0415 - optional

    path, names = str(job.folder / "kv.safetensors"), _names(job)

    def save(arrays: Sequence[Any], _end: int) -> None:
        words = {2: mx.uint16, 4: mx.uint32}
        save_file({name: each.view(words[each.itemsize]) for name, each in zip(names, arrays, strict=True)}, path)

    def load() -> Sequence[Any]:
        found = load_file(path)
        arrays = [found[name] for name in names]
        mx.eval(arrays)
        return arrays

    return save, load


def _sqlite(job: Job) -> tuple[Save, Load]:
    blocks = SqliteBlocks(job.folder, _names(job))

    def save(arrays: Sequence[Any], end: int) -> None:
        blocks.publish(prompt(end), arrays)

    def load() -> Sequence[Any]:
        found: Sequence[Any] = blocks.load(prompt(job.tokens))
        return found

    return save, load


def _diskcache(job: Job) -> tuple[Save, Load]:
    """One value a save: the new rows of all tensors, which is what its user would have to think of."""
    import diskcache  # noqa: PLC0415 - optional

    cache = diskcache.Cache(str(job.folder / "cache"), size_limit=1 << 50)
    row = job.shape.token_bytes // len(job.shape.specs) // job.shape.heads

    def save(arrays: Sequence[Any], end: int) -> None:
        rows = (np.ascontiguousarray(_numpy(array)[0, :, end - job.step : end]) for array in arrays)
        cache[end] = b"".join(each.data.cast("B") for each in rows)

    def load() -> Sequence[Any]:
        whole = [np.empty((job.shape.heads, job.tokens, row), np.uint8) for _ in job.shape.specs]
        for end in range(job.step, job.tokens + 1, job.step):
            parts = np.frombuffer(cache[end], np.uint8).reshape(len(whole), job.shape.heads, job.step, row)
            for array, part in zip(whole, parts, strict=True):
                array[:, end - job.step : end] = part
        return whole

    return save, load


_PEERS: dict[str, Callable[[Job], tuple[Save, Load]]] = {
    "kvstore": _kvstore,
    "raw": _raw,
    "mlx_lm": _mlx_lm,
    "safetensors_numpy": _safetensors_numpy,
    "safetensors_mlx": _safetensors_mlx,
    "sqlite": _sqlite,
    "diskcache": _diskcache,
}
