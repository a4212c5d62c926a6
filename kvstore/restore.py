"""Read a match into the engine's own memory, every digest checked.

A missing, short, stale or damaged file is never an error here: the restored prefix ends before it, a counter counts it
and one log line names it. The caller learns how many tokens of its buffers are valid, and computes the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.blocks import MAX_HEADER_BYTES, TensorBuffer, TensorSpec, read_specs
from kvstore.context import Context
from kvstore.errors import DamagedBlockError
from kvstore.fs import close_read, is_damage, is_lost, mostly_holes, out_of_files
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match, Step, common_tokens, load_manifest
from kvstore.manifest import BlockRef, Manifest
from kvstore.scatter import Allocate, OpenBlock, scatter
from kvstore.states import digest_of_file

__all__ = ["Allocate", "Restored", "read"]

log = logging.getLogger("kvstore")

THREADS = 2
"""Readers of one restore, the caller among them. Two hide the first touch of memory behind reading; more win nothing on
a laptop's disk."""

_WINDOW = 64
"""Files open at once. A long conversation has hundreds of blocks, and macOS gives a process 256 descriptors."""

TOUCH_AFTER_NS = 3600 * 10**9
"""A manifest's mtime is its last use, refreshed at most once an hour: exact enough for eviction, cheap enough to do."""


@dataclass(frozen=True, slots=True)
class Restored:
    """tokens are valid in the caller's buffers, from size bytes read. border: see Match."""

    tokens: int
    size: int
    border: int


def read(match: Match, allocate: Allocate, threads: int = THREADS) -> Restored:
    """Restore a match; Restored(0, 0, 0) when nothing of it could be read.

    allocate is called once, when the first blocks are open, and not at all when none opens or there is none. What it
    raises for tensors of a block that is whole is raised here; with ValueError it refuses them, and this process then
    takes the node for damaged (others may be asked for the same prompt, and nobody could save it again).
    """
    with match.space.context.reading(step.where for step in match.steps):
        return _read(match, allocate, threads)


def _read(match: Match, allocate: Allocate, threads: int) -> Restored:
    context = match.space.context
    steps, refs = _refs(match)
    if not steps:
        return Restored(0, 0, 0)
    if not refs:
        # An engine that keeps nothing per token: the tokens were compared, and there is nothing more to read.
        tokens = min(match.count, steps[-1].end)
        context.counters.add(restored_tokens=tokens)
        _touch(context, steps)
        return Restored(tokens, 0, max((step.end for step in steps if step.end <= tokens), default=0))
    good, bad = _read_windows(context, steps[0].path, refs, allocate, threads)
    if bad is not None:
        # Remembered, so that the next lookup ends before this node instead of reading into the same damage again.
        context.damaged.update(step.path for step in steps if step.first <= bad.first < step.end)
    if not good:
        return Restored(0, 0, 0)
    if context.damaged:
        # Another process healed it, or it could not be opened for a moment: its digest says that it is whole, and a
        # publish that goes on from here must be able to refer to it.
        context.damaged.difference_update(context.layout.block(ref.digest) for ref in good)
    size = sum(ref.size for ref in good)
    tokens = min(match.count, good[-1].first + good[-1].count)
    context.counters.add(restored_tokens=tokens, restored_bytes=size)
    _touch(context, [step for step in steps if step.first < tokens])
    borders = [ref.first + ref.count for ref in good]
    return Restored(tokens, size, max((end for end in borders if end <= tokens), default=0))


def _read_windows(
    context: Context, node: Path, refs: list[BlockRef], allocate: Allocate, threads: int
) -> tuple[list[BlockRef], BlockRef | None]:
    """Read blocks in order, a window of open files at a time; the good ones before the first that is not good.

    And that one, if it is missing or damaged: one that cannot be read now may be whole. node: the manifest that names
    the first.
    """
    memory: Mapping[str, TensorBuffer] = {}
    specs: tuple[TensorSpec, ...] | None = None
    good: list[BlockRef] = []
    bad: BlockRef | None = None
    while len(good) < len(refs) and bad is None:
        opened: list[OpenBlock] = []
        try:
            bad = _open_window(context, refs[len(good) : len(good) + _WINDOW], specs, opened)
            if not opened:
                break
            if specs is None:
                specs = opened[0].specs
                tokens = refs[-1].first + refs[-1].count
                asked = False
                try:
                    memory = allocate(specs, tokens)
                    asked = True
                    _check(memory, specs, tokens)
                except Exception as refusal:
                    # The header was not checked yet: a flipped bit in a name gives the engine tensors that it has not.
                    if (error := _fault(opened[0])) is not None:
                        return [], _ended(context, opened[0].ref, error)
                    if isinstance(refusal, ValueError) and not asked:
                        # What no engine takes stands in the way of what one computes. The next publish replaces it.
                        context.damaged.add(node)
                    raise
            read, damaged = _read_all(context, opened, memory, threads)
        finally:
            for block in opened:
                close_read(block.fd)
        good.extend(read)
        if len(read) < len(opened):
            return good, damaged
    return good, bad


