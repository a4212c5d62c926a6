"""``kvstore repack``: join the small blocks of conversations that rest.

With ``--json`` one document with the fields of kvstore.repack.RepackReport, and "directory":

    {"directory": "/…", "dry_run": false, "busy": false, "dropped": 0, "nodes": 0, "replaced": 0, "replaced_bytes": 0,
     "written": 0, "written_bytes": 0, "warm": 0, "bound": 0, "skipped": 0, "damaged": 0, "problems": [], "error": ""}

Exit code 1 when it had to stop early. Nodes that are left alone because something is damaged are no reason to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from kvstore.cli.app import DirectoryArgument, JsonOption, app, counted, opened, print_json
from kvstore.cli.common import DryRunOption, bar, one_namespace, say, warn
from kvstore.directory import complete
from kvstore.errors import KVStoreError
from kvstore.repack import RepackReport
from kvstore.repack import repack as join_blocks
from kvstore.sizes import format_size, parse_age

__all__ = ["repack"]


@app.command()
def repack(
    directory: DirectoryArgument = None,
    *,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only what was not used for this long, such as 1d, 12h or 0s.")
    ] = "1d",
    namespace: Annotated[
        str | None, typer.Option(metavar="ID", help="Only nodes of this namespace; a unique beginning will do.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Join the small blocks of conversations that rest, for faster restores. Safe beside running servers.

    Tails that a longer node contains are dropped first: they hold the blocks apart, and the longer one serves for them.
    Needs room for the new blocks until gc has removed the old ones, a day later.
    """
    with opened(directory) as store:
        older_than_ns = int(parse_age(older_than) * 1e9)
        namespaces = None if namespace is None else [one_namespace(store, namespace)]
        if not dry_run:
            complete(store.context.fs, store.context.layout)
        with bar("joining blocks", quiet=as_json) as told:
            report = join_blocks(
                store.context, older_than_ns=older_than_ns, namespaces=namespaces, dry_run=dry_run, progress=told
            )
        if as_json:
            print_json({"directory": str(store.path), **asdict(report)})
        else:
            say(_lines(report))
        warn(report.problems)
        if report.error:
            raise KVStoreError(report.error)


def _lines(report: RepackReport) -> Iterator[str]:
    would = "Would join" if report.dry_run else "Joined"
    if report.busy:
        yield "A collection runs, so tails that a longer node contains were left, and the blocks that they hold apart."
    if report.dropped:
        yield (
            f"{'Would drop' if report.dry_run else 'Dropped'} {counted(report.dropped, 'tail')} that a longer node "
            "contains."
        )
    if report.nodes:
        yield (
            f"{would} {counted(report.replaced, 'block')} of {counted(report.nodes, 'node')} into "
            f"{report.written:,} ({format_size(report.written_bytes)}); gc removes what they replace "
            f"({format_size(report.replaced_bytes)}) once it is a day old."
        )
    else:
        yield f"{would} nothing."
    if report.warm:
        yield f"{counted(report.warm, 'node')} with several blocks {_were(report.warm)} used too recently."
    if report.bound:
        yield (
            f"{counted(report.bound, 'node')} {_keep(report.bound)} several blocks: other nodes share them one by one, "
            "or prefill and decoding alternate."
        )
    if report.skipped:
        yield f"{counted(report.skipped, 'node')} changed meanwhile."
    if report.damaged:
        yield f"{counted(report.damaged, 'node')} {_were(report.damaged)} left alone because of damage."


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _keep(number: int) -> str:
    return "keeps" if number == 1 else "keep"
