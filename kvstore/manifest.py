"""The manifest of one node: which tokens it covers and which blocks hold their KV.

Binary on purpose. A restore of 200,000 tokens reads a hundred of them before it reads any KV; a JSON manifest that
lists every tensor costs seven times its read to parse. All integers are little-endian; docs/format.md is normative.

This module turns bytes into Manifest values and back, and rejects every byte string that it would not itself write.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import DamagedManifestError, FormatVersionError
from kvstore.keys import TOKEN_BYTES, Buffer, Key, checksum, node_key
from kvstore.keys import rungs as rungs_of
from kvstore.layout import NAME_KEY_BYTES, Kind, NodeName

__all__ = [
    "MAX_MANIFEST_BYTES",
    "BlockRef",
    "Manifest",
    "References",
    "decode",
    "decode_references",
    "encode",
    "max_manifest_bytes",
    "newer_format",
]

MAGIC = b"KVSTNODE"
FORMAT = 1
_HEAD = struct.Struct("<8s I I 32s 32s 32s Q I I I I Q")
_REF = struct.Struct("<16s Q Q I I I I")
_KINDS: dict[Kind, int] = {"kv": 1, "state": 2}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}
_DECODE_FLAG = 1
_CHECKSUM_BYTES = 16

MAX_INTERVAL = 1 << 16
MAX_BLOCKS = 1 << 16
MAX_WRITER_BYTES = 256
MAX_MANIFEST_BYTES = (
    _HEAD.size + MAX_INTERVAL * TOKEN_BYTES + MAX_BLOCKS * _REF.size + MAX_WRITER_BYTES + _CHECKSUM_BYTES
)
"""Nothing larger is read, so that a damaged size cannot make a reader allocate much."""


def max_manifest_bytes(interval: int) -> int:
    """As MAX_MANIFEST_BYTES, in a directory of this interval: no chunk has more blocks than tokens."""
    return _HEAD.size + interval * (TOKEN_BYTES + _REF.size) + MAX_WRITER_BYTES + _CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block of a node: its digest (16 bytes, also its file name), file size, and the token span it holds.

    first counts from the beginning of the prompt. payload is the offset of the first tensor byte in the file. decode
    says that at least one token of the span was computed by decoding rather than prefill, whose KV can differ in the
    last bits.
    """

    digest: bytes
    size: int
    first: int
    count: int
    payload: int
    decode: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """One node. tokens are packed uint32; first is the index of the first of them in the prompt."""

    kind: Kind
    fingerprint: bytes
    parent: Key
    key: Key
    first: int
    interval: int
    tokens: bytes
    blocks: tuple[BlockRef, ...]
    created_ns: int
    writer: str

    @property
    def count(self) -> int:
        """Number of tokens this node covers, 1 to interval."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """Length in tokens of the prefix this node completes."""
        return self.first + self.count

    @property
    def name(self) -> NodeName:
        """The parts of its file's name."""
        return NodeName.of(self.parent, self.count, self.key, rungs_of(self.tokens, self.count))

    @property
    def file_name(self) -> str:
        """The name that its file must have: name.file, without the parts, because fsck asks a million manifests."""
        parent, key, count = self.parent[:NAME_KEY_BYTES].hex(), self.key[:NAME_KEY_BYTES].hex(), self.count
        return f"{parent}-{count}-{key}-{rungs_of(self.tokens, count)}.{self.kind}"


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest, checksum included."""
    writer = manifest.writer.encode()[:MAX_WRITER_BYTES].decode(errors="ignore").encode()
    body = b"".join(
        (
            _HEAD.pack(
                MAGIC,
                FORMAT,
                _KINDS[manifest.kind],
                manifest.fingerprint,
                manifest.parent,
                manifest.key,
                manifest.first,
                manifest.count,
                manifest.interval,
                len(manifest.blocks),
                len(writer),
                manifest.created_ns,
            ),
            manifest.tokens,
            *(
                _REF.pack(ref.digest, ref.size, ref.first, ref.count, ref.payload, _DECODE_FLAG if ref.decode else 0, 0)
                for ref in manifest.blocks
            ),
            writer,
        )
    )
    return body + checksum(body)


def decode(data: Buffer) -> Manifest:
    """The manifest in data, with its checksum, key, spans and bounds checked; raises DamagedManifestError."""
    if len(data) < _HEAD.size + _CHECKSUM_BYTES:
        raise DamagedManifestError(f"manifest of {len(data)} bytes is too short")
    view = memoryview(data)
    (
        magic,
        version,
        kind_number,
        fingerprint,
        parent,
        key,
        first,
        count,
        interval,
        n_blocks,
        writer_bytes,
        created_ns,
    ) = _HEAD.unpack_from(view)
    if magic != MAGIC or version != FORMAT or kind_number not in _KIND_OF:
        raise DamagedManifestError("manifest has another magic, version or kind")
    tokens_at = _HEAD.size
    refs_at = tokens_at + count * TOKEN_BYTES
    writer_at = refs_at + n_blocks * _REF.size
    end = writer_at + writer_bytes
    if end + _CHECKSUM_BYTES != len(data):
        raise DamagedManifestError("manifest size contradicts its counts")
    if checksum(view[:end]) != view[end:]:
        raise DamagedManifestError("manifest checksum does not match")
    chunk = 1 <= count <= interval <= MAX_INTERVAL and first % interval == 0
    # (No chunk has more blocks than tokens.)
    if not chunk or n_blocks > min(count, MAX_BLOCKS) or writer_bytes > MAX_WRITER_BYTES:
        raise DamagedManifestError("manifest counts are out of their bounds, or not inside one chunk")
    tokens = bytes(view[tokens_at:refs_at])
    if node_key(parent, tokens) != key:
        raise DamagedManifestError("manifest key is not the key of its tokens")
    blocks = _block_refs(view[refs_at:writer_at])
    kind = _KIND_OF[kind_number]
    if kind == "state":
        _check_state(blocks, first, count)
    elif blocks:
        _check_spans(blocks, first, count)
    try:
        writer = str(view[writer_at:end], "utf-8")
    except UnicodeDecodeError as error:
        raise DamagedManifestError("manifest writer is not UTF-8") from error
    return Manifest(kind, fingerprint, parent, key, first, interval, tokens, blocks, created_ns, writer)


class References(NamedTuple):
    """What a manifest refers to: its place, its packed tokens, and the digest and size of each of its blocks."""

    parent: Key
    first: int
    tokens: memoryview
    blocks: tuple[tuple[bytes, int], ...]


def decode_references(data: Buffer) -> References:
    """What the manifest in data refers to, a fifth of the cost of decode: for whoever reads a million of them.

    Checked by its checksum, so the references are those that were written; whether its key is that of its tokens is
    for the read path to say, which serves them. Raises DamagedManifestError; FormatVersionError for one of a newer
    version, whose references cannot be known.
    """
    if len(data) < _HEAD.size + _CHECKSUM_BYTES:
        raise DamagedManifestError(f"manifest of {len(data)} bytes is too short")
    view = memoryview(data)
    magic, version, _, _, parent, _, first, count, _, n_blocks, writer_bytes, _ = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise DamagedManifestError("manifest has another magic")
    if version != FORMAT:
        if newer_format(view) is not None:
            raise FormatVersionError(f"manifest has format {version}, and this kvstore knows format {FORMAT}")
        raise DamagedManifestError("manifest has a format that there never was")
    refs_at = _HEAD.size + count * TOKEN_BYTES
    writer_at = refs_at + n_blocks * _REF.size
    end = writer_at + writer_bytes
    if end + _CHECKSUM_BYTES != len(data):
        raise DamagedManifestError("manifest size contradicts its counts")
    if checksum(view[:end]) != view[end:]:
        raise DamagedManifestError("manifest checksum does not match")
    blocks = tuple(row[:2] for row in _REF.iter_unpack(view[refs_at:writer_at]))
    return References(parent, first, view[_HEAD.size : refs_at], blocks)


def newer_format(data: Buffer, magic: bytes = MAGIC) -> int | None:
    """The format of a file that is whole and of a newer version; None for any other file.

    Every format keeps the magic, the place of its number and the checksum at the end (docs/format.md section 3), so
    that one flipped bit in the number is damage, which heals, and not a newer version, which nobody may touch.
    """
    view = memoryview(data)
    version = int.from_bytes(view[8:12], "little")
    if view[:8] != magic or version <= FORMAT or checksum(view[:-_CHECKSUM_BYTES]) != view[-_CHECKSUM_BYTES:]:
        return None
    return version


def _block_refs(rows: memoryview) -> tuple[BlockRef, ...]:
    blocks = []
    for digest, size, first, count, payload, flags, reserved in _REF.iter_unpack(rows):
        if flags & ~_DECODE_FLAG or reserved:
            raise DamagedManifestError("manifest has flags this version does not know")
        blocks.append(BlockRef(digest, size, first, count, payload, flags == _DECODE_FLAG))
    return tuple(blocks)


def _check_state(blocks: tuple[BlockRef, ...], first: int, count: int) -> None:
    """A boundary state has one block, which says itself whose it is: no other prefix's state is served for this one."""
    if [(ref.first, ref.count) for ref in blocks] != [(first, count)] or blocks[0].payload > blocks[0].size:
        raise DamagedManifestError("a boundary state has exactly one block, of its own tokens")


def _check_spans(blocks: tuple[BlockRef, ...], first: int, count: int) -> None:
    """The spans of a kv manifest must follow each other without hole or overlap and cover the node exactly.

    (A kv manifest without any block is a node of an engine that keeps nothing per token.)
    """
    at = first
    for ref in blocks:
        if ref.first != at or ref.count < 1 or ref.payload >= ref.size:
            raise DamagedManifestError("manifest spans leave a hole or overlap")
        at += ref.count
    if at != first + count:
        raise DamagedManifestError("manifest spans do not cover its tokens")
