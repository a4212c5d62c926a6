"""Boundary states: what an engine cannot cut by token, saved whole at one prefix.

Recurrent and convolution state, rotating windows, next-token logits, an engine's own extras: named tensors of any shape
and small typed values. A state is a block beside the KV of its node, under a manifest of its own (``.state``), so that
it can be added later, or thinned out alone, and a ``stat`` tells a resume point.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from kvstore.blocks import DTYPE_BYTES, ENTRY_FIELDS, MAX_HEADER_BYTES, MISTAKES, pack_header, parse_part, read_header
from kvstore.context import Context, Space
from kvstore.errors import DamagedBlockError, PublishError
from kvstore.fs import allocated_bytes, is_damage, is_lost, mostly_holes, out_of_files, preadv_full
from kvstore.interpreter import short_turns
from kvstore.keys import Buffer, flat
from kvstore.lookup import Step, load_manifest
from kvstore.manifest import BlockRef
from kvstore.pacing import paced
from kvstore.populate import populate
from kvstore.untrusted import JSON_ERRORS, fits

__all__ = [
    "AllocateState",
    "Scalar",
    "State",
    "StateTensor",
    "digest_of_file",
    "parse_state_header",
    "read_state",
    "state_parts",
    "state_size",
]

_UNSEEN = 4 << 20
"""Memory that a header alone is believed for."""

_PIECE = 1 << 20

MAX_SIZE = 1 << 40
"""No size of a tensor's shape reaches this."""

