"""Read back what was just published, once a namespace and process: a disk or a codec that lies is found at once.

Runs on the writer thread, on plain memory. (What a restore reads is checked against its digest each time; this compares
with what the engine had.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.blocks import Span, TensorBuffer, TensorSpec
from kvstore.commit import node_path
from kvstore.context import Space
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match, chunks, load_manifest
from kvstore.states import State, StateTensor
from kvstore_mlx.forms import Form

__all__ = ["differs"]


def differs(form: Form, tokens: bytes, published: Span | State) -> str:
    """What is wrong with the copy in the store, or an empty string.

    tokens are the prompt up to the end of what was published. When it is not there any more (collected, or its folder
    gone) nothing is wrong with it.
    """
    match = form.namespace.lookup(tokens, trimmable=isinstance(published, Span))
    found: str | None = None
    if match.count * TOKEN_BYTES == len(tokens):
        if isinstance(published, State):
            found = _state_differs(form, match, published)
        else:
            found = _span_differs(form, match, published)
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


def _span_differs(form: Form, match: Match, span: Span) -> str | None:
    memory: dict[str, np.ndarray[Any, Any]] = {}

    def allocate(specs: tuple[TensorSpec, ...], count: int) -> Mapping[str, TensorBuffer]:
        for spec in specs:
            memory[spec.name] = np.empty((spec.outer, count, spec.row_bytes), np.uint8)
        return {spec.name: TensorBuffer(memoryview(memory[spec.name].data).cast("B"), count) for spec in specs}

    restored = form.namespace.read(match, allocate)
    if restored.tokens != span.end:
        return None
    for spec, data in zip(span.specs, span.data, strict=True):
        own = np.frombuffer(data, np.uint8).reshape(spec.outer, span.count, spec.row_bytes)
        if not np.array_equal(memory[spec.name][:, span.first : span.end], own):
            return f"{spec.name} of tokens {span.first} to {span.end} reads back as other bytes than were written"
    return ""


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
