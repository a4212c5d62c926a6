"""``kvstore du``: what the bytes of a cache directory are.

With ``--json`` one document. All numbers are bytes allocated on disk; both lists add up to "total":

    {"directory": "/…", "total": 1208000000, "damaged": 0, "foreign": 0,
     "namespaces": [{"namespace": "<32 hex>", "label": "…", "nodes": 4, "kv": 1207959552, "states": 0,
                     "manifests": 49152, "total": 1208008704, "quota": null}],
     "kinds": {"kv blocks": 0, "state blocks": 0, "manifests": 0, "tokenizations": 0, "tmp": 0, "quarantine": 0,
               "unreferenced": 0, "other": 0},
     "shared": 0}

The namespaces' totals and "shared" (blocks that several of them name) are kv blocks, state blocks and manifests.
quota: what `kvstore quota` allows, or null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from kvstore.breakdown import Breakdown, breakdown
from kvstore.cli.app import DirectoryArgument, JsonOption, app, console, counted, opened, output, print_json
from kvstore.cli.common import plain, warn
from kvstore.quotas import read_quotas
from kvstore.sizes import exact_size, format_size
from kvstore.store import unavailable

__all__ = ["du"]

_SHORT_ID = 12


@app.command()
def du(directory: DirectoryArgument = None, as_json: JsonOption = False) -> None:
    """Show what the directory takes on disk: by namespace, and by kind of file."""
    with opened(directory) as store:
        try:
            found = breakdown(store.context)
        except OSError as error:
            raise unavailable(store.path, error) from error
        quotas = read_quotas(store.context)
        if as_json:
            print_json(
                {
                    "directory": str(store.path),
                    "total": found.total,
                    "damaged": found.damaged,
                    "foreign": found.foreign,
                    "namespaces": [
                        {**asdict(each), "total": each.total, "quota": quotas.sizes.get(each.namespace)}
                        for each in found.namespaces
                    ],
                    "kinds": found.kinds,
                    "shared": found.shared,
                }
            )
            return
        if found.namespaces:
            output().print(_by_namespace(found, quotas.sizes))
            output().print()
        output().print(_by_kind(found))
        warn(list(quotas.problems))
        if found.damaged:
            console.print(
                f"{counted(found.damaged, 'manifest')} cannot be read, so its blocks count as unreferenced; "
                "`kvstore fsck` names each.",
                highlight=False,
                soft_wrap=True,
            )


def _by_namespace(found: Breakdown, quotas: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    table.add_column("namespace", no_wrap=True)
    headings = ("nodes", "kv", "states", "manifests", "total")
    for heading in (*headings, "quota") if quotas else headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in sorted(found.namespaces, key=lambda each: -each.total):
        sizes = (each.kv, each.states, each.manifests, each.total)
        table.add_row(
            Text(plain(each.label[:200])),
            each.namespace[:_SHORT_ID],
            f"{each.nodes:,}",
            *(format_size(size) for size in sizes),
            *([exact_size(quotas[each.namespace])] if each.namespace in quotas else []),
        )
    if found.shared:
        table.add_row("shared by several", "", "", "", "", "", format_size(found.shared))
    return table


def _by_kind(found: Breakdown) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for kind, size in found.kinds.items():
        table.add_row(kind, format_size(size))
    table.add_row("total", format_size(found.total))
    return table