Scalar: TypeAlias = bool | int | float | str | None
"""A small typed value: what JSON can tell apart. Floats keep all their bits (repr round-trips)."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A named tensor of any shape. One with a zero size has no bytes and is restored by its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class State:
    """A boundary state to be published: one buffer of bytes a tensor, in order, and values by name.

    decode: something that led to it was decoded and not prefilled; see BlockRef.
    """

    tensors: tuple[StateTensor, ...]
    data: Sequence[Buffer]
    values: Mapping[str, Scalar] = field(default_factory=dict)
    phase: int = 0
    decode: bool = False


AllocateState: TypeAlias = Callable[[tuple[StateTensor, ...]], Mapping[str, memoryview]]
"""Given the tensors, returns writable C-contiguous bytes for each by name (none is needed for a zero size).
ValueError refuses the tensors: see read_state."""


def state_parts(state: State, first: int, count: int) -> tuple[list[Buffer], int]:
    """The file of a state as buffers to write, and its payload offset; raises PublishError for what no reader takes.

    That is for the reader to say, so the header is read back. JSON hides one thing from it: names that are no strings.
    """
    try:
        parts, payload, size = _parts(state, first, count)
        tensors, values = parse_state_header(parts[0], BlockRef(b"", size, first, count, payload))
        unlike = {tensor.name for tensor in tensors} != {tensor.name for tensor in state.tensors}
        if unlike or values.keys() != state.values.keys():
            raise PublishError("tensors and values of a state have strings for names")
    except (DamagedBlockError, *MISTAKES) as error:
        raise PublishError(
            f"a state that nobody could read (sizes are plain integers, names are strings): {error!s:.200}"
        ) from error
    return parts, payload


def _parts(state: State, first: int, count: int) -> tuple[list[Buffer], int, int]:
    """Buffers to write, payload offset and size of the file; raises PublishError, or one of MISTAKES."""
    if len(state.data) != len(state.tensors):
        raise PublishError("a state needs one buffer for each tensor")
    if type(state.decode) is not bool:
        raise PublishError("decode is True or False")
    empty = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in state.tensors if not tensor.nbytes]
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "kvstore/1",
            "first": str(first),
            "count": str(count),
            "values": json.dumps(dict(state.values), separators=(",", ":")),
            "empty": json.dumps(empty, separators=(",", ":")),
        }
    }
    at = 0
    parts: list[Buffer] = []
    for tensor, data in zip(state.tensors, state.data, strict=True):
        size = tensor.nbytes
        if (given := flat(data).nbytes) != size:
            raise PublishError(f"{tensor.name} has {given} bytes of data, not {size}")
        if size:
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + size],
            }
            at += size
            parts.append(data)
    head = pack_header(entries, state.phase, at)
    return [head, *parts], len(head), len(head) + at


def read_state(space: Space, step: Step, allocate: AllocateState) -> dict[str, Scalar] | None:
    """Read the state at a node into memory that allocate provides, digest checked; its values.

    None when it is missing or damaged; the counter counts it and the next lookup passes it by. One that cannot be read
    now is a miss. What allocate raises for tensors of a whole one is raised here; with ValueError it refuses them, and
    the state is passed by from then on, and replaced by the next publish.
    """
    path = step.path.with_suffix(".state")
    with space.context.reading([step.where, str(path)]):
        return _read_at(space, step, path, allocate)


def _read_at(space: Space, step: Step, path: Path, allocate: AllocateState) -> dict[str, Scalar] | None:
    context = space.context
    ref = _ref(space, step, path)
    if ref is None:
        return None
    block = context.layout.block(ref.digest)
    try:
        found = _read(context, ref, path, allocate)
    except (OSError, EOFError, DamagedBlockError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or is_damage(error):
            context.counters.add(damaged=1)
            context.damaged.update({path, block})
        elif not out_of_files(error):
            context.counters.add(missing=1)
            if is_lost(error):
                context.damaged.add(block)
        return None
    context.damaged.discard(block)
    if isinstance(found, Exception):
        try:
            raise found
        finally:
            # It refers to this frame, and would keep the engine's memory in a cycle.
            del found
    context.counters.add(restored_bytes=ref.size)
    return found


def state_size(space: Space, step: Step) -> int:
    """Bytes that read_state would read at a node; 0 when there is nothing good to read."""
    ref = _ref(space, step, step.path.with_suffix(".state"))
    return 0 if ref is None else ref.size


def _ref(space: Space, step: Step, path: Path) -> BlockRef | None:
    """What a state's manifest names; None when it is missing, or damaged, which is remembered and counted once.

    Its name, which was compared, has the parent and the key; where it begins is in neither.
    """
    if path in space.context.damaged:
        return None
    manifest = load_manifest(space, path)
    if manifest is None:
        return None
    if (manifest.kind, manifest.first, manifest.end) != ("state", step.first, step.end):
        space.context.counters.add(damaged=1)
        space.context.damaged.add(path)
        return None
    (ref,) = manifest.blocks
    return ref


def _read(context: Context, ref: BlockRef, path: Path, allocate: AllocateState) -> dict[str, Scalar] | Exception:
    """The values of a state; or what allocate raised for tensors of a whole one, returned so that its OSError is not
    taken for one of the file's.
    """
    with context.fs.open_read(context.layout.block(ref.digest)) as (fd, status):
        if status.st_size != ref.size:
            raise DamagedBlockError(f"is {status.st_size} bytes long, not {ref.size}")
        if mostly_holes(fd, status):
            raise DamagedBlockError("is mostly holes")
        head = os.pread(fd, min(ref.payload, MAX_HEADER_BYTES), 0)
        tensors, values = parse_state_header(head, ref)
        # An honest header is no proof that there is what it describes, and the engine has only the header to go by.
        # Files without holes cost their maker what they cost here; the others are looked at before memory is asked for.
        if _UNSEEN < status.st_size > allocated_bytes(status) and digest_of_file(fd, status.st_size) != ref.digest:
            raise DamagedBlockError("digest does not match its bytes")
        asked = False
        try:
            memory = allocate(tensors)
            asked = True
            runs = _runs(memory, tensors)
        except Exception as refusal:
            # The header was not checked yet: a flipped bit in a name gives the engine a tensor that it has not.
            if digest_of_file(fd, ref.size) != ref.digest:
                raise DamagedBlockError("digest does not match its bytes") from refusal
            if isinstance(refusal, ValueError) and not asked:
                context.damaged.add(path)
            return refusal
        with short_turns():
            digest = _fill(fd, ref.payload, runs, xxhash.xxh3_128(head))
        if digest != ref.digest:
            raise DamagedBlockError("digest does not match its bytes")
        return values


def _runs(memory: Mapping[str, memoryview], tensors: Sequence[StateTensor]) -> list[memoryview]:
    """The bytes to fill, in payload order; raises ValueError when they do not fit."""
    filled = [tensor for tensor in tensors if tensor.nbytes]
    runs = [flat(memory[tensor.name]) for tensor in filled]
    if [run.nbytes for run in runs] != [tensor.nbytes for tensor in filled] or any(run.readonly for run in runs):
        raise ValueError("the memory for a state does not fit its tensors")
    return runs


def _fill(fd: int, offset: int, runs: Iterable[memoryview], state: xxhash.xxh3_128) -> bytes:
    """Read what follows offset into the runs, hashed while it is in the processor's cache; the digest then."""
    for run in runs:
        for at in range(0, run.nbytes, _PIECE):
            view = run[at : at + _PIECE]
            populate([view])
            preadv_full(fd, [view], offset)
            state.update(view)
            offset += view.nbytes
    return state.digest()


