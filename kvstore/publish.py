"""Publish what an engine computed: spans of a prompt as nodes, and boundary states beside them.

Data, then manifest, then nothing more to do: before a manifest gets its name, every byte it refers to lies under its
own; after it, nothing it refers to changes. How files are put in place is the business of kvstore.commit.

Failures raise. The caller (an engine adapter's writer thread) counts them, drops that node and goes on serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.alike import are_alike, holds_others
from kvstore.blocks import Span, block_parts
from kvstore.children import names, sharing
from kvstore.commit import existing, intact, node_path, put_block, put_node, replacing
from kvstore.context import Context, Space
from kvstore.errors import MissingParentError, PublishError
from kvstore.keys import TOKEN_BYTES, node_key
from kvstore.lookup import Chunk, chunks, common_tokens, load_manifest
from kvstore.manifest import BlockRef
from kvstore.states import State, state_parts

__all__ = ["Published", "publish", "publish_state"]


@dataclass(frozen=True, slots=True)
class Published:
    """end: length of the longest prefix now in the store. nodes: how many were new. written: bytes of new files, and of
    copies that took the place of another user's (kvstore.takeover).

    blocks: bytes of new blocks, of what was written; a block that was there already is not kept twice, and counts
    for nothing.
    """

    end: int
    nodes: int
    written: int
    blocks: int = 0


def publish(space: Space, packed: bytes, spans: Sequence[Span]) -> Published:
    """Publish consecutive spans of a prompt; each becomes one block and completes one node.

    packed are the prompt's tokens, at least up to the last span's end. The first span may begin at 0, at the end of a
    published chunk, or inside a chunk where some node with these tokens has a border between blocks: its blocks before
    the border are referenced, not written again.

    Raises MissingParentError when what comes before the first span is not in the store, PublishError for spans that do
    not follow each other, cross a chunk border, have other tensors than the rest of the prompt, or hold what no reader
    takes (kvstore.blocks.block_parts), LockTimeoutError, FormatVersionError where a newer kvstore has published the
    node, and OSError from the file system. Nodes before the failing one stay published.
    """
    _check(space, packed, spans)
    written = nodes = new = 0
    end = spans[0].first
    ways = _chunks_of(space, packed, spans)
    before: tuple[BlockRef, ...] | None = None
    known: Span | None = None
    for span, (parent, chunk) in zip(spans, ways, strict=True):
        if parent is not None:
            _require(space, parent)
        if before is None:
            before = _blocks_before(space, parent, chunk, span.first)
        _check_alike(span, before)
        with replacing(space, chunk, "kv"):
            before, done = _publish_node(space, parent, chunk, before, span, known=known)
        known = span if done.nodes else None
        written += done.written
        new += done.blocks
        nodes += done.nodes
        end = done.end
    return Published(end, nodes, written, new)


def _check(space: Space, packed: bytes, spans: Sequence[Span]) -> None:
    interval = space.context.interval
    if not isinstance(spans, Sequence) or not all(_is_span(span) for span in spans):
        raise PublishError(
            "spans are a list of Span, whose first and count are plain integers, decode True or False, and specs and "
            "data lists (what can be gone through only once would be empty when it is written)"
        )
    if not spans:
        raise PublishError("there is nothing to publish")
    at = spans[0].first
    for span in spans:
        if span.first != at or span.count < 1 or span.first < 0:
            raise PublishError(f"the span at token {span.first} does not follow the one that ends at {at}")
        if span.first // interval != (span.end - 1) // interval:
            raise PublishError(f"tokens {span.first} to {span.end} cross a chunk border (every {interval})")
        if span.data and not span.specs:
            raise PublishError(f"tokens {span.first} to {span.end} have data, but no tensors that they are of")
        at = span.end
    if len(packed) < at * TOKEN_BYTES:
        raise PublishError(f"spans end at token {at} but only {len(packed) // TOKEN_BYTES} tokens were given")


def _is_span(span: object) -> bool:
    return (
        isinstance(span, Span)
        and {type(span.first), type(span.count)} == {int}
        and type(span.decode) is bool
        and isinstance(span.specs, Sequence)
        and isinstance(span.data, Sequence)
    )


def _check_alike(span: Span, before: tuple[BlockRef, ...] | None) -> None:
    """A prompt has tensors everywhere or nowhere: a restore would take what was never filled for saved.

    before: see _blocks_before.
    """
    if before is not None and bool(before) != bool(span.specs):
        ours, theirs = ("tensors", "have none") if span.specs else ("no tensors", "do")
        raise PublishError(f"tokens {span.first} to {span.end} have {ours}, but those before them {theirs}")


def _check_tensors(context: Context, span: Span, before: BlockRef, known: Span | None) -> None:
    """A restore has one set of buffers for the whole prompt, and ends before a block with other tensors.

    known: the span before, if it was just written; otherwise the header of its block is read.
    """
    if not are_alike(known.specs, span.specs) if known else holds_others(context, before, span.specs):
        raise PublishError(f"tokens {span.first} to {span.end} have other tensors than those before them")


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


def _require(space: Space, chunk: Chunk) -> None:
    """Publishing stops at the first hole: a child is never published without its parent (rule 4).

    Asked before anything is written; the commit asks again. What is built upon is made young already here, so that a
    collection meanwhile does not choose it.
    """
    path = node_path(space, chunk)
    if not path.is_file():
        raise MissingParentError(
            f"the prefix of {chunk.first + chunk.count} tokens is not in the store; publish it first"
        )
    with suppress(OSError):
        space.context.fs.touch(path, space.context.clock())


def _blocks_before(space: Space, parent: Chunk | None, chunk: Chunk, first: int) -> tuple[BlockRef, ...] | None:
    """Blocks of the node that a span of the chunk goes on from when it begins at this token.

    None when there is none, or it cannot be read, which a restore sees, too.
    """
    if first > chunk.first:
        return _blocks_within(space, chunk, first)
    manifest = None if parent is None else load_manifest(space, node_path(space, parent))
    return None if manifest is None else manifest.blocks


def _blocks_within(space: Space, chunk: Chunk, border: int) -> tuple[BlockRef, ...]:
    """Blocks that hold the chunk's tokens up to border, from any node that shares them and has a border there.

    Empty for a tail that ends there and has none: its engine keeps nothing per token.
    """
    wanted = border - chunk.first
    found = sharing(names(space, chunk.parent), chunk.tokens[: wanted * TOKEN_BYTES])
    for name in sorted(found, key=lambda name: name.count != wanted):
        if name.count < wanted:
            continue
        manifest = load_manifest(space, space.context.layout.node(space.id, name))
        if manifest is None or common_tokens(manifest.tokens, chunk.tokens) < wanted:
            continue
        if not manifest.blocks and manifest.count == wanted:
            return ()
        refs = tuple(ref for ref in manifest.blocks if ref.first + ref.count <= border)
        if refs and refs[-1].first + refs[-1].count == border and all(intact(space.context, ref) for ref in refs):
            return refs
    raise MissingParentError(
        f"no node holds these tokens with a border at token {border}; publish from the chunk's start"
    )


def _publish_node(
    space: Space,
    parent: Chunk | None,
    chunk: Chunk,
    before: tuple[BlockRef, ...] | None,
    span: Span,
    *,
    known: Span | None,
) -> tuple[tuple[BlockRef, ...], Published]:
    """Write one span's block and its node, if they are not there; the node's blocks, and what was done.

    before: see _blocks_before. known: see _check_tensors.
    """
    copied: list[int] = []
    if (there := existing(space, chunk, "kv", bare=not span.specs, wrote=copied.append)) is not None:
        return there.blocks, Published(span.end, 0, sum(copied))
    new = 0
    refs = before if before and span.first > chunk.first else ()
    if span.specs:
        parts, payload = block_parts(span)
        if before:
            _check_tensors(space.context, span, before[-1], known)
        ref, new = put_block(space.context, parts, payload, span.first, span.count, decode=span.decode)
        refs = (*refs, ref)
    above = None if parent is None else node_path(space, parent)
    nodes, written = put_node(space, chunk, "kv", refs, above)
    return refs, Published(span.end, nodes, new + written, new)


def publish_state(space: Space, packed: bytes, state: State) -> Published:
    """Publish the boundary state at the end of these tokens, whose spans must have been published before.

    Raises MissingParentError when they are not in the store; otherwise as publish.
    """
    if not packed:
        raise PublishError("there is nothing to publish")
    *_, chunk = chunks(space, packed)
    end = chunk.first + chunk.count
    _require(space, chunk)
    copied: list[int] = []
    with replacing(space, chunk, "state"):
        if existing(space, chunk, "state", wrote=copied.append) is not None:
            return Published(end, 0, sum(copied))
        parts, payload = state_parts(state, chunk.first, chunk.count)
        ref, new = put_block(space.context, parts, payload, chunk.first, chunk.count, decode=state.decode)
        nodes, written = put_node(space, chunk, "state", (ref,), node_path(space, chunk))
    return Published(end, nodes, new + written, new)
