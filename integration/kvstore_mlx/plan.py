"""How the caches of one model lie in the store: which tensors are rows of tokens, and what is boundary state.

A plan is made once a model from its fresh caches and from what one short forward pass leaves in them, so that every
dtype and shape is known before anything is saved or restored. Everything here runs on the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from kvstore.blocks import TensorSpec
from kvstore.states import Scalar
from kvstore_mlx.buffers import DTYPES
from kvstore_mlx.codecs import Codec, Snapshot, codec_of

__all__ = ["Leaf", "Part", "Plan", "Slot", "leaves_of", "unknown_classes"]


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

    slots: tensors of the state that a few tokens fill. What appears later (a group that closes, say) is not checked.
    """

    make: Callable[[], list[Any]]
    leaves: tuple[Leaf, ...]
    parts: tuple[Part, ...]
    slots: tuple[Slot, ...] = ()

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
        slots = [
            _slot(f"{name}.{key}", array, codec.token_axis)
            for name, cache, codec in _with_codecs(filled)
            if codec.stateful
            for key, array in codec.snapshot(cache, None).tensors.items()
            if array is not None
        ]
        return Plan(make, tuple(leaves), tuple(parts), tuple(slots))

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
        """The live buffers of every part, checked against the plan; evaluated, because a memoryview needs that."""
        arrays = [array for _, cache, codec in self._match(caches) for array in codec.arrays(cache)]
        for part, array in zip(self.parts, arrays, strict=True):
            if _part(part.name, array) != part:
                raise ValueError(f"{part.name} is {array.dtype}{list(array.shape)}, not {part}")
        mx.eval(arrays)
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
        """ValueError when a tensor of a state has another dtype or shape than this model's."""
        for slot in self.slots:
            array = tensors.get(slot.name)
            if array is not None and not slot.holds(array):
                raise ValueError(f"{slot.name} is {array.dtype}{list(array.shape)}, not {slot}")

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
