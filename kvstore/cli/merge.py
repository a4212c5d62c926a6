"""``kvstore merge``: bring everything of one cache directory into another.

With ``--json`` one document with the fields of kvstore.merge.MergeReport, and the two directories:

    {"source": "/…", "target": "/…", "dry_run": false, "nodes": 0, "states": 0, "blocks": 0, "copied_bytes": 0,
     "tokenizations": 0, "namespaces": 0, "there": 0, "damaged": 0, "without_parent": 0, "skipped": 0, "foreign": 0,
     "problems": [], "error": "", "warnings": []}

warnings: what speaks against the place of the target (kvstore.locations); on stderr, too. Exit code 1 when the two
cannot be merged, or when it had to stop early; running it again goes on. What is damaged in the source is said on
stderr, left out, and no reason to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.app import DIRECTORY_DEFAULT, JsonOption, app, counted, named, opened, print_json
from kvstore.cli.common import DryRunOption, bar, say, warn
from kvstore.errors import KVStoreError
from kvstore.locations import warnings_for
from kvstore.merge import MergeReport
from kvstore.merge import merge as bring
from kvstore.sizes import format_size

__all__ = ["merge"]


@app.command()
def merge(
    source: Annotated[
        Path, typer.Argument(parser=named, metavar="SRC", help="The cache directory to read.", show_default=False)
    ],
    target: Annotated[
        Path | None,
        typer.Argument(
            parser=named, metavar="DST", help=f"The cache directory to add to {DIRECTORY_DEFAULT}.", show_default=False
        ),
    ] = None,
    *,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring everything of SRC into DST, which then holds every prefix of either. SRC is only read; it may be in use."""
    with opened(source) as one, opened(target) as other:
        with bar("copying blocks", quiet=as_json) as told:
            report = bring(one.context, other.context, dry_run=dry_run, progress=told)
        warnings = warnings_for(other.path)
        if as_json:
            print_json({"source": str(one.path), "target": str(other.path), **asdict(report), "warnings": warnings})
        else:
            say(_lines(report, other.path))
        warn([*warnings, *report.problems])
        if report.error:
            raise KVStoreError(f"{report.error}; what was copied stays, and running this again goes on")


def _lines(report: MergeReport, target: Path) -> Iterator[str]:
    parts = [
        counted(number, one)
        for number, one in (
            (report.nodes, "node"),
            (report.states, "boundary state"),
            (report.tokenizations, "tokenization"),
            (report.namespaces, "namespace description"),
        )
        if number
    ]
    would = "Would copy" if report.dry_run else "Copied"
    size = f", {counted(report.blocks, 'block')} of {format_size(report.copied_bytes)}" if report.blocks else ""
    yield f"{would} {', '.join(parts) or 'nothing'}{size} into {target}."
    if report.there:
        yield f"{counted(report.there, 'manifest')} were there already."
    if report.damaged:
        yield f"{counted(report.damaged, 'damaged file')} left out."
    if report.without_parent:
        yield f"{counted(report.without_parent, 'node')} left out because what they continue is in neither directory."
    if report.skipped:
        yield f"{counted(report.skipped, 'file')} vanished meanwhile; running this again brings what is still there."
