"""ArraysCache: recurrent and convolution state, any number of slots, replaced as a whole at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.states import Scalar
from kvstore_mlx.codecs.base import Snapshot, Whole, refuse

__all__ = ["Arrays"]


class Arrays(Whole):
    """ArraysCache, alone or in a batch: the first axis of each slot is the sequence."""

    token_axis: int | None = None

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """How many slots."""
        return {"slots": len(cache.cache)}

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """It does not count tokens; other layers and the recording do."""
        del cache, index
        return None

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """Each slot; padding belongs to the batch and is never saved.

        Refuses a cache in the middle of a padded step, and one sequence that still has padding before it.
        """
        if cache.lengths is not None:
            raise ValueError("a recurrent layer is in the middle of a padded step")
        if cache.left_padding is not None and cache.left_padding.tolist()[index or 0] > 0:
            raise ValueError("a recurrent layer has padding before its first token")
        if index is None:
            if cache.batch_size != 1:
                raise ValueError(f"a recurrent layer holds {cache.batch_size} sequences")
            index = 0
        slots = [slot if slot is None else slot[index : index + 1] for slot in cache.cache]
        return Snapshot({str(number): slot for number, slot in enumerate(slots)})

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """Every slot as it was, empty ones too."""
        del tokens, arrays
        refuse(snapshot, {str(number) for number in range(len(cache.cache))}, set())
        cache.cache = [snapshot.tensors[str(number)] for number in range(len(cache.cache))]
