"""How mlx-lm's cache classes become spans of tokens and back.

Plain attention (KVCache) only: keys and values are ``[1, heads, capacity, head dim]`` buffers that grow by token, so a
span of tokens is a slice of rows, at any time after they were computed. A model with any other class is served without
the cache directory, and told so once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from kvstore.blocks import TensorBuffer, TensorSpec
from kvstore_mlx.buffers import copy_rows, empty, spec_of

__all__ = ["LAYOUT", "Restoring", "Rows", "batch_rows", "sequence_rows", "unsupported"]

LAYOUT = 1
"""Version of what this module writes into blocks; part of the namespace, so that a change never meets old bytes."""

_PARTS = ("keys", "values")
_STEP = 256
"""KVCache grows in steps of this many tokens; a restored buffer is a multiple of it like a native one."""


def unsupported(caches: Sequence[Any]) -> str | None:
    """The names of cache classes that have no codec, or None when every layer has one."""
    names = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    return ", ".join(names) or None


@dataclass(frozen=True)
class Rows:
    """One sequence's KV in an engine's live buffers, to be copied out by token.

    count tokens are there; start is the row of token 0 (left padding of a batch); index the sequence's batch index.
    """

    arrays: Mapping[str, Any]
    index: int
    start: int
    count: int

    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of a span, in layer order."""
        return tuple(spec_of(name, array) for name, array in self.arrays.items())

    def copy(self, first: int, end: int) -> list[Any]:
        """Tokens first .. end of every tensor, as bytes that belong to the caller."""
        if not 0 <= first < end <= self.count:
            raise ValueError(f"tokens {first} to {end} of {self.count} were asked for")
        return [copy_rows(array, self.index, self.start + first, self.start + end) for array in self.arrays.values()]


def sequence_rows(caches: Sequence[Any], exactly: int | None) -> Rows:
    """The rows of a list of KVCache, one a layer, every one of which must hold exactly this many tokens.

    None is for the middle of speculative decoding: the model and its draft model may differ by tokens that one of them
    has not been shown yet, and the shorter one counts (all of its tokens are in the longer one too).
    """
    if reason := unsupported(caches):
        raise ValueError(f"no codec for {reason}")
    offsets = {cache.offset for cache in caches}
    if exactly is not None and offsets != {exactly}:
        raise ValueError(f"layers hold {sorted(offsets)} tokens where {exactly} were computed")
    _evaluate(caches)
    return Rows(_arrays(caches), 0, 0, min(offsets))


def batch_rows(caches: Sequence[Any], index: int, exactly: int) -> Rows:
    """The rows of one sequence of a list of BatchKVCache, which are left-padded to the longest sequence.

    The sequence must hold exactly this many tokens in every layer.
    """
    if any(type(cache) is not BatchKVCache for cache in caches):
        raise ValueError("the batch holds other cache classes than the model makes")
    _evaluate(caches)
    start = caches[0].left_padding.tolist()[index]
    counts = {cache._idx - start for cache in caches}  # noqa: SLF001 - mlx-lm has no public name for the filled length
    if counts != {exactly}:
        raise ValueError(f"layers hold {sorted(counts)} tokens where {exactly} were computed")
    return Rows(_arrays(caches), index, start, exactly)


def _evaluate(caches: Sequence[Any]) -> None:
    """Force what a decode step may have left lazy: a memoryview needs evaluated memory."""
    mx.eval([getattr(cache, part) for cache in caches for part in _PARTS])


def _arrays(caches: Sequence[Any]) -> dict[str, Any]:
    return {f"{layer}.{part}": getattr(cache, part) for layer, cache in enumerate(caches) for part in _PARTS}


class Restoring:
    """Memory for one restore, in the engine's own layout, and the caches made of it afterwards.

    layers is the number of caches the model makes; room the tokens the prompt will grow to, so that the engine does not
    copy the whole cache at its first update.
    """

    def __init__(self, layers: int, room: int) -> None:
        self._names = [f"{layer}.{part}" for layer in range(layers) for part in _PARTS]
        self._room = room
        self._arrays: dict[str, Any] = {}

    def allocate(self, specs: tuple[TensorSpec, ...], tokens: int) -> Mapping[str, TensorBuffer]:
        """See kvstore.restore.Allocate. Refuses (ValueError) tensors that are not this model's."""
        if [spec.name for spec in specs] != self._names:
            raise ValueError(f"blocks hold {len(specs)} tensors, the model has {len(self._names)}")
        capacity = -(-max(tokens, self._room) // _STEP) * _STEP
        self._arrays = empty({spec.name: (spec.dtype, (1, spec.outer, capacity, *spec.inner)) for spec in specs})
        return {spec.name: TensorBuffer(memoryview(self._arrays[spec.name]).cast("B"), capacity) for spec in specs}

    def caches(self, tokens: int) -> list[Any]:
        """One KVCache a layer that holds the first tokens of what was read."""
        make: Callable[[], Any] = KVCache
        caches = []
        for at in range(0, len(self._names), len(_PARTS)):
            cache = make()
            cache.keys, cache.values = (self._arrays[name] for name in self._names[at : at + len(_PARTS)])
            cache.offset = tokens
            caches.append(cache)
        return caches
