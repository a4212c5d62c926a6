"""What a check found, and what became of it: the values that fsck hands to people and programs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from enum import IntFlag
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvstore.manifest import BlockRef

__all__ = ["Action", "Counts", "ExitCode", "Finding", "Problem", "Report", "Seen", "Severity"]

Severity: TypeAlias = Literal["error", "note"]
"""error: a reader, a publisher or the collector trips over it. note: worth knowing, and no reason to act."""

Action: TypeAlias = Literal["none", "folder", "tag", "damaged", "blocks", "parent", "mtime", "staging", "interval"]
"""What a repair may do. damaged, blocks, parent: set aside a file whose content is wrong; a manifest, if a block of it
is still missing; a manifest, if what it continues is still missing. interval: put first into kvstore.json."""

Seen: TypeAlias = tuple[int, int, int, int]
"""Inode, size, mtime and ctime of a file when it was examined."""


class ExitCode(IntFlag):
    """As fsck(8): the sum of what applies."""

    CLEAN = 0
    CORRECTED = 1
    LEFT = 4
    FAILED = 8
    USAGE = 16
    INTERRUPTED = 32


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    path: relative to the cache directory. code: one word for programs (docs/fsck.md lists them). repair: what a repair
    did about it, empty when nothing was tried. corrected: it is no longer so.
    """

    severity: Severity
    code: str
    path: str
    sentence: str
    repair: str = ""
    corrected: bool = False


@dataclass(slots=True)
class Problem:
    """A finding in the making: what a repair needs to know on top.

    seen: the file when it was examined. refs: blocks that were missing or damaged. lacks: namespace and key, as names
    carry it, of the manifest that this one must not be without.
    """

    severity: Severity
    code: str
    path: Path
    sentence: str
    action: Action = "none"
    seen: Seen | None = None
    refs: tuple[BlockRef, ...] = ()
    lacks: str = ""
    first: int = 0
    repair: str = ""
    corrected: bool = False

    def solved(self, how: str) -> None:
        """It is no longer so."""
        self.repair, self.corrected = how, True

    def left(self, why: str) -> None:
        """It is still so."""
        self.repair, self.corrected = why, False

    def finding(self, root: Path) -> Finding:
        """What people and programs see of it."""
        path = str(self.path.relative_to(root))
        return Finding(self.severity, self.code, path, self.sentence, self.repair, self.corrected)


@dataclass(slots=True)
class Counts:
    """What was looked at. Bytes are file sizes.

    manifests: of KV; states: of boundary states; tokenizations. verified: blocks whose bytes were all read; resumed:
    those that an earlier, interrupted run had read. orphans: blocks past grace that no manifest names, which the next
    gc removes; waiting: such blocks that are still young, as every publish makes them for a moment. unreachable: whole
    manifests that wait for what they continue. wide: files and
    folders that others may enter. foreign: what kvstore did not write. quarantined: files set aside earlier.
    """

    manifests: int = 0
    states: int = 0
    blocks: int = 0
    block_bytes: int = 0
    tokenizations: int = 0
    verified: int = 0
    verified_bytes: int = 0
    resumed: int = 0
    resumed_bytes: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    unreachable: int = 0
    wide: int = 0
    foreign: int = 0
    quarantined: int = 0
    quarantined_bytes: int = 0
    staging: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run. error: one sentence, why it ended early or could not see everything; else empty."""

    directory: Path
    read_data: bool
    repair: bool
    findings: tuple[Finding, ...]
    counts: Counts = field(default_factory=Counts)
    error: str = ""
    seconds: float = 0.0

    @property
    def errors(self) -> int:
        """How many errors were found, corrected or not."""
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def corrected(self) -> int:
        """How many of them are no longer there."""
        return sum(finding.severity == "error" and finding.corrected for finding in self.findings)

    @property
    def exit_code(self) -> ExitCode:
        """As fsck(8). A part that could not be examined is a failed check, not damage; notes change nothing."""
        code = ExitCode.FAILED if self.error else ExitCode.CLEAN
        for finding in self.findings:
            if finding.code == "unreadable":
                code |= ExitCode.FAILED
            elif finding.severity == "error":
                code |= ExitCode.CORRECTED if finding.corrected else ExitCode.LEFT
        return code

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "directory": os.fspath(self.directory),
            "read_data": self.read_data,
            "repair": self.repair,
            "exit_code": int(self.exit_code),
            "error": self.error,
            "errors": self.errors,
            "corrected": self.corrected,
            "notes": len(self.findings) - self.errors,
            "seconds": round(self.seconds, 3),
            "counts": asdict(self.counts),
            "findings": [asdict(finding) for finding in self.findings],
        }
