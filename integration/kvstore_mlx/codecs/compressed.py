"""LayerCache of mlx_lm.models.deepseek_v41: a window, compressed groups, their index keys and the group still open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, Whole, refuse, rows_of

__all__ = ["Compressed"]

_TENSORS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


class Compressed(Whole):
    """Never in a batch: mlx-lm cannot merge it. Groups close every few tokens, so it cannot be cut by token either."""

    token_axis: int | None = 1

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """The size of the window."""
        return {"window_size": cache.window_size}

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """Tokens seen."""
        if index is not None:
            raise ValueError("compressed caches are not served in batches")
        return 0, cache.offset

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """Every tensor, those that are not there yet too. Each is replaced and never written to."""
        del index
        return Snapshot({name: getattr(cache, name) for name in _TENSORS}, {"offset": cache.offset})

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """Attribute by attribute."""
        del arrays
        refuse(snapshot, set(_TENSORS), {"offset"})
        if snapshot.values["offset"] != tokens:
            raise ValueError(f"a layer holds {snapshot.values['offset']} tokens instead of {tokens}")
        _check(cache.window_size, tokens, snapshot.tensors)
        for name in _TENSORS:
            setattr(cache, name, snapshot.tensors[name])
        cache.offset = tokens


def _check(size: int, tokens: int, tensors: Mapping[str, Any]) -> None:
    """The window is as full as it can be, and closed groups of one length (the model's) and the open one have all."""
    window = rows_of(tensors["window"], axis=1)
    pending = rows_of(tensors["pending_kv"], tensors["pending_gate"], axis=1)
    groups = rows_of(tensors["compress_kv"], axis=1)
    keys = rows_of(tensors["index_k"], axis=1)
    closed = tokens - pending
    # A layer that closes no groups has an open one or none; one that shares its keys has none of its own.
    whole = closed % groups == 0 and pending < closed // groups if groups else pending in {0, tokens}
    if window != min(tokens, size) or not whole or keys not in {0, groups}:
        raise ValueError(
            f"a layer holds {window} of {size} rows, {groups} groups, {keys} index keys and {pending} more after "
            f"{tokens} tokens"
        )
