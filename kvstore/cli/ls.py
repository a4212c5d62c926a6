"""``kvstore ls``: the conversations of a cache directory, as a list, by namespace, or as a tree.

With ``--json`` one document:

    {"directory": "/…", "damaged": 0, "foreign": 0, "hidden": 0, "quotas": {"<32 hex>": 5368709120},
     "conversations": [{"namespace": "<32 hex>", "label": "…", "key": "<32 hex>", "tokens": 8192, "nodes": 4,
                        "bytes": 1207959552, "own_bytes": 301989888, "used": 1764434520.5, "resumable": false,
                        "complete": true}]}

bytes: KV and states of the whole path; own_bytes: what no other conversation shares. used: seconds since the epoch.
resumable: a boundary state lies at the end. complete: false when a node of the path is missing or damaged.
damaged, foreign: manifests that could not be read, files that are not kvstore's. hidden: conversations beyond --limit;
with --by-namespace, namespaces.

With ``--by-namespace``, in place of "conversations":

     "namespaces": [{"namespace": "<32 hex>", "label": "…", "conversations": 12, "tokens": 8192, "bytes": 1207959552,
                     "used": 1764434520.5}]

tokens: the longest conversation. bytes: all blocks that the namespace names. With ``--tree``, in place of them:

     "branches": [{"parent": null, "namespace": "<32 hex>", "label": "…", "key": "<32 hex>", "first": 0, "end": 2048,
                   "nodes": 1, "bytes": 301989888, "used": 1764434520.5, "leaf": false, "resumable": false,
                   "complete": true}]

A branch is a run of nodes that conversations go through together. parent: the index of the branch before it in this
list, where it comes earlier. bytes: of the branch alone. leaf: a conversation ends with it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

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
from kvstore.cli.common import PrefixOption, beginning, plain, say
from kvstore.listing import Branch, Conversation, Listing, NamespaceRow, branches, by_namespace, listing
from kvstore.quotas import read_quotas
from kvstore.sizes import exact_size, format_age, format_size, parse_age
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


_LIMIT = 200
"""Conversations shown to people who do not say how many."""

_DEPTH = 16
"""What forks more often goes on at the same indent: a terminal has only so many columns."""


@app.command()
def ls(
    directory: DirectoryArgument = None,
    *,
    as_json: JsonOption = False,
    namespace: PrefixOption = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what was not used for this long, such as 30d, 12h or 90m.")
    ] = None,
    newer_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what was used within this time, such as 1h.")
    ] = None,
    min_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Only conversations of at least so many tokens.")
    ] = 0,
    sort: Annotated[Sort, typer.Option(help="What comes first: the longest, the largest, the last used.")] = Sort.AGE,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Show so many conversations, or with --by-namespace so many namespaces, the first ones; 0 for all "
            f"(default: {_LIMIT}, with --json all).",
        ),
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show what conversations share once, as a tree.")] = False,
    grouped: Annotated[bool, typer.Option("--by-namespace", help="Add them up by namespace.")] = False,
) -> None:
    """List the conversations: the longest saved prefixes, how long they are, and what they take."""
    if tree and grouped:
        raise typer.BadParameter("--tree and --by-namespace exclude each other")
    with opened(directory) as store:
        wanted = _Wanted(
            time.time_ns(),
            None if older_than is None else int(parse_age(older_than) * 1e9),
            None if newer_than is None else int(parse_age(newer_than) * 1e9),
            min_tokens,
        )
        try:
            prefix = beginning(namespace)
            found = listing(store.context, namespace_ids(store, prefix) if prefix else None)
        except OSError as error:
            raise unavailable(store.path, error) from error
        matching = [each for each in found.conversations if wanted.includes(each)]
        most = limit if limit is not None else 0 if as_json else _LIMIT
        shown = _first(matching, sort, len(matching) if grouped or not most else most)
        hidden = len(matching) - len(shown)
        if grouped:
            shown, hidden = _of_first(shown, most)
        quotas = read_quotas(store.context).sizes
        if as_json:
            about = {"directory": str(store.path), "damaged": found.damaged, "foreign": found.foreign}
            print_json({**about, "hidden": hidden, "quotas": quotas, **_content(found, shown, tree, grouped)})
            return
        if not shown:
            nothing = "no conversation like that" if found.conversations else "no conversation yet"
            say([f"{store.path} holds {nothing}."])
        elif tree:
            output().print(_tree(branches(found, shown)))
        else:
            output().print(_by_namespace(by_namespace(found, shown), quotas) if grouped else _table(shown))
        if hidden:
            more = "more namespace" if grouped else "more conversation"
            say([f"… and {counted(hidden, more)}; --limit 0 shows all."])
        if found.damaged:
            damaged = counted(found.damaged, "damaged manifest")
            console.print(f"Left out: {damaged}; `kvstore fsck` names each.", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Wanted:
    """Which conversations somebody wants to see; ages in nanoseconds."""

    now_ns: int
    older_ns: int | None
    newer_ns: int | None
    tokens: int

    def includes(self, each: Conversation) -> bool:
        age = self.now_ns - each.used_ns
        return (
            each.tokens >= self.tokens
            and (self.older_ns is None or age >= self.older_ns)
            and (self.newer_ns is None or age <= self.newer_ns)
        )


def _first(conversations: list[Conversation], sort: Sort, most: int) -> list[Conversation]:
    def key(each: Conversation) -> tuple[Any, ...]:
        return (_KEYS[sort](each), each.namespace, each.key)

    return heapq.nsmallest(most, conversations, key=key)


def _of_first(conversations: list[Conversation], most: int) -> tuple[list[Conversation], int]:
    """The conversations of so many namespaces, in the order in which these come; how many namespaces are left out."""
    namespaces = list(dict.fromkeys(each.namespace for each in conversations))
    chosen = set(namespaces[: most or None])
    return [each for each in conversations if each.namespace in chosen], len(namespaces) - len(chosen)


def _content(found: Listing, shown: list[Conversation], tree: bool, grouped: bool) -> dict[str, Any]:
    if tree:
        return {"branches": [_renamed(asdict(each)) for each in branches(found, shown)]}
    if grouped:
        return {"namespaces": [_renamed(asdict(each)) for each in by_namespace(found, shown)]}
    return {"conversations": [_document(each) for each in shown]}


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as documents have them: bytes, and times in seconds."""
    names = {"size": "bytes", "used_ns": "used"}
    return {names.get(name, name): value / 1e9 if name == "used_ns" else value for name, value in fields.items()}


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


