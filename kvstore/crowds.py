"""Whether a lookup finds a longer sibling in place of a tail that is gone: what gc and repack must know before it goes.

A tail is found by its key. A longer sibling that begins with its tokens is found by its rungs, and a lookup opens only
the MAX_OPENED most promising of those. So the tail must have a rung (64 tokens), and must not be one of many that begin
alike: for a prompt that begins with its tokens the siblings that share all of its rungs come first, and if they are few
the longer one is among those opened.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.lookup import MAX_OPENED
from kvstore.marking import Marked, group_of, level_of

__all__ = ["Crowds"]


class Crowds:
    """How many siblings share all rungs of each of some tails. nodes: those that stay, the tails among them."""

    def __init__(self, nodes: Iterable[Marked], tails: Iterable[Marked]) -> None:
        # Of these groups only: a directory of a million nodes has as many others.
        self._counts = {_crowd(tail): 0 for tail in tails}
        self._parents = {tail.file.parent for tail in tails}
        for node in nodes:
            self._count(node, 1)

    def add(self, node: Marked) -> None:
        """A node stays after all."""
        self._count(node, 1)

    def remove(self, node: Marked) -> None:
        """A node goes."""
        self._count(node, -1)

    def finds_longer(self, tail: Marked) -> bool:
        """Whether a lookup opens a longer sibling that begins with a tail, once the tail was removed."""
        return level_of(tail.file.tokens) > 0 and self._counts[_crowd(tail)] <= MAX_OPENED

    def _count(self, node: Marked, by: int) -> None:
        if node.file.kind == "kv" and node.file.parent in self._parents:
            for level in range(1, level_of(node.file.tokens) + 1):
                group = group_of(node.file, level)
                if group in self._counts:
                    self._counts[group] += by


def _crowd(tail: Marked) -> str:
    return group_of(tail.file, level_of(tail.file.tokens))
