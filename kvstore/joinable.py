"""Which nodes keep several blocks, and which of those blocks can become one without storing anything twice.

A border between two blocks of a node may go when every manifest that names the one block names the other too, and all
of these manifests may be changed: afterwards nothing names the old blocks. Manifests that share such blocks form a
family, which changes together.

That is not enough when an earlier run was killed half way through a family. Then two nodes that shared blocks, and
will again, do not: one names the joined block, the other still its parts, and each could go on joining for itself what
the other cannot follow. So a border also stays where a sibling with the same tokens before it has one too, but goes on
with another block, or ends (Borders).

Pure: it looks at marks and manifests, and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from kvstore.keys import TOKEN_BYTES, Key, node_key
from kvstore.manifest import BlockRef, Manifest
from kvstore.marking import Marked, Marks

__all__ = ["Borders", "Joinable", "Run"]

Run: TypeAlias = tuple[BlockRef, ...]
"""Blocks of consecutive spans that are to become one."""


class Borders:
    """Where the nodes of some chunks have a border between blocks, and what comes behind it."""

    def __init__(self) -> None:
        self._behind: defaultdict[Key, set[bytes]] = defaultdict(set)

    def add(self, manifest: Manifest) -> None:
        """Take a node into account."""
        ends = [*(ref.digest for ref in manifest.blocks[1:]), b""]
        for ref, behind in zip(manifest.blocks, ends, strict=True):
            self._behind[_until(manifest, ref)].add(behind)

    def all_go_on_alike(self, manifest: Manifest, ref: BlockRef) -> bool:
        """Whether every node with a border behind this block goes on with the same block, and none ends there."""
        return len(self._behind[_until(manifest, ref)]) == 1


def _until(manifest: Manifest, ref: BlockRef) -> Key:
    """The key of the prefix that a block ends: it stands for the tokens, as it would for a node that ends there."""
    count = ref.first + ref.count - manifest.first
    return node_key(manifest.parent, manifest.tokens[: count * TOKEN_BYTES])


class Joinable:
    """What can be joined among the nodes of a scan.

    candidates: indices of the wanted nodes that have several blocks. unsure: those of them whose family may be larger
    than can be seen, because a manifest beside them is damaged. A user of a block is the index of a manifest that names
    it; which users may change is asked for once each.
    """

    def __init__(self, marks: Marks, is_wanted: Callable[[Marked], bool], is_cold: Callable[[Marked], bool]) -> None:
        self._nodes = marks.nodes
        self.candidates = [
            index
            for index, node in enumerate(marks.nodes)
            if len(node.blocks) > 1 and _has_kv(node) and is_wanted(node)
        ]
        # A damaged manifest may name any block of its chunk, and those are its siblings'.
        damaged = {_chunk(node) for node in marks.unreadable}
        self.unsure = [index for index in self.candidates if _chunk(marks.nodes[index]) in damaged]
        self._users = self._find_users()
        several = {_chunk(marks.nodes[index]) for index in self.candidates}
        self._by_chunk: defaultdict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(marks.nodes):
            if _has_kv(node) and _chunk(node) in several:
                self._by_chunk[_chunk(node)].append(index)
        may_change = {
            index: _has_kv(node) and is_wanted(node) and is_cold(node) and _chunk(node) not in damaged
            for users in self._users.values()
            for index in users
            for node in (marks.nodes[index],)
        }
        # Many blocks have the same users; they are told apart by a number.
        numbers: dict[tuple[int, ...], int] = {}
        self._same_users = {digest: numbers.setdefault(users, len(numbers)) for digest, users in self._users.items()}
        self._free = {number for users, number in numbers.items() if all(may_change[index] for index in users)}

    def families(self) -> tuple[list[list[int]], int]:
        """Indices of the nodes that change together, and the bytes of all blocks that may be joined."""
        leader = list(range(len(self._nodes)))

        def find(index: int) -> int:
            while leader[index] != index:
                leader[index] = index = leader[leader[index]]
            return index

        chosen: set[int] = set()
        sizes: dict[bytes, int] = {}
        for index in self.candidates:
            for (one, size), (other, other_size) in pairwise(self._nodes[index].blocks):
                if self._same_users[one] == self._same_users[other] and self._same_users[one] in self._free:
                    sizes[one], sizes[other] = size, other_size
                    chosen.add(index)
                    leader[find(index)] = find(self._users[one][0])
        found: defaultdict[int, list[int]] = defaultdict(list)
        for index in sorted(chosen):
            found[find(index)].append(index)
        families = sorted(found.values(), key=lambda indices: _chunk(self._nodes[indices[0]]))
        return families, sum(sizes.values())

    def siblings(self, indices: Sequence[int]) -> list[int]:
        """All nodes of the chunks that some nodes belong to, these included."""
        chunks = {_chunk(self._nodes[index]) for index in indices}
        return [index for chunk in sorted(chunks) for index in self._by_chunk[chunk]]

    def users(self, ref: BlockRef) -> tuple[int, ...]:
        """The manifests that name a block, in order."""
        return self._users.get(ref.digest, ())

    def runs(self, manifest: Manifest, borders: Borders, longest: int) -> Iterator[Run]:
        """The runs of a manifest's blocks that can be joined, none of more than longest blocks.

        Blocks of prefill and of decoding are kept apart: together they would count as decoded.
        """
        run: list[BlockRef] = []
        for ref in manifest.blocks:
            if run and (
                self._kind(ref) != self._kind(run[0])
                or len(run) == longest
                or not borders.all_go_on_alike(manifest, run[-1])
            ):
                if len(run) > 1:
                    yield tuple(run)
                run = []
            if self._same_users.get(ref.digest) in self._free:
                run.append(ref)
        if len(run) > 1:
            yield tuple(run)

    def _kind(self, ref: BlockRef) -> tuple[int | None, bool]:
        return self._same_users.get(ref.digest), ref.decode

    def _find_users(self) -> dict[bytes, tuple[int, ...]]:
        users: dict[bytes, list[int]] = {
            digest: [] for index in self.candidates for digest, _ in self._nodes[index].blocks
        }
        for index, node in enumerate(self._nodes):
            for digest in {digest for digest, _ in node.blocks}:
                if digest in users:
                    users[digest].append(index)
        return {digest: tuple(indices) for digest, indices in users.items()}


def _has_kv(node: Marked) -> bool:
    return node.file.kind == "kv" and node.unreadable is None


def _chunk(node: Marked) -> str:
    return node.file.namespace + node.file.parent
