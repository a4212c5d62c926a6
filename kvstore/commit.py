"""Put files in place: blocks under their digests, then the manifest whose rename is the one commit point.

Heavy writing happens without locks, into this process's staging folder; the publish lock is held for the few system
calls that check what a manifest refers to and rename it. Nothing here decides what belongs into a node.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.context import Context, Space
from kvstore.errors import FormatVersionError, KVStoreError, MissingParentError
from kvstore.fs import is_damage, status_of
from kvstore.holds import kept_open
from kvstore.keys import Buffer, block_digest
from kvstore.layout import Kind
from kvstore.locks import publish_lock
from kvstore.lookup import Chunk, read_manifest
from kvstore.manifest import MAX_MANIFEST_BYTES, BlockRef, Manifest, encode, newer_format
from kvstore.staged import stage, staged_file
from kvstore.takeover import take_over

__all__ = [
    "existing",
    "free_quarantine",
    "freshen",
    "intact",
    "intact_block",
    "make_folders",
    "newer_manifest",
    "node_path",
    "place_block",
    "put_block",
    "put_file",
    "put_manifest",
    "put_node",
    "replacing",
]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def node_path(space: Space, chunk: Chunk, kind: Kind = "kv") -> Path:
    """Where the manifest of this prefix lies."""
    return space.context.layout.node(space.id, chunk.name, kind)


def existing(
    space: Space, chunk: Chunk, kind: Kind, *, bare: bool = False, wrote: Callable[[int], None]
) -> Manifest | None:
    """The node's manifest when it is whole, with all its blocks; it then counts as just used. bare: it may have none.
    wrote is told the bytes of a copy that was made for that (kvstore.takeover).

    One that is not whole is remembered as damaged, so that put_node replaces it. Raises FormatVersionError for one of
    a newer version, which nobody may replace, and OSError for one that cannot be read: it may be either, or whole.
    """
    context = space.context
    path = node_path(space, chunk, kind)
    context.note_use([str(path)])
    if status_of(path) is None:
        return None
    manifest = None if path in context.damaged else read_manifest(space, path)
    if manifest is not None and (manifest.blocks or bare) and all(intact(context, ref) for ref in manifest.blocks):
        with suppress(OSError, KVStoreError):
            if not context.fs.touch(path, context.clock()):
                _counted(context, wrote)(take_over(context, path))
        return manifest
    if (version := newer_manifest(context, path)) is not None:
        raise FormatVersionError(f"{path} has format {version}, which a newer kvstore wrote; upgrade this one")
    context.damaged.add(path)
    return None


@contextmanager
def replacing(space: Space, chunk: Chunk, kind: Kind) -> Iterator[None]:
    """What existing remembers as damaged is forgotten when nothing takes its place (the disk is full): a block that was
    not read once, or was gone, must not hide its node, and all below it, for as long as the process runs.
    """
    path, damaged = node_path(space, chunk, kind), space.context.damaged
    known = path in damaged
    try:
        yield
    except BaseException:
        if not known:
            damaged.discard(path)
        raise


def _counted(context: Context, wrote: Callable[[int], None] = lambda _: None) -> Callable[[int], None]:
    """To be told bytes of a publish when they are in the directory, and not when all of it is done: where a commit
    fails, who keeps a budget must know of the block that lies there without a node.
    """

    def told(size: int) -> None:
        context.counters.add(written_bytes=size)
        wrote(size)

    return told


def put_block(
    context: Context, parts: Sequence[Buffer], payload: int, first: int, count: int, *, decode: bool
) -> tuple[BlockRef, int]:
    """A block under its final name, and the bytes written: 0 for one that is there, which is made young (rule 5).

    Hashed as it is written, slice by slice, while it is in the processor's cache: one pass over memory, not two. So it
    is known only afterwards that a block is there already, before any of it has been waited for on the disk. Where
    there is no room to find out so, it is only hashed: what is there needs none.
    """
    size = sum(memoryview(part).nbytes for part in parts)
    try:
        with staged_file(context, size) as staged:
            for batch in context.pace.batches(parts):
                with context.pace.turns():
                    staged.write(batch)
            ref = BlockRef(staged.digest(), size, first, count, payload, decode)
            staged.wanted = not _freshened(context, ref)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        pieces = (piece for batch in context.pace.batches(parts) for piece in batch)
        ref = BlockRef(block_digest(pieces), size, first, count, payload, decode)
        if not _freshened(context, ref):
            raise
        return ref, 0
    return ref, place_block(context, staged.path, ref, _counted(context)) if staged.wanted else 0


def place_block(context: Context, staged: Path, ref: BlockRef, wrote: Callable[[int], None] = lambda _: None) -> int:
    """Give a staged block, which holds what ref says, its name; the bytes written, 0 when it was there already.

    wrote is told of them as soon as the block has its name, whatever fails after that.
    """
    path = context.layout.block(ref.digest)
    new = True
    try:
        make_folders(context, path.parent)
        # Right before the rename: what somebody else placed meanwhile is not written a second time, nor counted.
        if _freshened(context, ref):
            context.staging.discard(staged)
            return 0
        if status_of(path) is not None:
            # Whatever loses its name to the new file gives its space back when the lock is free.
            with kept_open(context.fs, path), publish_lock(context.layout):
                if not intact(context, ref):
                    # Short or known to be damaged: the right bytes take its place.
                    _set_aside(context, path)
                    context.fs.rename(staged, path)
                    context.damaged.discard(path)
                elif freshen(context, [ref]):
                    # Another user's, which nobody else can make young: the same bytes.
                    context.fs.rename(staged, path)
                else:
                    context.staging.discard(staged)
                    new = False
        else:
            context.fs.rename(staged, path)
            context.damaged.discard(path)
    except BaseException:
        context.staging.discard(staged)
        raise
    if new:
        wrote(ref.size)
    context.fs.sync_dir(path.parent)
    return ref.size if new else 0


def _freshened(context: Context, ref: BlockRef) -> bool:
    """Whether a block is there, and now young (rule 5). It may be swept away between the two: then it is not. Nor is
    one that cannot be touched: a copy of it can be written.
    """
    path = context.layout.block(ref.digest)
    if intact(context, ref):
        with suppress(FileNotFoundError):
            if context.fs.touch(path, context.clock()):
                # Who gave it its name may be killed before the folder is durable, and the manifest to come is not.
                context.fs.sync_dir(path.parent)
                return True
    return False


def put_node(space: Space, chunk: Chunk, kind: Kind, refs: tuple[BlockRef, ...], above: Path | None) -> tuple[int, int]:
    """Commit a node whose blocks are in place; returns how many nodes were (none when somebody else was first) and the
    bytes written: the manifest's, and those of copies that it took (kvstore.takeover). above: see put_manifest.
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
    copied: list[int] = []
    placed = put_manifest(context, path, manifest, refs, above, wrote=_counted(context, copied.append))
    if not placed:
        return 0, sum(copied)
    context.counters.add(published_nodes=1, written_bytes=len(manifest))
    return 1, len(manifest) + sum(copied)


