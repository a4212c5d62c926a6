"""The table of docs/reliability.md, made of what the tests counted: ``make reliability`` after make test and make soak.

make test and make soak leave one JSON document in build/reliability for each test that counts something; see
tests/record_support.py. Tests of the same row are added up. Prints Markdown; --write puts it between the markers of
the page. A row without a document is not there, and a test that failed is counted as failed. --add is --write that
keeps the rows of earlier runs whose documents are not at hand, with the line on what those ran on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from page import markers, put

__all__ = ["added", "load", "main", "table"]

ROOT = Path(__file__).resolve().parent.parent
MARKERS = markers("figures")
COUNTS = {
    "histories": "histories",
    "steps": "steps",
    "publishes": "publishes",
    "restores": "restores compared",
    "tokens": "tokens restored",
    "collections": "collections",
    "checks": "checks by fsck",
    "repacks": "repacks",
    "watched": "looks at the invariants",
    "vandalised": "files damaged",
    "timeouts": "times the lock was not to be had in 10 s",
    "kills": "SIGKILL",
    "stops": "SIGSTOP",
    "requests": "requests",
    "prompt_tokens": "prompt tokens",
    "reused_tokens": "of them reused",
    "points": "points to stop at",
    "disks": "disks examined",
    "faults": "failing calls",
    "damages": "damages",
    "ties": "answers that parted at two equally likely tokens",
    "collected_nodes": "nodes collected",
    "latency_ms_first": "ms a request in the first third (median)",
    "latency_ms_last": "in the last",
    "latency_growth": "times that for the same work",
    "processor_growth": "times the processor time for the same work",
    "memory_mib_peak": "MiB of memory at most",
    "memory_mib_peak_without": "without a directory",
}
"""What a row shows, in this order; what else was counted is in the documents."""


_WIDTH = 5


def load(folder: Path) -> list[dict[str, Any]]:
    """All documents in a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(documents: Iterable[dict[str, Any]]) -> str:
    """One row for each thing that was tested, with the conditions of all below."""
    found = list(documents)
    return _table(_rows(found), [_conditions(found)])


def added(page: str, documents: Iterable[dict[str, Any]]) -> str:
    """The same, with the rows of a page that have no document, and its lines on conditions, kept."""
    found = list(documents)
    block = MARKERS.search(page)
    before = block[0].splitlines() if block is not None else []
    rows = {
        (cells[-1].strip("`"), cells[0]): line for line in before if (cells := _cells(line)) and len(cells) == _WIDTH
    }
    conditions = [line for line in before if " cores (" in line]
    return _table({**rows, **_rows(found)}, list(dict.fromkeys([*conditions, _conditions(found)])))


def _cells(line: str) -> list[str]:
    """The cells of a row of figures; none of anything else."""
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    return cells if cells and cells[-1].startswith("`make ") else []


def _rows(documents: Iterable[dict[str, Any]]) -> dict[tuple[str, str], str]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in documents:
        groups.setdefault((document["command"], document["what"]), []).append(document)
    rows = {}
    for (command, what), found in groups.items():
        failed = sum(each["outcome"] != "passed" for each in found)
        seconds = sum(each["seconds"] for each in found)
        cells = what, _counts(found), f"{failed} of {len(found)} tests", f"{seconds:,.0f} s", f"`{command}`"
        rows[command, what] = f"| {' | '.join(cells)} |"
    return rows


def _table(rows: dict[tuple[str, str], str], conditions: Sequence[str]) -> str:
    # The longest runs first.
    order = sorted(rows, key=lambda row: ("soak" not in row[0], row))
    lines = ["| what | n | failed | time | command |", "|---|---|---|---|---|", *(rows[row] for row in order)]
    return "\n".join([*lines, *(text for each in conditions for text in ("", each))]) + "\n"


def _counts(documents: Sequence[dict[str, Any]]) -> str:
    totals = {name: sum(each["figures"].get(name, 0) for each in documents) for name in COUNTS}
    return ", ".join(f"{total:,} {COUNTS[name]}" for name, total in totals.items() if total)


def _conditions(documents: Sequence[dict[str, Any]]) -> str:
    """Where all of it ran. More than one value of something is said as it is: the runs were then not of one machine."""

    def all_of(name: str) -> str:
        return ", ".join(sorted({str(each["conditions"][name]) for each in documents}))

    loads = [each["conditions"]["load_average"][0] for each in documents]
    dates = sorted(each["conditions"]["date"][:10] for each in documents)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"{all_of('cores')} cores ({all_of('machine')}), {all_of('system')}, Python {all_of('python')}, {when}, commit "
        f"{all_of('commit')}. Most tests keep their directories in memory (/dev/shm). Load average at the end "
        f"of a test: {min(loads):.1f} to {max(loads):.1f}, this work included."
    )


def main() -> int:
    """Print the table, or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=ROOT / "build" / "reliability", help="where the tests wrote")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reliability.md")
    parser.add_argument("--write", action="store_true", help="rewrite the page's table instead of printing it")
    parser.add_argument("--add", action="store_true", help="as --write, and keep rows whose documents are not there")
    arguments = parser.parse_args()
    documents = load(arguments.records)
    if not documents:
        print(f"{arguments.records} holds no figures; run make test and make soak first", file=sys.stderr)
        return 1
    new = table(documents)
    if arguments.add:
        new = added(arguments.page.read_text(encoding="utf-8"), documents)
    elif not arguments.write:
        print(new, end="")
        return 0
    return 0 if put(arguments.page, MARKERS, new) else 1


if __name__ == "__main__":
    sys.exit(main())
