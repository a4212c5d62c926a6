"""A cache directory as one page to look at: prefixes, use over time, conversations. Needs no network and no server.

The page is kvstore/report.html with the data in it as JSON, column by column: ten thousand branches are a megabyte.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from kvstore._version import __version__
from kvstore.context import Context
from kvstore.listing import Branch, Conversation, Listing, branches, by_namespace, listing
from kvstore.sizes import format_size
from kvstore.stats import Row, Stats, read_stats

__all__ = ["page", "report"]

MAX_PROCESSES = 500
_LABEL = 200


def report(context: Context, limit: int = 0) -> dict[str, Any]:
    """What the page shows: the conversations that were used last, limit of them (0 for all). Raises OSError."""
    found = listing(context)
    chosen = found.conversations
    if limit:
        chosen = heapq.nlargest(limit, chosen, key=_last_used)
    chosen = sorted(chosen, key=_last_used, reverse=True)
    labels = {each.namespace: each.label[:_LABEL] for each in chosen}
    index_of = {namespace: index for index, namespace in enumerate(sorted(labels))}
    stats = read_stats(context)
    return {
        "version": __version__,
        "directory": str(context.layout.root),
        "made": context.clock() / 1e9,
        "hidden": len(found.conversations) - len(chosen),
        "totals": _totals(found, stats),
        "namespaces": [{"id": namespace, "label": labels[namespace]} for namespace in index_of],
        "branches": _branches(branches(found, chosen), index_of),
        "conversations": _conversations(chosen, index_of),
        "processes": [_process(row) for row in _latest(stats)],
    }


def page(document: dict[str, Any]) -> str:
    """The page with a report in it. Nothing in the report can end the element that holds it."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return files("kvstore").joinpath("report.html").read_text(encoding="utf-8").replace("/*DATA*/", text, 1)


def _last_used(each: Conversation) -> tuple[int, str, str]:
    return each.used_ns, each.namespace, each.key


def _branches(rows: Sequence[Branch], index_of: dict[str, int]) -> dict[str, list[Any]]:
    return {
        "parent": [-1 if each.parent is None else each.parent for each in rows],
        "namespace": [index_of[each.namespace] for each in rows],
        "key": [each.key for each in rows],
        "first": [each.first for each in rows],
        "end": [each.end for each in rows],
        "nodes": [each.nodes for each in rows],
        "bytes": [each.size for each in rows],
        "used": [each.used_ns // 10**9 for each in rows],
        "leaf": [int(each.leaf) for each in rows],
        "complete": [int(each.complete) for each in rows],
    }


def _conversations(rows: Sequence[Conversation], index_of: dict[str, int]) -> dict[str, list[Any]]:
    return {
        "namespace": [index_of[each.namespace] for each in rows],
        "key": [each.key for each in rows],
        "tokens": [each.tokens for each in rows],
        "nodes": [each.nodes for each in rows],
        "bytes": [each.size for each in rows],
        "own": [each.own for each in rows],
        "used": [each.used_ns // 10**9 for each in rows],
        "resumable": [int(each.resumable) for each in rows],
        "complete": [int(each.complete) for each in rows],
    }


def _totals(found: Listing, stats: Stats) -> list[tuple[str, str]]:
    spaces = by_namespace(found, found.conversations)
    rows = [
        ("conversations", f"{len(found.conversations):,}"),
        ("models", f"{len(spaces):,}"),
        ("longest", f"{max((each.tokens for each in spaces), default=0):,} tokens"),
        ("saved", format_size(found.forest.total())),
    ]
    prompt = stats.total("prompt_tokens")
    if prompt:
        reused = stats.total("memory_tokens") + stats.total("disk_tokens")
        rows += [
            ("requests", f"{stats.total('requests'):,}"),
            ("tokens reused", f"{100 * reused / prompt:.1f} %"),
            ("read", format_size(stats.total("read_bytes"))),
            ("written", format_size(stats.total("written_bytes"))),
        ]
    return rows


def _latest(stats: Stats) -> list[Row]:
    return sorted(stats.rows.values(), key=lambda row: row.updated)[-MAX_PROCESSES:]


def _process(row: Row) -> dict[str, Any]:
    tokens = row.counts.get("prompt_tokens", 0)
    reused = row.counts.get("memory_tokens", 0) + row.counts.get("disk_tokens", 0)
    return {
        "began": row.began,
        "updated": row.updated,
        "requests": row.counts.get("requests", 0),
        "tokens": tokens,
        "rate": reused / tokens if tokens else 0.0,
    }
