"""What the adapter does to MLX's memory behind its back: allocate without touching, look at and fill arrays in place.

None of it is promised by MLX. Where it works was measured, and kvstore_mlx.selfcheck looks again on each machine; these
are the primitives that it looks at, so nothing here asks it. Everything runs on the generation thread, because lazy
arrays cannot be evaluated on another.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from kvstore.blocks import DTYPE_BYTES, PAGE

__all__ = ["Shapes", "address_of", "hollow", "view_of"]


class _NoRead(io.RawIOBase):
    """A safetensors file that is all header: mx.load allocates what it describes, and readinto leaves it as it is."""

    def __init__(self, head: bytes, size: int) -> None:
        super().__init__()
        self._head = head
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._at < len(self._head):
            view[:] = self._head[self._at : self._at + view.nbytes]
        self._at += view.nbytes
        return view.nbytes


_LARGE = 1 << 17
"""Bytes of an array from which on it matters where in a page it begins."""

Shapes: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Arrays by name: safetensors dtype and shape."""


def hollow(shapes: Shapes, phase: int | None = None) -> dict[str, Any]:
    """Evaluated arrays of these safetensors dtypes and shapes with undefined contents.

    mx.zeros would touch every page that the restore is about to fill: 1,230 ms against 10 ms for 576 MiB here.

    phase: the address within a page at which large arrays are to begin, so that what is read into them from the same
    place of a file is copied at full speed. A new buffer lies there by itself (kvstore_mlx.buffers measures where that
    is), one that the allocator hands out again does not: of a chunk's 72 arrays half, which took twice as long to fill.
    Such an array is a part of a buffer that is a page longer, and all that is left of it.
    """
    if phase is None:
        return _allocated(shapes)
    rooms = {name: _with_room(dtype, shape) for name, (dtype, shape) in shapes.items()}
    arrays = _allocated(rooms)
    for name, (dtype, shape) in shapes.items():
        if rooms[name][1] != shape:
            arrays[name] = _part(arrays[name], shape, phase, DTYPE_BYTES[dtype])
    mx.eval(list(arrays.values()))
    return {name: arrays[name] for name in shapes}


def _with_room(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    size, count = DTYPE_BYTES[dtype], math.prod(shape)
    return (dtype, (count + PAGE // size,)) if count * size >= _LARGE else (dtype, shape)


def _part(buffer: Any, shape: tuple[int, ...], phase: int, size: int) -> Any:
    """Items of a buffer from a place in a page on, contiguous; from its beginning, where no item begins there."""
    offset = (phase - address_of(buffer)) % PAGE
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return mx.as_strided(buffer, shape, strides, 0 if offset % size else offset // size)


def address_of(array: Any) -> int:
    """Where the memory of an evaluated, contiguous array begins."""
    return int(np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data)


def _allocated(shapes: Shapes) -> dict[str, Any]:
    tensors = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        tensors[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tensors).encode()
    head = len(text).to_bytes(8, "little") + text
    load: Any = mx.load  # its stub does not know the io.RawIOBase that it reads from
    arrays: dict[str, Any] = load(_NoRead(head, len(head) + at), format="safetensors")
    mx.eval(list(arrays.values()))
    return arrays


def view_of(array: Any) -> memoryview | None:
    """The memory of an evaluated array as bytes, to be used before anything else happens; None when it is strided.

    The view of a non-contiguous slice would cover neighbouring memory. A view pins the Python object and not its
    memory: it dangles when the engine updates the array and cannot do so in place.
    """
    if not array.size:
        return memoryview(bytearray())  # Python casts no view with a zero in its shape.
    view = memoryview(array)
    return view.cast("B") if view.c_contiguous else None
