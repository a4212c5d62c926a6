"""Publish spans of a prompt as nodes: data, then manifest, then nothing more to do.

The one commit point is the rename of a manifest. Before it, every byte it refers to lies under its final name; after
it, nothing it refers to changes. Heavy writing happens without locks; the publish lock is held for the few system calls
that check that the referenced blocks still exist and rename the manifest.

Failures raise. The caller (an engine adapter's writer thread) counts them, drops that node and goes on serving.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.blocks import Span, block_parts
from kvstore.context import Context, Space
from kvstore.errors import MissingParentError, PublishError
from kvstore.keys import TOKEN_BYTES, Buffer, block_digest, node_key
from kvstore.locks import publish_lock
from kvstore.lookup import Chunk, chunks, common_tokens, load_manifest, siblings
from kvstore.manifest import BlockRef, Manifest, encode

__all__ = ["Published", "publish"]


@dataclass(frozen=True, slots=True)
class Published:
    """end: length of the longest prefix now in the store. written: bytes of new files. nodes: how many were new."""

    end: int
    nodes: int
    written: int


def publish(space: Space, packed: bytes, spans: Sequence[Span]) -> Published:
    """Publish consecutive spans of a prompt; each becomes one block and completes one node.

    packed are the prompt's tokens, at least up to the last span's end. The first span may begin at 0, at the end of a
    published chunk, or inside a chunk where some node with these tokens has a border between blocks: its blocks before
    the border are referenced, not written again.

    Raises MissingParentError when what comes before the first span is not in the store, PublishError for spans that do
    not follow each other or cross a chunk border, LockTimeoutError, and OSError from the file system. Nodes before the
    failing one stay published.
    """
    _check(space, packed, spans)
    written = nodes = 0
    end = spans[0].first
    ways = _chunks_of(space, packed, spans)
    before: tuple[BlockRef, ...] | None = None
    for span, (parent, chunk) in zip(spans, ways, strict=True):
        if parent is not None:
            _require(space, parent)
        if span.first == chunk.first:
            before = ()
        elif before is None:
            before = _blocks_before(space, chunk, span.first)
        refs, size = _publish_node(space, parent, chunk, before, span)
        written += size
        nodes += size > 0
        before = refs
        end = span.end
    space.context.counters.add(published_nodes=nodes, written_bytes=written)
    return Published(end, nodes, written)


def _check(space: Space, packed: bytes, spans: Sequence[Span]) -> None:
    interval = space.context.interval
    if not spans:
        raise PublishError("there is nothing to publish")
    at = spans[0].first
    for span in spans:
        if span.first != at or span.count < 1:
            raise PublishError(f"the span at token {span.first} does not follow the one that ends at {at}")
        if span.first // interval != (span.end - 1) // interval:
            raise PublishError(f"tokens {span.first} to {span.end} cross a chunk border (every {interval})")
        at = span.end
    if len(packed) < at * TOKEN_BYTES:
        raise PublishError(f"spans end at token {at} but only {len(packed) // TOKEN_BYTES} tokens were given")


def _chunks_of(space: Space, packed: bytes, spans: Sequence[Span]) -> list[tuple[Chunk | None, Chunk]]:
    """For each span, the chunk (or tail) that it completes and that chunk's parent."""
    last = spans[-1].end
    whole = list(chunks(space, packed[: last * TOKEN_BYTES]))
    interval = space.context.interval
    ways = []
    for span in spans:
        index = span.first // interval
        parent = whole[index - 1] if index else None
        first = index * interval
        if span.end == whole[index].first + whole[index].count:
            chunk = whole[index]
        else:
            tokens = packed[first * TOKEN_BYTES : span.end * TOKEN_BYTES]
            above = parent.key if parent else space.root
            chunk = Chunk(first, span.end - first, above, node_key(above, tokens), tokens)
        ways.append((parent, chunk))
    return ways


def _path(space: Space, chunk: Chunk) -> Path:
    return space.context.layout.node(space.id, chunk.name)


def _require(space: Space, chunk: Chunk) -> None:
    """Publishing stops at the first hole: a child is never published without its parent (rule 4)."""
    if not _path(space, chunk).is_file():
        raise MissingParentError(
            f"the prefix of {chunk.first + chunk.count} tokens is not in the store; publish it first"
        )


