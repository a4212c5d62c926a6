"""``kvstore clear``: delete a namespace, what is old, or everything. Asks first.

With ``--json`` one document with the fields of kvstore.clear.ClearReport, and "directory":

    {"directory": "/…", "dry_run": false, "busy": false, "error": "", "nodes": 0, "states": 0, "blocks": 0,
     "tokenizations": 0, "quarantined": 0, "staging": 0, "namespaces": 0, "skipped": 0, "failed": 0, "freed_bytes": 0,
     "after_bytes": 0}

Exit code 1 when nothing was done (a collection runs, the answer was no) or when it had to stop early.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from kvstore.clear import ClearReport, clear_unused
from kvstore.clear import clear as delete
from kvstore.cli.app import DirectoryArgument, JsonOption, app, console, counted, opened, print_json
from kvstore.cli.common import DryRunOption, one_namespace, say, unseen
from kvstore.directory import complete
from kvstore.errors import KVStoreError
from kvstore.eviction import PROTECT_NS
from kvstore.sizes import format_size, parse_age

__all__ = ["clear"]


@app.command()
def clear(
    directory: DirectoryArgument = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete everything; an empty cache directory is left.")
    ] = False,
    namespace: Annotated[
        str | None, typer.Option(metavar="ID", help="Delete this namespace; a unique beginning of its id will do.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Delete what was not used for this long, such as 30d; with --namespace, of it."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a namespace, what is old, or everything. Asks first. Files that are not kvstore's are never touched."""
    if everything == (namespace is not None or older_than is not None):
        raise typer.BadParameter("say what to delete: --all, or --namespace ID, or --older-than AGE")
    with opened(directory) as store:
        chosen = None if namespace is None else one_namespace(store, namespace, "nothing to clear")
        run = partial(delete, store.context, chosen)
        older_than_ns = None if older_than is None else int(parse_age(older_than) * 1e9)
        if older_than_ns is not None:
            run = partial(clear_unused, store.context, older_than_ns, chosen)
        report = _run(partial(run, dry_run=True), quiet=as_json)
        if not dry_run and not report.error:
            if not yes:
                _ask(report, f"{store.path}" if chosen is None else f"namespace {chosen} in {store.path}")
            complete(store.context.fs, store.context.layout)
            report = _run(run, quiet=as_json)
        if as_json:
            print_json({"directory": str(store.path), **asdict(report)})
        elif not report.busy and (report.after_bytes or not report.error):
            say(_lines(report))
            if older_than_ns is not None and older_than_ns < PROTECT_NS:
                say(["What was written or used in the last minute stays, and for a day blocks that no manifest names."])
        if report.busy:
            raise KVStoreError("a collection of this directory is running, so nothing was deleted; wait for it")
        if report.error:
            raise KVStoreError(report.error)


def _run(run: partial[ClearReport], *, quiet: bool) -> ClearReport:
    with nullcontext() if unseen(quiet) else console.status("looking at everything …"):
        return run()


def _ask(report: ClearReport, where: str) -> None:
    """Let a person say yes; raises KVStoreError where there is none, and typer.Abort at a no."""
    if not sys.stdin.isatty():
        raise KVStoreError("nothing was deleted: nobody can be asked here; say --yes, or look with --dry-run first")
    typer.confirm(f"Delete {_what(report)} ({format_size(report.freed_bytes)}) from {where}?", abort=True, err=True)


def _what(report: ClearReport) -> str:
    parts = [
        counted(number, one)
        for number, one in (
            (report.nodes, "node"),
            (report.states, "boundary state"),
            (report.blocks, "block"),
            (report.tokenizations, "tokenization"),
            (report.quarantined, "quarantined file"),
            (report.staging, "stale staging folder"),
            (report.namespaces, "namespace description"),
        )
        if number
    ]
    return ", ".join(parts) or "nothing"


def _lines(report: ClearReport) -> Iterator[str]:
    would = "Would delete" if report.dry_run else "Deleted"
    yield f"{would} {_what(report)}: {format_size(report.freed_bytes)}."
    yield f"The directory {'would take' if report.dry_run else 'takes'} {format_size(report.after_bytes)}."
    if report.skipped:
        yield f"Used meanwhile, or needed by what stays, so left: {counted(report.skipped, 'file')}."
    if report.failed:
        yield f"{counted(report.failed, 'file')} could not be deleted; check who owns them."
