"""How the caches of one model lie in the store: which tensors are rows of tokens, and what is boundary state.

A plan is made once a model from its fresh caches and from what one short forward pass leaves in them, so that every
dtype and shape is known before anything is saved or restored. Everything here runs on the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from kvstore.blocks import TensorSpec
from kvstore.states import Scalar, StateTensor
from kvstore_mlx.buffers import DTYPES
from kvstore_mlx.codecs import Codec, Snapshot, codec_of

__all__ = ["Leaf", "Part", "Plan", "Slot", "leaves_of", "unknown_classes"]

_UNKNOWN_BYTES = 1 << 20
"""For each token of a prompt, of tensors in a state that the model's first tokens do not show: more than the keys and
values of nearly all models take."""


@dataclass(frozen=True)
class Leaf:
    """One cache of a model: 3 for the fourth layer's, 3.1 for the second in its CacheList."""

    name: str
    class_name: str
    codec: Codec
    config: Mapping[str, Scalar]


@dataclass(frozen=True)
class Part:
    """One tensor that grows by token, without its token axis.

    A tensor with a zero size (a layer that has keys and no values, say) is in no block and restored by its shape.
    """

    name: str
    dtype: str
    heads: int
    inner: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """As a block has it."""
        return TensorSpec(self.name, self.dtype, self.heads, self.inner)

    @property
    def stored(self) -> bool:
        """Whether it has any bytes."""
        return self.heads > 0 and 0 not in self.inner


@dataclass(frozen=True)
class Slot:
    """One tensor of a boundary state. A size that depends on the tokens is None."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def holds(self, array: Any) -> bool:
        """Whether an array could be this one."""
        return (
            DTYPES.get(array.dtype) == self.dtype
            and array.ndim == len(self.shape)
            and all(size in {None, own} for size, own in zip(self.shape, array.shape, strict=True))
        )

    def admits(self, tensor: StateTensor, tokens: int) -> bool:
        """Whether what a header describes could be this one, in a prompt of so many tokens."""
        return (
            tensor.dtype == self.dtype
            and len(tensor.shape) == len(self.shape)
            and all(
                own <= tokens if size is None else own == size
                for size, own in zip(self.shape, tensor.shape, strict=True)
            )
        )


def leaves_of(caches: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every cache that is not a list of others, with its name."""
    for number, cache in enumerate(caches):
        if type(cache) is CacheList:
            yield from ((f"{number}.{name}", leaf) for name, leaf in leaves_of(cache.caches))
        else:
            yield str(number), cache


def unknown_classes(caches: Sequence[Any]) -> str:
    """Names of the cache classes that have no codec; empty when every one has."""
    return ", ".join(sorted({type(leaf).__name__ for _, leaf in leaves_of(caches) if codec_of(leaf) is None}))


