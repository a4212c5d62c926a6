"""Blocks: immutable safetensors files that hold the KV of one token span, named by the hash of their bytes.

The payload is laid out ``[tensor][outer][token][inner]``: tensors in layer order, so that layers arrive in order, and
each ``[token][inner]`` run of an outer index (a head) contiguous, so that one preadv scatters many of them straight
into the engine's own ``[outer, capacity, inner]`` buffer. The header is padded to an offset that the writer chooses and
the manifest records: copying is twice as fast when the payload's offset is congruent to the buffer's address modulo 64.

This module knows the inside of one file. It never decides which file, and never publishes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import DamagedBlockError, PublishError
from kvstore.keys import Buffer, flat
from kvstore.manifest import BlockRef
from kvstore.untrusted import JSON_ERRORS, MAX_ELEMENTS, is_plain, parse_exact

__all__ = [
    "DTYPE_BYTES",
    "MISTAKES",
    "Span",
    "TensorBuffer",
    "TensorSpec",
    "block_head",
    "block_parts",
    "parse_header",
    "parse_part",
    "read_header",
    "read_specs",
]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes an element of each safetensors dtype that a block may hold."""

LINE = 64
"""Payload offsets are chosen modulo this: the cache line and the widest vector register."""

PAGE = 4096
"""And those of large payloads modulo this: the page of memory. See pack_header."""

_LARGE_BYTES = 1 << 20
"""Payloads from here on: the padding to a page is less than half a percent, and no more than any file is rounded up."""

MAX_HEADER_BYTES = 256 << 10
"""Room for the tensors of 1,000 layers (about 200 KB); nothing larger is parsed. See kvstore.untrusted for the rest of
what keeps a hostile header cheap."""

MAX_TENSORS = 2100
"""Opening braces of a header: sixteen tensors for each of 128 layers, or two for each of 1,000. To parse and to check
one costs 1.2 us, so this is what a hostile header costs at most."""

MAX_NAMES = 12_000
"""Colons: four for each tensor, and some thousand for a state's values. As many names as fit cost more than tensors."""

MISTAKES = (*JSON_ERRORS, BufferError)
"""What it raises to make a header of what a caller should not have given, or to look at data that are no buffers."""

_LENGTH_BYTES = 8

