"""The readable nodes of some namespaces as trees: what each path adds up to, and what no other path shares.

For `ls`. Made once from marks, in memory, and thrown away; nothing here looks at the directory. A node is a number, and
what is known of it a place in some arrays: a directory may have a million, and `ls` shows a few of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.layout import NAME_KEY_BYTES
from kvstore.marking import Marked, Marks

__all__ = ["Forest", "Leaf"]

_NONE = -1
_KV, _STATE = 1, 2
_NUMBER_BYTES = 4


class Leaf(NamedTuple):
    """A node without children, with what the path down to it adds up to. See kvstore.listing.Conversation."""

    namespace: str
    key: str
    tokens: int
    nodes: int
    size: int
    own: int
    used_ns: int
    resumable: bool
    complete: bool


class Forest:
    """The readable nodes of some namespaces, KV and state together.

    parts: marks of whole folders of manifests, so that all children of a parent are in one part. What is in no array
    may be larger in a forged manifest than an array can hold.
    """

    def __init__(self, parts: Iterable[Marks]) -> None:
        self._namespaces: dict[str, bytes] = {}
        self._number: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._used: list[int] = []
        self._first, self._tokens, self._kinds = array("Q"), array("I"), bytearray()
        # The blocks that a node names are those from its place in _starts to the next one's.
        self._starts, self._named = array("Q", [0]), array("Q")
        self._block: dict[bytes, int] = {}
        self._sizes, self._user = array("Q"), array("q")
        # By namespace: blocks that contained tails name and nothing beside them: repack gave the longer sibling others.
        self._beside: dict[bytes, dict[bytes, int]] = {}
        parents: list[bytes] = []
        for marks in parts:
            # What a longer sibling contains is part of that one, not a conversation of its own; unless it has a state,
            # where one can resume and in that one cannot.
            states = {self._name(node) for node in marks.nodes if node.file.kind == "state" and not node.unreadable}
            inside = {self._name(marks.nodes[tail]) for tail in marks.containers} - states
            found: dict[bytes, list[Marked]] = {}
            for node in marks.nodes:
                if not node.unreadable and (name := self._name(node)) not in inside:
                    found.setdefault(name, []).append(node)
            for name, files in found.items():
                self._add(name, files)
                parents.append(self._start(files[0]) + bytes.fromhex(files[0].file.parent))
            if inside:
                tails = [node for node in marks.nodes if not node.unreadable and self._name(node) in inside]
                self._set_beside(tails, [node for files in found.values() for node in files])
        self._above = array("q", (self._number.get(name, _NONE) for name in parents))
        self._children = array("I", bytes(4 * len(parents)))
        for above in self._above:
            if above != _NONE:
                self._children[above] += 1

    def _set_beside(self, tails: Iterable[Marked], others: Iterable[Marked]) -> None:
        named = {(self._start(node), digest) for node in others for digest, _ in node.blocks}
        for tail in tails:
            start = self._start(tail)
            # What another namespace names is this one's as well: none of them is first.
            left = {digest: size for digest, size in tail.blocks if (start, digest) not in named}
            if left:
                self._beside.setdefault(start, {}).update(left)

    def _name(self, node: Marked) -> bytes:
        """What a node is called here: the number of its namespace, and its key."""
        return self._start(node) + bytes.fromhex(node.file.key)

    def _start(self, node: Marked) -> bytes:
        start = self._namespaces.get(node.file.namespace)
        if start is None:
            start = self._namespaces[node.file.namespace] = len(self._namespaces).to_bytes(_NUMBER_BYTES)
        return start

    def _add(self, name: bytes, files: Sequence[Marked]) -> None:
        number = self._number[name] = len(self._names)
        self._names.append(name)
        self._used.append(max(node.file.mtime_ns for node in files))
        self._first.append(files[0].first)
        self._tokens.append(files[0].file.tokens)
        kinds = {node.file.kind for node in files}  # forged names may have a key more often than twice
        self._kinds.append(_KV * ("kv" in kinds) | _STATE * ("state" in kinds))
        for digest, size in {digest: size for node in files for digest, size in node.blocks}.items():
            block = self._block.setdefault(digest, len(self._sizes))
            if block == len(self._sizes):
                self._sizes.append(size)
                self._user.append(number)
            else:
                self._user[block] = _NONE  # several
            self._named.append(block)
        self._starts.append(len(self._named))

    def conversations(self) -> Iterator[Leaf]:
        """The leaves."""
        # Parents before children, by the position of their first token, which a forged circle of names cannot fool.
        order = sorted(range(len(self._names)), key=self._first.__getitem__)
        own = self._own()
        nodes, whole = array("Q", bytes(8 * len(order))), bytearray(len(order))
        sizes = [sum(map(self._sizes.__getitem__, self._blocks(number))) for number in range(len(order))]
        for number in order:
            above = self._above[number]
            has_kv = self._kinds[number] & _KV
            if above != _NONE and nodes[above]:
                nodes[number] = nodes[above] + 1
                sizes[number] += sizes[above]
                own[number] += own[above] if self._children[above] == 1 else 0
                whole[number] = has_kv and whole[above] and self.end(above) == self._first[number]
            else:
                nodes[number] = 1
                whole[number] = has_kv and not self._first[number]
        namespaces = list(self._namespaces)
        for number, children in enumerate(self._children):
            if not children:
                name = self._names[number]
                yield Leaf(
                    namespaces[int.from_bytes(name[:_NUMBER_BYTES])],
                    self.key(number),
                    self.end(number),
                    nodes[number],
                    sizes[number],
                    own[number],
                    self._used[number],
                    self.has_state(number),
                    bool(whole[number]),
                )

    def _own(self) -> list[int]:
        """Bytes of the blocks that only one node names, by that node."""
        own = [0] * len(self._names)
        for user, size in zip(self._user, self._sizes, strict=True):
            if user != _NONE:
                own[user] += size
        return own

    def _blocks(self, number: int) -> array[int]:
        return self._named[self._starts[number] : self._starts[number + 1]]

    def find(self, namespace: str, key: str) -> int:
        """A node by its names. Raises KeyError."""
        return self._number[self._namespaces[namespace] + bytes.fromhex(key)]

    def key(self, number: int) -> str:
        """A node's key as names carry it."""
        return self._names[number][-NAME_KEY_BYTES:].hex()

    def first(self, number: int) -> int:
        """Index of a node's first token."""
        return self._first[number]

    def end(self, number: int) -> int:
        """Index of the first token after a node."""
        return self._first[number] + self._tokens[number]

    def used_ns(self, number: int) -> int:
        """When a node was last used."""
        return self._used[number]

    def has_state(self, number: int) -> bool:
        """Whether a node has a boundary state."""
        return bool(self._kinds[number] & _STATE)

    def size(self, numbers: Iterable[int]) -> int:
        """Bytes of the blocks that some nodes name, each once."""
        return sum(self._sizes[block] for block in {block for number in numbers for block in self._blocks(number)})

    def sizes(self) -> dict[str, int]:
        """Bytes of all blocks that a namespace names, each once, by namespace. One pass, however many there are."""
        named: dict[bytes, set[int]] = {start: set() for start in self._namespaces.values()}
        for number, name in enumerate(self._names):
            named[name[:_NUMBER_BYTES]].update(self._blocks(number))
        return {
            namespace: sum(map(self._sizes.__getitem__, named[start]))
            + sum(
                size
                for digest, size in self._beside.get(start, {}).items()
                if self._block.get(digest) not in named[start]
            )
            for namespace, start in self._namespaces.items()
        }

    def total(self) -> int:
        """Bytes of all blocks that any namespace names, each once."""
        beside = {digest: size for blocks in self._beside.values() for digest, size in blocks.items()}
        return sum(self._sizes) + sum(size for digest, size in beside.items() if digest not in self._block)

    def path(self, number: int) -> list[int]:
        """The nodes from the first that is there down to this one. Ends at a node that does not begin before its child:
        a forged circle of names does.
        """
        path = [number]
        while (above := self._above[path[-1]]) != _NONE and self._first[above] < self._first[path[-1]]:
            path.append(above)
        return path[::-1]
