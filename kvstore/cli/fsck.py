"""``kvstore fsck``: check a cache directory, and repair it.

With ``--json`` one document; path is relative to the directory, and counts has the fields of kvstore.fsck.Counts:

    {"directory": "/…", "read_data": true, "repair": true, "exit_code": 1, "error": "", "errors": 1, "corrected": 1,
     "notes": 0, "seconds": 0.123, "counts": {"manifests": 12, "states": 0, "blocks": 12, …},
     "findings": [{"severity": "error", "code": "block-damaged", "path": "objects/blocks/ab/ab…",
                   "sentence": "…", "repair": "set aside as quarantine/…", "corrected": true}],
     "warnings": ["/… is a temporary folder, …"]}

warnings: what speaks against the place of the directory (kvstore.locations); on stderr, too. They change no exit code.
docs/fsck.md lists the codes of findings. The exit code is fsck(8)'s, and so a command line that is wrong exits with 16
here, not with 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.app import (
    Command,
    DirectoryArgument,
    JsonOption,
    app,
    console,
    counted,
    opened,
    output,
    print_json,
    writing,
)
from kvstore.cli.common import stages, warn
from kvstore.fsck import ExitCode, Finding, Report, check
from kvstore.locations import warnings_for
from kvstore.sizes import format_size

__all__ = ["fsck"]

_SHOWN = 50
"""Findings that are listed for people; --json has them all."""

_STAGES = {"files": "reading manifests", "bytes": "reading data"}


class _Command(Command):
    """Exits with the code of fsck(8) for a wrong command line. Typer's way to say so is to be subclassed."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            # Whatever class of whichever click it is: typer has its own since 0.20.
            if getattr(error, "exit_code", None) == 2:
                error.exit_code = int(ExitCode.USAGE)  # type: ignore[attr-defined]
            raise

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with writing(int(ExitCode.FAILED)):
            return super().invoke(*args, **kwargs)


@app.command(
    cls=_Command,
    epilog="Exit codes, added up: 0 no errors; 1 errors were found and corrected; 4 errors are left; 8 the check could "
    "not be done, or not be completed; 16 the command line is wrong; 32 interrupted. Notes change nothing.",
)
def fsck(
    directory: DirectoryArgument = None,
    *,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read every byte of every block, instead of sizes and headers only.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside in quarantine/ what is damaged. Nothing of value is deleted.")
    ] = False,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="How many files to examine at once.")] = 2,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --read-data: record in FILE what was read, and skip what FILE says was read. "
            "It is removed when all is read.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a cache directory, and repair it with --repair. Safe beside running servers."""
    if resume is not None and not read_data:
        console.print("kvstore: --resume goes with --read-data, which is what takes long", style="red", highlight=False)
        raise typer.Exit(ExitCode.USAGE)
    report = None
    try:
        with opened(directory) as store, stages(_STAGES, quiet=as_json) as told:
            report = check(store.context, read_data=read_data, repair=repair, jobs=jobs, resume=resume, progress=told)
    except KeyboardInterrupt as stop:
        again = f"; go on with --resume {resume}" if resume is not None else ""
        console.print(f"kvstore: interrupted{again}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(ExitCode.INTERRUPTED) from stop
    except typer.Exit as stop:
        # opened() has said why the directory cannot be used.
        raise typer.Exit(ExitCode.FAILED) from stop
    warnings = warnings_for(store.path)
    if as_json:
        print_json({**report.document(), "warnings": warnings})
    else:
        for line in _lines(report):
            output().print(line, highlight=False, soft_wrap=True, markup=False)
    warn(warnings)
    if report.error:
        console.print(f"kvstore: {report.error}", style="red", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(report.exit_code)


def _lines(report: Report) -> Iterator[str]:
    """The report for people: errors first, then what was checked."""
    ordered = sorted(report.findings, key=lambda finding: finding.severity)
    for finding in ordered[:_SHOWN]:
        yield _line(finding)
    if len(ordered) > _SHOWN:
        yield f"… and {len(ordered) - _SHOWN:,} more; --json has them all."
    counts = report.counts
    yield (
        f"Checked {counted(counts.manifests, 'manifest')}, {counted(counts.states, 'boundary state')} and "
        f"{counted(counts.blocks, 'block')} ({format_size(counts.block_bytes)}) in {report.seconds:.1f} s."
    )
    if report.read_data:
        earlier = f", {counts.resumed:,} more in an earlier run" if counts.resumed else ""
        yield f"Read {counted(counts.verified, 'block')} ({format_size(counts.verified_bytes)}){earlier}."
    if counts.waiting:
        young = counted(counts.waiting, "young block")
        yield f"Not named by a manifest yet: {young} ({format_size(counts.waiting_bytes)})."
    if counts.quarantined:
        yield f"In quarantine before: {counted(counts.quarantined, 'file')} ({format_size(counts.quarantined_bytes)})."
    if counts.foreign:
        yield f"Not kvstore's, so left alone: {counted(counts.foreign, 'file')}."
    left = report.errors - report.corrected
    if report.error:
        yield "The check was not completed."
    if not report.errors:
        yield "No errors so far." if report.error else "No errors."
    elif report.repair:
        yield f"{counted(report.errors, 'error')}: {report.corrected:,} corrected, {left:,} left."
    else:
        yield f"{counted(report.errors, 'error')}; --repair sets aside what is damaged."


def _line(finding: Finding) -> str:
    did = f" — {finding.repair}" if finding.repair else ""
    return f"{finding.severity}: {finding.path}: {finding.sentence}{did}"
