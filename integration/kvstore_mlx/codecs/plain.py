"""Attention that keeps every token: keys and values grow by rows and can be cut at any token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, attention_rows, batch_start

__all__ = ["Concatenated", "Plain"]


class Plain:
    """KVCache, and the BatchKVCache that a batch makes of it."""

    rows = ("keys", "values")
    stateful = False
    token_axis: int | None = None

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """Nothing: its tensors say it all."""
        del cache
        return {}

    def arrays(self, cache: Any) -> Sequence[Any]:
        """Both buffers, spare rows included."""
        return attention_rows(cache)

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """A batch is padded on the left, and its filled length is the same for all."""
        if index is None:
            return 0, cache.offset
        start = batch_start(cache, index)
        return start, cache._idx - start  # noqa: SLF001 - mlx-lm has no public name for the filled length

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """Nothing beside its rows."""
        del cache, index
        return Snapshot()

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """The buffers become the cache's own, with their spare rows as room for the suffix."""
        del snapshot
        cache.keys, cache.values = arrays
        cache.offset = tokens


class Concatenated(Plain):
    """ConcatenateKVCache: the same, without spare rows, and never in a batch."""

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """As many tokens as rows: mlx-lm's trim moves the offset alone, and the next update takes all rows again."""
        if index is not None:
            raise ValueError("concatenated caches are not served in batches")
        return 0, 0 if cache.keys is None else cache.keys.shape[-2]

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """Its length is the length of its arrays."""
        del snapshot
        cache.keys, cache.values = (array[:, :, :tokens] for array in arrays)
        cache.offset = tokens
