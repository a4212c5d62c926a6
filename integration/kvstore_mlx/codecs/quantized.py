"""QuantizedKVCache: packed integers, scales and biases of keys and values, each growing by token like plain rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, attention_rows

__all__ = ["Quantized"]

_PARTS = ("packed", "scales", "biases")


class Quantized:
    """Never in a batch: mlx-lm serves quantized caches one request at a time."""

    rows = tuple(f"{tensor}.{part}" for tensor in ("keys", "values") for part in _PARTS)
    stateful = False
    token_axis: int | None = None

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """How many numbers share a scale, and the bits of each."""
        return {"group_size": cache.group_size, "bits": cache.bits}

    def arrays(self, cache: Any) -> Sequence[Any]:
        """Six buffers, spare rows included."""
        keys, values = attention_rows(cache)
        return [*keys, *values]

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """All tokens, from row 0."""
        if index is not None:
            raise ValueError("quantized caches are not served in batches")
        return 0, cache.offset

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """Nothing beside its rows."""
        del cache, index
        return Snapshot()

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """As a plain cache."""
        del snapshot
        # A list: the engine assigns to slices of each, in place.
        cache.keys, cache.values = list(arrays[: len(_PARTS)]), list(arrays[len(_PARTS) :])
        cache.offset = tokens
