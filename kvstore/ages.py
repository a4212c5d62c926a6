"""How long ago what is saved was last used: nodes and bytes by age. Reads manifests, no block, and changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvstore.context import Context
from kvstore.marking import mark_folders
from kvstore.scan import nodes
from kvstore.walk import Tally

__all__ = ["LIMITS_S", "Age", "ages"]

LIMITS_S = (3600, 86400, 7 * 86400, 30 * 86400)
"""Upper bounds of the ages that are told apart, in seconds; what is older comes last."""


@dataclass(frozen=True, slots=True)
class Age:
    """What was last used less than below_s seconds ago, and not later than the row before; None for all that is older.

    size: bytes of blocks, each counted where the youngest node is that names it.
    """

    below_s: int | None
    nodes: int
    size: int


def ages(context: Context) -> list[Age]:
    """A row for each of LIMITS_S, and one for what is older. Raises OSError when a part of it cannot be seen."""
    now = context.clock()
    count, size = [0] * (len(LIMITS_S) + 1), [0] * (len(LIMITS_S) + 1)
    youngest: dict[bytes, tuple[int, int]] = {}
    for marks in mark_folders(context, nodes(context.layout, Tally())):
        for node in marks.nodes:
            row = bisect_left(LIMITS_S, (now - node.file.mtime_ns) / 1e9)
            count[row] += node.file.kind == "kv"
            for digest, block_size in node.blocks:
                if digest not in youngest or row < youngest[digest][0]:
                    youngest[digest] = row, block_size
    for row, block_size in youngest.values():
        size[row] += block_size
    return [Age(limit, count[row], size[row]) for row, limit in enumerate((*LIMITS_S, None))]