def _check(memory: Mapping[str, TensorBuffer], specs: tuple[TensorSpec, ...], tokens: int) -> None:
    for spec in specs:
        memory[spec.name].check(spec, tokens)


def _open_window(
    context: Context, refs: list[BlockRef], expected: tuple[TensorSpec, ...] | None, opened: list[OpenBlock]
) -> BlockRef | None:
    """Open blocks into opened, in order, until one is missing or damaged, which is returned, or cannot be read now, or
    has other tensors than the one before it. expected: those of blocks that were found whole, if any were.

    Which of two unlike ones is damaged shows when those before were read: the later one is the first of a window then.
    """
    for ref in refs:
        try:
            block = _open(context, ref)
        except OSError as error:
            # Those that are open are read and closed, then it goes on. With not even one, it is a miss but no damage.
            if not opened:
                _unread(context, ref, error)
            return None
        if block is None:
            return ref
        if expected is not None and block.specs != expected:
            try:
                return None if opened else _unlike(context, block)
            finally:
                close_read(block.fd)
        expected = block.specs
        opened.append(block)
    return None


def _unlike(context: Context, block: OpenBlock) -> BlockRef | None:
    """What ends a restore at a block with other tensors than whole ones before it; see _ended.

    One that is whole itself has no place in this prompt: its node is what is replaced, and not its file.
    """
    if (error := _fault(block)) is not None:
        return _ended(context, block.ref, error)
    context.counters.add(damaged=1)
    path = context.layout.block(block.ref.digest)
    _warn(f"block {path} holds other tensors than those before it; computing from token {block.ref.first}")
    return block.ref


def _fault(block: OpenBlock) -> Exception | None:
    """What is wrong with an open block, which is read whole to tell; None for one that is what its name says."""
    try:
        if digest_of_file(block.fd, block.ref.size) == block.ref.digest:
            return None
    except EOFError as error:
        return DamagedBlockError(str(error))
    except OSError as error:
        # A new one: what was raised refers to what the engine raised before, and so, in a cycle, to its memory.
        return OSError(error.errno, error.strerror)
    return DamagedBlockError("digest does not match its bytes")


def _refs(match: Match) -> tuple[list[Step], list[BlockRef]]:
    """The steps whose manifests are good and say what the prompt says, and their blocks up to the match's end.

    The blocks leave no hole: each manifest's cover its tokens, and where one has blocks, all have.
    """
    steps: list[Step] = []
    refs: list[BlockRef] = []
    parent = match.space.root
    for step in match.steps:
        manifest = load_manifest(match.space, step.path)
        if manifest is None:
            _warn(f"{step.path} is missing, damaged or cannot be read; computing from token {step.first}")
            break
        prompt = match.tokens[step.first * TOKEN_BYTES : match.count * TOKEN_BYTES]
        if not _continues(manifest, step, parent) or common_tokens(manifest.tokens, prompt) < min(
            manifest.count, match.count - step.first
        ):
            _warn(f"{step.path} holds another prefix than its name says; computing from token {step.first}")
            match.space.context.counters.add(damaged=1)
            match.space.context.damaged.add(step.path)
            break
        if steps and bool(refs) != bool(manifest.blocks):
            # Blocks show that this engine keeps something per token, so those without any hold nothing of it. Had they
            # come first, nothing that follows could be used either.
            bare = [step] if refs else steps
            _warn(f"{bare[0].path} has no blocks, unlike others of its prompt; computing from token {bare[0].first}")
            match.space.context.counters.add(damaged=len(bare))
            match.space.context.damaged.update(each.path for each in bare)
            if not refs:
                return [], []
            break
        steps.append(step)
        refs.extend(ref for ref in manifest.blocks if ref.first < match.count)
        parent = manifest.key
    return steps, refs


