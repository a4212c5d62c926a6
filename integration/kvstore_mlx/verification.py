"""Read back what was just published, once a namespace and process: a disk or a codec that lies is found at once.

Runs on the writer thread, on plain memory. (What a restore reads is checked against its digest each time; this compares
with what the engine had.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.blocks import Span, TensorBuffer, TensorSpec
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match
from kvstore.states import State, StateTensor
from kvstore_mlx.forms import Form

__all__ = ["differs"]


def differs(form: Form, tokens: bytes, published: Span | State) -> str:
    """What is wrong with the copy in the store, or an empty string.

    tokens are the prompt up to the end of what was published. When it is not there any more (collected, or its folder
    gone) nothing is wrong with it.
    """
    match = form.namespace.lookup(tokens, trimmable=isinstance(published, Span))
    if match.count * TOKEN_BYTES != len(tokens):
        return ""
    if isinstance(published, State):
        return _state_differs(form, match, published)
    return _span_differs(form, match, published)


def _span_differs(form: Form, match: Match, span: Span) -> str:
    memory: dict[str, np.ndarray[Any, Any]] = {}

    def allocate(specs: tuple[TensorSpec, ...], count: int) -> Mapping[str, TensorBuffer]:
        for spec in specs:
            memory[spec.name] = np.empty((spec.outer, count, spec.row_bytes), np.uint8)
        return {spec.name: TensorBuffer(memoryview(memory[spec.name].data).cast("B"), count) for spec in specs}

    restored = form.namespace.read(match, allocate)
    if restored.tokens != span.end or not span.specs:
        return ""
    for spec, data in zip(span.specs, span.data, strict=True):
        own = np.frombuffer(data, np.uint8).reshape(spec.outer, span.count, spec.row_bytes)
        if not np.array_equal(memory[spec.name][:, span.first : span.end], own):
            return f"{spec.name} of tokens {span.first} to {span.end} reads back as other bytes than were written"
    return ""


def _state_differs(form: Form, match: Match, state: State) -> str:
    memory: dict[str, bytearray] = {}

    def allocate(tensors: tuple[StateTensor, ...]) -> Mapping[str, memoryview]:
        memory.update({tensor.name: bytearray(tensor.nbytes) for tensor in tensors})
        return {name: memoryview(data) for name, data in memory.items()}

    values = form.namespace.read_state(match, allocate)
    if values is None:
        return ""
    written = {tensor.name: bytes(data) for tensor, data in zip(state.tensors, state.data, strict=True)}
    if values != dict(state.values) or memory != written:
        return "a boundary state reads back as another one than was written"
    return ""