def put_manifest(
    context: Context,
    path: Path,
    manifest: bytes,
    refs: Sequence[BlockRef],
    above: Path | None,
    *,
    used_ns: int | None = None,
    wrote: Callable[[int], None] = lambda _: None,
) -> bool:
    """Commit an encoded manifest whose blocks are in place; False when there is one already.

    above: the manifest that it stands on, if any: its parent's, or for a state that of its KV. used_ns: when its prefix
    was last used, if not now. wrote is told the bytes of copies. Raises MissingParentError when what it needs is gone.
    """
    staged = stage(context, [manifest])
    own: set[Path] = set()
    try:
        if used_ns is not None:
            context.fs.touch(staged, used_ns)
        make_folders(context, path.parent)
        while True:
            with publish_lock(context.layout):
                old = [] if above is None else _freshen_above(context, above, used_ns)
                old = [each for each in (*old, *freshen(context, refs)) if each not in own]
                if not old:
                    if not all(_is_there(context, ref) for ref in refs):
                        raise MissingParentError(f"a block of {path.name} was removed meanwhile")
                    placed = _put(context, staged, path)
                    break
            for each in old:
                wrote(take_over(context, each))
                own.add(each)
    except BaseException:
        context.staging.discard(staged)
        raise
    context.fs.sync_dir(path.parent)
    return placed