@dataclass(frozen=True)
class Plan:
    """The caches that make gives, as the store sees them.

    slots: tensors of the state that a few tokens fill. later: those that one more token filled, and logits: what the
    model makes of it; both are checked where they are, and in no namespace.
    """

    make: Callable[[], list[Any]]
    leaves: tuple[Leaf, ...]
    parts: tuple[Part, ...]
    slots: tuple[Slot, ...] = ()
    later: tuple[Slot, ...] = ()
    logits: Slot | None = None

    @staticmethod
    def of(make: Callable[[], list[Any]], filled: Sequence[Any]) -> Plan:
        """The plan of a model. filled are caches as make gives them, after a forward pass.

        ValueError for a class without a codec, and for tensors that cannot be cut by token.
        """
        if unknown := unknown_classes(filled):
            raise ValueError(f"no codec for {unknown}")
        leaves = []
        for name, cache in leaves_of(make()):
            codec = codec_of(cache)
            assert codec is not None
            leaves.append(Leaf(name, type(cache).__name__, codec, codec.config(cache)))
        parts = [
            _part(f"{name}.{row}", array)
            for name, cache, codec in _with_codecs(filled)
            for row, array in zip(codec.rows, codec.arrays(cache), strict=True)
        ]
        return Plan(make, tuple(leaves), tuple(parts), tuple(_slots(filled)))

    def after(self, filled: Sequence[Any], logits: Any) -> Plan:
        """This plan with what a further step left in the caches and made as logits."""
        known = {slot.name for slot in self.slots}
        later = tuple(slot for slot in _slots(filled) if slot.name not in known)
        return replace(self, later=later, logits=_slot("logits", logits, None))

    @cached_property
    def stateful(self) -> bool:
        """Whether a prefix can be resumed at boundary states only."""
        return any(leaf.codec.stateful for leaf in self.leaves)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of a span, in layer order."""
        return tuple(part.spec for part in self.parts if part.stored)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes a token takes in blocks."""
        return sum(spec.span_bytes(1) for spec in self.specs)

    def describe(self) -> dict[str, Any]:
        """For the namespace: classes, what they were made with, and every tensor's dtype and shape."""
        return {
            "caches": [[leaf.name, leaf.class_name, dict(leaf.config)] for leaf in self.leaves],
            "rows": [[part.name, part.dtype, part.heads, list(part.inner)] for part in self.parts],
            "state": [[slot.name, slot.dtype, list(slot.shape)] for slot in self.slots],
        }

    def fits(self, caches: Sequence[Any]) -> bool:
        """Whether these caches, or those of a batch, are of the classes that the model makes."""
        return [(name, codec_of(cache)) for name, cache in leaves_of(caches)] == [
            (leaf.name, leaf.codec) for leaf in self.leaves
        ]

    def arrays(self, caches: Sequence[Any]) -> list[Any]:
        """The live buffers of every part; evaluated, because a memoryview needs that."""
        arrays = self.buffers(caches)
        mx.eval(arrays)
        return arrays

    def buffers(self, caches: Sequence[Any]) -> list[Any]:
        """The same as they are, checked against the plan."""
        arrays = [array for _, cache, codec in self._match(caches) for array in codec.arrays(cache)]
        for part, array in zip(self.parts, arrays, strict=True):
            if _part(part.name, array) != part:
                raise ValueError(f"{part.name} is {array.dtype}{list(array.shape)}, not {part}")
        return arrays

    def starts(self, caches: Sequence[Any], index: int | None, exactly: int | None) -> list[int]:
        """The row of token 0 of every part, after checking that every layer holds exactly this many tokens.

        None is for the middle of speculative decoding: a model and its draft model may differ by tokens that one of
        them has not been shown yet.
        """
        starts = []
        counts = set()
        for _, cache, codec in self._match(caches):
            extent = codec.extent(cache, index)
            if extent is not None:
                counts.add(extent[1])
            starts += [0 if extent is None else extent[0]] * len(codec.rows)
        if exactly is not None and not counts <= {exactly}:
            raise ValueError(f"layers hold {sorted(counts)} tokens where {exactly} were computed")
        return starts

    def count(self, caches: Sequence[Any]) -> int | None:
        """Tokens that every layer of one sequence holds, the fewest when they differ; None when no layer counts."""
        extents = [codec.extent(cache, None) for _, cache, codec in self._match(caches)]
        return min((extent[1] for extent in extents if extent is not None), default=None)

    def snapshot(self, caches: Sequence[Any], index: int | None) -> Snapshot:
        """The state of one sequence, names prefixed with the cache's. ValueError when a tensor is not the plan's."""
        tensors: dict[str, Any] = {}
        values: dict[str, Scalar] = {}
        for name, cache, codec in self._match(caches):
            if codec.stateful:
                own = codec.snapshot(cache, index)
                tensors.update({f"{name}.{key}": tensor for key, tensor in own.tensors.items()})
                values.update({f"{name}.{key}": value for key, value in own.values.items()})
        self._check(tensors)
        return Snapshot(tensors, values)

    def rebuild(self, tokens: int, arrays: Mapping[str, Any], snapshot: Snapshot) -> list[Any]:
        """Caches that go on after these tokens; ValueError when what was read does not fit them."""
        self._check(snapshot.tensors)
        caches = self.make()
        for leaf, (_, cache, codec) in zip(self.leaves, self._match(caches), strict=True):
            prefix = f"{leaf.name}."
            own = Snapshot(_below(snapshot.tensors, prefix), _below(snapshot.values, prefix))
            codec.rebuild(cache, tokens, [arrays[prefix + row] for row in codec.rows], own)
        self.starts(caches, None, tokens)
        return caches

    def _check(self, tensors: Mapping[str, Any]) -> None:
        """ValueError when a tensor of a state has another dtype or shape than this model's, or is not there."""
        for slot in (*self.slots, *self.later):
            array = tensors.get(slot.name)
            if array is None and slot in self.later:
                continue
            if array is None or not slot.holds(array):
                raise ValueError(f"{slot.name} is {_kind(array)}, not {slot}")

    def check_header(self, tensors: Sequence[StateTensor], tokens: int) -> None:
        """ValueError when a state's header asks for memory that no state of this model takes after so many tokens.

        What is not known of the model (a group that closes later, an engine's extras) is bounded by its size.
        """
        known = {slot.name: slot for slot in (*self.slots, *self.later, self.logits) if slot is not None}
        rest = 0
        for tensor in tensors:
            slot = known.get(tensor.name)
            if slot is None:
                rest += tensor.nbytes
            elif not slot.admits(tensor, tokens):
                raise ValueError(f"a state has {tensor}, not {slot}")
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"a state has {tensor}, which is no array of this engine's")
        if rest > tokens * _UNKNOWN_BYTES:
            raise ValueError(f"a state has {rest} bytes of tensors that are not known of this model")

    def check_logits(self, logits: Any) -> None:
        """ValueError when these are not one row of logits of this model."""
        if self.logits is not None and not self.logits.holds(logits):
            raise ValueError(f"logits are {_kind(logits)}, not {self.logits}")

    def _match(self, caches: Sequence[Any]) -> Iterator[tuple[str, Any, Codec]]:
        """Caches beside the leaves they belong to; ValueError when the engine holds other classes than it made."""
        if not self.fits(caches):
            raise ValueError("the engine holds other cache classes than the model makes")
        yield from _with_codecs(caches)


