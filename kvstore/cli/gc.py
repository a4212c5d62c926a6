"""``kvstore gc``: remove garbage, and the least recently used nodes when a limit is passed.

With ``--json`` one document with the fields of kvstore.gc.GcReport, and "directory":

    {"directory": "/…", "dry_run": false, "busy": false, "error": "", "before_bytes": 0, "after_bytes": 0,
     "freed_bytes": 0, "unmet_bytes": 0, "over_quota_bytes": 0, "nodes": 0, "states": 0, "blocks": 0, "orphans": 0,
     "staging": 0, "quarantined": 0, "tokenizations": 0, "skipped": 0, "failed": 0, "waiting": 0, "damaged": 0,
     "foreign": 0, "future": 0, "coldest_ns": null, "mark_seconds": 0.0, "sweep_seconds": 0.0,
     "rested_seconds": 0.0}

Exit code 1 when another collection runs (nothing is done) or when the collection had to stop early.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kvstore.cli.app import DirectoryArgument, JsonOption, app, counted, opened, print_json
from kvstore.cli.common import DryRunOption, one_namespace, say, stages, warn
from kvstore.directory import complete
from kvstore.errors import KVStoreError
from kvstore.gc import GcReport, Policy, collect
from kvstore.quotas import read_quotas
from kvstore.sizes import format_size, parse_age, parse_size

__all__ = ["gc"]

_STAGES = {"files": "looking at files", "manifests": "reading manifests", "bytes": "removing"}


@app.command()
def gc(
    directory: DirectoryArgument = None,
    *,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="What the directory may take, such as 20GiB. With --namespace: what that one may take."
        ),
    ] = None,
    min_free: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What should stay free on its file system, such as 10GiB.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what was not used for this long, such as 30d, 12h or 90m.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="ID", help="Remove nodes of this namespace only; a unique beginning will do.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove garbage, and the least recently used nodes when a limit is passed. Safe beside running servers.

    Quotas of namespaces (`kvstore quota`) are kept to, unless --namespace and --size say another limit of one.
    """
    with opened(directory) as store:
        quotas = read_quotas(store.context)
        policy = Policy(
            size=parse_size(size) if size is not None else None,
            min_free=parse_size(min_free) if min_free is not None else None,
            older_than_ns=int(parse_age(older_than) * 1e9) if older_than is not None else None,
            namespace=one_namespace(store, namespace) if namespace is not None else None,
            quotas=quotas.sizes,
            dry_run=dry_run,
        )
        if not dry_run:
            complete(store.context.fs, store.context.layout)
        texts = {**_STAGES, "bytes": "adding up"} if dry_run else _STAGES
        with stages(texts, quiet=as_json) as told:
            report = collect(store.context, policy, progress=told)
        if as_json:
            print_json({"directory": str(store.path), **asdict(report)})
        else:
            say(_lines(report, policy))
        warn(list(quotas.problems))
        if report.busy:
            raise KVStoreError("another collection of this directory is running, so this one did nothing; wait for it")
        if report.error:
            raise KVStoreError(f"the collection {report.error}")


def _lines(report: GcReport, policy: Policy) -> list[str]:
    """The report as sentences: none when the collection ended before it had looked."""
    if report.busy or (report.error and not report.after_bytes):
        return []
    would = "would remove" if report.dry_run else "removed"
    parts = [
        counted(number, noun)
        for number, noun in (
            (report.nodes, "node"),
            (report.states, "boundary state"),
            (report.blocks, "block"),
            (report.tokenizations, "tokenization"),
            (report.staging, "stale staging folder"),
            (report.quarantined, "quarantined file"),
        )
        if number
    ]
    limits = (policy.size, policy.min_free, policy.older_than_ns)
    lines = []
    if not policy.quotas and all(limit is None for limit in limits):
        lines.append(
            "No limit was given (--size, --min-free, --older-than, or `kvstore quota`), so only garbage is removed."
        )
    lines.append(f"{would.capitalize()} {', '.join(parts) or 'nothing'}: {format_size(report.freed_bytes)}.")
    lines.append(f"The directory {'would take' if report.dry_run else 'takes'} {format_size(report.after_bytes)}.")
    if report.unmet_bytes:
        lines.append(
            f"{format_size(report.unmet_bytes)} more would have to go: the rest is in use, just written, or not a node."
        )
    if report.over_quota_bytes:
        lines.append(
            f"{format_size(report.over_quota_bytes)} more would have to go for the quotas: the rest is in use or just "
            "written."
        )
    if report.future:
        lines.append(
            f"Written while the clock was ahead, so left: {counted(report.future, 'file')}, whose age nobody can tell; "
            "run `kvstore fsck --repair`."
        )
    if report.skipped:
        lines.append(f"Used meanwhile, so left: {counted(report.skipped, 'file')}.")
    if report.failed:
        lines.append(f"Could not remove {counted(report.failed, 'file')}; check who owns them.")
    if report.damaged:
        lines.append(
            f"Unreadable: {counted(report.damaged, 'manifest')}. Blocks that they may name stay; "
            "run `kvstore fsck --repair`."
        )
    return lines
