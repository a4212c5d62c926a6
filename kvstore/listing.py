"""The conversations of a cache directory, for people: what is saved, how long it is, and what it would free.

A conversation is a longest saved prefix: a node without children that no longer sibling contains. Everything is read
from the manifests; no block is opened, so what is damaged inside one is for fsck to find. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.context import Context
from kvstore.marking import Marked, Marks, mark
from kvstore.namespace import read_label
from kvstore.scan import Tally, nodes

__all__ = ["Conversation", "Listing", "listing"]


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
class Listing:
    """conversations in no particular order; damaged: manifests that could not be read; foreign: files not ours."""

    conversations: list[Conversation]
    damaged: int
    foreign: int


def listing(context: Context, namespaces: Iterable[str] | None = None) -> Listing:
    """List conversations, of all namespaces or of these. Raises OSError when part of the directory cannot be seen."""
    wanted = None if namespaces is None else set(namespaces)
    tally = Tally()
    files = [file for file in nodes(context.layout, tally) if wanted is None or file.namespace in wanted]
    marks = mark(context, files)
    found = _Forest(marks).conversations()
    labels = {
        name: read_label(context.fs, context.layout, name) for name in {node.file.namespace for node, *_ in found}
    }
    return Listing(
        [
            Conversation(
                node.file.namespace,
                labels[node.file.namespace],
                node.file.key,
                node.first + node.file.tokens,
                sums.nodes,
                sums.size,
                own,
                used,
                resumable,
                sums.complete,
            )
            for node, sums, own, used, resumable in found
        ],
        len(marks.unreadable),
        tally.foreign,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the path down to a node adds up to."""

    nodes: int
    size: int
    complete: bool


class _Forest:
    """The readable nodes of some namespaces by name (namespace and key), KV and state together."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        # What a longer sibling contains is part of that one, not a conversation of its own.
        inside = {_name(marks.nodes[tail]) for tail in marks.containers}
        self._files: dict[str, list[Marked]] = {}
        for node in marks.nodes:
            if not node.unreadable and _name(node) not in inside:
                self._files.setdefault(_name(node), []).append(node)
        self._order = sorted(self._files, key=lambda name: self._files[name][0].first)
        self._children = Counter(_above(files[0]) for files in self._files.values())
        self._users = Counter(digest for files in self._files.values() for digest in _blocks(files))

    def conversations(self) -> list[tuple[Marked, _Sums, int, int, bool]]:
        """The leaves, with the sums of their paths, own bytes, last use, and whether they have a state."""
        sums, own = self._sums(), self._own()
        found = []
        for name, files in self._files.items():
            if not self._children[name]:
                used = max(node.file.mtime_ns for node in files)
                resumable = any(node.file.kind == "state" for node in files)
                found.append((files[0], sums[name], own[name], used, resumable))
        return found

    def _sums(self) -> dict[str, _Sums]:
        """Parents before children, by the position of their first token, which a forged cycle of names cannot fool."""
        sums: dict[str, _Sums] = {}
        for name in self._order:
            files = self._files[name]
            above = sums.get(_above(files[0]))
            size = sum(_blocks(files).values())
            whole = any(node.file.kind == "kv" for node in files)
            if above is not None:
                whole = whole and above.complete and self._follows(files)
                sums[name] = _Sums(above.nodes + 1, above.size + size, whole)
            else:
                sums[name] = _Sums(1, size, whole and files[0].first == 0)
        return sums

    def _follows(self, files: list[Marked]) -> bool:
        """Whether a node begins where its parent ends."""
        parent = self._files[_above(files[0])][0]
        return parent.first + parent.file.tokens == files[0].first

    def _own(self) -> Counter[str]:
        """Bytes of the blocks on a leaf's path that only nodes of this conversation name."""
        own: Counter[str] = Counter()
        leaf_of: dict[str, str] = {}
        for name in reversed(self._order):
            files = self._files[name]
            leaf = leaf_of.get(name) if self._children[name] == 1 else name if not self._children[name] else None
            if leaf is None:
                continue
            own[leaf] += sum(size for digest, size in _blocks(files).items() if self._users[digest] == 1)
            leaf_of[_above(files[0])] = leaf
        return own


def _blocks(files: list[Marked]) -> dict[bytes, int]:
    """Digest and size of every block that a node's manifests name."""
    return {digest: size for node in files for digest, size in node.blocks}


def _name(node: Marked) -> str:
    return node.file.namespace + node.file.key


def _above(node: Marked) -> str:
    return node.file.namespace + node.file.parent
