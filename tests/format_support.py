"""The format's bytes written from the text of docs/format.md alone, for known answers and for forgeries."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash


def h(*fields: bytes) -> bytes:
    """H of section 2.1."""
    return hashlib.sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as the format stores them."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def root_of(fingerprint: bytes, interval: int) -> bytes:
    """The root key of section 2.1."""
    return h(b"kvstore/1 root", fingerprint, struct.pack("<I", interval))


@dataclass(frozen=True)
class Ref:
    """A block reference as the table of section 3 has it."""

    digest: bytes
    size: int
    first: int
    count: int
    payload: int
    flags: int = 0
    zero: int = 0

    def pack(self) -> bytes:
        return struct.pack(
            "<16sQQIIII", self.digest, self.size, self.first, self.count, self.payload, self.flags, self.zero
        )


@dataclass(frozen=True)
class Forged:
    """A manifest whose every field can be chosen; what is None is computed as the format says."""

    fingerprint: bytes
    parent: bytes
    tokens: bytes
    refs: tuple[Ref, ...]
    first: int = 0
    interval: int = 16
    magic: bytes = b"KVSTNODE"
    version: int = 1
    kind: int = 1
    count: int | None = None
    n_refs: int | None = None
    key: bytes | None = None
    writer: bytes = b"kvstore test"
    writer_bytes: int | None = None
    created: int = 1_700_000_000_000_000_000
    tail: bytes = b""

    def but(self, **changes: Any) -> Forged:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def node_key(self) -> bytes:
        return h(b"kvstore/1 node", self.parent, self.tokens) if self.key is None else self.key

    def body(self) -> bytes:
        """The manifest without its checksum."""
        head = struct.pack(
            "<8sII32s32s32sQIIIIQ",
            self.magic,
            self.version,
            self.kind,
            self.fingerprint,
            self.parent,
            self.node_key,
            self.first,
            len(self.tokens) // 4 if self.count is None else self.count,
            self.interval,
            len(self.refs) if self.n_refs is None else self.n_refs,
            len(self.writer) if self.writer_bytes is None else self.writer_bytes,
            self.created,
        )
        return head + self.tokens + b"".join(ref.pack() for ref in self.refs) + self.writer

    def encode(self) -> bytes:
        """The manifest with a right checksum, whatever else is wrong."""
        body = self.body()
        return body + xxhash.xxh3_128(body).digest() + self.tail

    def file_name(self) -> str:
        """The name that section 2.2 gives it."""
        count = len(self.tokens) // 4
        rungs = "".join(
            f"{xxhash.xxh3_64(self.tokens[: 4 * n]).intdigest() % (1 << 24):06x}" if n <= count else "000000"
            for n in (64, 256, 1024)
        )
        return f"{self.parent[:16].hex()}-{count}-{self.node_key[:16].hex()}-{rungs}.kv"

    def path(self, root: Path) -> Path:
        """Where it lies in a cache directory."""
        folder = root / "objects" / "nodes" / self.fingerprint[:16].hex() / self.parent.hex()[:2]
        return folder / self.file_name()

    def install(self, root: Path) -> Path:
        """Put it where a lookup finds it."""
        path = self.path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.encode())
        return path


def block_bytes(header: bytes | str | dict[str, Any], payload: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header at all."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + payload


def install_block(root: Path, data: bytes) -> bytes:
    """Put bytes where a block of their digest lies; returns the digest."""
    digest = xxhash.xxh3_128(data).digest()
    path = root / "objects" / "blocks" / digest.hex()[:2] / digest.hex()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return digest
