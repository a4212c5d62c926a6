"""Whether blocks hold the same tensors: a restore has one set of buffers for a whole prompt, and ends before a block
with others.

Headers tell, and nothing is refused for what a header says before its block was read whole: a flipped bit in a name
makes another tensor of it. What cannot be read, or is damaged, is like anything; whoever reads it sees.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvstore.blocks import MAX_HEADER_BYTES, TensorSpec, read_specs
from kvstore.context import Context
from kvstore.errors import DamagedBlockError
from kvstore.fs import mostly_holes
from kvstore.manifest import BlockRef
from kvstore.states import digest_of_file

__all__ = ["are_alike", "differ", "holds_others"]


def are_alike(specs: Sequence[TensorSpec], others: Sequence[TensorSpec]) -> bool:
    """Whether the buffers that tensors need are those that others need, in the same order."""
    return _layout(specs) == _layout(others)


def _layout(specs: Sequence[TensorSpec]) -> list[tuple[str | int, ...]]:
    return [(spec.name, spec.dtype, spec.outer, *spec.inner) for spec in specs]


def holds_others(context: Context, ref: BlockRef, specs: Sequence[TensorSpec]) -> bool:
    """Whether a block has other tensors than these."""
    found = _specs(context, ref)
    return found is not None and not are_alike(found, specs) and _is_whole(context, ref)


def differ(context: Context, ref: BlockRef, other_context: Context, others: Sequence[BlockRef]) -> bool:
    """Whether a block has other tensors than one of some others, which may lie in another directory."""
    specs = _specs(context, ref) if others else None
    return (
        specs is not None
        and any(holds_others(other_context, other, specs) for other in others)
        and _is_whole(context, ref)
    )


def _specs(context: Context, ref: BlockRef) -> tuple[TensorSpec, ...] | None:
    try:
        with context.fs.open_read(context.layout.block(ref.digest)) as (fd, status):
            if status.st_size != ref.size:
                return None
            return read_specs(os.pread(fd, min(ref.payload, MAX_HEADER_BYTES), 0), ref)
    except (OSError, DamagedBlockError):
        return None


def _is_whole(context: Context, ref: BlockRef) -> bool:
    """Read with rests beside an engine at work; a sparse file of terabytes is quickly made, and not read."""
    try:
        with context.fs.open_read(context.layout.block(ref.digest)) as (fd, status):
            return (
                status.st_size == ref.size
                and not mostly_holes(fd, status)
                and digest_of_file(fd, ref.size, context.pace.resting()) == ref.digest
            )
    except (OSError, EOFError):
        return False
