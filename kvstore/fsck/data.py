"""Examine blocks: a header against the manifest that names the block, and all bytes against the block's name.

Pure reading. OSError means that a file could not be read, which is not damage.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import xxhash

from kvstore.blocks import DTYPE_BYTES, MAX_HEADER_BYTES, parse_header, read_specs
from kvstore.errors import DamagedBlockError
from kvstore.fs import mostly_holes
from kvstore.fsck.findings import Seen
from kvstore.fsck.values import Fault, Reader, seen_of, unopened
from kvstore.keys import Buffer
from kvstore.layout import Kind
from kvstore.manifest import BlockRef
from kvstore.states import parse_state_header
from kvstore.untrusted import JSON_ERRORS, fits

__all__ = ["Headers", "Verifier", "judge_block"]

BUFFER_BYTES = 1 << 20
"""Read and hash in pieces that stay in a core's cache: 13 GB/s on the development machine, 10 with 8 MiB."""

_KNOWN = 256
"""Headers remembered: blocks of one model have a few, one for each length of a span."""


class Headers:
    """Compares blocks with the manifests that name them, and remembers which of both were found good.

    All blocks of a model's full chunks have the same header but for the index of their first token, so that nearly none
    has to be parsed. For one thread.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._good: dict[bytes, tuple[BlockRef, bytes]] = {}
        self._known: dict[tuple[bytes, bytes, int, int, Kind], bytes] = {}

    def check(self, ref: BlockRef, kind: Kind) -> bytes:
        """Whether a block can be what a manifest says, by its size and header: which tensors it holds (see _parse).

        Raises DamagedBlockError and OSError.
        """
        good = self._good.get(ref.digest)
        if good is not None and good[0] == ref:
            return good[1]
        fd, status = self._reader.fs.open_fd(self._reader.block(ref.digest))
        try:
            if status.st_size != ref.size:
                raise DamagedBlockError(f"it is {status.st_size} bytes long, and its manifest says {ref.size}")
            head = os.pread(fd, min(ref.payload, MAX_HEADER_BYTES), 0)
        finally:
            os.close(fd)
        # As pack_header writes it. What varies between blocks is here; what follows is the same for many.
        usual = b'{"__metadata__":{"format":"kvstore/1","first":"%d","count":"%d"' % (ref.first, ref.count)
        if head.startswith(usual, 8):
            known = (head[:8], head[8 + len(usual) :], ref.count, ref.size, kind)
            tensors = self._known.get(known)
            if tensors is None:
                tensors = _parse(head, ref, kind)
                if len(self._known) >= _KNOWN:
                    self._known.clear()
                self._known[known] = tensors
        else:
            tensors = _parse(head, ref, kind)
        self._good[ref.digest] = ref, tensors
        return tensors


def _parse(head: bytes, ref: BlockRef, kind: Kind) -> bytes:
    """A hash of the tensors of a token span, which all blocks of a prompt have in common; empty for a state."""
    if kind == "kv":
        specs = [(spec.name, spec.dtype, spec.outer, spec.inner) for spec in read_specs(head, ref)]
        return xxhash.xxh3_64_digest(repr(specs).encode(errors="backslashreplace"))
    parse_state_header(head, ref)
    return b""


def judge_block(reader: Reader, digest: bytes) -> tuple[Seen, Fault | None] | None:
    """Read one suspicious block whole and say what is wrong with it, if anything; None when it is gone.

    Decides who is at fault when a manifest and a block contradict each other. Raises OSError.
    """
    path = reader.block(digest)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    try:
        with reader.fs.open_read(Path(path)) as (fd, status):
            seen = seen_of(status)
            # By its header first, which decides what size it can have: a sparse file of terabytes is quickly made, with
            # an honest header, too.
            why = (
                "it is mostly holes"
                if mostly_holes(fd, status)
                else _bounds(os.pread(fd, MAX_HEADER_BYTES, 0), status.st_size)
            )
            if why:
                return seen, Fault("block-damaged", f"It is damaged: {why}.")
            if _digest(fd, buffer, lambda: False) != digest:
                return seen, Fault("block-damaged", f"Its {status.st_size:,} bytes are not those of its name.")
    except FileNotFoundError:
        return None
    except OSError as error:
        found = unopened(path, error, "block-damaged")
        return (found.seen, found.fault) if found is not None else None
    return seen, None


def _bounds(head: bytes, size: int) -> str:
    """Why a block's file cannot be a safetensors file of this size, or an empty string."""
    length = _header_length(head)
    if not 0 < length <= min(size, MAX_HEADER_BYTES) - 8:
        return "its header does not fit into it"
    try:
        tensors = parse_header(head[8 : 8 + length])
        del tensors["__metadata__"]
        at = 0
        for begin, end, shape, dtype in sorted(
            (*entry["data_offsets"], entry["shape"], entry["dtype"]) for entry in tensors.values()
        ):
            if not fits(shape) or begin != at or end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
                return "its tensors overlap or leave holes"
            at = end
    except JSON_ERRORS:
        return "its header cannot be understood"
    return "" if 8 + length + at == size else "its tensors do not fill it"


def _header_length(head: Buffer) -> int:
    return int.from_bytes(head[:8], "little")


class Verifier:
    """Reads whole blocks and compares their digests; called from several threads, each with a buffer of its own.

    fs and layout are the reader's. stop: asked between two pieces; when it says so, Interrupted is raised.
    """

    def __init__(self, reader: Reader, stop: Callable[[], bool]) -> None:
        self._reader = reader
        self._stop = stop
        self._local = threading.local()

    def verify(self, digest: bytes, known: Callable[[Seen], bool]) -> tuple[Seen, bool | None] | None:
        """Whether a block's bytes are right; None for the answer when known says so already, None when it is gone.

        Raises OSError, also for what is not a regular file, and InterruptedError when asked to stop.
        """
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(BUFFER_BYTES))
        try:
            with self._reader.fs.open_read(Path(self._reader.block(digest))) as (fd, status):
                seen = seen_of(status)
                if known(seen):
                    return seen, None
                return seen, not mostly_holes(fd, status) and _digest(fd, self._local.buffer, self._stop) == digest
        except FileNotFoundError:
            return None


def _digest(fd: int, buffer: memoryview, stop: Callable[[], bool]) -> bytes:
    """XXH3-128 of a block from its beginning, in pieces that are hashed while they are hot.

    Empty for what cannot be a block by its first bytes: nobody waits for the end of a sparse file.
    """
    state = xxhash.xxh3_128()
    got = os.readv(fd, [buffer])
    if not 0 < _header_length(buffer[:got]) <= MAX_HEADER_BYTES:
        return b""
    while got:
        state.update(buffer[:got])
        if stop():
            raise InterruptedError(errno.EINTR, "stopped")
        got = os.readv(fd, [buffer])
    return state.digest()
