"""Bring everything of one cache directory into another: afterwards the second holds every prefix of either.

The source is only read; it may be in use, and nothing of it is trusted: each block's digest is checked while it is
copied, each manifest before. What is damaged is left out and counted. Into the target everything goes as a publish
would put it: staged, made durable, renamed, blocks before the manifest that names them, parents before children. So it
can be killed anywhere; running it again goes on where it stopped, because what is there is not copied again.

A manifest's last use is the later of both directories' (docs/format.md section 7). Of a node that both have, the
target's stays: that makes the merge of a directory with its own repacked or older copy cheap.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from kvstore.alike import differ
from kvstore.commit import intact, newer_manifest, put_manifest
from kvstore.context import Context
from kvstore.copying import BUFFER_BYTES, copy_block
from kvstore.destination import check_apart
from kvstore.directory import unavailable
from kvstore.errors import (
    DamagedBlockError,
    DamagedError,
    DamagedManifestError,
    IntervalMismatchError,
    KVStoreError,
    MissingParentError,
)
from kvstore.manifest import MAX_MANIFEST_BYTES, BlockRef, decode
from kvstore.merged import MergeReport
from kvstore.scan import NodeFile, nodes
from kvstore.small_files import bring_descriptions, bring_tokenizations
from kvstore.stats import merge_stats
from kvstore.stored import Stored, load
from kvstore.walk import Tally

__all__ = ["MergeReport", "merge"]

_TRIES = 3
"""A block that is gone may mean that its manifest was replaced (repack) or removed (gc) meanwhile: look again."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes copied and bytes to copy in all."""


