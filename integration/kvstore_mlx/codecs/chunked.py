"""ChunkedKVCache: attention within chunks, whose older rows are dropped at the front as it goes on.

mlx-lm calls it trimmable, but trims it no further back than what is left, and to places whose chunk has lost its first
rows, silently; so it is resumed at states only, and what was trimmed so far is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, Whole, refuse, rows_of

__all__ = ["Chunked"]


class Chunked(Whole):
    """Never in a batch: mlx-lm cannot merge it."""

    token_axis: int | None = 2

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """The size of a chunk."""
        return {"chunk_size": cache.chunk_size}

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """Tokens seen, which may be more than are still there. ValueError when the next one would lack some."""
        if index is not None:
            raise ValueError("chunked caches are not served in batches")
        first = cache.offset // cache.chunk_size * cache.chunk_size
        if cache.start_position > first:
            raise ValueError(f"a chunk begins at token {first}, and its rows at {cache.start_position}")
        return 0, cache.offset

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """The rows that are left, and where they begin."""
        del index
        keys, values = cache.keys, cache.values
        if keys is not None:
            held = cache.offset - cache.start_position
            keys, values = keys[:, :, :held], values[:, :, :held]
        return Snapshot({"keys": keys, "values": values}, {"offset": cache.offset, "start": cache.start_position})

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """The rows become the whole buffer, which grows at the next update."""
        del arrays
        refuse(snapshot, {"keys", "values"}, {"offset", "start"})
        keys, values = snapshot.tensors["keys"], snapshot.tensors["values"]
        offset, start = snapshot.values["offset"], snapshot.values["start"]
        held = rows_of(keys, values)
        if offset != tokens or not isinstance(start, int) or start + held != tokens or start < 0:
            raise ValueError(f"a chunk holds rows {start} to {start} + {held} after {offset} of {tokens} tokens")
        cache.keys, cache.values = keys, values
        cache.offset, cache.start_position = tokens, start