def digest_of_file(fd: int, size: int, rest: Callable[[], None] = lambda: None) -> bytes:
    """XXH3-128 of a file's first size bytes, through little memory, with a chance to rest before each piece.

    Raises EOFError when it is shorter.
    """
    buffer = memoryview(bytearray(_PIECE))
    pieces = (buffer[: size - at] for at in range(0, size, _PIECE))
    return _fill(fd, 0, paced(pieces, rest, every=1), xxhash.xxh3_128())


def parse_state_header(head: Buffer, ref: BlockRef) -> tuple[tuple[StateTensor, ...], dict[str, Scalar]]:
    """Tensors (in payload order, then the empty ones) and values of a header; raises DamagedBlockError.

    Every name is there once, because memory is asked for by name.
    """
    entries, metadata = read_header(head, ref)
    try:
        values = parse_part(metadata["values"].encode())
        rows = [[name, entry["dtype"], entry["shape"]] for name, entry in entries.items()]
        tensors = [_tensor(row) for row in rows]
        at = 0
        for tensor, entry in zip(tensors, entries.values(), strict=True):
            size = tensor.nbytes
            begin, end = entry["data_offsets"]
            if not size or begin != at or end != at + size or type(begin) is not int or type(end) is not int:
                raise ValueError("tensors overlap or leave holes")
            if len(entry) != ENTRY_FIELDS:
                raise ValueError(f"tensor {tensor.name!r:.80} has a field that none has")
            at += size
        listed = parse_part(metadata["empty"].encode())
        if type(listed) is not list:
            raise TypeError("tensors without data are no list")
        empty = [_tensor(row) for row in listed]
        if any(tensor.nbytes for tensor in empty):
            raise ValueError("a tensor without data has a size")
        tensors += empty
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("two tensors have one name")
        if bad := [name for name, value in values.items() if not _is_scalar(value)]:
            raise TypeError(f"the value {bad[0]!r:.80} is no scalar")
    except JSON_ERRORS as error:
        raise DamagedBlockError(f"header cannot be read: {error!r:.200}") from error
    if ref.payload + at != ref.size:
        raise DamagedBlockError("payload size contradicts the header")
    return tuple(tensors), values


def _is_scalar(value: object) -> bool:
    return isinstance(value, bool | int | str | None) or (isinstance(value, float) and math.isfinite(value))


def _tensor(row: Sequence[Any]) -> StateTensor:
    name, dtype, shape = row
    if type(row) is not list or type(shape) is not list:
        raise TypeError("a tensor is a list with a list of its sizes")
    if not isinstance(name, str) or name == "__metadata__" or dtype not in DTYPE_BYTES:
        raise ValueError(f"tensor {name!r:.80} has an impossible name or dtype")
    if any(type(size) is not int or not 0 <= size < MAX_SIZE for size in shape) or not fits(shape):
        raise ValueError(f"tensor {name!r:.80} has an impossible shape")
    return StateTensor(name, dtype, tuple(shape))