def merge(
    source: Context,
    target: Context,
    *,
    dry_run: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> MergeReport:
    """Merge source into target. Raises KVStoreError when the two cannot be merged at all, before anything is done."""
    check_apart(source.layout.root, target.layout.root)
    if source.interval != target.interval:
        raise IntervalMismatchError(
            f"{source.layout.root} has an interval of {source.interval} tokens and {target.layout.root} one of "
            f"{target.interval}; only directories of one interval can be merged"
        )
    report = MergeReport(dry_run=dry_run)
    try:
        _Merge(source, target, report, progress).run()
    except OSError as error:
        report.error = str(unavailable(target.layout.root, error))
    except KVStoreError as error:
        report.error = str(error)
    return report


class _Merge:
    """One run of merge. A dry run goes the same way and copies nothing."""

    def __init__(self, source: Context, target: Context, report: MergeReport, progress: Progress) -> None:
        self._source = source
        self._target = target
        self._report = report
        self._progress = progress
        self._done = self._total = 0
        self._now_ns = target.clock()
        self._buffer = None if report.dry_run else memoryview(bytearray(BUFFER_BYTES))
        # Manifests of full chunks that the target has, by namespace and key: what nodes may be put upon.
        self._full: dict[str, Path] = {}
        # The last block of nodes of the target, if they have one, as far as that was looked at.
        self._last: dict[str, BlockRef | None] = {}
        self._bad: set[bytes] = set()
        self._copied: set[bytes] = set()

    def run(self) -> None:
        """Nodes before states, because a state lies at a node; then what nothing depends on."""
        for folder in self._target.layout.folders:
            if not self._report.dry_run:
                self._target.fs.make_dir(folder)
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        for file in nodes(self._target.layout, Tally()):
            self._know(file)
        for file in self._survey():
            self._node(file)
        bring_tokenizations(self._source, self._target, self._report)
        bring_descriptions(self._source, self._target, self._report)
        if not self._report.dry_run:
            merge_stats(self._source, self._target)
        self._progress(self._total, self._total)

    def _survey(self) -> list[NodeFile]:
        """The source's manifests that are whole, parents before children, and how much there is to copy."""
        tally = Tally()
        found: list[tuple[bool, int, NodeFile]] = []
        missing: dict[bytes, int] = {}
        try:
            files = list(nodes(self._source.layout, tally))
        except OSError as error:
            raise unavailable(self._source.layout.root, error) from error
        for file in files:
            stored = self._load(file)
            if stored is not None:
                found.append((file.kind == "state", stored.manifest.first, file))
                refs = stored.manifest.blocks
                missing.update((ref.digest, ref.size) for ref in refs if not intact(self._target, ref))
        self._report.foreign += tally.foreign
        self._total = sum(missing.values())
        return [file for *_, file in sorted(found)]

    def _load(self, file: NodeFile) -> Stored | None:
        """A manifest of the source that is whole; None, counted, when it is not, or of a newer version."""
        try:
            stored = load(self._source, file)
        except (OSError, DamagedManifestError) as error:
            path = file.path(self._source.layout)
            with suppress(OSError):
                if (version := newer_manifest(self._source, path)) is not None:
                    self._report.leave_newer(f"manifest {path}", version)
                    return None
            self._leave_out(file, error)
            return None
        if stored is None:
            self._report.skipped += 1
        return stored

    # One node.

    def _node(self, file: NodeFile) -> None:
        before: Stored | None = None
        for _ in range(_TRIES):
            stored = self._load(file)
            if stored is None:
                return
            if before is not None and stored.data == before.data:
                break
            try:
                if self._bring(file, stored):
                    return
            except MissingParentError:
                self._report.skipped += 1
                return
            except DamagedError:
                self._report.damaged += 1
                return
            except NotADirectoryError as error:
                # In the target, where a file has the name of a folder: nothing can be there, and the rest can.
                self._leave_out(file, f"{error.filename2 or error.filename}: {error.strerror}")
                return
            before = stored
        self._leave_out(file, "a block that it names is missing")

    def _leave_out(self, file: NodeFile, why: object) -> None:
        self._report.leave_damaged(f"manifest {file.path(self._source.layout)} is left out: {why}")

    def _bring(self, file: NodeFile, stored: Stored) -> bool:
        """Bring one node or state; False when the source lacks one of its blocks.

        Raises MissingParentError when a collector of the target was faster, DamagedError (reported) for a bad block,
        and NotADirectoryError when no file can be where the manifest or a block of it belongs.
        """
        path = file.path(self._target.layout)
        used = min(stored.status.st_mtime_ns, self._now_ns)
        if self._has(file, path, stored):
            self._use(path, used)
            self._know(file)  # it may have come just now, from a publisher or another merge
            self._report.there += 1
            return True
        below = self._below(file, stored)
        if below is None and (stored.manifest.first or file.kind == "state"):
            self._report.without_parent += 1
            return True
        if file.kind == "kv" and (unlike := self._unlike(file, stored, below)):
            self._leave_out(file, unlike)
            return True
        if not all(self._block(ref) for ref in stored.manifest.blocks):
            return False
        if not self._report.dry_run:
            put_manifest(
                self._target,
                path,
                stored.data,
                stored.manifest.blocks,
                below,
                used_ns=used,
            )
        self._know(file)
        self._note_last(file, stored)
        self._report.nodes += file.kind == "kv"
        self._report.states += file.kind == "state"
        return True

    def _has(self, file: NodeFile, path: Path, stored: Stored) -> bool:
        """Whether the target has a node with all its blocks, given those that the source has of the same name.

        One that is not whole, or without the blocks that the source's has, is remembered as damaged, so that
        put_manifest sets it aside. One that cannot be read may be whole, and stays, as one of a newer version does.
        Raises NotADirectoryError when there can be none.
        """
        there = None
        try:
            try:
                there = load(self._target, file)
            except DamagedManifestError:
                if newer_manifest(self._target, path) is not None:
                    return True
            else:
                if there is None:
                    return False
        except NotADirectoryError:
            raise
        except OSError as error:
            self._report.leave_damaged(f"manifest {path} cannot be read ({error.strerror}); it is left as it is")
            return True
        with suppress(DamagedBlockError):
            if (
                there is not None
                and bool(there.manifest.blocks) >= bool(stored.manifest.blocks)
                and all(self._block(ref) for ref in there.manifest.blocks)
            ):
                self._note_last(file, there)
                return True
        if not self._report.dry_run:
            self._target.damaged.add(path)
        return False

    def _below(self, file: NodeFile, stored: Stored) -> Path | None:
        """The manifest in the target that this one needs; None when there is none or, for a first node, no need."""
        if file.kind == "kv":
            return self._full.get(file.above) if stored.manifest.first else None
        beside = self._target.layout.node(file.namespace, file.name, "kv")
        return beside if beside.is_file() or (self._report.dry_run and file.place in self._full) else None

    def _note_last(self, file: NodeFile, stored: Stored) -> None:
        if file.kind == "kv":
            self._last[file.place] = next(reversed(stored.manifest.blocks), None)

    def _unlike(self, file: NodeFile, stored: Stored, below: Path | None) -> str:
        """Why a node cannot continue what it would, or an empty string: one has blocks and the other none (format.md
        section 3), or other tensors. What cannot be read now is left to whoever restores it.
        """
        if below is None:
            return ""
        if file.above not in self._last:
            try:
                data, _ = self._target.fs.read_file(below, MAX_MANIFEST_BYTES)
                self._last[file.above] = next(reversed(decode(data).blocks), None)
            except (OSError, DamagedManifestError):
                return ""
        last, refs = self._last[file.above], stored.manifest.blocks
        if (last is None) == bool(refs):
            return "of it and what it continues, one has no blocks"
        # In a dry run what it continues may not be in the target yet.
        held = self._target if last is None or intact(self._target, last) else self._source
        others = last is not None and differ(held, last, self._source, refs)
        return "it has other tensors than what it continues" if others else ""

    def _use(self, path: Path, used: int) -> None:
        if self._report.dry_run:
            return
        try:
            there = os.stat(path, follow_symlinks=False).st_mtime_ns
            if there < used:
                self._target.fs.touch(path, used)
        except FileNotFoundError as error:
            raise MissingParentError(f"{path} was removed meanwhile") from error

    def _know(self, file: NodeFile) -> None:
        if file.kind == "kv" and (file.tokens == self._target.interval or self._report.dry_run):
            self._full[file.place] = file.path(self._target.layout)

    def _block(self, ref: BlockRef) -> bool:
        """Have a block in the target; False when the source has none of the name. Raises DamagedBlockError."""
        if intact(self._target, ref) or ref.digest in self._copied:
            return True
        if ref.digest in self._bad:
            raise DamagedBlockError("reported before")
        try:
            found = copy_block(self._source, self._target, ref, self._buffer, self._wrote)
        except DamagedBlockError as error:
            self._bad.add(ref.digest)
            self._report.leave_damaged(f"{error}; it is left out")
            raise
        if found:
            self._copied.add(ref.digest)
            self._report.blocks += 1
            self._report.copied_bytes += ref.size
        return found

    def _wrote(self, size: int) -> None:
        self._done += size
        self._progress(min(self._done, self._total), self._total)
