"""``kvstore ls``: the conversations of a cache directory.

With ``--json`` one document:

    {"directory": "/…", "damaged": 0, "foreign": 0,
     "conversations": [{"namespace": "<32 hex>", "label": "…", "key": "<32 hex>", "tokens": 8192, "nodes": 4,
                        "bytes": 1207959552, "own_bytes": 301989888, "used": 1764434520.5, "resumable": false,
                        "complete": true}]}

bytes: KV and states of the whole path; own_bytes: what no other conversation shares. used: seconds since the epoch.
resumable: a boundary state lies at the end. complete: false when a node of the path is missing or damaged.
damaged, foreign: manifests that could not be read, files that are not kvstore's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvstore.cli.app import (
    DirectoryArgument,
    JsonOption,
    app,
    console,
    counted,
    namespace_ids,
    opened,
    output,
    print_json,
)
from kvstore.cli.common import plain, say
from kvstore.listing import Conversation, listing
from kvstore.sizes import format_age, format_size
from kvstore.store import unavailable

__all__ = ["ls"]

_SHORT_ID = 12
_LABEL = 200


class Sort(StrEnum):
    """What to sort by; the largest or the most recently used comes first."""

    TOKENS = "tokens"
    BYTES = "bytes"
    AGE = "age"


_KEYS: dict[Sort, Callable[[Conversation], Any]] = {
    Sort.TOKENS: lambda each: -each.tokens,
    Sort.BYTES: lambda each: -each.size,
    Sort.AGE: lambda each: -each.used_ns,
}


@app.command()
def ls(
    directory: DirectoryArgument = None,
    as_json: JsonOption = False,
    namespace: Annotated[
        str, typer.Option(metavar="PREFIX", help="Only namespaces whose id begins with this.", show_default=False)
    ] = "",
    sort: Annotated[Sort, typer.Option(help="What comes first: the longest, the largest, the last used.")] = Sort.AGE,
) -> None:
    """List the conversations: the longest saved prefixes, how long they are, and what they take."""
    with opened(directory) as store:
        try:
            wanted = namespace_ids(store, namespace) if namespace else None
            found = listing(store.context, wanted)
        except OSError as error:
            raise unavailable(store.path, error) from error
        rows = sorted(found.conversations, key=lambda each: (_KEYS[sort](each), each.namespace, each.key))
        if as_json:
            document = {"directory": str(store.path), "damaged": found.damaged, "foreign": found.foreign}
            print_json({**document, "conversations": [_document(each) for each in rows]})
            return
        if rows:
            output().print(_table(rows))
        else:
            say([f"{store.path} holds no conversation yet."])
        if found.damaged:
            damaged = counted(found.damaged, "damaged manifest")
            console.print(f"Left out: {damaged}; `kvstore fsck` names each.", highlight=False, soft_wrap=True)


def _document(each: Conversation) -> dict[str, Any]:
    return {
        "namespace": each.namespace,
        "label": each.label,
        "key": each.key,
        "tokens": each.tokens,
        "nodes": each.nodes,
        "bytes": each.size,
        "own_bytes": each.own,
        "used": each.used_ns / 1e9,
        "resumable": each.resumable,
        "complete": each.complete,
    }


def _table(rows: list[Conversation]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    table.add_column("namespace", no_wrap=True)
    table.add_column("key", no_wrap=True)
    for heading in ("tokens", "nodes", "size", "own", "last used"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    now = time.time_ns()
    for each in rows:
        table.add_row(
            Text(plain(each.label[:_LABEL])),
            each.namespace[:_SHORT_ID],
            each.key[:_SHORT_ID],
            f"{each.tokens:,}",
            f"{each.nodes:,}",
            format_size(each.size),
            format_size(each.own),
            format_age((now - each.used_ns) / 1e9),
            "" if each.complete else "incomplete",
        )
    return table
