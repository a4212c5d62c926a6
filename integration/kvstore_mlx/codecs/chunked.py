"""ChunkedKVCache: attention within chunks, whose older rows are dropped at the front as it goes on.

mlx-lm calls it trimmable, but trims it no further back than what is left, silently; so it is resumed at states only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, Whole, refuse

__all__ = ["Chunked"]


class Chunked(Whole):
    """Never in a batch: mlx-lm cannot merge it."""

    token_axis: int | None = 2

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """The size of a chunk."""
        return {"chunk_size": cache.chunk_size}

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """Tokens seen, which may be more than are still there."""
        if index is not None:
            raise ValueError("chunked caches are not served in batches")
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
        keys = snapshot.tensors["keys"]
        offset, start = snapshot.values["offset"], snapshot.values["start"]
        held = 0 if keys is None else keys.shape[2]
        if offset != tokens or not isinstance(start, int) or start + held != tokens or start < 0:
            raise ValueError(f"a chunk holds rows {start} to {start} + {held} after {offset} of {tokens} tokens")
        cache.keys, cache.values = keys, snapshot.tensors["values"]
        cache.offset, cache.start_position = tokens, start