def freshen(context: Context, refs: Iterable[BlockRef]) -> list[Path]:
    """Rule 5: what is referenced is made young before its manifest appears, and under the lock (see kvstore.gc): a
    sweep that took it for garbage sees the new time and leaves it. One that came first is noticed by the next look.

    Returns what could not be made young, because it is another user's.
    """
    old = []
    for ref in refs:
        path = context.layout.block(ref.digest)
        with suppress(FileNotFoundError):
            if not context.fs.touch(path, context.clock()):
                old.append(path)
    return old


def _freshen_above(context: Context, above: Path, used_ns: int | None) -> list[Path]:
    """The same for the manifest that a node stands on, whose last use is no earlier than the node's (rule 7)."""
    try:
        there = context.fs.stat(above)
        if not stat.S_ISREG(there.st_mode):
            raise FileNotFoundError
        time_ns = context.clock() if used_ns is None else max(there.st_mtime_ns, used_ns)
        return [] if context.fs.touch(above, time_ns) else [above]
    except FileNotFoundError as error:
        raise MissingParentError(f"{above.name} is not in the store; publish it first") from error


def put_file(
    context: Context, path: Path, data: Sequence[Buffer], used_ns: int | None = None, *, durable: bool = True
) -> None:
    """A small file that no other file depends on (a tokenization, a description), whole or not at all. If it need not
    be durable, a power cut may take it.
    """
    staged = stage(context, data)
    try:
        if used_ns is not None:
            context.fs.touch(staged, used_ns)
        make_folders(context, path.parent)
        context.fs.rename(staged, path)
    except BaseException:
        context.staging.discard(staged)
        raise
    if durable:
        context.fs.sync_dir(path.parent)


def intact(context: Context, ref: BlockRef) -> bool:
    """Whether a block is there with its size, and nobody in this process found it damaged. Raises OSError when it
    cannot be told, as the following do.
    """
    return intact_block(context, ref.digest, ref.size)


def intact_block(context: Context, digest: bytes, size: int) -> bool:
    """As intact, for a block that is known by its digest and the size of its file."""
    path = context.layout.block(digest)
    return path not in context.damaged and _has_size(path, size)


def _is_there(context: Context, ref: BlockRef) -> bool:
    """Whether a block is there with its size. What a commit asks: another thread may just have read, and reported, the
    damaged file whose place the block has taken since.
    """
    return _has_size(context.layout.block(ref.digest), ref.size)


def _has_size(path: Path, size: int) -> bool:
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode) and status.st_size == size


def _put(context: Context, staged: Path, path: Path) -> bool:
    """Give a staged manifest its name, under the publish lock. The first writer wins, unless its file is damaged: that
    one is moved to quarantine first, never overwritten. False when the first writer was somebody else, or a newer
    kvstore.
    """
    if status_of(path) is not None:
        if path not in context.damaged or newer_manifest(context, path) is not None:
            context.staging.discard(staged)
            return False
        _set_aside(context, path)
    context.fs.rename(staged, path)
    context.damaged.discard(path)
    return True


def newer_manifest(context: Context, path: Path) -> int | None:
    """The format of a manifest that a newer kvstore wrote; None for anything else.

    Raises OSError for one that cannot be read: nobody knows who wrote it.
    """
    try:
        data, _ = context.fs.read_file(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_damage(error):
            return None
        raise
    return newer_format(data)


def _set_aside(context: Context, path: Path) -> None:
    context.fs.rename(path, free_quarantine(context, path.name))


def free_quarantine(context: Context, name: str) -> Path:
    """A path in quarantine that nothing has, behind the time: a clock may tick slower than files are set aside, and two
    directories merged may bring one twice. Under the publish lock nobody else takes it before the caller's rename.
    """
    stamp = context.clock()
    while os.path.lexists(path := context.layout.quarantine / f"{stamp:x}.{name}"):
        stamp += 1
    return path


def make_folders(context: Context, folder: Path) -> None:
    """Make a fan-out folder and, for a new namespace, the one above. Folders are never removed, so no race removes
    one between this and the rename.

    Not those that a directory is set up with: they are missing where its volume is no longer mounted.
    """
    if folder.is_dir():
        return
    setup = (context.layout.root, *context.layout.folders)
    if folder not in setup:
        if folder.parent not in setup:
            context.fs.make_dir(folder.parent)
        context.fs.make_dir(folder)
