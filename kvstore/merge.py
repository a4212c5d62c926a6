"""Bring everything of one cache directory into another: afterwards the second holds every prefix of either.

The source is only read; it may be in use, and nothing of it is trusted: each block's digest is checked while it is
copied, each manifest before. What is damaged is left out and counted. Into the target everything goes as a publish
would put it: staged, made durable, renamed, blocks before the manifest that names them, parents before children. So it
can be killed anywhere; running it again goes on where it stopped, because what is there is not copied again.

A manifest's last use is the later of both directories' (docs/format.md section 7). Of a node that both have, the
target's stays: that makes the merge of a directory with its own repacked or older copy cheap.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kvstore.alike import differ
from kvstore.commit import intact, newer_manifest, put_file, put_manifest
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
from kvstore.layout import Layout
from kvstore.manifest import MAX_MANIFEST_BYTES, BlockRef, decode, newer_format
from kvstore.namespace import MAX_NAMESPACE_BYTES, read_namespace_file
from kvstore.scan import NodeFile, nodes, tokenizations
from kvstore.stats import merge_stats
from kvstore.stored import Stored, load
from kvstore.tokenizations import MAGIC, MAX_ENTRY_BYTES, stands
from kvstore.tokenizations import decode as decode_tokens
from kvstore.walk import Tally

__all__ = ["MergeReport", "merge"]

MAX_PROBLEMS = 100
"""Sentences kept of a run; the rest is only counted."""

_TRIES = 3
"""A block that is gone may mean that its manifest was replaced (repack) or removed (gc) meanwhile: look again."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes copied and bytes to copy in all."""


@dataclass
class MergeReport:
    """What was brought over, or with dry_run would be (as far as manifests and the headers of blocks tell).

    nodes, states, tokenizations, namespaces (descriptions), blocks: copied, and copied_bytes of these blocks. there:
    manifests that the target had already. damaged: files of the source that are not whole, manifests that name them,
    and those that go on with other tensors; newer: those that a newer kvstore wrote; problems says which.
    without_parent: nodes that continue one which neither directory has whole. skipped: what changed or vanished
    meanwhile; another run brings what is still there. foreign: files in the source that are not kvstore's. error: one
    sentence, why it stopped; what was done until then is counted.
    """

    dry_run: bool = False
    nodes: int = 0
    states: int = 0
    blocks: int = 0
    copied_bytes: int = 0
    tokenizations: int = 0
    namespaces: int = 0
    there: int = 0
    damaged: int = 0
    newer: int = 0
    without_parent: int = 0
    skipped: int = 0
    foreign: int = 0
    problems: list[str] = field(default_factory=list)
    error: str = ""


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
        if not self._report.dry_run:
            for folder in self._target.layout.folders:
                self._target.fs.make_dir(folder)
        for file in nodes(self._target.layout, Tally()):
            self._know(file)
        for file in self._survey():
            self._node(file)
        self._tokenizations()
        self._namespaces()
        if not self._report.dry_run:
            merge_stats(self._source, self._target)
        self._progress(self._total, self._total)

    def _survey(self) -> list[NodeFile]:
        """The source's manifests that are whole, parents before children, and how much there is to copy."""
        tally = Tally()
        found: list[tuple[bool, int, NodeFile]] = []
        missing: dict[bytes, int] = {}
        try:
            for file in nodes(self._source.layout, tally):
                stored = self._load(file)
                if stored is not None:
                    found.append((file.kind == "state", stored.manifest.first, file))
                    refs = stored.manifest.blocks
                    missing.update((ref.digest, ref.size) for ref in refs if not intact(self._target, ref))
        except OSError as error:
            raise unavailable(self._source.layout.root, error) from error
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
                    self._newer(f"manifest {path}", version)
                    return None
            self._problem(f"manifest {path} is left out: {error}")
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
            before = stored
        self._problem(f"manifest {file.path(self._source.layout)} is left out: a block that it names is missing")

    def _bring(self, file: NodeFile, stored: Stored) -> bool:
        """Bring one node or state; False when the source lacks one of its blocks.

        Raises MissingParentError when a collector of the target was faster, DamagedError (reported) for a bad block.
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
            self._problem(f"manifest {file.path(self._source.layout)} is left out: {unlike}")
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
        except OSError as error:
            self._problem(f"manifest {path} cannot be read ({error.strerror}); it is left as it is")
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
        others = last is not None and any(differ(held, last, self._source, ref) for ref in refs)
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
            self._problem(f"{error}; it is left out")
            raise
        if found:
            self._copied.add(ref.digest)
            self._report.blocks += 1
            self._report.copied_bytes += ref.size
        return found

    def _wrote(self, size: int) -> None:
        self._done += size
        self._progress(min(self._done, self._total), self._total)

    # What nothing depends on.

    def _tokenizations(self) -> None:
        tally = Tally()
        try:
            found = list(tokenizations(self._source.layout, tally))
        except OSError as error:
            raise unavailable(self._source.layout.root, error) from error
        self._report.foreign += tally.foreign
        for file in found:
            name = file.name
            path = self._target.layout.tokens / name[:2] / name
            used = min(file.mtime_ns, self._now_ns)
            if stands(self._target, path, file.size):
                with suppress(MissingParentError):
                    self._use(path, used)
                continue
            source = self._source.layout.tokens / name[:2] / name
            try:
                data, _ = self._source.fs.read_file(source, MAX_ENTRY_BYTES)
            except FileNotFoundError:
                self._report.skipped += 1
                continue
            except OSError as error:
                self._problem(f"tokenization {source} is left out: {error.strerror}")
                continue
            if (version := newer_format(data, MAGIC)) is not None:
                self._newer(f"tokenization {source}", version)
                continue
            if data[16:32].hex() != name or decode_tokens(data, data[16:48]) is None:
                self._problem(f"tokenization {source} is left out: it is damaged")
                continue
            if not self._report.dry_run:
                put_file(self._target, path, [data], used)
            self._report.tokenizations += 1

    def _namespaces(self) -> None:
        try:
            names = sorted(os.listdir(self._source.layout.namespaces))
        except OSError:
            names = []
        for name in names:
            stem, _, suffix = name.partition(".")
            path = self._target.layout.namespaces / name
            if suffix != "json" or not Layout.is_namespace_id(stem) or path.exists():
                continue
            source = self._source.layout.namespaces / name
            if not read_namespace_file(self._source.fs, source):
                self._problem(f"namespace description {source} is left out: it cannot be read")
                continue
            if not self._report.dry_run:
                put_file(self._target, path, [self._source.fs.read_file(source, MAX_NAMESPACE_BYTES)[0]])
            self._report.namespaces += 1

    def _newer(self, what: str, version: int) -> None:
        self._report.newer += 1
        self._say(f"{what} is left out: it has format {version}, which a newer kvstore wrote; merge with that one")

    def _problem(self, sentence: str) -> None:
        self._report.damaged += 1
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        if len(self._report.problems) < MAX_PROBLEMS:
            self._report.problems.append(sentence)
