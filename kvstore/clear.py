"""Delete what a person says must go: everything, or one namespace, however young; or what was not used for some time.

The last is a garbage collection with an age for a limit (kvstore.gc). The others differ from one: youth protects
nothing, so what a running server has just written goes too, unless it appears or is touched while this works. A node
that was used, or built upon, since it was looked at stays, with its ancestors. Otherwise locks, fence and order are
those of gc, and so are the reasons: boundary states before the KV of their node, children before parents, in short
batches under the publish lock; then the blocks that no manifest names any more. A kill anywhere leaves a valid
directory, with unreferenced blocks at worst.

What kvstore did not write is never touched, nor are manifests of a newer version and what they may need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.context import Context
from kvstore.directory import unavailable
from kvstore.errors import KVStoreError
from kvstore.fs import allocated_bytes
from kvstore.gc import Policy, collect
from kvstore.layout import Layout, NodeName
from kvstore.locks import gc_lock
from kvstore.marking import Marked, Marks, mark
from kvstore.scan import HashedFile, NodeFile, Scan, SetAside, appeared, scan
from kvstore.sweep import Doomed, Sweeper, batches, changed

__all__ = ["ClearReport", "clear", "clear_unused"]

_ROUND = 1024
"""Nodes removed before their folders are synced and their blocks follow; see kvstore.gc."""


@dataclass
class ClearReport:
    """What was deleted, or with dry_run would be. Bytes are those allocated on disk.

    nodes, states: manifests. namespaces: descriptions. skipped: files that were used meanwhile, or that what stays
    needs. failed: could not be removed. after_bytes: what the whole directory takes now. busy: a collection runs, and
    nothing was done. error: one sentence, why it stopped; what was done until then is counted.
    """

    dry_run: bool = False
    busy: bool = False
    error: str = ""
    nodes: int = 0
    states: int = 0
    blocks: int = 0
    tokenizations: int = 0
    quarantined: int = 0
    staging: int = 0
    namespaces: int = 0
    skipped: int = 0
    failed: int = 0
    freed_bytes: int = 0
    after_bytes: int = 0


def clear(context: Context, namespace: str | None = None, *, dry_run: bool = False) -> ClearReport:
    """Delete everything in the directory, or one namespace with its blocks. The directory stays a valid one.

    Never raises for what the directory or the file system does: see ClearReport.error. A dry run takes no lock.
    """
    report = ClearReport(dry_run=dry_run)
    try:
        with nullcontext(True) if dry_run else gc_lock(context.layout) as mine:
            report.busy = not mine
            if mine:
                _Clearing(context, namespace, report).run()
    except OSError as error:
        report.error = str(unavailable(context.layout.root, error))
    except KVStoreError as error:
        report.error = str(error)
    if namespace is None and not report.busy and not report.error:
        # What killed processes left in tmp/, by the collector's rules: nobody may be writing there.
        left = collect(context, Policy(dry_run=dry_run))
        report.staging, report.error = left.staging, left.error
        if not dry_run:
            report.freed_bytes += left.freed_bytes
            report.after_bytes = left.after_bytes
    return report


def clear_unused(
    context: Context, older_than_ns: int, namespace: str | None = None, *, dry_run: bool = False
) -> ClearReport:
    """Delete what was not used for that long, as kvstore.gc does. What the last minute used always stays."""
    found = collect(context, Policy(older_than_ns=older_than_ns, namespace=namespace, dry_run=dry_run))
    return ClearReport(
        dry_run,
        found.busy,
        found.error,
        found.nodes,
        found.states,
        found.blocks,
        found.tokenizations,
        found.quarantined,
        found.staging,
        0,
        found.skipped,
        found.failed,
        found.freed_bytes,
        found.after_bytes,
    )


class _Clearing:
    """One run of clear. A dry run goes the same way."""

    def __init__(self, context: Context, namespace: str | None, report: ClearReport) -> None:
        self._context = context
        self._layout = context.layout
        self._namespace = namespace
        self._report = report
        self._sweeper = Sweeper(context, lambda _point: None, dry_run=report.dry_run)
        # Names (namespace and key) of nodes that must stay because of what stays below them.
        self._kept: set[str] = set()

    def run(self) -> None:
        """Look at everything, then delete. Raises OSError and KVStoreError."""
        found = scan(self._context)
        try:
            self._clear(found)
        finally:
            sweeper, report = self._sweeper, self._report
            report.skipped, report.failed, report.freed_bytes = sweeper.skipped, sweeper.failed, sweeper.freed
            report.after_bytes = found.tally.allocated - sweeper.freed

    def _clear(self, found: Scan) -> None:
        with self._sweeper.lock():  # the fence, see kvstore.gc
            pass
        marks = mark(self._context, found.nodes, appeared(self._layout, found.nodes))
        newer = {node.file.above for node in marks.nodes if node.unreadable == "newer"}
        # One of a newer version may name any block of its chunk, and those are its siblings'.
        self._kept.update(newer, (node.file.place for node in marks.nodes if node.file.above in newer))
        # What appeared during the scan was looked at too late to show that it gained a child (see kvstore.eviction).
        self._kept.update(node.file.place for node in marks.nodes if node.file.file in marks.fresh)
        chosen = _by_node(
            [
                node
                for node in marks.nodes
                if self._namespace in (None, node.file.namespace) and node.unreadable != "newer"
            ]
        )
        for unit in batches(chosen, _ROUND):
            self._nodes(unit, found, marks)
        if self._namespace is None:
            self._rest(found, marks)
        self._descriptions()

    def _nodes(self, units: Sequence[list[Marked]], found: Scan, marks: Marks) -> None:
        """Delete nodes, the blocks that nothing else names, and between the two make sure of the first."""
        blocks: list[Doomed] = []
        folders: dict[Path, None] = {}
        with self._sweeper.in_short_holds(units, self._paths) as held:
            for unit in held:
                if not self._node(unit):
                    self._kept.update((unit[0].file.place, unit[0].file.above))
                    continue
                for node in unit:
                    folders[node.file.path(self._layout).parent] = None
                    blocks.extend(self._block(block) for block in _unnamed(node, found, marks))
        for folder in folders:
            self._sweeper.sync(folder)
        self._report.blocks += self._sweeper.remove_all(blocks)

    def _node(self, unit: Sequence[Marked]) -> bool:
        """Delete a node's state and then its KV, if neither changed: a lookup refreshes the times of the KV alone."""
        files = [Doomed.node(self._layout, node.file) for node in unit]
        if unit[0].file.place in self._kept or (not self._report.dry_run and any(changed(file) for file in files)):
            self._sweeper.skipped += len(unit)
            return False
        for node, file in zip(unit, files, strict=True):
            if not self._sweeper.remove(file):
                return False
            self._report.nodes += node.file.kind == "kv"
            self._report.states += node.file.kind == "state"
        return True

    def _paths(self, unit: Sequence[Marked]) -> list[Path]:
        return [node.file.path(self._layout) for node in unit]

    def _rest(self, found: Scan, marks: Marks) -> None:
        """What no manifest names, unless one that stays cannot be read."""
        if all(node.unreadable != "newer" for node in marks.nodes):
            named = marks.named
            self._report.blocks += self._sweeper.remove_all(
                [self._block(block) for digest, block in found.blocks.items() if digest not in named]
            )
        self._report.tokenizations += self._sweeper.remove_all(
            [_seen(self._layout.tokens / file.name[:2] / file.name, file) for file in found.tokenizations]
        )
        self._report.quarantined += self._sweeper.remove_all([_seen(file.path, file) for file in found.quarantine])

    def _descriptions(self) -> None:
        """Descriptions of namespaces that hold no manifest any more."""
        ids = [self._namespace] if self._namespace is not None else self._described()
        with self._sweeper.in_short_holds(ids, lambda _: ()) as held:
            for namespace in held:
                path = self._layout.namespace_file(namespace)
                if not path.is_file() or self._keeps(namespace):
                    continue
                status = os.stat(path, follow_symlinks=False)
                file = Doomed(path, allocated_bytes(status), status.st_mtime_ns, status.st_ctime_ns)
                self._report.namespaces += self._sweeper.remove(file)

    def _described(self) -> list[str]:
        found: list[str] = []
        with suppress(FileNotFoundError):  # a copy leaves out folders that are empty
            found = sorted(os.listdir(self._layout.namespaces))
        names = (name.partition(".") for name in found)
        return [stem for stem, _, suffix in names if suffix == "json" and Layout.is_namespace_id(stem)]

    def _keeps(self, namespace: str) -> bool:
        """Whether a namespace has anything left; for a dry run, whether it would."""
        if self._report.dry_run:
            return any(name.startswith(namespace) for name in self._kept)
        folders = os.walk(self._layout.nodes / namespace)
        return any(NodeName.is_file_name(name) for _, _, names in folders for name in names)

    def _block(self, block: HashedFile) -> Doomed:
        return _seen(self._layout.block(block.digest), block)


def _seen(path: Path, file: NodeFile | HashedFile | SetAside) -> Doomed:
    return Doomed(path, file.allocated, file.mtime_ns, file.ctime_ns)


def _by_node(nodes: Sequence[Marked]) -> list[list[Marked]]:
    """The files of each node, state first, children before parents. Damaged ones, which no child can rely on, last."""
    found: dict[str, list[Marked]] = {}
    for node in sorted(nodes, key=lambda node: (-node.first, node.file.kind == "kv")):
        found.setdefault(node.file.place, []).append(node)
    return list(found.values())


def _unnamed(node: Marked, found: Scan, marks: Marks) -> Iterator[HashedFile]:
    """Forget the references of a manifest that is gone; the blocks that no manifest names now."""
    for digest in {digest for digest, _ in node.blocks}:
        marks.named[digest] -= 1
        if not marks.named[digest] and digest in found.blocks:
            yield found.blocks[digest]
