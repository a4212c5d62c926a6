"""The readable nodes of some namespaces as trees: what each path adds up to, and what no other path shares.

For `ls`. Made once from marks, in memory, and thrown away; nothing here looks at the directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.marking import Marked, Marks

__all__ = ["Forest", "Sums", "name_of"]


@dataclass(frozen=True, slots=True)
class Sums:
    """What the path down to a node adds up to."""

    nodes: int
    size: int
    complete: bool


class Forest:
    """The readable nodes of some namespaces by name (namespace and key), KV and state together."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        # What a longer sibling contains is part of that one, not a conversation of its own.
        inside = {name_of(marks.nodes[tail]) for tail in marks.containers}
        self._files: dict[str, list[Marked]] = {}
        for node in marks.nodes:
            if not node.unreadable and name_of(node) not in inside:
                self._files.setdefault(name_of(node), []).append(node)
        self._order = sorted(self._files, key=lambda name: self._files[name][0].first)
        self._children = Counter(_above(files[0]) for files in self._files.values())
        self._users = Counter(digest for files in self._files.values() for digest in _blocks(files))

    def conversations(self) -> list[tuple[Marked, Sums, int, int, bool]]:
        """The leaves, with the sums of their paths, own bytes, last use, and whether they have a state."""
        sums, own = self._sums(), self._own()
        found = []
        for name, files in self._files.items():
            if not self._children[name]:
                used = max(node.file.mtime_ns for node in files)
                resumable = any(node.file.kind == "state" for node in files)
                found.append((files[0], sums[name], own[name], used, resumable))
        return found

    def files(self, name: str) -> list[Marked]:
        """The manifests of a node, by namespace and key."""
        return self._files[name]

    def size(self, names: Iterable[str]) -> int:
        """Bytes of the blocks that some nodes name, each once."""
        return sum({digest: size for name in names for digest, size in _blocks(self._files[name]).items()}.values())

    def of_namespace(self, namespace: str) -> list[str]:
        """The nodes of one namespace."""
        return [name for name in self._files if name.startswith(namespace)]

    def path(self, name: str) -> list[str]:
        """The nodes from the first that is there down to this one. Ends at a node that does not begin before its child:
        a forged circle of names does.
        """
        path = [name]
        while (above := _above(self._files[path[-1]][0])) in self._files:
            if self._files[above][0].first >= self._files[path[-1]][0].first:
                break
            path.append(above)
        return path[::-1]

    def _sums(self) -> dict[str, Sums]:
        """Parents before children, by the position of their first token, which a forged cycle of names cannot fool."""
        sums: dict[str, Sums] = {}
        for name in self._order:
            files = self._files[name]
            above = sums.get(_above(files[0]))
            size = sum(_blocks(files).values())
            whole = any(node.file.kind == "kv" for node in files)
            if above is not None:
                whole = whole and above.complete and self._follows(files)
                sums[name] = Sums(above.nodes + 1, above.size + size, whole)
            else:
                sums[name] = Sums(1, size, whole and files[0].first == 0)
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


def name_of(node: Marked) -> str:
    """What a node is called here: its namespace and its key."""
    return node.file.namespace + node.file.key


def _above(node: Marked) -> str:
    return node.file.namespace + node.file.parent
