"""Put files in place: blocks under their digests, then the manifest whose rename is the one commit point.

Heavy writing happens without locks, into this process's staging folder; the publish lock is held for the few system
calls that check what a manifest refers to and rename it. Nothing here decides what belongs into a node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.context import Context, Space
from kvstore.errors import MissingParentError
from kvstore.keys import Buffer, block_digest
from kvstore.layout import Kind
from kvstore.locks import publish_lock
from kvstore.lookup import Chunk, load_manifest
from kvstore.manifest import BlockRef, Manifest, encode

__all__ = ["existing", "intact", "make_folders", "node_path", "put_block", "put_node"]


def node_path(space: Space, chunk: Chunk, kind: Kind = "kv") -> Path:
    """Where the manifest of this prefix lies."""
    return space.context.layout.node(space.id, chunk.name, kind)


def existing(space: Space, chunk: Chunk, kind: Kind) -> Manifest | None:
    """The node's manifest when it is whole, with all its blocks; it then counts as just used.

    One that is not whole is remembered as damaged, so that put_node replaces it.
    """
    context = space.context
    path = node_path(space, chunk, kind)
    context.recent[path] = context.clock()
    if path in context.damaged or not path.exists():
        return None
    manifest = load_manifest(space, path)
    if manifest is not None and all(intact(context, ref) for ref in manifest.blocks):
        with suppress(OSError):
            context.fs.touch(path, context.clock())
        return manifest
    context.damaged.add(path)
    return None


def put_block(
    context: Context, parts: Sequence[Buffer], payload: int, first: int, count: int, *, decode: bool
) -> tuple[BlockRef, int]:
    """A block under its final name, and the bytes written: 0 for one that is there, which is made young (rule 5)."""
    size = sum(memoryview(part).nbytes for part in parts)
    ref = BlockRef(block_digest(parts), size, first, count, payload, decode)
    path = context.layout.block(ref.digest)
    if intact(context, ref):
        context.fs.touch(path, context.clock())
        return ref, 0
    staged = _stage(context, parts, size)
    try:
        make_folders(context, path.parent)
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
    return ref, size


def put_node(space: Space, chunk: Chunk, kind: Kind, refs: tuple[BlockRef, ...], require: Callable[[], None]) -> int:
    """Commit a node whose blocks are in place; returns the manifest's bytes.

    require is called under the publish lock and raises MissingParentError when what the node stands on is gone.
    """
    context = space.context
    path = node_path(space, chunk, kind)
    manifest = encode(
        Manifest(
            kind,
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
        make_folders(context, path.parent)
        for ref in refs:
            # Rule 5: what is referenced is made young before the lock, so that a sweep that marked it as garbage sees
            # the new time and leaves it.
            with suppress(FileNotFoundError):
                context.fs.touch(context.layout.block(ref.digest), context.clock())
        with publish_lock(context.layout):
            require()
            if not all(intact(context, ref) for ref in refs):
                raise MissingParentError(
                    f"a block of tokens {chunk.first} to {chunk.first + chunk.count} was removed meanwhile"
                )
            _put(context, staged, path)
    except BaseException:
        context.staging.discard(staged)
        raise
    context.fs.sync_dir(path.parent)
    return len(manifest)


def intact(context: Context, ref: BlockRef) -> bool:
    """Whether a block is there with its size, and nobody in this process found it damaged."""
    path = context.layout.block(ref.digest)
    try:
        return path not in context.damaged and os.stat(path, follow_symlinks=False).st_size == ref.size
    except OSError:
        return False


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


def make_folders(context: Context, folder: Path) -> None:
    """Make a fan-out folder and, for a new namespace, the one above. Folders are never removed, so no race removes
    one between this and the rename.
    """
    if not folder.is_dir():
        context.fs.make_dir(folder.parent)
        context.fs.make_dir(folder)
