"""Make one block out of several that hold consecutive spans of the same tensors.

In a block every tensor is ``[outer][token][inner]``, so a joined block takes, for each tensor and each outer index, the
run of the first block, then that of the second, and so on. Each source is thereby read once from its beginning to its
end: one pass reads, checks every digest and writes, through one small buffer, whatever the blocks' sizes.

Changes nothing but the new block; which blocks to join, and what then names the result, is the business of
kvstore.repack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import xxhash

from kvstore.blocks import MAX_HEADER_BYTES, TensorSpec, block_head, payload_phase, read_specs
from kvstore.commit import place_block
from kvstore.context import Context
from kvstore.errors import DamagedBlockError
from kvstore.fs import mostly_holes, preadv_full
from kvstore.manifest import BlockRef
from kvstore.staged import staged_file

__all__ = ["MAX_SOURCES", "join"]

MAX_SOURCES = 128
"""Blocks joined at once: each is an open file, and macOS gives a process 256 of them."""

BUFFER_BYTES = 4 << 20
"""Read, hashed and written at a time: large enough for long writes, small enough to be hashed while it is hot."""


def join(context: Context, refs: Sequence[BlockRef], progress: Callable[[int], None]) -> tuple[BlockRef, int]:
    """Write one block with the spans of all refs, and give it its name; its reference, and the bytes written.

    refs follow each other, at most MAX_SOURCES of them. progress is told the bytes as they are written. Raises
    DamagedBlockError when a source is missing, cannot be read, is not what its reference says, or holds other tensors
    than the first: nothing is published then. Raises OSError when the result cannot be written.
    """
    first, count = refs[0].first, sum(ref.count for ref in refs)
    with ExitStack() as stack:
        sources = [_Source(context, ref, stack) for ref in refs]
        specs = sources[0].specs
        if any(source.specs != specs for source in sources):
            raise DamagedBlockError(f"the blocks of tokens {first} to {first + count} hold different tensors")
        head = block_head(specs, first, count, payload_phase(max(refs, key=lambda ref: ref.size)))
        size = len(head) + sum(spec.span_bytes(count) for spec in specs)
        with staged_file(context, size) as staged:
            for piece in _pieces(head, specs, sources):
                staged.write([piece])
                progress(piece.nbytes)
            for source in sources:
                source.check()
    ref = BlockRef(staged.digest(), size, first, count, len(head), any(ref.decode for ref in refs))
    return ref, place_block(context, staged.path, ref)


def _pieces(head: bytes, specs: Sequence[TensorSpec], sources: Sequence[_Source]) -> Iterator[memoryview]:
    """The bytes of the joined block, in pieces that are overwritten by the next one."""
    yield memoryview(head)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    wanted: list[list[memoryview]] = [[] for _ in sources]
    at = 0
    for source, size in _runs(specs, sources):
        while size:
            view = buffer[at : at + size]
            wanted[source].append(view)
            at, size = at + view.nbytes, size - view.nbytes  # noqa: PLW2901 - what is left of the run
            if at == BUFFER_BYTES:
                _fill(sources, wanted)
                yield buffer
                at = 0
    _fill(sources, wanted)
    yield buffer[:at]


def _runs(specs: Sequence[TensorSpec], sources: Sequence[_Source]) -> Iterator[tuple[int, int]]:
    """Index of the source and length of each run of the joined payload, in order."""
    for spec in specs:
        for _ in range(spec.outer):
            for index, source in enumerate(sources):
                yield index, source.ref.count * spec.row_bytes


def _fill(sources: Sequence[_Source], wanted: Sequence[list[memoryview]]) -> None:
    for source, views in zip(sources, wanted, strict=True):
        if views:
            source.read(views)
            views.clear()


class _Source:
    """A block that is read from its beginning to its end. Everything that is wrong with it is a DamagedBlockError."""

    def __init__(self, context: Context, ref: BlockRef, stack: ExitStack) -> None:
        self.ref = ref
        self._path = context.layout.block(ref.digest)
        try:
            self._fd, status = context.fs.open_fd(self._path)
            stack.callback(os.close, self._fd)
            if status.st_size != ref.size or ref.payload > MAX_HEADER_BYTES:
                raise DamagedBlockError(f"block {self._path} is {status.st_size} bytes long, not {ref.size}")
            if mostly_holes(self._fd, status):
                raise DamagedBlockError(f"block {self._path} is mostly holes")
            head = os.pread(self._fd, ref.payload, 0)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        try:
            self.specs = read_specs(head, ref)
        except DamagedBlockError as error:
            raise DamagedBlockError(f"block {self._path}: {error}") from error
        self._digest = xxhash.xxh3_128(head)
        self._at = ref.payload

    def read(self, views: Sequence[memoryview]) -> None:
        """Fill the views with the bytes that come next."""
        try:
            preadv_full(self._fd, views, self._at)
        except EOFError as error:
            raise DamagedBlockError(f"block {self._path}: {error}") from error
        except OSError as error:
            raise _unreadable(self._path, error) from error
        for view in views:
            self._digest.update(view)
            self._at += view.nbytes

    def check(self) -> None:
        """After everything was read: whether the bytes were those that the block's name stands for."""
        if self._at != self.ref.size or self._digest.digest() != self.ref.digest:
            raise DamagedBlockError(f"block {self._path} is damaged: its digest does not match its bytes")


def _unreadable(path: Path, error: OSError) -> DamagedBlockError:
    return DamagedBlockError(f"block {path} cannot be read: {error.strerror or error}")
