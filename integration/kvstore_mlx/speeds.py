"""How fast a disk and a store on it are, in a few seconds: for `kvstore doctor`. Benchmarks are made by tools/bench.py.

Each figure is the better of two with one 8B-like chunk: good enough to see that a disk is the wrong one, or that the
store is far from what the disk can do.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.blocks import Span, TensorBuffer, TensorSpec
from kvstore.errors import KVStoreError
from kvstore.fs import preadv_full
from kvstore.namespace import NamespaceInfo
from kvstore.store import Store
from kvstore_mlx.buffers import Filling, address_phase

__all__ = ["DEFAULT_BYTES", "Speeds", "measure", "scratch_parent"]

_LAYERS, _HEADS, _DIM = 32, 8, 128
_SPECS = tuple(
    TensorSpec(f"{layer}.{part}", "F16", _HEADS, (_DIM,)) for layer in range(_LAYERS) for part in ("keys", "values")
)
_TOKEN_BYTES = sum(spec.span_bytes(1) for spec in _SPECS)
_DISTINCT_BYTES = 16 << 20
_TIMES = 2

DEFAULT_BYTES = 2048 * _TOKEN_BYTES
"""256 MiB: one chunk of an 8B-like model."""


@dataclass(frozen=True)
class Speeds:
    """Bytes a second. write is os.write and fsync, publish is the store's with its usual durability.

    read and restore read from the page cache into new memory, as a restore in a server does; restore checks digests.
    read_cold is after the file was dropped from the page cache, None where the system cannot do that.
    """

    bytes_each: int
    write: float
    read: float
    read_cold: float | None
    publish: float
    restore: float


def scratch_parent(directory: Path) -> Path:
    """A folder on the disk of a cache directory, which may not exist yet, for scratch files: beside it if possible."""
    there = directory
    while not there.is_dir():
        there = there.parent
    if there != directory:
        return there
    beside = directory.parent
    on_the_same_disk = beside.stat().st_dev == directory.stat().st_dev
    return beside if on_the_same_disk and os.access(beside, os.W_OK) else directory


def measure(parent: Path, size: int = DEFAULT_BYTES) -> Speeds:
    """Measure in a folder of its own below parent, which is removed again. OSError or KVStoreError when that fails.

    size is rounded to whole tokens, at least 16 of them.
    """
    count = max(16, size // _TOKEN_BYTES)
    size = count * _TOKEN_BYTES
    piece = os.urandom(min(size, _DISTINCT_BYTES))
    data = memoryview(bytearray((piece * (-(-size // len(piece))))[:size]))
    with tempfile.TemporaryDirectory(prefix=".kvstore-doctor-", dir=parent) as folder:
        write, read, cold = _raw(Path(folder) / "raw", data)
        publish, restore = _store(Path(folder) / "store", data, count)
    return Speeds(size, write, read, cold, publish, restore)


def _best(work: Callable[[int], Any]) -> float:
    """Seconds of the faster one of two times; work is given their number."""
    taken = []
    for number in range(_TIMES):
        started = time.perf_counter()
        work(number)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _raw(path: Path, data: memoryview) -> tuple[float, float, float | None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    fds = [os.open(path.with_suffix(f".{number}"), flags, 0o600) for number in range(_TIMES)]
    try:

        def write(number: int) -> None:
            rest = data
            while rest.nbytes:
                rest = rest[os.write(fds[number], rest[: 1 << 30]) :]
            os.fsync(fds[number])

        def read(number: int) -> None:
            with mmap.mmap(-1, data.nbytes) as memory, memoryview(memory) as view:
                preadv_full(fds[number], [view], 0)

        written, cold = _best(write), None
        if hasattr(os, "posix_fadvise"):
            for fd in fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cold = data.nbytes / _best(read)
        return data.nbytes / written, data.nbytes / _best(read), cold
    finally:
        for fd in fds:
            os.close(fd)


def _store(path: Path, data: memoryview, count: int) -> tuple[float, float]:
    tokens = range(count)
    with Store.open(path, interval=count) as store:
        spaces = [store.namespace(NamespaceInfo({"model": f"kvstore doctor {number}"})) for number in range(_TIMES)]

        def publish(number: int) -> None:
            # Other bytes each time: what is there already is not written again.
            data[0] = number
            spaces[number].publish(tokens, [Span(0, count, _SPECS, [data], phase=address_phase())])

        def restore(number: int) -> None:
            filling = Filling({spec.name: (spec.dtype, (1, spec.outer, count, *spec.inner)) for spec in _SPECS})

            def allocate(*_: Any) -> dict[str, TensorBuffer]:
                return {name: TensorBuffer(view, count) for name, view in filling.memory().items()}

            if spaces[number].read(spaces[number].lookup(tokens), allocate).tokens != count:
                raise KVStoreError("what was just written cannot be read back")
            filling.arrays()

        return data.nbytes / _best(publish), data.nbytes / _best(restore)
