"""Put right what an inspection found. Sets aside into quarantine/ and never deletes what it cannot explain.

Order matters, because a kill may come between any two calls. Folders first; then damaged files; then manifests whose
blocks are missing, which looks at the blocks again; then manifests without a parent, ancestors first, after the names
that are there have been listed again, and once more when they are set aside: what continues a parent that came
meanwhile is put back. So every step only acts on what the directory says now, a publisher that writes a damaged block
or node again in the meantime keeps what stands on it, and an interrupted repair is simply begun again.

A file is set aside by a rename under the publish lock, when it is still the file that was examined.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.commit import free_quarantine, freshen, put_file
from kvstore.context import Context, Owner, remove_staged
from kvstore.directory import CACHEDIR_TAG
from kvstore.errors import DamagedManifestError
from kvstore.eviction import PROTECT_NS, young
from kvstore.fsck.findings import Action, Problem
from kvstore.fsck.interval import restore_interval
from kvstore.fsck.lineage import names_there
from kvstore.fsck.surroundings import STAGED, newest
from kvstore.fsck.values import is_future, seen_of
from kvstore.layout import NodeName
from kvstore.locks import publish_lock
from kvstore.manifest import MAX_MANIFEST_BYTES, BlockRef, decode

__all__ = ["SETTLE_S", "repair"]

SETTLE_S = 1.0
"""A file that is damaged and was changed in the last minute may still be written (cp writes in place). It is set aside
only if it did not change for this long."""

_RECENT_NS = 60 * 10**9
_BATCH = 64
"""Files renamed under one hold of the publish lock: about a millisecond."""

_ROUND = 1024
"""Manifests without a parent that are set aside between two listings of the names that are there."""

_BACK = "left, because what it continues is back"

_PAUSE_S = 0.001
"""Given to waiting publishers between two holds of the lock."""


def repair(context: Context, problems: Sequence[Problem], settle_s: float, pause: Callable[[str], None]) -> None:
    """Work through the problems and write into each what became of it.

    What fails for one file is said there; LockTimeoutError, and an OSError of the directory as a whole, end it.
    """
    work = _Repair(context, pause)
    for problem in _of(problems, "folder"):
        work.attempt(problem, work.make_folder)
    for problem in _of(problems, "tag"):
        work.attempt(problem, work.write_tag)
    for problem in _of(problems, "interval"):
        work.attempt(problem, lambda problem: restore_interval(context, problem))
    damaged = _of(problems, "damaged")
    if any(_is_recent(problem, context.clock()) for problem in damaged):
        time.sleep(settle_s)
    work.set_aside(damaged)
    work.set_aside(_of(problems, "blocks"))
    work.set_aside_unreachable(_of(problems, "parent"))
    for problem in _of(problems, "mtime"):
        work.attempt(problem, work.touch)
    for problem in _of(problems, "staging"):
        work.attempt(problem, work.remove_staging)


def _of(problems: Sequence[Problem], action: Action) -> list[Problem]:
    return [problem for problem in problems if problem.action == action]


def _name(problem: Problem) -> str:
    """Namespace and key of the node that a manifest's path stands for; empty for a boundary state, which is none."""
    parsed = NodeName.parse(problem.path.name)
    return problem.path.parent.parent.name + parsed[0].key if parsed is not None and parsed[1] == "kv" else ""


def _is_recent(problem: Problem, now_ns: int) -> bool:
    assert problem.seen is not None
    return max(problem.seen[2:]) > now_ns - _RECENT_NS


