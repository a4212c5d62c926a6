"""``kvstore merge``: bring everything of one cache directory into another.

With ``--json`` one document with the fields of kvstore.merge.MergeReport, and the two directories:

    {"source": "/…", "target": "/…", "dry_run": false, "nodes": 0, "states": 0, "blocks": 0, "copied_bytes": 0,
     "tokenizations": 0, "namespaces": 0, "there": 0, "damaged": 0, "newer": 0, "without_parent": 0, "skipped": 0,
     "foreign": 0, "problems": [], "error": "", "made": false, "warnings": []}

made: the target was not there or empty, and was made like the source (in a dry run: would be). warnings: what speaks
against the place of the target (kvstore.locations); on stderr, too. Exit code 1 when the two cannot be merged, or when
it had to stop early; running it again goes on. What is damaged in the source, of a newer version, or kept from its
place in the target by something else there, is said on stderr, left out, and no reason to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.app import DIRECTORY_DEFAULT, JsonOption, app, counted, named, opened, print_json, refuse
from kvstore.cli.common import DryRunOption, bar, say, warn
from kvstore.destination import destination
from kvstore.errors import KVStoreError, NotACacheDirectoryError
from kvstore.locations import place_of, warnings_for
from kvstore.merge import MergeReport
from kvstore.merge import merge as bring
from kvstore.sizes import format_size
from kvstore.store import Store

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
    """Bring everything of SRC into DST, which then holds every prefix of either. SRC is only read; it may be in use.

    Where DST is given and not there, or an empty folder, a cache directory with SRC's interval is made.
    """
    with opened(source) as one, _destination(one, target, dry_run=dry_run) as (other, made):
        with bar("copying blocks", quiet=as_json) as told:
            report = bring(one.context, other.context, dry_run=dry_run, progress=told)
        warnings = warnings_for(other.path)
        if as_json:
            about = {"source": str(one.path), "target": str(other.path)}
            print_json({**about, **asdict(report), "made": made, "warnings": warnings})
        else:
            if made:
                say(_made(other, dry_run=dry_run))
            say(_lines(report, other.path))
        warn([*warnings, *report.problems])
        if report.error:
            raise KVStoreError(f"{report.error}; what was copied stays, and running this again goes on")


@contextmanager
def _destination(source: Store, target: Path | None, *, dry_run: bool) -> Iterator[tuple[Store, bool]]:
    place = place_of(target)
    # What a variable names may be where a volume is not mounted now.
    create = place.source == "given"
    try:
        context, made = destination(source.context, place.path, create=create, dry_run=dry_run)
    except NotACacheDirectoryError as error:
        refuse(place, error)
    with Store(context) as store:
        yield store, made


def _made(target: Store, *, dry_run: bool) -> Iterator[str]:
    shared = "" if target.context.fs.private else ", shared by several users as the source is"
    would = "Would make" if dry_run else "Made"
    yield f"{would} the cache directory {target.path} with chunks of {counted(target.interval, 'token')}{shared}."


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
        yield f"There already: {counted(report.there, 'manifest')}."
    if report.damaged:
        yield f"{counted(report.damaged, 'damaged file')} left out."
    if report.newer:
        yield f"{counted(report.newer, 'file')} of a newer kvstore left out; merge with that one."
    if report.without_parent:
        yield f"{counted(report.without_parent, 'node')} left out because what they continue is in neither directory."
    if report.skipped:
        yield f"{counted(report.skipped, 'file')} vanished meanwhile; running this again brings what is still there."
