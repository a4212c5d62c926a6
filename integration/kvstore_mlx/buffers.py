"""MLX arrays as plain memory: fill in place, copy rows out.

Where kvstore_mlx.selfcheck found that MLX's memory can be used as such it is (kvstore_mlx.inplace), and no memoryview
of it outlives the call or the restore that takes it; elsewhere the bytes are copied by MLX and numpy. Everything here
runs on the generation thread, because lazy arrays cannot be evaluated on another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from kvstore.blocks import DTYPE_BYTES, PAGE
from kvstore_mlx.inplace import hollow, view_of
from kvstore_mlx.pool import Loan
from kvstore_mlx.selfcheck import answer

__all__ = ["DTYPES", "Filling", "address_phase", "copy_rows", "copy_whole", "empty", "has_non_finite"]

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
    mx.uint64: "U64",
    mx.bool_: "BOOL",
    mx.float64: "F64",
}
"""MLX dtypes that a block can hold, by their safetensors names."""

_PIECE = 1 << 18
_PROBE_BYTES = (64 << 20) + PAGE
"""More than glibc's malloc keeps free at the top of its heap, where addresses say nothing: twice the largest size that
it does not take new pages for (DEFAULT_MMAP_THRESHOLD_MAX). Nobody touches it."""

_PLUS_INFINITY = {"F32": (4, 0x7F800000), "F16": (2, 0x7C00), "BF16": (2, 0x7F80), "F64": (8, 0x7FF0 << 48)}
"""Of the floating-point dtypes: bytes of a word, and the word."""

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def empty(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Evaluated arrays of these safetensors dtypes and shapes with undefined contents; see inplace.hollow."""
    if answer().in_place:
        return hollow(shapes)
    by_name = {name: dtype for dtype, name in DTYPES.items()}
    arrays = {name: mx.zeros(shape, by_name[dtype]) for name, (dtype, shape) in shapes.items()}
    mx.eval(list(arrays.values()))
    return arrays


