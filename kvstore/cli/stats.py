"""``kvstore stats``: what the cache was good for, over all processes and restarts, and how old what it holds is.

With ``--json`` one document:

    {"directory": "/…", "processes": 12, "since": 1764434520, "until": 1764520920, "unreadable": 0,
     "counters": {"requests": 100, "prompt_tokens": 250000, "memory_tokens": 90000, "disk_tokens": 110000,
                  "generated_tokens": 9000, "read_bytes": 17716740096, "read_us": 6109221,
                  "written_tokens": 59000, "written_bytes": 8699510784, "failed_writes": 0},
     "hit_rate": 0.8, "written_per_read": 0.49, "written_bytes_per_token": 147449.33,
     "read_bytes_per_second": 2900000000,
     "ages": [{"below": 3600, "nodes": 12, "bytes": 1207959552}, {"below": null, "nodes": 0, "bytes": 0}]}

hit_rate: tokens of prompts that were not computed, of all; written_per_read: bytes; written_bytes_per_token: of the
tokens that were written, everything that was written for them; null when there is nothing to divide by, and so is
read_bytes_per_second when nobody measured it. since, until: seconds since the epoch, null when nothing was counted.
unreadable: damaged files of counters. ages: by last use; below: seconds, null for all that is older.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvstore.ages import Age, ages
from kvstore.cli.app import DirectoryArgument, JsonOption, app, console, counted, opened, output, print_json
from kvstore.cli.common import say
from kvstore.sizes import format_age, format_size
from kvstore.stats import COUNTERS, FOLD_ABOVE, Stats, fold, read_stats
from kvstore.store import unavailable

__all__ = ["stats"]


@app.command()
def stats(directory: DirectoryArgument = None, as_json: JsonOption = False) -> None:
    """Show what the cache was good for: the hit rate by tokens, what was read and written, and how old it all is."""
    with opened(directory) as store:
        fold(store.context, FOLD_ABOVE)
        found = read_stats(store.context)
        try:
            by_age = ages(store.context)
        except OSError as error:
            raise unavailable(store.path, error) from error
        figures = _Figures.of(found)
        if as_json:
            print_json({"directory": str(store.path), **_document(found, figures, by_age)})
            return
        if figures.counts["requests"]:
            output().print(_counters(found, figures))
        else:
            say([f"Nothing was counted in {store.path} yet; `kvstore serve --kv-cache-dir` does, for each prompt."])
        if any(row.nodes for row in by_age):
            output().print()
            output().print(_ages(by_age))
        if found.unreadable:
            damaged = counted(found.unreadable, "file of counters", "files of counters")
            console.print(
                f"Left out: {damaged} that cannot be read; `kvstore fsck` names each.", highlight=False, soft_wrap=True
            )


@dataclass(frozen=True)
class _Figures:
    """Sums, and what they come to. since, until: seconds since the epoch."""

    counts: dict[str, int]
    hit_rate: float | None
    written_per_read: float | None
    written_per_token: float | None
    since: int | None
    until: int | None
    speed: float | None

    @staticmethod
    def of(found: Stats) -> _Figures:
        counts = {name: found.total(name) for name in COUNTERS}
        reused = counts["memory_tokens"] + counts["disk_tokens"]
        rows = found.rows.values()
        return _Figures(
            counts,
            reused / counts["prompt_tokens"] if counts["prompt_tokens"] else None,
            counts["written_bytes"] / counts["read_bytes"] if counts["read_bytes"] else None,
            counts["written_bytes"] / counts["written_tokens"] if counts["written_tokens"] else None,
            min((row.began for row in rows), default=None),
            max((row.updated for row in rows), default=None),
            found.read_speed(),
        )


def _document(found: Stats, figures: _Figures, by_age: list[Age]) -> dict[str, Any]:
    return {
        "processes": len(found.rows),
        "since": figures.since,
        "until": figures.until,
        "unreadable": found.unreadable,
        "counters": figures.counts,
        "hit_rate": figures.hit_rate,
        "written_per_read": figures.written_per_read,
        "written_bytes_per_token": figures.written_per_token,
        "read_bytes_per_second": None if figures.speed is None else round(figures.speed),
        "ages": [{"below": row.below_s, "nodes": row.nodes, "bytes": row.size} for row in by_age],
    }


def _counters(found: Stats, figures: _Figures) -> Table:
    counts = figures.counts
    since = format_age(time.time() - (figures.since or 0))
    reused = counts["memory_tokens"] + counts["disk_tokens"]
    rate = f" ({100 * figures.hit_rate:.1f} %)" if figures.hit_rate is not None else ""
    ratio = f", {figures.written_per_read:.2g} of what was read" if figures.written_per_read is not None else ""
    each = f": {format_size(figures.written_per_token)} each" if figures.written_per_token is not None else ""
    speed = f", at {format_size(figures.speed)}/s" if figures.speed is not None else ""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    rows = [
        ("requests", f"{counts['requests']:,} in {since}, by {counted(len(found.rows), 'process', 'processes')}"),
        ("prompt tokens", f"{counts['prompt_tokens']:,}"),
        (
            "reused",
            f"{reused:,}{rate}: {counts['memory_tokens']:,} from memory, {counts['disk_tokens']:,} from disk",
        ),
        ("generated", f"{counts['generated_tokens']:,} tokens"),
        ("read", f"{format_size(counts['read_bytes'])}{speed}"),
        (
            "written",
            f"{format_size(counts['written_bytes'])}{ratio}, for {counts['written_tokens']:,} new tokens{each}",
        ),
    ]
    if counts["failed_writes"]:
        rows.append(("failed writes", f"{counts['failed_writes']:,}; the log of the server says why"))
    for name, text in rows:
        table.add_row(name, text)
    return table


def _ages(by_age: list[Age]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("last used", no_wrap=True)
    for heading in ("nodes", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    most = max(row.size for row in by_age)
    for row in by_age:
        name = f"less than {format_age(row.below_s)} ago" if row.below_s is not None else "before"
        table.add_row(name, f"{row.nodes:,}", format_size(row.size), "█" * round(30 * row.size / most) if most else "")
    return table
