"""Read the longest saved prefix of a prompt into the engine's own buffers, and make caches of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvstore.blocks import TensorBuffer, TensorSpec
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match
from kvstore.states import Scalar, StateTensor
from kvstore_mlx.buffers import Filling, empty
from kvstore_mlx.codecs import Snapshot
from kvstore_mlx.forms import Form
from kvstore_mlx.live import Extras, taken_apart
from kvstore_mlx.plan import Plan

__all__ = ["Found", "Restored", "Restoring", "find", "longest", "restore"]

log = logging.getLogger("kvstore")

_STEP = 256
"""The engine's caches grow in steps of this many tokens; a restored buffer is a multiple of it like a native one."""

_ROOM = 256
"""Tokens of a generation that fit without growing a restored buffer."""

_TRIES = 4
"""A damaged file on the way makes the next lookup end before it; this often, then the prompt is computed."""


@dataclass(frozen=True)
class Found:
    """A lookup's answer, and what it takes to read it."""

    form: Form
    match: Match

    @property
    def count(self) -> int:
        """Tokens that may be restored."""
        return self.match.count

    @cached_property
    def state_size(self) -> int:
        """Bytes of the state at their end; 0 when there is none."""
        return self.form.namespace.state_size(self.match)

    @property
    def size(self) -> int:
        """Bytes that a restore reads, headers aside: blocks are read whole, however little of the last one matches."""
        rows = self.form.plan.token_bytes * (self.count + self.match.beyond)
        return rows + self.state_size if self.form.stateful else rows


@dataclass(frozen=True)
class Restored:
    """tokens of a prompt, with caches that go on after them.

    saved: up to where the store holds the prompt in whole blocks. size: bytes read, of which the state took state_size.
    logits and extras are of the last token, and only there where an engine saved them and the prefix ends exactly
    there.
    """

    tokens: int
    caches: list[Any]
    saved: int
    size: int
    seconds: float
    logits: Any | None = None
    extras: Extras = field(default_factory=Extras)
    state_size: int = 0


class Restoring:
    """Memory for one restore in the engine's own layout.

    room is the number of tokens the prompt will grow to, so that the engine does not copy the whole cache at its first
    update.
    """

    def __init__(self, plan: Plan, room: int) -> None:
        self._plan = plan
        self._room = room
        self._state: Filling | None = None
        self._rows: Filling | None = None

    def allocate(self, specs: tuple[TensorSpec, ...], tokens: int) -> Mapping[str, TensorBuffer]:
        """See kvstore.restore.Allocate. Refuses (ValueError) tensors that are not this model's."""
        if specs != self._plan.specs:
            raise ValueError(f"blocks hold {len(specs)} tensors that are not those of this model")
        capacity = -(-max(tokens, self._room) // _STEP) * _STEP
        self._rows = Filling({spec.name: (spec.dtype, (1, spec.outer, capacity, *spec.inner)) for spec in specs})
        return {name: TensorBuffer(view, capacity) for name, view in self._rows.memory().items()}

    def allocate_state(self, tensors: tuple[StateTensor, ...]) -> Mapping[str, memoryview]:
        """See kvstore.states.AllocateState. Refuses (ValueError) what no state of this model can be."""
        self._plan.check_header(tensors, max(self._room, _ROOM))
        self._state = Filling({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors})
        return self._state.memory()

    def caches(self, tokens: int, values: Mapping[str, Scalar] | None) -> tuple[list[Any], Any | None, Extras]:
        """Caches after these tokens, and logits and extras when a state was read (values are its)."""
        snapshot, logits, extras = Snapshot(), None, Extras()
        if values is not None and self._state is not None:
            snapshot, logits, extras = taken_apart(self._state.arrays(), values)
            if logits is not None:
                self._plan.check_logits(logits)
        rows: dict[str, Any] = {}
        if self._plan.specs:
            if self._rows is None:
                raise ValueError("the blocks of a prefix hold no tensors")
            rows = self._rows.arrays()
        # As many rows as the others have: the engine looks at one tensor's to know the room in all of them.
        capacity = max((array.shape[2] for array in rows.values()), default=tokens)
        hollow = {
            part.name: (part.dtype, (1, part.heads, capacity, *part.inner))
            for part in self._plan.parts
            if not part.stored
        }
        return (
            self._plan.rebuild(tokens, rows | empty(hollow), snapshot if self._plan.stateful else Snapshot()),
            logits,
            extras,
        )


def find(form: Form, packed: bytes, *, prefill_only: bool = False) -> Found:
    """The longest prefix of packed tokens that this model could go on from."""
    return Found(form, form.namespace.lookup(packed, trimmable=not form.stateful, prefill_only=prefill_only))


def longest(found: Sequence[Found]) -> Found | None:
    """What reaches furthest, of the forms that an uninterrupted run could have at that length."""
    return max((one for one in found if one.count >= one.form.least), key=lambda one: one.count, default=None)


def restore(found: Found, room: int, *, state: bool = False, prefill_only: bool = False) -> Restored | None:
    """Read what was found, or less of it when files are damaged; None when nothing of it can be read.

    state True asks for logits and extras too, where they are.
    """
    try:
        return _restore(found, room, state, prefill_only)
    except ValueError as error:
        # Whole by its digests, which the store looks at before it lets a refusal of tensors pass, and nothing that this
        # model writes: somebody else's doing, and a miss like any other.
        log.warning("kvstore: what is saved of a prompt does not fit the model (%s); computing instead", error)
        return None


def _restore(found: Found, room: int, state: bool, prefill_only: bool) -> Restored | None:
    started = time.perf_counter()
    form = found.form
    for _ in range(_TRIES):
        match = found.match
        if not match.count or match.count < form.least:
            return None
        target = Restoring(form.plan, room + _ROOM)
        values = form.namespace.read_state(match, target.allocate_state) if form.stateful or state else None
        if values is not None or not form.stateful:
            read = form.namespace.read(match, target.allocate)
            # Damage may end it where an uninterrupted run would not have this form yet.
            enough = not form.stateful and read.tokens >= max(form.least, 1)
            if read.tokens == match.count or enough:
                caches, logits, extras = target.caches(read.tokens, values if read.tokens == match.count else None)
                seconds = time.perf_counter() - started
                own = 0 if values is None else found.state_size
                return Restored(read.tokens, caches, read.border, read.size + own, seconds, logits, extras, own)
        found = find(form, match.tokens[: match.count * TOKEN_BYTES], prefill_only=prefill_only)
    return None