class Filling:
    """Arrays for one restore, to be filled as plain bytes: the arrays' own where this machine's MLX allows that, else
    memory that they are made of afterwards.
    """

    def __init__(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._shapes = dict(shapes)
        self._arrays: dict[str, Any] = {}
        self._copies: dict[str, np.ndarray[Any, Any]] = {}

    def memory(self) -> dict[str, memoryview]:
        """Writable bytes of every array, good until arrays is called.

        All at once: allocated in groups, so that the first are read into meanwhile, they came later (a chunk of an 8B
        model in 31 ms instead of 25), because MLX's threads and the readers wait for each other's lock and cores.
        """
        if answer().in_place:
            self._arrays = hollow(self._shapes)
            return {name: view for name, array in self._arrays.items() if (view := view_of(array)) is not None}
        for name, (dtype, shape) in self._shapes.items():
            self._copies[name] = np.empty(math.prod(shape) * DTYPE_BYTES[dtype], np.uint8)
        return {name: copy.data for name, copy in self._copies.items()}

    def arrays(self) -> dict[str, Any]:
        """The filled arrays, in order."""
        for name in list(self._copies):
            self._arrays[name] = _from_bytes(self._copies.pop(name), *self._shapes[name])
        return self._arrays


def _from_bytes(data: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> Any:
    """An array that holds a copy of these bytes; by way of integers, because numpy has no bfloat16."""
    by_name = {name: dtype for dtype, name in DTYPES.items()}
    words = data.view(np.bool_ if dtype == "BOOL" else f"u{DTYPE_BYTES[dtype]}")
    array = mx.array(words)
    array = (array if dtype == "BOOL" else array.view(by_name[dtype])).reshape(shape)
    mx.eval(array)
    return array


def _to_bytes(array: Any) -> np.ndarray[Any, Any]:
    """A copy of an array's bytes that MLX makes, without a look at its memory."""
    flat = mx.contiguous(array).reshape(-1)
    words = flat.astype(mx.uint8) if array.dtype == mx.bool_ else flat.view(_WORDS[array.dtype.size])
    return np.array(words).view(np.uint8)


def copy_rows(array: Any, index: int, begin: int, end: int, into: Loan | None = None) -> Any:
    """Rows begin .. end of the token axis of one sequence, as contiguous bytes ``[heads, rows, row bytes]``.

    array is ``[batch, heads, tokens, *inner]``. The copy is what makes it safe to write in another thread while the
    engine goes on updating the array in place. It goes into memory of its own (a numpy array), or into the next bytes
    of a loan (a memoryview).
    """
    mx.eval(array)
    view = view_of(array) if answer().in_place else None
    if view is None:
        array = array[index : index + 1, :, begin:end]
        copied = _to_bytes(array)
        if into is None:
            return copied.reshape(array.shape[1], end - begin, -1)
        view, index, begin, end = copied.data, 0, 0, end - begin
    batch, heads, tokens = array.shape[:3]
    if into is None:
        rows = np.frombuffer(view, dtype=np.uint8).reshape(batch, heads, tokens, -1)
        return rows[index, :, begin:end].copy()
    # Slice by slice and not by numpy, which lets go of the interpreter's lock for each copy: beside a busy thread this
    # one, which is the engine's, would wait 5 ms to get it back, each time.
    row = view.nbytes // (batch * heads * tokens)
    size = (end - begin) * row
    part = into.take(heads * size)
    for head in range(heads):
        at = ((index * heads + head) * tokens + begin) * row
        part[head * size : (head + 1) * size] = view[at : at + size]
    return part


def copy_whole(array: Any) -> memoryview:
    """All bytes of an evaluated array, in order, as memory that nobody else writes to."""
    if not array.size:
        return memoryview(b"")
    if not answer().in_place:
        return _to_bytes(array).data
    view = memoryview(array)
    if not view.c_contiguous:
        del view
        array = mx.contiguous(array)
        mx.eval(array)
        view = memoryview(array)
    return np.frombuffer(view.cast("B"), dtype=np.uint8).copy().data


def has_non_finite(data: Any, dtype: str, *, but_minus: bool = False) -> bool:
    """Whether bytes of a floating-point dtype hold NaN or infinity: the exponent is then all ones.

    but_minus: minus infinity is allowed.

    Integers on purpose: numpy has no bfloat16, and this runs off the generation thread, where MLX must not be used. As
    such, words with that exponent are the largest of their sign: taken as signed the largest word tells of those
    without a sign, taken as unsigned of those with one, whose least is minus infinity. Nothing is made on the way.
    """
    if dtype not in _PLUS_INFINITY:
        return False
    size, plus = _PLUS_INFINITY[dtype]
    unsigned = np.frombuffer(data, dtype=f"u{size}")
    signed = unsigned.view(f"i{size}")
    with_sign = (plus | 1 << 8 * size - 1) + but_minus
    # In pieces, so that the second look finds them in the processor's cache.
    return any(
        signed[at : at + _PIECE].max() >= plus or unsigned[at : at + _PIECE].max() >= with_sign
        for at in range(0, unsigned.size, _PIECE)
    )


def address_phase() -> int:
    """Address within a page of MLX's large new buffers on this machine, which the payload of a block should share.

    Copying is up to twice as fast when source and destination have the same alignment within a cache line, and into
    memory that nobody has touched faster still with the same within a page. Measured at first use because it is the
    allocator's habit (glibc's malloc takes new pages for each large buffer), not a promise: a wrong value costs speed
    only.
    """
    if not answer().in_place:
        return 0
    array = hollow({"probe": ("U8", (1, 1, _PROBE_BYTES, 1))})["probe"]
    return int(np.frombuffer(memoryview(array).cast("B"), dtype=np.uint8).ctypes.data) % PAGE
