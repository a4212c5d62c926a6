"""What one sequence's caches hold at one moment: rows to be copied out by token, and a boundary state.

Both are copies: the engine goes on updating its buffers in place while another thread writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx

from kvstore.blocks import TensorSpec
from kvstore.errors import PublishError
from kvstore.states import Scalar, State, StateTensor, state_parts
from kvstore_mlx.buffers import DTYPES, copy_rows, copy_whole
from kvstore_mlx.codecs import Snapshot
from kvstore_mlx.plan import Plan
from kvstore_mlx.pool import Loan

__all__ = [
    "EXTRA",
    "LOGITS",
    "Extras",
    "ExtrasHook",
    "HookError",
    "Live",
    "Rows",
    "captured",
    "state_of",
    "taken_apart",
]

LOGITS = "logits"
"""The name of next-token logits in a state: one row ``[vocabulary]`` of the model's own dtype."""

EXTRA = "extra."
"""What an engine's own names begin with in a state."""


@dataclass(frozen=True)
class Extras:
    """What an engine attaches to a boundary and gets back there: named arrays and small typed values."""

    tensors: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)


class ExtrasHook(Protocol):
    """What an engine attaches to each boundary, for example the pending prediction of a router.

    name goes into the namespace: prefixes that were saved without these extras, or with another version of them, are
    never restored. Both methods run on the generation thread.
    """

    @property
    def name(self) -> str:
        """Name and version, such as ``prerouter/1``."""

    def capture(self) -> Extras:
        """What must come back, as it is now: the caches hold exactly the tokens of the boundary."""

    def restore(self, extras: Extras | None) -> None:
        """Take up what was captured at the restored boundary, or begin anew (None) when nothing was restored."""


class HookError(Exception):
    """An engine's own hook failed, or gave what cannot be saved: no bug of kvstore's. Its cause is what was raised."""


def captured(capture: Callable[[], Extras]) -> Extras:
    """What a hook attaches, computed; HookError when that fails, or when it cannot be saved. Whether its tensors hold
    finite numbers the writer finds out, where nobody waits for it.
    """
    try:
        extras = capture()
        if isinstance(extras, Extras) and isinstance(extras.tensors, Mapping):
            mx.eval([tensor for tensor in extras.tensors.values() if isinstance(tensor, mx.array)])
    except Exception as error:
        raise HookError(f"the extras hook failed: {str(error) or type(error).__name__}") from error
    if not isinstance(extras, Extras):
        raise HookError(f"the extras hook gave {type(extras).__name__}, not Extras")
    if what := next(_unsavable(extras), ""):
        raise HookError(f"the extras hook gave {what}, which cannot be saved")
    return extras


def _unsavable(extras: Extras) -> Iterator[str]:
    """What of extras is no array or small typed value with a name; to be asked for the first only."""
    tensors: Any = extras.tensors
    values: Any = extras.values
    for kind, given in (("tensors", tensors), ("values", values)):
        if not isinstance(given, Mapping):
            yield f"{type(given).__name__} as {kind}"
        yield from (f"{type(name).__name__} as a name of {kind}" for name in given if not isinstance(name, str))
    for name, tensor in tensors.items():
        if tensor is not None and (not isinstance(tensor, mx.array) or tensor.dtype not in DTYPES):
            yield f"{tensor.dtype if isinstance(tensor, mx.array) else type(tensor).__name__} as tensor {name}"
    for name, value in values.items():
        if value is not None and not isinstance(value, bool | int | float | str):
            yield f"{type(value).__name__} as value {name}"
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{value} as value {name}"
    try:
        state_parts(State((), [], values), 0, 1)
    except PublishError as error:
        yield f"values that are no small ones ({error})"


@dataclass(frozen=True)
class Rows:
    """One sequence's rows in an engine's live buffers.

    count tokens are there; starts has the row of token 0 of each array (left padding of a batch); index is the
    sequence's place in the batch.
    """

    specs: tuple[TensorSpec, ...]
    arrays: Sequence[Any]
    starts: Sequence[int]
    index: int
    count: int

    def copy(self, first: int, end: int, into: Loan | None = None) -> list[Any]:
        """Tokens first .. end of every tensor, as bytes that belong to the caller, or in memory that is lent to it."""
        if not 0 <= first < end <= self.count:
            raise ValueError(f"tokens {first} to {end} of {self.count} were asked for")
        return [
            copy_rows(array, self.index, start + first, start + end, into)
            for array, start in zip(self.arrays, self.starts, strict=True)
        ]


