"""Check a cache directory, and repair it.

    report = check(store.context, read_data=True, repair=True)

A check looks at every file: names, sizes, checksums, keys recomputed from tokens, parents, the headers of blocks, and
with read_data every byte. It changes nothing and runs beside readers, publishers and gc. A repair sets aside what is
damaged or cannot be reached; see kvstore.fsck.repair. What a finding's code means is in docs/fsck.md.
"""

from __future__ import annotations

import time
from pathlib import Path

from kvstore.context import Context
from kvstore.directory import unavailable
from kvstore.errors import KVStoreError
from kvstore.eviction import GRACE_NS
from kvstore.fsck.findings import Counts, ExitCode, Finding, Report, Severity
from kvstore.fsck.inspection import Inspection, Pause
from kvstore.fsck.passes import Progress
from kvstore.fsck.repair import SETTLE_S
from kvstore.fsck.repair import repair as _repair
from kvstore.fsck.resume import Resume

__all__ = ["Counts", "ExitCode", "Finding", "Progress", "Report", "Severity", "check"]


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Progress for nobody."""


def check(
    context: Context,
    *,
    read_data: bool = False,
    repair: bool = False,
    jobs: int = 1,
    resume: Path | None = None,
    grace_ns: int = GRACE_NS,
    settle_s: float = SETTLE_S,
    progress: Progress = _silent,
    pause: Pause = lambda _: None,
) -> Report:
    """Check a directory once. Never raises for what the directory holds or the file system does: see Report.error.

    jobs: threads that read data; and with 2 or more, processes that read manifests when there are many. (A new process
    imports the caller's main module, which must be safe to import.) resume: a file that records what was read, so that
    an interrupted check with read_data can go on. grace_ns: how old something must be before what it needs counts as
    missing rather than on its way. settle_s: how long something damaged must stay unchanged before it is set aside,
    when it was changed in the last minute.
    """
    started = time.monotonic()
    inspection = Inspection(context, grace_ns, jobs, progress, pause)
    error = ""
    try:
        with Resume(resume if read_data else None) as record:
            inspection.run(read_data=read_data, resume=record)
        if repair:
            pause("repairing")
            _repair(context, inspection.problems, settle_s, pause)
        # A volume that was unmounted meanwhile looks like a directory that everybody's files went away from.
        context.layout.config.stat()
    except OSError as failure:
        error = str(unavailable(context.layout.root, failure))
    except KVStoreError as failure:
        error = str(failure)
    root = context.layout.root
    findings = tuple(problem.finding(root) for problem in inspection.problems)
    return Report(root, read_data, repair, findings, inspection.counts, error, time.monotonic() - started)