def _blocks_before(space: Space, chunk: Chunk, border: int) -> tuple[BlockRef, ...]:
    """Blocks that hold the chunk's tokens up to border, from any node that shares them and has a border there."""
    wanted = border - chunk.first
    for name in sorted(siblings(space, chunk.parent), key=lambda name: name.count != wanted):
        if name.count < wanted:
            continue
        manifest = load_manifest(space, space.context.layout.node(space.id, name))
        if manifest is None or common_tokens(manifest.tokens, chunk.tokens) < wanted:
            continue
        refs = tuple(ref for ref in manifest.blocks if ref.first + ref.count <= border)
        if refs and refs[-1].first + refs[-1].count == border and all(_intact(space.context, ref) for ref in refs):
            return refs
    raise MissingParentError(
        f"no node holds these tokens with a border at token {border}; publish from the chunk's start"
    )


def _publish_node(
    space: Space, parent: Chunk | None, chunk: Chunk, before: tuple[BlockRef, ...], span: Span
) -> tuple[tuple[BlockRef, ...], int]:
    """Write one span's block and its node; returns the node's blocks and the bytes written (0 when it was there)."""
    context = space.context
    path = _path(space, chunk)
    context.recent[path] = context.clock()
    if path not in context.damaged and path.exists():
        there = load_manifest(space, path)
        if there is not None and all(_intact(context, ref) for ref in there.blocks):
            with suppress(OSError):
                context.fs.touch(path, context.clock())
            return there.blocks, 0
        context.damaged.add(path)
    ref, written = _write_block(context, span)
    refs = (*before, ref)
    manifest = encode(
        Manifest(
            "kv",
            space.fingerprint,
            chunk.parent,
            chunk.key,
            chunk.first,
            context.interval,
            chunk.tokens,
            refs,
            context.clock(),
            context.writer,
        )
    )
    staged = _stage(context, [manifest])
    try:
        _make_folders(context, path.parent)
        for older in before:
            # Rule 5: what is referenced again is made young before the lock, so that a sweep that marked it as garbage
            # sees the new time and leaves it.
            context.fs.touch(context.layout.block(older.digest), context.clock())
        with publish_lock(context.layout):
            if parent is not None:
                _require(space, parent)
            if not all(_intact(context, each) for each in refs):
                raise MissingParentError(f"a block of tokens {chunk.first} to {span.end} was removed meanwhile")
            _put(context, staged, path)
    except BaseException:
        context.staging.discard(staged)
        raise
    context.fs.sync_dir(path.parent)
    return refs, written + len(manifest)


def _write_block(context: Context, span: Span) -> tuple[BlockRef, int]:
    """The block of a span under its final name. One that is already there is made young instead (rule 5)."""
    parts, payload = block_parts(span)
    ref = BlockRef(block_digest(parts), payload + span.payload_bytes, span.first, span.count, payload, span.decode)
    path = context.layout.block(ref.digest)
    if _intact(context, ref):
        context.fs.touch(path, context.clock())
        return ref, 0
    staged = _stage(context, parts, ref.size)
    try:
        _make_folders(context, path.parent)
        if path.exists():
            # Short or known to be damaged: the right bytes take its place, under the lock like everything that removes.
            with publish_lock(context.layout):
                context.damaged.add(path)
                _put(context, staged, path)
        else:
            context.fs.rename(staged, path)
    except BaseException:
        context.staging.discard(staged)
        raise
    context.fs.sync_dir(path.parent)
    return ref, ref.size


def _stage(context: Context, parts: Sequence[Buffer], size: int = 0) -> Path:
    """Write a staged file and make its data durable."""
    fd, path = context.staging.create()
    try:
        try:
            context.fs.allocate(fd, size)
            context.fs.write(fd, parts)
            context.fs.sync_file(fd)
        finally:
            os.close(fd)
    except BaseException:
        context.staging.discard(path)
        raise
    return path


def _put(context: Context, staged: Path, path: Path) -> None:
    """Give a staged file its name, under the publish lock. The first writer wins, unless its file is damaged: that one
    is moved to quarantine first, never overwritten.
    """
    if path.exists():
        if path not in context.damaged:
            context.staging.discard(staged)
            return
        context.fs.rename(path, context.layout.quarantine / f"{context.clock():x}.{path.name}")
    context.fs.rename(staged, path)
    context.damaged.discard(path)


def _intact(context: Context, ref: BlockRef) -> bool:
    """Whether a block is there with its size, and nobody in this process found it damaged."""
    path = context.layout.block(ref.digest)
    try:
        return path not in context.damaged and os.stat(path, follow_symlinks=False).st_size == ref.size
    except OSError:
        return False


def _make_folders(context: Context, folder: Path) -> None:
    """Make a fan-out folder and, for a new namespace, the one above. Folders are never removed, so no race removes
    one between this and the rename.
    """
    if not folder.is_dir():
        context.fs.make_dir(folder.parent)
        context.fs.make_dir(folder)
