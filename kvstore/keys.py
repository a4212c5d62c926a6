"""Names of things: namespace fingerprints, node keys, block digests and rungs.

Two kinds of hash, on purpose. A node key decides *whose* KV is served, so it is SHA-256 over every token of the prefix
(weak prefix hashes have had security advisories; a chain over 131,072 tokens costs about 0.4 ms). A block digest only
checks bytes that a key already led to, so it is XXH3-128, which runs at memory speed.

This module computes; it never touches a file.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from kvstore.errors import TokenError

__all__ = [
    "RUNGS",
    "TOKEN_BYTES",
    "Buffer",
    "Key",
    "block_digest",
    "checksum",
    "flat",
    "namespace_fingerprint",
    "node_key",
    "pack_tokens",
    "request_key",
    "root_key",
    "rungs",
    "unpack_tokens",
]

Key: TypeAlias = bytes
"""A full 32-byte SHA-256 node key. File names carry its first 16 bytes."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything that is bytes in memory and can be read without a copy."""


_NATIVE_ORDER = "@=<" if sys.byteorder == "little" else "@=>"
_NUMBERS = frozenset("?cbBhHiIlLqQnNefd")
"""Formats of one number, as the struct module calls them."""


def flat(data: Buffer) -> memoryview:
    """The bytes of contiguous memory in a row; none of an array without elements, whose view Python does not cast.

    Raises ValueError for what are no plain numbers in this machine's order of bytes: of those that are swapped, or are
    pointers to objects, a reader would make other numbers.
    """
    view = memoryview(data)
    if view.format.lstrip(_NATIVE_ORDER) not in _NUMBERS:
        raise ValueError(f"elements of format {view.format!r:.80} are no plain numbers of this machine")
    return view.cast("B") if view.nbytes else memoryview(b"")


TOKEN_BYTES = 4
"""Tokens are stored and hashed as unsigned 32-bit little-endian integers."""

RUNGS = (64, 256, 1024)
"""A manifest name carries a short hash of this many of its chunk's first tokens, so that one folder listing finds the
child that shares most tokens with a prompt without opening every candidate. 64 is the shortest overlap worth restoring;
each step is four times the one before, so the best candidates are ordered well enough with three hashes."""

_RUNG_SIZES = tuple(rung * TOKEN_BYTES for rung in RUNGS)
_RUNG_BITS = 24
_RUNG_MASK = (1 << _RUNG_BITS) - 1


def _digest(*fields: Buffer) -> bytes:
    """SHA-256 of the fields, each prefixed with its length as 8 bytes little-endian, so that no two lists collide."""
    return sha256(b"".join(part for field in fields for part in (len(field).to_bytes(8, "little"), field))).digest()


def pack_tokens(tokens: Iterable[int] | bytes) -> bytes:
    """Token ids as uint32 little-endian bytes; bytes pass through, so packing twice is free.

    Raises TokenError for an id outside 0 .. 2**32 - 1 (mlx-lm marks image patches with negative ids: those prompts are
    not cacheable by their tokens alone).
    """
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise TokenError(f"packed tokens must be a multiple of {TOKEN_BYTES} bytes, got {len(tokens)}")
        return tokens
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be integers from 0 to 4294967295 ({error})") from error
    if sys.byteorder == "big":  # pragma: no cover - no such machine at hand
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: Buffer) -> Sequence[int]:
    """The inverse of pack_tokens."""
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":  # pragma: no cover - no such machine at hand
        tokens.byteswap()
    return tokens


def namespace_fingerprint(description: Mapping[str, Any], salt: bytes = b"") -> bytes:
    """The 32-byte fingerprint of everything that must be equal for KV bytes to be interchangeable.

    description is hashed as canonical JSON (sorted keys, no spaces, UTF-8). salt separates tenants: who does not know
    it can neither find nor forge a prefix of that tenant.
    """
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return _digest(b"kvstore/1 namespace", canonical.encode(), salt)


def root_key(fingerprint: bytes, interval: int) -> Key:
    """The key of the empty prefix of a namespace."""
    return _digest(b"kvstore/1 root", fingerprint, interval.to_bytes(4, "little"))


def node_key(parent: Key, packed_chunk: Buffer) -> Key:
    """The key of the prefix that ends with this chunk (or tail) and goes on from parent."""
    # The same bytes as _digest would hash, put together faster: a lookup does this once a chunk.
    return sha256(b"".join((_NODE_HEAD, parent, len(packed_chunk).to_bytes(8, "little"), packed_chunk))).digest()


_NODE_HEAD = (14).to_bytes(8, "little") + b"kvstore/1 node" + (32).to_bytes(8, "little")


def request_key(scope: bytes, request: bytes) -> bytes:
    """The 32-byte key of a whole request's tokenization under everything that decides its tokens (the scope)."""
    return _digest(b"kvstore/1 tokens", scope, request)


def rungs(packed_chunk: Buffer, count: int) -> str:
    """Hex of the low 24 bits of XXH3-64 of the chunk's first 64, 256 and 1,024 tokens, zeros where it is shorter.

    A hint for choosing candidates only: tokens are compared before anything is served.
    """
    # Written out, because a lookup does this once a chunk and a loop over RUNGS takes twice as long.
    one = xxh3_64_intdigest(packed_chunk[: _RUNG_SIZES[0]]) & _RUNG_MASK if count >= RUNGS[0] else 0
    two = xxh3_64_intdigest(packed_chunk[: _RUNG_SIZES[1]]) & _RUNG_MASK if count >= RUNGS[1] else 0
    three = xxh3_64_intdigest(packed_chunk[: _RUNG_SIZES[2]]) & _RUNG_MASK if count >= RUNGS[2] else 0
    return f"{one << 2 * _RUNG_BITS | two << _RUNG_BITS | three:018x}"


def block_digest(parts: Iterable[Buffer]) -> bytes:
    """XXH3-128 of the concatenated parts: the name of the block they make."""
    state = xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def checksum(data: Buffer) -> bytes:
    """XXH3-128 of a manifest's bytes."""
    return xxh3_128_digest(data)