def _by_namespace(rows: list[NamespaceRow], quotas: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="ellipsis", no_wrap=True)
    table.add_column("namespace", no_wrap=True)
    for heading in ("conversations", "longest", "size", "quota", "last used"):
        table.add_column(heading, justify="right", no_wrap=True)
    now = time.time_ns()
    for each in rows:
        table.add_row(
            Text(plain(each.label[:_LABEL])),
            each.namespace[:_SHORT_ID],
            f"{each.conversations:,}",
            f"{each.tokens:,}",
            format_size(each.size),
            exact_size(quotas[each.namespace]) if each.namespace in quotas else "",
            format_age((now - each.used_ns) / 1e9),
        )
    return table


def _tree(rows: list[Branch]) -> Tree:
    """Branches below their namespaces."""
    root = Tree("", hide_root=True)
    models: dict[str, Tree] = {}
    placed: list[tuple[Tree, int]] = []
    now = time.time_ns()
    for each in rows:
        if each.parent is not None:
            above, depth = placed[each.parent]
        else:
            if each.namespace not in models:
                text = f"{plain(each.label[:_LABEL]) or 'no label'} ({each.namespace[:_SHORT_ID]})"
                models[each.namespace] = root.add(Text(text, no_wrap=True, overflow="ellipsis"))
            above, depth = models[each.namespace], 0
        line = Text(_branch_line(each, now), no_wrap=True, overflow="ellipsis")
        node = above.add(line)
        placed.append((node, depth + 1) if depth < _DEPTH else (above, depth))
    return root


def _branch_line(each: Branch, now_ns: int) -> str:
    notes = ["" if each.complete else "incomplete", "resumable" if each.resumable else ""]
    parts = [
        f"{each.first:,} to {each.end:,}",
        counted(each.nodes, "node"),
        format_size(each.size),
        format_age((now_ns - each.used_ns) / 1e9),
        each.key[:_SHORT_ID],
        *(note for note in notes if note),
    ]
    return ", ".join(parts)
