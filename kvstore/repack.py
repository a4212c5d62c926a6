"""Join the small blocks of nodes that were not used for a while: one file to open and one long read for each.

A tail that grows leaves a block a turn behind it (publishing writes only what is new). Once the conversation rests,
those are joined.

A node's name says its tokens, and its manifest says in which blocks their KV lies; after joining, that must change
while the name cannot. So a new manifest is renamed over the old one, under the publish lock: the one exception to "a
published file is never overwritten" (docs/format.md section 7). It is safe because both say the same about the same
bytes, and both stay true for a while:

- A reader that opened the old manifest finds the old blocks. They are not removed here: they are made young when the
  new manifest takes its place, and leave with gc once they are past its grace time.
- The old manifest is replaced only if it is the one that was read. If it was used, replaced or removed meanwhile, the
  result is dropped: an unreferenced block, which gc removes.
- The new block is written, verified and durable first. A crash anywhere leaves the old manifest or the new one, each
  with all of its blocks.

Bytes on disk must not grow for good. So a border between two blocks of a node is only removed when every manifest that
names the one block names the other, and all of these are changed together: then nothing names the old blocks any more
(kvstore.joinable).
(With [a] a tail, [a b] a longer one and [a b c] the whole chunk, nothing can be joined without storing a twice. So cold
tails that a longer node contains are dropped first, if a lookup finds that one as well: kvstore.contained.) Blocks from
prefill and from decoding stay apart, because a joined block would count as decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvstore.contained import Cold, drop_contained
from kvstore.context import Context
from kvstore.directory import unavailable
from kvstore.errors import DamagedBlockError, DamagedManifestError, KVStoreError, PublishError
from kvstore.joinable import Borders, Joinable, Run
from kvstore.joining import MAX_SOURCES, join
from kvstore.manifest import BlockRef, encode
from kvstore.marking import Marks, mark
from kvstore.replacing import Replacement, replace_manifests
from kvstore.scan import nodes
from kvstore.stored import Stored, load
from kvstore.walk import Tally

__all__ = ["COLD_NS", "RepackReport", "repack"]

COLD_NS = 24 * 3600 * 10**9
"""What was not used for a day is cold: a conversation that still grows would be joined again and again."""

MAX_PROBLEMS = 100
"""Sentences kept of a run; the rest is only counted."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes written and bytes to write in all."""


@dataclass
class RepackReport:
    """What was joined, or with dry_run would be. Bytes are those of files.

    busy: a collection ran, so no tail was dropped. dropped: tails that a longer sibling contains. nodes: got a new
    manifest. replaced, replaced_bytes: blocks that no manifest names any more because of that, which gc removes after
    its grace time. written, written_bytes: blocks that took their place. warm: nodes with several blocks that were
    used too recently. bound: cold nodes whose several blocks must all stay (see this module). skipped: nodes that
    changed meanwhile. damaged: nodes left alone because a block or a manifest that counts for them cannot be read;
    problems says why. error: one sentence, why it stopped; what was done until then is counted.
    """

    dry_run: bool = False
    busy: bool = False
    dropped: int = 0
    nodes: int = 0
    replaced: int = 0
    replaced_bytes: int = 0
    written: int = 0
    written_bytes: int = 0
    warm: int = 0
    bound: int = 0
    skipped: int = 0
    damaged: int = 0
    problems: list[str] = field(default_factory=list)
    error: str = ""


