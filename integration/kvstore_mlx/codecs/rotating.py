"""RotatingKVCache: a sliding window in a ring, with a few first tokens kept. It cannot be cut by its logical length.

What is saved is the ring as it lies, with its cursor. A prefill leaves more rows than the window; those that the next
update would drop are left out, which changes nothing that it computes (RotatingKVCache._trim in mlx-lm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, Whole, refuse, rows_of

__all__ = ["Rotating"]


class Rotating(Whole):
    """RotatingKVCache, and the BatchRotatingKVCache that a batch makes of it."""

    token_axis: int | None = 2

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """The window, and how many first tokens never leave it."""
        return {"max_size": cache.max_size, "keep": cache.keep}

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """Tokens seen, which may be more than are still there."""
        return 0, cache.offset if index is None else cache.offset.tolist()[index]

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """keys, values, cursor and offset of the window."""
        if index is not None:
            cache = cache.extract(index)
        keys, values, cursor = cache.keys, cache.values, cache._idx  # noqa: SLF001 - the cursor has no other name
        if keys is not None:
            size = keys.shape[2]
            if size > cache.max_size:
                # Only a prefill leaves so many, and it leaves them in order.
                keys, values = (_without(array, cache.keep, size - cache.max_size) for array in (keys, values))
                cursor = cache.max_size
            elif cache.offset < size:
                keys, values = keys[:, :, : cache.offset], values[:, :, : cache.offset]
        _check(cache.max_size, cache.offset, keys, values, cursor)
        return Snapshot({"keys": keys, "values": values}, {"offset": cache.offset, "cursor": cursor})

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """The ring as it lay."""
        del arrays
        refuse(snapshot, {"keys", "values"}, {"offset", "cursor"})
        keys, values = snapshot.tensors["keys"], snapshot.tensors["values"]
        if snapshot.values["offset"] != tokens:
            raise ValueError(f"a window was saved after {snapshot.values['offset']} tokens instead of {tokens}")
        _check(cache.max_size, tokens, keys, values, snapshot.values["cursor"])
        cache.keys, cache.values = keys, values
        cache.offset, cache._idx = tokens, snapshot.values["cursor"]  # noqa: SLF001 - as above


def _check(window: int, tokens: int, keys: Any, values: Any, cursor: Any) -> None:
    """A ring holds the last tokens of its window, as many as there were."""
    held = rows_of(keys, values)
    if held != min(tokens, window) or not isinstance(cursor, int) or not 0 <= cursor <= held:
        raise ValueError(f"a window of {window} holds {held} rows and cursor {cursor} after {tokens} tokens")


def _without(array: Any, keep: int, count: int) -> Any:
    """Rows without the count oldest ones after those that are kept."""
    if not keep:
        return array[:, :, count:]
    return mx.concatenate([array[:, :, :keep], array[:, :, keep + count :]], axis=2)