def _continues(manifest: Manifest, step: Step, parent: bytes) -> bool:
    return manifest.kind == "kv" and manifest.parent == parent and manifest.first == step.first


def _open(context: Context, ref: BlockRef) -> OpenBlock | None:
    """A block with its header read; None (counted) when it is missing or damaged. Raises OSError when it cannot be
    opened or read now.
    """
    path = context.layout.block(ref.digest)
    try:
        fd, status = context.fs.open_fd(path)
    except (FileNotFoundError, NotADirectoryError):
        context.counters.add(missing=1)
        _warn(f"block {path} is missing; computing from token {ref.first}")
        return None
    except OSError as error:
        if not is_damage(error):
            raise
        context.counters.add(missing=1)
        context.damaged.add(path)
        _warn(f"block {path} cannot be opened ({error.strerror}); computing from token {ref.first}")
        return None
    try:
        if status.st_size != ref.size or ref.payload > MAX_HEADER_BYTES:
            raise DamagedBlockError(f"is {status.st_size} bytes long, not {ref.size}")
        if mostly_holes(fd, status):
            raise DamagedBlockError("is mostly holes")
        head = os.pread(fd, ref.payload, 0)
        return OpenBlock(ref, fd, head, read_specs(head, ref))
    except BaseException as error:
        # An interrupt, too: the caller closes only what it was given.
        close_read(fd)
        if isinstance(error, OSError | DamagedBlockError) and is_damage(error):
            _damaged(context, ref, error)
            return None
        raise


def _read_all(
    context: Context, opened: list[OpenBlock], memory: Mapping[str, TensorBuffer], threads: int
) -> tuple[list[BlockRef], BlockRef | None]:
    """Read all blocks; the references of the good ones before the first that is not, and that one if it is damaged."""
    results = scatter(opened, memory, threads)
    bad = [(block.ref, error) for block, error in zip(opened, results, strict=True) if error is not None]
    if not bad:
        return [block.ref for block in opened], None
    for ref, error in bad[1:]:
        if is_damage(error):
            _note_damaged(context, ref)
        elif is_lost(error):
            context.damaged.add(context.layout.block(ref.digest))
    (first, error), *_ = bad
    good = [block.ref for block in opened if block.ref.first < first.first]
    return good, _ended(context, first, error)


def _ended(context: Context, ref: BlockRef, error: Exception) -> BlockRef | None:
    """Say why a restore ends at a block; that block, if it is damaged and did not only fail to be read now."""
    if isinstance(error, OSError) and not is_damage(error):
        _unread(context, ref, error)
        return None
    _damaged(context, ref, error)
    return ref


def _unread(context: Context, ref: BlockRef, error: OSError) -> None:
    """Say that a block cannot be read now; a miss, and counted, but for want of descriptors. Its node is not hidden for
    that, so the next restore tries again; see kvstore.fs.is_lost.
    """
    if not out_of_files(error):
        context.counters.add(missing=1)
    path = context.layout.block(ref.digest)
    if is_lost(error):
        context.damaged.add(path)
    _warn(f"block {path} cannot be read now ({error.strerror}); computing from token {ref.first}")


def _damaged(context: Context, ref: BlockRef, error: Exception) -> None:
    """Count a damaged block and say so: once a restore, for the one that ends it."""
    path = _note_damaged(context, ref)
    _warn(f"block {path} is damaged ({error}); computing from token {ref.first}")


def _note_damaged(context: Context, ref: BlockRef) -> Path:
    path = context.layout.block(ref.digest)
    context.counters.add(damaged=1)
    context.damaged.add(path)
    return path


def _warn(text: str) -> None:
    log.warning("kvstore: %s", text)


def _touch(context: Context, steps: list[Step]) -> None:
    """Mark a restored path as used, leaf first, so that a parent is never older than its child (rule 7)."""
    now = context.clock()
    due = False
    for step in reversed(steps):
        due = due or now - step.mtime_ns > TOUCH_AFTER_NS
        if due and step.mtime_ns < now:
            with suppress(OSError):
                context.fs.touch(step.path, now)