def _with_codecs(caches: Sequence[Any]) -> Iterator[tuple[str, Any, Codec]]:
    for name, cache in leaves_of(caches):
        codec = codec_of(cache)
        if codec is None:
            raise ValueError(f"no codec for {type(cache).__name__}")
        yield name, cache, codec


def _part(name: str, array: Any) -> Part:
    if array.dtype not in DTYPES or array.ndim < 4:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, which cannot be cut by token")
    return Part(name, DTYPES[array.dtype], array.shape[1], tuple(array.shape[3:]))


def _slots(filled: Sequence[Any]) -> Iterator[Slot]:
    """The tensors of a state that are there."""
    for name, cache, codec in _with_codecs(filled):
        if codec.stateful:
            for key, array in codec.snapshot(cache, None).tensors.items():
                if array is not None:
                    yield _slot(f"{name}.{key}", array, codec.token_axis)


def _kind(array: Any) -> str:
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"


def _slot(name: str, array: Any, token_axis: int | None) -> Slot:
    if array.dtype not in DTYPES:
        raise ValueError(f"{name} is {array.dtype}, which cannot be saved")
    return Slot(
        name,
        DTYPES[array.dtype],
        tuple(None if axis == token_axis else size for axis, size in enumerate(array.shape)),
    )


def _below(mapping: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in mapping.items() if key.startswith(prefix)}