@dataclass(frozen=True)
class Live:
    """One sequence's caches between two steps of the engine, which must hold exactly count tokens in every layer.

    index is its place in a batch, None for caches of one sequence. count None is for the middle of speculative
    decoding, where a model and its draft model may differ: the fewest tokens that one of them holds count then.
    """

    plan: Plan
    caches: Sequence[Any]
    index: int | None
    exactly: int | None

    @cached_property
    def count(self) -> int:
        """Tokens that were computed."""
        if self.exactly is not None:
            return self.exactly
        held = self.plan.count(self.caches)
        if held is None:
            raise ValueError("no layer says how many tokens it holds")
        return held

    def check(self, logits: Any | None = None) -> None:
        """ValueError when a layer holds another number of tokens, or other tensors than the model's, or logits are not
        the model's. Computes nothing.
        """
        self.plan.starts(self.caches, self.index, self.exactly)
        self.plan.buffers(self.caches)
        self.plan.snapshot(self.caches, self.index)
        if logits is not None:
            self.plan.check_logits(logits)

    @cached_property
    def rows(self) -> Rows:
        """Everything that is cut by token. ValueError when a layer holds another number of tokens."""
        starts = self.plan.starts(self.caches, self.index, self.exactly)
        arrays = self.plan.arrays(self.caches)
        stored = [at for at, part in enumerate(self.plan.parts) if part.stored]
        return Rows(
            self.plan.specs, [arrays[at] for at in stored], [starts[at] for at in stored], self.index or 0, self.count
        )

    def state(self, *, decode: bool, phase: int = 0, logits: Any | None = None, extras: Extras | None = None) -> State:
        """Everything that is not. ValueError as above, and for logits that are not the model's."""
        self.plan.starts(self.caches, self.index, self.exactly)
        if logits is not None:
            self.plan.check_logits(logits)
        return state_of(self.plan.snapshot(self.caches, self.index), decode, phase, logits, extras)


def state_of(snapshot: Snapshot, decode: bool, phase: int, logits: Any | None, extras: Extras | None) -> State:
    """A state to be published, with copies of all arrays."""
    tensors = dict(snapshot.tensors)
    values: dict[str, Scalar] = dict(snapshot.values)
    if logits is not None:
        tensors[LOGITS] = logits
    if extras is not None:
        tensors.update({EXTRA + name: array for name, array in extras.tensors.items()})
        values.update({EXTRA + name: value for name, value in extras.values.items()})
    # An empty slot has no bytes, but it is something that a restore must bring back.
    values.update({name: None for name, array in tensors.items() if array is None})
    there = {name: array for name, array in tensors.items() if array is not None}
    if unknown := [name for name, array in there.items() if array.dtype not in DTYPES]:
        raise ValueError(f"{unknown[0]} is {there[unknown[0]].dtype}, which cannot be saved")
    mx.eval(list(there.values()))
    return State(
        tuple(StateTensor(name, DTYPES[array.dtype], tuple(array.shape)) for name, array in there.items()),
        [copy_whole(array) for array in there.values()],
        values,
        phase,
        decode,
    )


def taken_apart(arrays: Mapping[str, Any], values: Mapping[str, Scalar]) -> tuple[Snapshot, Any | None, Extras]:
    """The other way round: what a restored state holds of the caches, the logits, and the engine's extras."""
    own = {name: array for name, array in arrays.items() if name != LOGITS and not name.startswith(EXTRA)}
    extras = Extras(
        {name.removeprefix(EXTRA): array for name, array in arrays.items() if name.startswith(EXTRA)},
        {name.removeprefix(EXTRA): value for name, value in values.items() if name.startswith(EXTRA)},
    )
    counted = {}
    for name, value in values.items():
        if name.startswith(EXTRA):
            continue
        if value is None:
            own[name] = None
        else:
            counted[name] = value
    return Snapshot(own, counted), arrays.get(LOGITS), extras
