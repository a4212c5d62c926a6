"""Decide about single suspicious files, and collect what is wrong.

A suspect was seen once by the pass over all folders. Here it is examined again, because what was in motion then may
have settled, and because a manifest and a block that contradict each other leave open which of them is at fault.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

from kvstore.context import Context
from kvstore.eviction import young
from kvstore.fsck.data import judge_block
from kvstore.fsck.findings import Problem, Seen
from kvstore.fsck.reading import inspect_node, inspect_tokens
from kvstore.fsck.values import Fault, Inspected, Node, Reader
from kvstore.keys import Key
from kvstore.layout import NodeName
from kvstore.manifest import BlockRef

__all__ = ["Judge"]

_Verdict: TypeAlias = Literal["whole", "damaged", "gone", "unreadable"]


class Judge:
    """Verdicts on files, each of them a problem or nothing.

    bad: digests of damaged blocks. doomed: keys of kv manifests that no reader can use. newer: namespace and key of
    manifests of a newer version, which are there but cannot be understood. blind: a manifest or a folder of manifests
    could not be read, so nothing can be called missing or unreferenced. wide_count, wide_example: of files and folders
    that other users may enter or read; waiting_count, waiting_example: of manifests that nothing reaches just now.
    """

    def __init__(self, context: Context, grace_ns: int) -> None:
        self.context = context
        self.layout = context.layout
        self.now_ns = context.clock()
        self.reader = Reader.of(context, self.now_ns)
        self.problems: list[Problem] = []
        self.bad: set[bytes] = set()
        self.doomed: set[Key] = set()
        self.newer: set[str] = set()
        self.blind = False
        self.waiting_count = 0
        self.waiting_example: Path | None = None
        self.wide_count = 0
        self.wide_example: Path | None = None
        self._grace_ns = grace_ns
        self._not_seen: set[Path] = set()
        self._blocks: dict[bytes, _Verdict] = {}

    def young(self, seen: Seen) -> bool:
        """Whether a file is so young that what it needs may still be on its way, by a publish or by a copy."""
        return young(seen[2], seen[3], self.now_ns, self._grace_ns)

    def wide_files(self, example: Path, count: int) -> None:
        """Count what other users may enter or read; one note at the end tells how much that is."""
        self.wide_count += count
        self.wide_example = self.wide_example or example

    def unreachable(self, path: Path) -> None:
        """Count a whole manifest that waits for what it continues; one note at the end tells how many there are."""
        self.waiting_count += 1
        self.waiting_example = self.waiting_example or path

    def unreadable(self, path: Path, error: OSError) -> None:
        """A file or folder that could not be read: not damage, but the check is not complete."""
        self._unseen(Problem("error", "unreadable", path, f"It cannot be read: {error.strerror or error}."))

    def blocked(self, path: Path) -> None:
        """Something else where a folder belongs. Never touched: a link may have been put there on purpose."""
        sentence = "A folder belongs here, not a file or a link (kvstore does not follow it): put a folder here."
        self._unseen(Problem("error", "folder-blocked", path, sentence))

    def hidden(self, path: Path) -> None:
        """A folder that no reader finds. Never touched: what is in it may be in the right one, too."""
        sentence = "Its name is in capitals, so no reader looks into it: give it the same name in small letters."
        self._unseen(Problem("error", "folder-hidden", path, sentence))

    def _unseen(self, problem: Problem) -> None:
        """Report once what could not be looked at, in however many ways it was tried."""
        if problem.path not in self._not_seen:
            self._not_seen.add(problem.path)
            self.problems.append(problem)
            self.blind = self.blind or problem.path.is_relative_to(self.layout.nodes)

    def block(self, digest: bytes) -> _Verdict:
        """Read a block whole, once, and report it when it is damaged."""
        if digest not in self._blocks:
            self._blocks[digest] = self._judge_block(digest)
        return self._blocks[digest]

    def _judge_block(self, digest: bytes) -> _Verdict:
        path = self.layout.block(digest)
        try:
            judged = judge_block(self.reader, digest)
        except OSError as error:
            self.unreadable(path, error)
            return "unreadable"
        if judged is None:
            return "gone"
        seen, fault = judged
        if fault is None:
            return "whole"
        self.bad.add(digest)
        self.problems.append(Problem("error", fault.code, path, fault.sentence, "damaged", seen))
        return "damaged"

    def tokens(self, name: str) -> None:
        """Report a tokenization that is still not whole."""
        path = self.layout.tokens / name[:2] / name
        try:
            found = inspect_tokens(self.reader, name)
        except OSError as error:
            self.unreadable(path, error)
            return
        if found is not None and found.fault is not None:
            self._fault(path, found, found.fault)

    def node(self, namespace: str, file: str) -> Node | None:
        """Report what is wrong with a manifest, if anything; the node that it is all the same, or None."""
        path = self.layout.nodes / namespace / file[:2] / file
        try:
            found = inspect_node(self.reader, namespace, file)
        except OSError as error:
            self.unreadable(path, error)
            return None
        if found is None:
            return None
        fault = found.fault or self._references(path, found)
        if fault is None:
            return found.node
        self._fault(path, found, fault)
        if fault.code == "manifest-newer":
            parsed = NodeName.parse(file)
            assert parsed is not None
            self.newer.add(namespace + parsed[0].key)
        return None

    def _fault(self, path: Path, found: Inspected, fault: Fault) -> None:
        # Both are whole, for somebody else; kvstore.fsck.interval finds what is whole for nobody.
        stays = fault.code.endswith("-newer") or fault.code == "manifest-interval"
        action: Literal["none", "damaged"] = "none" if stays else "damaged"
        self.problems.append(Problem("error", fault.code, path, fault.sentence, action, found.seen))

    def _references(self, path: Path, found: Inspected) -> Fault | None:
        """Report the blocks that a manifest is without; the fault of a manifest that contradicts a whole block."""
        damaged = [ref for ref in found.refs if ref.digest in self.bad]
        missing = list(found.missing)
        for ref, why in found.wrong:
            match self.block(ref.digest):
                case "damaged":
                    damaged.append(ref)
                case "gone":
                    missing.append(ref)
                case "whole":
                    return Fault("manifest-block", f"It contradicts block {ref.digest.hex()}, which is whole: {why}.")
        lost = tuple(dict.fromkeys((*damaged, *missing)))
        if lost and _still_there(path, found.seen):
            self._without(path, found, lost, damaged=bool(damaged))
        return None

    def _without(self, path: Path, found: Inspected, lost: tuple[BlockRef, ...], *, damaged: bool) -> None:
        node = found.node
        assert node is not None
        of = f"{len(lost)} of its {len(found.refs)} blocks" if len(found.refs) > 1 else "Its block"
        waits = not damaged and self.young(found.seen)
        if damaged:
            code, sentence = "manifest-unusable", f"{of} cannot be used, because of damage."
        elif waits:
            code, sentence = "block-missing", f"{of} is not there (yet): it is young, and a copy may be under way."
        else:
            code, sentence = "block-missing", f"{of} is not there."
        if not waits and node.kind == "kv":
            self.doomed.add(node.key)
        action: Literal["none", "blocks"] = "none" if waits else "blocks"
        self.problems.append(
            Problem("note" if waits else "error", code, path, sentence, action, found.seen, lost, first=node.first)
        )


def _still_there(path: Path, seen: Seen) -> bool:
    """Whether a manifest is still the one that was examined. gc removes it before its blocks."""
    try:
        return os.lstat(path).st_ino == seen[0]
    except OSError:
        return False
