"""Examine a whole cache directory and say what is wrong with it. Changes nothing.

Everything goes on meanwhile: servers publish and restore, gc removes. So nothing is reported on the strength of one
look. Blocks are listed before manifests, so that a block whose manifest appears during the check is a referenced one.
A file that is not whole is examined again, alone. Before a block is called missing, the manifest that names it must
still be there after the block was not (gc removes manifests first). Before a parent is called missing, all names are
listed once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from kvstore.context import Context
from kvstore.fsck.findings import Counts, Problem, Severity
from kvstore.fsck.interval import judge_interval
from kvstore.fsck.judging import Judge
from kvstore.fsck.lineage import judge_lineage
from kvstore.fsck.passes import Progress, read_folders, verify_blocks
from kvstore.fsck.reading import FolderRead
from kvstore.fsck.resume import Resume
from kvstore.fsck.small import check_small
from kvstore.fsck.surroundings import check_modes, check_staging, check_top, count_quarantine
from kvstore.fsck.tree import Folder, Misfits, folders
from kvstore.fsck.values import Node, is_future, seen_of

__all__ = ["Inspection", "Pause"]

Pause: TypeAlias = Callable[[str], None]
"""Called at named points, for tests: listed, read, verified, judged; and while repairing: repairing, batch."""

_DIGEST_BYTES = 16


class Inspection:
    """One look at everything; see run. The problems it collects are what a repair works through."""

    def __init__(self, context: Context, grace_ns: int, jobs: int, progress: Progress, pause: Pause) -> None:
        self.counts = Counts()
        self._judge = Judge(context, grace_ns)
        self._context = context
        self._layout = context.layout
        self._jobs = jobs
        self._progress = progress
        self._pause = pause
        self._misfits = Misfits()
        self._nodes: list[Node] = []
        self._suspects: set[tuple[str, str]] = set()
        self._suspect_tokens: list[str] = []
        self._suspect_blocks: list[bytes] = []
        self._unnamed: set[bytes] = set()
        self._future: list[Path] = []

    @property
    def problems(self) -> list[Problem]:
        """What was found so far."""
        return self._judge.problems

    def run(self, *, read_data: bool, resume: Resume) -> None:
        """Find all problems. Raises UnavailableError when what was read cannot be recorded."""
        judge, misfits = self._judge, self._misfits
        check_top(judge, misfits)
        blocks = list(folders(self._layout, "blocks", misfits))
        others = [*folders(self._layout, "tokens", misfits), *folders(self._layout, "nodes", misfits)]
        self._pause("listed")
        self._read([*blocks, *others])
        self._pause("read")
        if read_data:
            self._verify(blocks, resume)
        self._pause("verified")
        self._judge_folders()
        self._judge_suspects()
        self._unnamed -= judge_interval(self._context, judge.problems, len(self._nodes))
        judge_lineage(judge, self._nodes)
        self._count_unreachable()
        self._judge_future()
        check_small(judge, {folder.namespace for folder in others if folder.namespace}, misfits)
        check_staging(judge, self.counts, misfits)
        count_quarantine(judge, self.counts, misfits)
        check_modes(judge, misfits)
        self._judge_folders()
        self._judge_misfits()
        self._count_unnamed()
        self._pause("judged")

    def _read(self, everything: list[Folder]) -> None:
        """The pass over all folders."""
        total = sum(len(folder.names) for folder in everything)
        done = 0

        def told(files: int) -> None:
            nonlocal done
            done += files
            self._progress("files", done, total)

        told(0)
        for folder, found in read_folders(self._judge.reader, everything, self._jobs, told):
            base = Path(folder.path)
            self._future.extend(base / name for name in found.future)
            if found.wide:
                self._judge.wide_files(base / found.example, found.wide)
            self._take(folder, found)

    def _take(self, folder: Folder, found: FolderRead) -> None:
        if folder.kind == "blocks":
            self.counts.blocks += found.files
            self.counts.block_bytes += found.size
            self._unnamed.update(found.digests)
            self._suspect_blocks.extend(bytes.fromhex(name) for name in found.suspects)
        elif folder.kind == "tokens":
            self.counts.tokenizations += found.files
            self._suspect_tokens.extend(found.suspects)
        else:
            states = sum(name.endswith(".state") for name in folder.names)
            self.counts.states += states
            self.counts.manifests += len(folder.names) - states
            self._nodes.extend(found.nodes)
            self._suspects.update((folder.namespace, name) for name in found.suspects)

    def _verify(self, blocks: list[Folder], resume: Resume) -> None:
        """Read all bytes of all blocks. What names a damaged one becomes suspect."""
        total, done = self.counts.block_bytes, 0

        def told(size: int) -> None:
            nonlocal done
            done += size
            self._progress("bytes", done, total)

        told(0)
        found = verify_blocks(self._judge.reader, blocks, self._jobs, resume, told)
        self.counts.verified, self.counts.verified_bytes = found.blocks, found.size
        self.counts.resumed, self.counts.resumed_bytes = found.resumed, found.resumed_size
        resume.finish()
        for digest in (*found.bad, *found.failed):
            self._judge.block(digest)
        if bad := self._judge.bad:
            self._suspects.update(
                (node.namespace, node.file) for node in self._nodes if not bad.isdisjoint(_digests(node))
            )

    def _judge_suspects(self) -> None:
        for digest in self._suspect_blocks:
            self._judge.block(digest)
        for name in self._suspect_tokens:
            self._judge.tokens(name)
        if self._suspects:
            self._nodes = [node for node in self._nodes if (node.namespace, node.file) not in self._suspects]
            for namespace, file in sorted(self._suspects):
                if (node := self._judge.node(namespace, file)) is not None:
                    self._nodes.append(node)

    def _judge_future(self) -> None:
        """Report files whose mtime is still ahead: it is their last use, and it would be the latest for a long time."""
        for path in self._future:
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if is_future(status.st_mtime_ns, self._judge.now_ns):
                sentence = "Its last use lies in the future, so it would outlive everything else."
                self.problems.append(Problem("error", "mtime-future", path, sentence, "mtime", seen_of(status)))

    def _judge_folders(self) -> None:
        """Report the folders that could not be walked, before anything in them is called missing."""
        misfits = self._misfits
        for path in sorted(set(misfits.blocked)):
            self._judge.blocked(path)
        for path, error in misfits.failed:
            self._judge.unreadable(path, error)
        for path in misfits.hidden:
            self._judge.hidden(path)
        misfits.blocked, misfits.failed, misfits.hidden = [], [], []

    def _judge_misfits(self) -> None:
        judge, misfits = self._judge, self._misfits
        for path in misfits.strays:
            self._misfit("note", "stray", path, "It lies in a folder where no reader looks for it.")
        known = {problem.path for problem in self.problems} if misfits.odd else set()
        for path in [path for path in misfits.odd if path not in known]:
            self._misfit("error", "not-a-file", path, "It has the name of a file of kvstore's and is not one.")
        for path in set(misfits.wide) - {self._layout.root}:  # the user's own folder may be open: its inside is not
            judge.wide_files(path, 1)
        self.counts.foreign = misfits.foreign
        self.counts.wide = judge.wide_count
        if judge.wide_example is not None and judge.context.fs.private:
            sentence = (
                f"{judge.wide_count:,} files and folders, this one among them, are open to other users, "
                "although the directory is not shared; chmod -R go= closes them."
            )
            self.problems.append(Problem("note", "modes-wide", judge.wide_example, sentence))

    def _count_unreachable(self) -> None:
        judge = self._judge
        self.counts.unreachable = judge.waiting_count
        if judge.waiting_example is not None:
            sentence = (
                f"{judge.waiting_count:,} whole manifests, this one among them, continue a prefix that is damaged or "
                "not there (yet). They are in use again as soon as it is."
            )
            self.problems.append(Problem("note", "unreachable", judge.waiting_example, sentence))

    def _misfit(self, severity: Severity, code: str, path: Path, sentence: str) -> None:
        with suppress(FileNotFoundError):
            seen = seen_of(os.lstat(path))
            self.problems.append(Problem(severity, code, path, sentence, "damaged", seen))

    def _count_unnamed(self) -> None:
        """Blocks that no manifest names: garbage when old, and on their way to be named when young."""
        if self._judge.blind:
            return
        for node in self._nodes:
            self._unnamed.difference_update(_digests(node))
        counts = self.counts
        for digest in self._unnamed - self._judge.bad:
            try:
                status = os.lstat(self._layout.block(digest))
            except OSError:
                continue
            if self._judge.young(seen_of(status)):
                counts.waiting += 1
                counts.waiting_bytes += status.st_size
            else:
                counts.orphans += 1
                counts.orphan_bytes += status.st_size
        if counts.orphans:
            sentence = f"{counts.orphans:,} blocks that no manifest names take {counts.orphan_bytes:,} bytes: run gc."
            self.problems.append(Problem("note", "orphans", self._layout.blocks, sentence))


def _digests(node: Node) -> Iterator[bytes]:
    """Of each block that a node names."""
    joined = node.digests
    return (joined[at : at + _DIGEST_BYTES] for at in range(0, len(joined), _DIGEST_BYTES))