ENTRY_FIELDS = 3
"""Of a tensor in a header: dtype, shape and data_offsets."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An append-only tensor of an engine, without its token axis: ``[outer, tokens, *inner]``.

    For attention keys of one layer outer is the number of KV heads and inner is (head dimension,).
    """

    name: str
    dtype: str
    outer: int
    inner: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one outer index."""
        return math.prod(self.inner) * DTYPE_BYTES[self.dtype]

    def span_bytes(self, count: int) -> int:
        """Bytes of a span of count tokens."""
        return self.outer * count * self.row_bytes


@dataclass(frozen=True, slots=True)
class TensorBuffer:
    """Caller-owned memory for one tensor: C-contiguous bytes of ``[outer, capacity, *inner]``, filled in place."""

    view: memoryview
    capacity: int

    def runs(self, spec: TensorSpec, first: int, count: int, some: slice = slice(None)) -> list[memoryview]:
        """Byte views of tokens first .. first + count, one an outer index (some of them), in payload order."""
        row, stride = spec.row_bytes, self.capacity * spec.row_bytes
        begin, end = first * row, (first + count) * row
        return [self.view[head * stride + begin : head * stride + end] for head in range(spec.outer)[some]]

    def check(self, spec: TensorSpec, tokens: int) -> None:
        """Refuse memory that preadv would write past, or that is not plain bytes (a strided view is not)."""
        if (
            self.view.readonly
            or not self.view.c_contiguous
            or self.view.ndim != 1
            or self.view.itemsize != 1
            or self.capacity < tokens
            or self.view.nbytes != spec.span_bytes(self.capacity)
        ):
            raise ValueError(f"the buffer for {spec.name} does not fit {tokens} tokens of {spec}")


@dataclass(frozen=True, slots=True)
class Span:
    """KV of consecutive tokens to be published as one block.

    data is the payload in order ``[tensor][outer][token][inner]``, cut into any number of buffers. phase is the wanted
    payload offset modulo PAGE, or of a small payload modulo LINE: see pack_header. decode: see BlockRef.
    """

    first: int
    count: int
    specs: tuple[TensorSpec, ...]
    data: Sequence[Buffer]
    decode: bool = False
    phase: int = 0

    @property
    def end(self) -> int:
        """Index of the first token after the span."""
        return self.first + self.count

    @property
    def payload_bytes(self) -> int:
        """Bytes of KV in the span."""
        return sum(spec.span_bytes(self.count) for spec in self.specs)


def block_parts(span: Span) -> tuple[list[Buffer], int]:
    """The file of a span as buffers to write, and its payload offset.

    Raises PublishError for data that do not fit or are not contiguous, and for tensors that no reader takes: sizes are
    plain integers (numpy's are not), names are strings. That is for the reader to say, so the header is read back.
    """
    try:
        head = block_head(span.specs, span.first, span.count, span.phase)
        size = span.payload_bytes
        if sum(flat(part).nbytes for part in span.data) != size:
            raise PublishError(f"the data of tokens {span.first} to {span.end} are not {size} bytes of {span.specs}")
        found = read_specs(head, BlockRef(b"", len(head) + size, span.first, span.count, len(head)))
        if [spec.name for spec in found] != [spec.name for spec in span.specs]:
            raise PublishError("tensors have strings for names")
    except (DamagedBlockError, *MISTAKES) as error:
        raise PublishError(
            f"a span that nobody could read (sizes are plain integers, names are strings): {error!s:.200}"
        ) from error
    return [head, *span.data], len(head)


def block_head(specs: Sequence[TensorSpec], first: int, count: int, phase: int) -> bytes:
    """What the file of a span begins with, up to its payload; raises PublishError for what no file can hold."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "kvstore/1", "first": str(first), "count": str(count)}}
    at = 0
    for spec in specs:
        if spec.dtype not in DTYPE_BYTES or min(spec.outer, *spec.inner, 1) < 1:
            raise PublishError(f"{spec} cannot be stored; leave out tensors of size zero")
        size = spec.span_bytes(count)
        tensors[spec.name] = {
            "dtype": spec.dtype,
            "shape": [spec.outer, count, *spec.inner],
            "data_offsets": [at, at + size],
        }
        at += size
    if len(tensors) != len(specs) + 1:
        raise PublishError(f"two of the tensors have one name: {[spec.name for spec in specs]}")
    return pack_header(tensors, phase, at)


def pack_header(tensors: Mapping[str, Any], phase: int, size: int) -> bytes:
    """A safetensors header, length included, padded so that a payload of so many bytes begins where copying is fast.

    Its offset is phase modulo PAGE if it is large, else modulo LINE. A page that nobody has touched is then filled by
    one copy from one page of the file: 14 % less time than with the same cache line only, for 1.2 GB and without what
    kvstore.populate does.
    """
    text = json.dumps(tensors, separators=(",", ":")).encode()
    alignment = PAGE if size >= _LARGE_BYTES and _LENGTH_BYTES + len(text) <= MAX_HEADER_BYTES - PAGE else LINE
    text += b" " * ((phase - _LENGTH_BYTES - len(text)) % alignment)
    if _LENGTH_BYTES + len(text) > MAX_HEADER_BYTES or not (_is_bounded(text) and is_plain(text)):
        raise PublishError(f"a header of {len(text)} bytes and {len(tensors)} entries is more than any reader accepts")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def payload_phase(ref: BlockRef) -> int:
    """The phase that a block was written with, as far as it shows: of a small one, or one from before there was a PAGE,
    modulo LINE.
    """
    return ref.payload % (PAGE if ref.size - ref.payload >= _LARGE_BYTES else LINE)


def read_specs(head: Buffer, ref: BlockRef) -> tuple[TensorSpec, ...]:
    """The tensors that a block's first ref.payload bytes describe, checked to fill ref.count tokens exactly.

    Raises DamagedBlockError. Also what keeps a hostile header harmless: bounded size, no recursion, no name trusted.
    """
    tensors, _ = read_header(head, ref)
    at = 0
    try:
        for name, entry in tensors.items():
            begin, end = entry["data_offsets"]
            if len(entry) != ENTRY_FIELDS:
                raise ValueError(f"tensor {name!r:.80} has a field that none has")
            if begin != at or end != at + _bytes(name, entry, ref.count) or {type(begin), type(end)} != {int}:
                raise ValueError("tensors overlap or leave holes")
            at = end
    except JSON_ERRORS as error:
        raise DamagedBlockError(f"header cannot be read: {error!r:.200}") from error
    if ref.payload + at != ref.size:
        raise DamagedBlockError("payload size contradicts the header")
    return tuple(
        TensorSpec(name, entry["dtype"], entry["shape"][0], tuple(entry["shape"][2:]))
        for name, entry in tensors.items()
    )


def read_header(head: Buffer, ref: BlockRef) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a block's header and its metadata, which must be of the manifest's tokens.

    Raises DamagedBlockError.
    """
    if not _LENGTH_BYTES < ref.payload <= MAX_HEADER_BYTES:
        raise DamagedBlockError(f"a header of {ref.payload} bytes is not possible")
    view = memoryview(head)
    if int.from_bytes(view[:_LENGTH_BYTES], "little") != ref.payload - _LENGTH_BYTES:
        raise DamagedBlockError("header length contradicts the manifest")
    try:
        entries = parse_header(bytes(view[_LENGTH_BYTES:]))
        metadata = entries.pop("__metadata__")
        found = metadata["format"], metadata["first"], metadata["count"]
        if {*map(type, metadata.values())} != {str}:
            raise TypeError("metadata are strings")
    except JSON_ERRORS as error:
        raise DamagedBlockError(f"header cannot be read: {error!r:.200}") from error
    if found != ("kvstore/1", str(ref.first), str(ref.count)):
        raise DamagedBlockError("it holds other tokens than its manifest says, or is of another format")
    return entries, metadata


def parse_header(text: bytes) -> Any:
    """The document that a header is, as safetensors wants it: nothing before it, and spaces behind it. Raises one of
    JSON_ERRORS.
    """
    end = text.rfind(b"}") + 1
    if text[:1] != b"{" or text[end:] != b" " * (len(text) - end):
        raise ValueError("a header begins with its object, and only spaces follow it")
    return parse_part(text[:end])


def parse_part(text: bytes) -> Any:
    """A document that is a header, or in one; raises one of JSON_ERRORS."""
    if not _is_bounded(text):
        raise ValueError("more tensors or names than any header has")
    return parse_exact(text)


def _is_bounded(text: bytes) -> bool:
    return text.count(b"{") <= MAX_TENSORS and text.count(b":") <= MAX_NAMES


def _bytes(name: str, entry: Mapping[str, Any], count: int) -> int:
    """The size of a tensor of count tokens, in one pass: a header may have thousands of entries."""
    shape = entry["shape"]
    elements = 1
    for size in shape:
        if type(size) is not int or size < 1 or elements >= MAX_ELEMENTS:
            raise ValueError(f"tensor {name!r:.80} has an impossible shape")
        elements *= size
    if len(shape) < 2 or shape[1] != count:
        raise ValueError(f"tensor {name!r:.80} is of other tokens")
    return elements * DTYPE_BYTES[entry["dtype"]]
