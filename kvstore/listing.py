"""The conversations of a cache directory, for people: what is saved, how long it is, and what it would free.

A conversation is a longest saved prefix: a node without children that no longer sibling contains. (One that has a
boundary state counts all the same: an engine that can resume only at states needs it, and it is collected on its own.)
Everything is read from the manifests; no block is opened, so what is damaged inside one is for fsck to find. Changes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise

from kvstore.context import Context
from kvstore.forest import Forest
from kvstore.marking import Marks, mark_folders
from kvstore.namespace import read_label
from kvstore.scan import nodes
from kvstore.walk import Tally

__all__ = ["Branch", "Conversation", "Listing", "NamespaceRow", "branches", "by_namespace", "listing"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One longest saved prefix.

    tokens: its length. nodes: how many nodes it is made of. size: bytes of KV and states on its path, as files; own:
    those that no other conversation shares, which removing it would free. used_ns: last use, nanoseconds since the
    epoch. resumable: whether its last node has a boundary state. complete: False when a node before it is missing or
    damaged, so that nothing from there on can be restored; size then counts from the hole.
    """

    namespace: str
    label: str
    key: str
    tokens: int
    nodes: int
    size: int
    own: int
    used_ns: int
    resumable: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of nodes that conversations go through together, up to where they part or where one ends.

    parent: index of the branch before it, which comes earlier in the list; None where a conversation begins. first,
    end: the tokens that it adds. size: bytes of the blocks that its nodes name. used_ns: last use of its last node.
    leaf: a conversation ends here, with that key; resumable and complete: as for that one.
    """

    parent: int | None
    namespace: str
    label: str
    key: str
    first: int
    end: int
    nodes: int
    size: int
    used_ns: int
    leaf: bool
    resumable: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """The conversations of one namespace. tokens: the longest. size: bytes of all blocks that the namespace names."""

    namespace: str
    label: str
    conversations: int
    tokens: int
    size: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class Listing:
    """conversations in no particular order; damaged: manifests that could not be read; foreign: files not ours.

    forest: the nodes that they are made of, for branches and by_namespace.
    """

    conversations: list[Conversation]
    damaged: int
    foreign: int
    forest: Forest = field(repr=False)


def listing(context: Context, namespaces: Iterable[str] | None = None) -> Listing:
    """List conversations, of all namespaces or of these. Raises OSError when part of the directory cannot be seen."""
    wanted = None if namespaces is None else set(namespaces)
    tally = Tally()
    damaged = 0

    def parts() -> Iterator[Marks]:
        nonlocal damaged
        files = (file for file in nodes(context.layout, tally) if wanted is None or file.namespace in wanted)
        for marks in mark_folders(context, files):
            damaged += len(marks.unreadable)
            yield marks

    forest = Forest(parts())
    label = cache(partial(read_label, context.fs, context.layout))
    found = [Conversation(label=label(leaf.namespace), **leaf._asdict()) for leaf in forest.conversations()]
    return Listing(found, damaged, tally.foreign, forest)


def branches(found: Listing, chosen: Sequence[Conversation]) -> list[Branch]:
    """Some conversations as a tree, what they share once: parents before children, in the order of the conversations.

    Costs as much as these are long, however many there are beside them.
    """
    forest = found.forest
    paths = [forest.path(forest.find(each.namespace, each.key)) for each in chosen]
    children = Counter(above for above, _ in {pair for path in paths for pair in pairwise(path)})
    rows: list[Branch] = []
    index_of: dict[int, int] = {}
    for each, path in zip(chosen, paths, strict=True):
        parent: int | None = None
        for run in _runs(path, children):
            if run[0] not in index_of:
                index_of[run[0]] = len(rows)
                rows.append(_branch(forest, each, run, parent))
            parent = index_of[run[0]]
    return rows


def _runs(path: Sequence[int], children: Mapping[int, int]) -> Iterator[list[int]]:
    """A path cut behind every node where the chosen conversations part."""
    run: list[int] = []
    for number in path:
        run.append(number)
        if children[number] > 1:
            yield run
            run = []
    if run:
        yield run


def _branch(forest: Forest, each: Conversation, run: Sequence[int], parent: int | None) -> Branch:
    last = run[-1]
    key = forest.key(last)
    leaf = key == each.key
    return Branch(
        parent,
        each.namespace,
        each.label,
        key,
        forest.first(run[0]),
        forest.end(last),
        len(run),
        forest.size(run),
        forest.used_ns(last),
        leaf,
        forest.has_state(last),
        each.complete or not leaf,
    )


def by_namespace(found: Listing, chosen: Iterable[Conversation]) -> list[NamespaceRow]:
    """The namespaces of some conversations, with what they add up to."""
    groups: dict[str, list[Conversation]] = {}
    for each in chosen:
        groups.setdefault(each.namespace, []).append(each)
    sizes = found.forest.sizes()
    return [
        NamespaceRow(
            namespace,
            group[0].label,
            len(group),
            max(each.tokens for each in group),
            sizes[namespace],
            max(each.used_ns for each in group),
        )
        for namespace, group in groups.items()
    ]
