"""Read back what was just published, once a namespace and process: a disk or a codec that lies is found at once.

Runs on the writer thread, on plain memory. (What a restore reads is checked against its digest each time; this compares
with what the engine had.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from xxhash import xxh3_128

from kvstore.blocks import Span
from kvstore.commit import node_path
from kvstore.context import Space
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match, chunks, load_manifest
from kvstore.states import State, StateTensor
from kvstore_mlx.forms import Form

__all__ = ["differs"]

_PIECE = 1 << 20
"""Bytes compared at a time."""


def differs(form: Form, tokens: bytes, published: Span | State) -> str:
    """What is wrong with the copy in the store, or an empty string.

    tokens are the prompt up to the end of what was published, as a node of this process: the same of another one may
    hold other bytes. When it is not there any more (collected, or its folder gone) nothing is wrong with it.
    """
    match = form.namespace.lookup(tokens, trimmable=isinstance(published, Span))
    found: str | None = None
    # Exact: a longer node that begins with these tokens may have been computed in other pieces.
    if match.exact and match.count * TOKEN_BYTES == len(tokens):
        if isinstance(published, State):
            found = _state_differs(form, match, published)
        else:
            found = _span_differs(match, published)
    return _unreadable(match.space, tokens, published) if found is None else found


def _unreadable(space: Space, tokens: bytes, published: Span | State) -> str:
    """What could not be read, if it is there and was found damaged; other damage on the way to it is not its own."""
    *_, chunk = chunks(space, tokens)
    path = node_path(space, chunk)
    if isinstance(published, State):
        path = path.with_suffix(".state")
    damaged = space.context.damaged
    manifest = load_manifest(space, path)
    if manifest is None:
        files = {path} if os.path.lexists(path) else set()
    else:
        own = [ref for ref in manifest.blocks if isinstance(published, State) or ref.first == published.first]
        files = {space.context.layout.block(ref.digest) for ref in own}
    if not files & damaged:
        return ""
    return "what was just written reads back as other bytes, or not at all"


def _span_differs(match: Match, span: Span) -> str | None:
    """Compares the span's own block only, a piece at a time: what comes before it may be gigabytes."""
    space = match.space
    manifest = load_manifest(space, match.steps[-1].path)
    own = [ref for ref in manifest.blocks if (ref.first, ref.count) == (span.first, span.count)] if manifest else []
    if not own:
        return None
    (ref,) = own
    try:
        with space.context.fs.open_read(space.context.layout.block(ref.digest)) as (fd, _):
            state = xxh3_128(os.pread(fd, ref.payload, 0))
            at = ref.payload
            for spec, data in zip(span.specs, span.data, strict=True):
                view = memoryview(data).cast("B")
                for begin in range(0, view.nbytes, _PIECE):
                    part = view[begin : begin + _PIECE]
                    read = os.pread(fd, part.nbytes, at)
                    if read != part:
                        return f"{spec.name} of tokens {span.first} to {span.end} reads back as other bytes"
                    state.update(read)
                    at += part.nbytes
            return "" if state.digest() == ref.digest else "a block reads back under another name than its own"
    except OSError as error:
        return f"what was just written cannot be read ({error.strerror or error})"


def _state_differs(form: Form, match: Match, state: State) -> str | None:
    memory: dict[str, bytearray] = {}

    def allocate(tensors: tuple[StateTensor, ...]) -> Mapping[str, memoryview]:
        memory.update({tensor.name: bytearray(tensor.nbytes) for tensor in tensors})
        return {name: memoryview(data) for name, data in memory.items()}

    values = form.namespace.read_state(match, allocate)
    if values is None:
        return None
    written = {tensor.name: bytes(data) for tensor, data in zip(state.tensors, state.data, strict=True)}
    if values != dict(state.values) or memory != written:
        return "a boundary state reads back as another one than was written"
    return ""