def repack(
    context: Context,
    *,
    older_than_ns: int = COLD_NS,
    namespaces: Collection[str] | None = None,
    dry_run: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> RepackReport:
    """Drop tails that a longer node contains and join what can be joined, in all namespaces or in these.

    Safe beside running readers, publishers and collectors. Needs room for the new blocks next to the old ones until gc
    removes those. Never raises for what the directory or the file system does: see RepackReport.error.
    """
    report = RepackReport(dry_run=dry_run)
    try:
        now_ns = context.clock()
        cold = Cold(context, now_ns, now_ns - older_than_ns, namespaces)
        marks = mark(context, list(nodes(context.layout, Tally())))
        dropped = drop_contained(cold, marks, dry_run=dry_run)
        report.busy = dropped is None
        if dropped is not None:
            marks, report.dropped = dropped
        _Repack(cold, marks, report).run(progress)
    except OSError as error:
        report.error = str(unavailable(context.layout.root, error))
    except KVStoreError as error:
        report.error = str(error)
    return report


@dataclass(frozen=True, slots=True)
class _Family:
    """Nodes that change together, and the runs of their blocks that become one block each."""

    nodes: tuple[Stored, ...]
    runs: tuple[Run, ...]


class _Repack:
    """One run of repack."""

    def __init__(self, cold: Cold, marks: Marks, report: RepackReport) -> None:
        self._context = cold.context
        self._marks = marks
        self._cold = cold
        self._report = report
        self._joinable = Joinable(marks, cold.is_wanted, cold.is_cold)
        self._siblings: list[int] = []
        self._borders = Borders()
        self._done = self._total = 0

    def run(self, progress: Progress) -> None:
        """Join family after family."""
        families, self._total = self._joinable.families()
        self._survey({index for family in families for index in family})

        def wrote(size: int) -> None:
            self._done += size
            progress(min(self._done, self._total), self._total)

        for indices in families:
            family = self._load(indices)
            if family is None:
                continue
            if self._report.dry_run:
                # But for a few bytes of the headers.
                self._count(family, sum(ref.size for run in family.runs for ref in run), len(family.nodes))
            else:
                self._join(family, wrote)
        progress(self._total, self._total)

    def _survey(self, chosen: set[int]) -> None:
        """Count the nodes that keep their blocks, by why they do."""
        unsure = set(self._joinable.unsure)
        for index in self._joinable.candidates:
            if not self._cold.is_cold(self._marks.nodes[index]):
                self._report.warm += 1
            elif index in unsure:
                self._report.damaged += 1
            elif index not in chosen:
                self._report.bound += 1
        if unsure:
            self._problem("a damaged manifest lies beside nodes that could be joined; run `kvstore fsck --repair`", 0)

    def _load(self, indices: Sequence[int]) -> _Family | None:
        """Read the manifests of a family again, whole, and find the runs that all who name them have alike."""
        try:
            borders = self._borders_of(indices)
            found = dict(self._read(indices))
        except (OSError, DamagedManifestError) as error:
            self._problem(f"the blocks of {len(indices)} nodes are not joined: {error}", len(indices))
            return None
        if len(found) < len(indices) or any(
            stored.status.st_mtime_ns != self._marks.nodes[index].file.mtime_ns for index, stored in found.items()
        ):
            self._report.skipped += len(indices)
            return None
        having: dict[Run, list[int]] = {}
        for index, stored in found.items():
            for run in self._joinable.runs(stored.manifest, borders, MAX_SOURCES):
                having.setdefault(run, []).append(index)
        runs = tuple(run for run, users in having.items() if tuple(users) == self._joinable.users(run[0]))
        changing = {index for run in runs for index in having[run]}
        self._report.bound += len(indices) - len(changing)
        return _Family(tuple(found[index] for index in sorted(changing)), runs) if runs else None

    def _borders_of(self, indices: Sequence[int]) -> Borders:
        """The borders of all nodes of a family's chunks. Families of one chunk come one after the other."""
        siblings = self._joinable.siblings(indices)
        if siblings != self._siblings:
            borders = Borders()
            for _, stored in self._read(siblings):
                borders.add(stored.manifest)
            self._siblings, self._borders = siblings, borders
        return self._borders

    def _read(self, indices: Sequence[int]) -> Iterator[tuple[int, Stored]]:
        """The manifests that are still there. Raises OSError, and DamagedManifestError that names the file."""
        for index in indices:
            file = self._marks.nodes[index].file
            try:
                stored = load(self._context, file)
            except DamagedManifestError as error:
                raise DamagedManifestError(f"manifest {file.file} cannot be used: {error}") from error
            if stored is not None:
                yield index, stored

    def _join(self, family: _Family, wrote: Callable[[int], None]) -> None:
        joined: dict[Run, BlockRef] = {}
        written = 0
        try:
            for run in family.runs:
                joined[run], size = join(self._context, run, wrote)
                written += size
        except (DamagedBlockError, PublishError) as error:
            self._problem(f"{error}; the nodes that name it are left as they are", len(family.nodes))
            return
        done = replace_manifests(self._context, [self._replacement(each, joined) for each in family.nodes])
        self._report.skipped += len(family.nodes) - done
        if done:
            self._count(family, written, done)

    def _replacement(self, stored: Stored, joined: dict[Run, BlockRef]) -> Replacement:
        """The manifest with a joined block in place of each run. It keeps its age, and says who wrote it."""
        refs = list(stored.manifest.blocks)
        runs = {run: ref for run, ref in joined.items() if run[0] in refs}
        for run, ref in runs.items():
            at = refs.index(run[0])
            refs[at : at + len(run)] = [ref]
        manifest = replace(stored.manifest, blocks=tuple(refs), writer=self._context.writer)
        old = [ref for run in runs for ref in run]
        return Replacement(stored.path, encode(manifest), stored.status, old, list(runs.values()))

    def _count(self, family: _Family, written: int, done: int) -> None:
        report = self._report
        report.nodes += done
        report.written += len(family.runs)
        report.written_bytes += written
        if done == len(family.nodes):
            report.replaced += sum(len(run) for run in family.runs)
            report.replaced_bytes += sum(ref.size for run in family.runs for ref in run)

    def _problem(self, sentence: str, nodes: int) -> None:
        self._report.damaged += nodes
        if len(self._report.problems) < MAX_PROBLEMS:
            self._report.problems.append(sentence)
