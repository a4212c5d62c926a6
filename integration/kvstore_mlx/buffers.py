"""MLX arrays as plain memory: allocate without touching, fill in place, copy rows out.

What MLX allows here was measured on its CPU backend: a memoryview of an evaluated array is writable and can be filled
in place; a memoryview of a non-contiguous slice silently covers neighbouring memory, so contiguity is checked; a
memoryview pins the Python object and not its memory, so none outlives the call that takes it. Everything here runs on
the generation thread, because lazy arrays cannot be evaluated on another.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from kvstore.blocks import DTYPE_BYTES, TensorSpec

__all__ = ["DTYPES", "address_phase", "copy_rows", "empty", "has_non_finite", "spec_of"]

DTYPES: dict[Any, str] = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
}
"""MLX dtypes that a block can hold, by their safetensors names."""

_CACHE_LINE = 64


def spec_of(name: str, array: Any) -> TensorSpec:
    """The spec of an append-only array ``[batch, heads, tokens, *inner]``; ValueError for one a block cannot hold."""
    if array.dtype not in DTYPES or array.ndim < 4 or 0 in array.shape:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, which cannot be cut by token")
    return TensorSpec(name, DTYPES[array.dtype], array.shape[1], tuple(array.shape[3:]))


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


def empty(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Evaluated arrays of these safetensors dtypes and shapes with undefined contents.

    mx.zeros would touch every page that the restore is about to fill: 1,230 ms against 10 ms for 576 MiB here.
    """
    tensors = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = int(np.prod(shape)) * DTYPE_BYTES[dtype]
        tensors[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tensors).encode()
    head = len(text).to_bytes(8, "little") + text
    load: Any = mx.load  # its stub does not know the io.RawIOBase that it reads from
    arrays: dict[str, Any] = load(_NoRead(head, len(head) + at), format="safetensors")
    mx.eval(list(arrays.values()))
    return arrays


def copy_rows(array: Any, index: int, begin: int, end: int) -> np.ndarray[Any, Any]:
    """Rows begin .. end of the token axis of one sequence, as contiguous bytes ``[heads, rows, row bytes]``.

    array is ``[batch, heads, tokens, *inner]``. The copy is what makes it safe to write in another thread while the
    engine goes on updating the array in place.
    """
    mx.eval(array)
    view = memoryview(array)
    if not view.c_contiguous:
        del view
        array = mx.contiguous(array[index : index + 1, :, begin:end])
        mx.eval(array)
        index, begin, end = 0, 0, end - begin
        view = memoryview(array)
    batch, heads, tokens = array.shape[:3]
    rows = np.frombuffer(view.cast("B"), dtype=np.uint8).reshape(batch, heads, tokens, -1)
    return rows[index, :, begin:end].copy()


def has_non_finite(data: Any, dtype: str) -> bool:
    """Whether bytes of a floating-point dtype hold NaN or infinity: the exponent is then all ones.

    Integers on purpose: numpy has no bfloat16, and this runs off the generation thread, where MLX must not be used.
    """
    kinds: dict[str, tuple[Any, int]] = {
        "F32": (np.uint32, 0x7F800000),
        "F16": (np.uint16, 0x7C00),
        "BF16": (np.uint16, 0x7F80),
    }
    if dtype not in kinds:
        return False
    unsigned, exponent = kinds[dtype]
    words = np.frombuffer(data, dtype=unsigned)
    return bool(((words & exponent) == exponent).any())


def address_phase() -> int:
    """Address modulo 64 of MLX's large buffers on this machine, which the payload of a block should share.

    Copying is up to twice as fast when source and destination have the same alignment within a cache line. Measured at
    first use because it is the allocator's habit, not a promise: a wrong value costs speed only.
    """
    array = empty({"probe": ("U8", (1, 1, 1 << 20, 1))})["probe"]
    return int(np.frombuffer(memoryview(array).cast("B"), dtype=np.uint8).ctypes.data) % _CACHE_LINE
