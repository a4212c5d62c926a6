"""Drop cold tails that a longer sibling contains, so that the sibling's blocks can be joined.

A conversation that grows leaves a tail a turn. Each names blocks that the longer ones name too, one by one, and as long
as it is there these can only be joined by storing its tokens twice. A lookup takes the longer sibling's first tokens
instead of the tail's, so that nothing is lost with it, if

- the sibling is whole (all of its blocks are there, the tail's first), stays, and was used no less recently: it is not
  evicted before the tail would have been;
- a lookup finds it (kvstore.crowds);
- the tail has no boundary state, which is a resume point that the sibling does not have;
- no manifest beside it is damaged: that one may name its blocks.

Only the manifest goes, under the locks and only if it is the file that was seen, as a collection does it
(kvstore.sweep); blocks that nothing names any more are left to gc. A kill anywhere leaves some of the tails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from kvstore.commit import intact_block
from kvstore.context import Context
from kvstore.crowds import Crowds
from kvstore.eviction import PROTECT_NS, young
from kvstore.locks import gc_lock
from kvstore.marking import Marked, Marks
from kvstore.sweep import Doomed, Sweeper

__all__ = ["Cold", "drop_contained"]


@dataclass(frozen=True, slots=True)
class Cold:
    """What a run may change: nodes of some namespaces (None: of all) that were not used after limit_ns."""

    context: Context
    now_ns: int
    limit_ns: int
    namespaces: Collection[str] | None

    def is_wanted(self, node: Marked) -> bool:
        """Whether a node is of these namespaces."""
        return self.namespaces is None or node.file.namespace in self.namespaces

    def is_cold(self, node: Marked) -> bool:
        """Whether a node rests, also as far as this process knows."""
        recent = self.context.last_use(node.file.path(self.context.layout), self.now_ns)
        return max(self.last_use(node), recent) <= self.limit_ns

    def last_use(self, node: Marked) -> int:
        """The mtime. A time in the future says nothing (a copy from a machine with a wrong clock); when the file came
        here does.
        """
        file = node.file
        return file.mtime_ns if file.mtime_ns <= self.now_ns else min(file.ctime_ns, self.now_ns)


@dataclass(frozen=True, slots=True)
class _Tail:
    """A tail to drop, and the sibling that must still be there when it goes."""

    index: int
    file: Doomed
    sibling: Path


def drop_contained(cold: Cold, marks: Marks, *, dry_run: bool) -> tuple[Marks, int] | None:
    """Drop what may go; the marks without it, and how many tails that were (with dry_run, would be).

    None when a collection runs, which is not waited for. The marks that come back are for joining: their nodes are all
    that is right in them. Raises OSError.
    """
    with nullcontext(True) if dry_run else gc_lock(cold.context.layout) as mine:
        return _drop(cold, marks, Sweeper(cold.context, lambda _point: None, dry_run=dry_run)) if mine else None


def _drop(cold: Cold, marks: Marks, sweeper: Sweeper) -> tuple[Marks, int]:
    gone: set[int] = set()
    folders: dict[Path, None] = {}
    with sweeper.in_short_holds(list(_droppable(cold, marks)), lambda tail: (tail.file.path,)) as held:
        for tail in held:
            path = tail.file.path
            # Its state may have come since it was looked for; that touches the tail, too, but one look is cheap.
            if path.with_suffix(".state").exists() or not tail.sibling.exists() or not sweeper.remove(tail.file):
                continue
            gone.add(tail.index)
            folders[path.parent] = None
    for folder in folders:
        # Before gc takes the blocks that only these named: a power cut must not bring a tail back without them.
        sweeper.sync(folder)
    return Marks([node for index, node in enumerate(marks.nodes) if index not in gone]), len(gone)


def _droppable(cold: Cold, marks: Marks) -> Iterator[_Tail]:
    """The tails that may go, longest first, so that whether a longer sibling stays is known by then."""
    layout = cold.context.layout
    candidates = _candidates(cold, marks)
    going = set(candidates)
    stay = (node for index, node in enumerate(marks.nodes) if index not in going)
    crowds = Crowds(stay, [marks.nodes[index] for index in candidates])
    for index in candidates:
        tail = marks.nodes[index]
        siblings = [marks.nodes[longer] for longer in marks.containers[index] if longer not in going]
        sibling = next((each for each in siblings if _serves(cold, each, tail)), None)
        if sibling is None or not crowds.finds_longer(tail):
            going.discard(index)
            crowds.add(tail)
        else:
            yield _Tail(index, Doomed.node(layout, tail.file), sibling.file.path(layout))


def _candidates(cold: Cold, marks: Marks) -> list[int]:
    """Tails that a longer sibling contains and that nothing but the siblings can keep, longest first."""
    states = {node.file.place for node in marks.nodes if node.file.kind == "state"}
    unsure = {node.file.above for node in marks.unreadable}

    def may_go(tail: Marked) -> bool:
        file = tail.file
        return (
            bool(tail.blocks)
            and cold.is_wanted(tail)
            and cold.is_cold(tail)
            and not young(file.mtime_ns, file.ctime_ns, cold.now_ns, PROTECT_NS)
            and tail.file.place not in states
            and tail.file.above not in unsure
        )

    found = [index for index in marks.containers if may_go(marks.nodes[index])]
    return sorted(found, key=lambda index: marks.nodes[index].file.tokens, reverse=True)


def _serves(cold: Cold, sibling: Marked, tail: Marked) -> bool:
    """Whether a sibling that contains a tail can stand in for it."""
    return (
        sibling.blocks[: len(tail.blocks)] == tail.blocks
        and cold.last_use(sibling) >= cold.last_use(tail)
        and all(intact_block(cold.context, digest, size) for digest, size in sibling.blocks)
    )
