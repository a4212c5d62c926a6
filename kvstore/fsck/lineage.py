"""Find manifests whose prefix goes on from nothing: no parent, or for a boundary state no KV beside it; and nodes
without blocks among others that have some, which hold nothing of their tokens.

Nothing is wrong with such a manifest in itself, and one damaged file must not cost all that continues it: the first
chunk of a prompt is shared by thousands of prefixes. When it is computed again it gets the same key, and all of them
are in use again. So what continues a damaged node, or one that lies in quarantine, is only counted; so is what is
young, because rule 12 of the design lets a copy under way deliver the parent later. What is left is a manifest whose
parent has been missing for long, and nobody knows why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from kvstore.fsck.findings import Problem, Seen
from kvstore.fsck.judging import Judge
from kvstore.fsck.tree import Misfits, entries, folders
from kvstore.fsck.values import UNLIKE, Node, seen_of
from kvstore.keys import Key
from kvstore.layout import NAME_KEY_BYTES, Layout, NodeName

__all__ = ["judge_lineage", "names_there"]

_ROUNDS = 3
"""How often names are listed again: what was published meanwhile may itself have a parent that was."""

_PARENT_HEX = 2 * NAME_KEY_BYTES

_BARE = "It has no blocks, unlike others of its prompt, so a restore ends before it."

_UNLIKE = (
    "Its blocks hold other tensors than the prefix that it continues, so a restore ends before it; `--read-data` tells "
    "whether a block is damaged."
)
_MIXED = (
    "Its blocks do not all hold the same tensors, so a restore ends among them; `--read-data` tells whether one is "
    "damaged."
)

_CODES = {_BARE: "manifest-bare", _UNLIKE: "manifest-tensors", _MIXED: "manifest-tensors"}


def judge_lineage(judge: Judge, nodes: list[Node]) -> None:
    """Report or count every node that continues nothing usable; nodes grows by what was published meanwhile."""
    for _ in range(_ROUNDS):
        lineage = _Lineage(judge, nodes)
        if not lineage.without_parent():
            return
        found = _published_since(judge, nodes)
        if not found:
            break
        nodes.extend(found)
    if not judge.blind:
        _Lineage(judge, nodes).report()


class _Lineage:
    """Which nodes can be reached from their namespace's root."""

    def __init__(self, judge: Judge, nodes: Sequence[Node]) -> None:
        self._judge = judge
        self._nodes = nodes
        self._usable = {node.key: node for node in nodes if node.kind == "kv" and node.key not in judge.doomed}
        bare = {key for key, node in self._usable.items() if not node.digests}
        self._above_blocks = {
            node.parent for node in nodes if node.parent in bare and node.kind == "kv" and node.digests and node.first
        }
        self._spared = _spared(judge)
        self._full = f"-{judge.context.interval}-"

    def without_parent(self) -> bool:
        """Whether any node is not as it should be."""
        return any(self._trouble(node) is not None for node in self._nodes)

    def _trouble(self, node: Node) -> str | None:
        """What is wrong with the place of a node: "" when what it continues is not there, None when nothing is."""
        if node.kind == "state":
            kv = self._usable.get(node.key)
            if kv is None or kv.namespace != node.namespace:
                return self._unless_newer(node, node.key)
            return None if kv.first == node.first else "It begins at another token than the KV that it belongs to."
        if node.key in self._above_blocks:
            return _BARE
        if node.tensors == UNLIKE:
            return _MIXED
        return None if node.first == 0 else self._trouble_above(node)

    def _trouble_above(self, node: Node) -> str | None:
        parent = self._usable.get(node.parent)
        if parent is None:
            return self._unless_newer(node, node.parent)
        if parent.namespace != node.namespace:
            return "The prefix that it continues is of another namespace."
        if parent.first + self._judge.context.interval != node.first or not parent.file.startswith(
            self._full, _PARENT_HEX
        ):
            return "The prefix that it continues does not end where it begins."
        if parent.digests and not node.digests:
            return _BARE
        return _UNLIKE if parent.tensors and node.tensors and parent.tensors != node.tensors else None

    def _unless_newer(self, node: Node, key: Key) -> str | None:
        return None if node.namespace + _hex(key) in self._judge.newer else ""

    def report(self) -> None:
        """Ancestors first, so that whatever stands on an unreachable node is seen to be unreachable too."""
        for node in sorted(self._nodes, key=lambda node: (node.first, node.kind)):
            trouble = self._trouble(node)
            if trouble is None:
                continue
            if node.kind == "kv":
                self._usable.pop(node.key, None)
                if node.key in self._judge.doomed:
                    continue
            path = self._judge.layout.nodes / node.namespace / node.file[:2] / node.file
            try:
                self._report(node, trouble, path, seen_of(os.lstat(path)))
            except FileNotFoundError:
                continue

    def _report(self, node: Node, trouble: str, path: Path, seen: Seen) -> None:
        lacks = _hex(node.key if node.kind == "state" else node.parent)
        if trouble:
            self._spared.add(_hex(node.key))
            code = _CODES.get(trouble, "manifest-parent")
            # A flipped bit in the header of either's block looks the same, and then that block is what is damaged.
            action: Literal["none", "damaged"] = "none" if code == "manifest-tensors" else "damaged"
            self._judge.problems.append(Problem("error", code, path, trouble, action, seen))
        elif lacks in self._spared or self._judge.young(seen):
            self._spared.add(_hex(node.key))
            self._judge.unreachable(path)
        else:
            state = node.kind == "state"
            code = "kv-missing" if state else "parent-missing"
            what = "The KV it belongs to" if state else f"The prefix of {node.first} tokens that it continues"
            sentence = f"{what} has not been there for long, so nothing reaches it."
            lacks = node.namespace + lacks
            problem = Problem("error", code, path, sentence, "parent", seen, lacks=lacks, first=node.first)
            self._judge.problems.append(problem)


def _spared(judge: Judge) -> set[str]:
    """Keys of nodes that are damaged, here or already in quarantine: their continuations keep waiting for them."""
    names = [problem.path.name for problem in judge.problems]
    names += [entry.name.partition(".")[2] for entry in entries(judge.layout.quarantine, Misfits())]
    parsed = [NodeName.parse(name) for name in names]
    return {found[0].key for found in parsed if found is not None and found[1] == "kv"}


def _published_since(judge: Judge, nodes: Iterable[Node]) -> list[Node]:
    """Nodes whose names were not there when the folders were listed."""
    known = {(node.namespace, node.file) for node in nodes}
    known |= {(problem.path.parent.parent.name, problem.path.name) for problem in judge.problems}
    found: list[Node] = []
    misfits = Misfits()
    for folder in folders(judge.layout, "nodes", misfits):
        new = [name for name in folder.names if (folder.namespace, name) not in known]
        found += [node for name in new if (node := judge.node(folder.namespace, name)) is not None]
    for path, error in misfits.failed:
        judge.unreadable(path, error)
    return found


def names_there(layout: Layout) -> set[str]:
    """Namespace and key of every kv manifest that has its name now. Raises OSError when not all can be listed."""
    there = set()
    misfits = Misfits()
    for folder in folders(layout, "nodes", misfits):
        for file in folder.names:
            parsed = NodeName.parse(file)
            if parsed is not None and parsed[1] == "kv":
                there.add(folder.namespace + parsed[0].key)
    for _, error in misfits.failed:
        raise error
    return there


def _hex(key: Key) -> str:
    return key[:NAME_KEY_BYTES].hex()
