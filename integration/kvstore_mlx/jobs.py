"""What the writer is handed: parts of one prompt, with the memory that they lie in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks import Span
from kvstore.pacing import Pace, slices
from kvstore.states import State
from kvstore_mlx.buffers import has_non_finite
from kvstore_mlx.forms import Form
from kvstore_mlx.live import LOGITS
from kvstore_mlx.pool import Loan
from kvstore_mlx.refusals import Fate

__all__ = ["Boundary", "Job", "non_finite"]


@dataclass(frozen=True)
class Boundary:
    """A state to be published after end tokens of a prompt."""

    end: int
    state: State

    @property
    def payload_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.state.tensors)


@dataclass
class Job:
    """Spans and states of one prompt to be published, in order.

    loans: the memory that a span's data lie in, by its first token, where they lie in the writer's pool. on_written is
    told on the writer thread of each item that was: new tokens, bytes, seconds. fate: shared by all jobs of the prompt.
    """

    form: Form
    tokens: bytes
    items: list[Span | Boundary]
    loans: dict[int, Loan] = field(default_factory=dict)
    on_written: Callable[[int, int, float], None] | None = None
    fate: Fate = field(default_factory=Fate)

    @property
    def size(self) -> int:
        """Bytes the job holds in memory."""
        return sum(item.payload_bytes for item in self.items)

    def give_back(self, item: Span | Boundary | None = None) -> None:
        """Return what one item's data were lent from, or all that is left; its data can no longer be read then."""
        firsts = list(self.loans) if item is None else [item.first] if isinstance(item, Span) else []
        for first in firsts:
            if (loan := self.loans.pop(first, None)) is not None:
                loan.give_back()


def non_finite(item: Span | Boundary, pace: Pace) -> str | None:
    """The name of a tensor that holds a number which is none, if there is one."""
    if isinstance(item, Span):
        names, dtypes = [spec.name for spec in item.specs], [spec.dtype for spec in item.specs]
        data = item.data
    else:
        names, dtypes = [tensor.name for tensor in item.state.tensors], [tensor.dtype for tensor in item.state.tensors]
        data = item.state.data
    # Some families forbid tokens by logits of minus infinity.
    rest = pace.resting()
    for name, dtype, part in zip(names, dtypes, data, strict=True):
        for piece in slices(part):
            if has_non_finite(piece, dtype, but_minus=name == LOGITS):
                return name
            rest()
    return None