class _Repair:
    """The steps, each for one problem or some of a kind."""

    def __init__(self, context: Context, pause: Callable[[str], None]) -> None:
        self._context = context
        self._layout = context.layout
        self._fs = context.fs
        self._pause = pause
        # Where manifests without a parent were moved to, and what those of them are called that are not back.
        self._aside: dict[Path, Path] = {}
        self._out: set[str] = set()

    def attempt(self, problem: Problem, step: Callable[[Problem], None]) -> None:
        """One step for one problem. A file that went away is no problem any more."""
        try:
            step(problem)
        except FileNotFoundError:
            problem.solved("it is gone meanwhile")
        except OSError as error:
            problem.left(f"could not be repaired: {error.strerror or error}")

    def make_folder(self, problem: Problem) -> None:
        """Make a folder that must be there."""
        self._fs.make_dir(problem.path)
        problem.solved("made")

    def write_tag(self, problem: Problem) -> None:
        """Write CACHEDIR.TAG, and set aside what lies there instead."""
        if problem.seen is not None:
            self.set_aside([problem])
            if os.path.lexists(problem.path):
                return
        put_file(self._context, problem.path, [CACHEDIR_TAG])
        problem.solved("written")

    def touch(self, problem: Problem) -> None:
        """Take a future time back to now."""
        now = self._context.clock()
        if is_future(os.lstat(problem.path).st_mtime_ns, now):
            self._fs.touch(problem.path, now)
            if is_future(os.lstat(problem.path).st_mtime_ns, now):
                problem.left("could not be repaired: it is another user's file")
                return
        problem.solved("set to now")

    def remove_staging(self, problem: Problem) -> None:
        """Remove what a process that is gone had not published. A file it cannot have made stays, with its folder."""
        owner = Owner.parse(problem.path.name)
        if owner is None or not owner.surely_gone():
            problem.left("left, because its process runs")
            return
        # Looked at again: in a container the number of a process that is gone may be another's, who writes here now.
        if young(newest(problem.path), 0, self._context.clock(), PROTECT_NS):
            problem.left("left, because something was written there just now")
            return
        remove_staged(self._fs, problem.path, STAGED.fullmatch)
        problem.solved("removed")

    def set_aside_unreachable(self, problems: Sequence[Problem]) -> None:
        """Set aside manifests whose parents, or whose KV, are not there: ancestors first, round by round.

        A listing takes too long for a hold of the lock, so a parent may be published between it and the renames. It is
        in the next listing, and what stands on it gets its name back.
        """
        ordered = sorted(problems, key=lambda problem: problem.first)
        there = names_there(self._layout) if ordered else set()
        for start in range(0, len(ordered), _ROUND):
            doomed = []
            for problem in ordered[start : start + _ROUND]:
                if problem.lacks in there:
                    problem.solved(_BACK)
                    continue
                doomed.append(problem)
                there.discard(_name(problem))
            self.set_aside(doomed)
            there = names_there(self._layout)
            self._out -= there
            back = []
            for problem in doomed:
                if problem.lacks in there and problem.path in self._aside:
                    back.append(problem)
                    there.add(_name(problem))
            self._in_short_holds(back, self._put_back)
            there -= self._out

    def set_aside(self, problems: Sequence[Problem]) -> None:
        """Rename files into quarantine, in short batches under the publish lock."""
        if problems and self._layout.quarantine.is_symlink():
            for problem in problems:
                problem.left("could not be set aside, because quarantine is a link")
            return
        self._in_short_holds(problems, self._set_aside)

    def _in_short_holds(self, problems: Sequence[Problem], step: Callable[[Problem], None]) -> None:
        """Rename files from or into quarantine."""
        for start in range(0, len(problems), _BATCH):
            batch = problems[start : start + _BATCH]
            with publish_lock(self._layout):
                for problem in batch:
                    self.attempt(problem, step)
            # Where the files are now first: a power cut may leave one in both places, and never in neither.
            folders = [self._layout.quarantine, *dict.fromkeys(problem.path.parent for problem in batch)]
            for folder in folders if step == self._set_aside else reversed(folders):
                self._fs.sync_dir(folder)
            self._pause("batch")
            time.sleep(_PAUSE_S)

    def _set_aside(self, problem: Problem) -> None:
        assert problem.seen is not None
        now = seen_of(os.lstat(problem.path))
        if now[0] != problem.seen[0]:
            problem.solved("left, because it was replaced meanwhile")
            return
        if problem.action == "damaged" and now != problem.seen:
            problem.left("left, because it changed meanwhile; run fsck again")
            return
        if problem.action == "blocks" and all(self._is_there(ref) for ref in problem.refs):
            problem.solved("left, because its blocks are back")
            return
        target = free_quarantine(self._context, problem.path.name)
        self._fs.rename(problem.path, target)
        self._context.damaged.discard(problem.path)
        if problem.action == "parent":
            self._aside[problem.path] = target
            self._out.add(_name(problem))
        problem.solved(f"set aside as quarantine/{target.name}")

    def _put_back(self, problem: Problem) -> None:
        """As a commit does (kvstore.gc): a collection that looked meanwhile takes its blocks for nobody's, or has. What
        continues one that stays set aside stays, too.
        """
        if os.path.lexists(problem.path):  # it was published again, too
            self._out.discard(_name(problem))
            return
        if problem.lacks in self._out:
            return
        aside = self._aside[problem.path]
        data, _ = self._fs.read_file(aside, MAX_MANIFEST_BYTES)
        with suppress(DamagedManifestError):
            refs = decode(data).blocks
            if not freshen(self._context, refs) and all(self._is_there(ref) for ref in refs):
                self._fs.rename(aside, problem.path)
                self._out.discard(_name(problem))
                problem.solved(_BACK)

    def _is_there(self, ref: BlockRef) -> bool:
        try:
            return os.lstat(self._layout.block(ref.digest)).st_size == ref.size
        except FileNotFoundError:
            return False
