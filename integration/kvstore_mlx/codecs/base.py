"""What a codec is. The engine's caches are seen here and in the modules beside this one, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.states import Scalar

__all__ = ["Codec", "Snapshot", "Whole", "attention_rows", "batch_start", "refuse", "rows_of"]


@dataclass(frozen=True)
class Snapshot:
    """What one cache of one sequence holds that cannot be cut by token. A tensor may be None: the slot is empty."""

    tensors: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)


class Codec(Protocol):
    """How the caches of one class are taken apart and put together.

    Where index is an int, the cache is the class that a batch makes of them, and index says which sequence is meant;
    where it is None, the cache holds one sequence. Every method runs on the generation thread.
    """

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the tensors ``[batch, heads, capacity, *inner]`` that only ever grow by token."""

    @property
    def stateful(self) -> bool:
        """Whether there is anything else. Such a cache can only be resumed at a boundary state."""

    @property
    def token_axis(self) -> int | None:
        """The axis of its state's tensors that is as long as tokens make it; None when every size is the model's."""

    def config(self, cache: Any) -> Mapping[str, Scalar]:
        """What was decided when the cache was made and must be equal to read another one's bytes."""

    def arrays(self, cache: Any) -> Sequence[Any]:
        """The live buffers of rows, in order, evaluated by the caller. ValueError when nothing was computed."""

    def extent(self, cache: Any, index: int | None) -> tuple[int, int] | None:
        """The row of the sequence's token 0 and the number of its tokens, or None for a class that does not count."""

    def snapshot(self, cache: Any, index: int | None) -> Snapshot:
        """The state of one sequence. Arrays may be lazy, and may share memory with the cache until its next update."""

    def rebuild(self, cache: Any, tokens: int, arrays: Sequence[Any], snapshot: Snapshot) -> None:
        """Fill a cache that the model has just made, so that it goes on after these tokens.

        arrays are the rows, with room for more than tokens. ValueError when the snapshot does not fit the cache.
        """


class Whole:
    """What the codecs of classes have in common that cannot be cut by token at all: nothing of them is rows."""

    rows: tuple[str, ...] = ()
    stateful = True

    def arrays(self, cache: Any) -> Sequence[Any]:
        """None: all of it is state."""
        del cache
        return ()


def batch_start(cache: Any, index: int) -> int:
    """Rows of padding before a sequence's first token in a left-padded batch."""
    padding: int = cache.left_padding.tolist()[index]
    return padding


def attention_rows(cache: Any) -> tuple[Any, Any]:
    """Keys and values of an attention cache."""
    if cache.keys is None:
        raise ValueError("a layer has computed nothing")
    return cache.keys, cache.values


def refuse(snapshot: Snapshot, tensors: set[str], values: set[str]) -> None:
    """ValueError for a snapshot that another version of a codec made."""
    if set(snapshot.tensors) != tensors or set(snapshot.values) != values:
        raise ValueError(f"a state holds {sorted(snapshot.tensors)} and {sorted(snapshot.values)}")


def rows_of(*tensors: Any, axis: int = 2) -> int:
    """Rows of tensors that must have as many each, 0 when none is there; ValueError when they differ."""
    counts = {0 if tensor is None else tensor.shape[axis] for tensor in tensors}
    if len(counts) > 1:
        raise ValueError(f"tensors of one cache hold {sorted(counts)} rows")
    return int(counts.pop())
