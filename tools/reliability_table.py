"""The table of docs/reliability.md, made of what the tests counted: ``make reliability`` after make test and make soak.

make test and make soak leave one JSON document in build/reliability for each test that counts something; see
tests/record_support.py. Tests of the same row are added up. Prints Markdown; --write puts it between the markers of
the page. A row without a document is not there, and a test that failed is counted as failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from page import markers, put

__all__ = ["load", "main", "table"]

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
}
"""What a row shows, in this order; what else was counted is in the documents."""


def load(folder: Path) -> list[dict[str, Any]]:
    """All documents in a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(documents: Iterable[dict[str, Any]]) -> str:
    """One row for each thing that was tested, with the conditions of all below."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in documents:
        rows.setdefault((document["command"], document["what"]), []).append(document)
    # The longest runs first.
    order = sorted(rows, key=lambda row: ("soak" not in row[0], row))
    lines = ["| what | n | failed | time | command |", "|---|---|---|---|---|"]
    for command, what in order:
        found = rows[command, what]
        failed = sum(each["outcome"] != "passed" for each in found)
        seconds = sum(each["seconds"] for each in found)
        cells = what, _counts(found), f"{failed} of {len(found)} tests", f"{seconds:,.0f} s", f"`{command}`"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _conditions([each for found in rows.values() for each in found])]) + "\n"


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
    arguments = parser.parse_args()
    documents = load(arguments.records)
    if not documents:
        print(f"{arguments.records} holds no figures; run make test and make soak first", file=sys.stderr)
        return 1
    new = table(documents)
    if not arguments.write:
        print(new, end="")
        return 0
    return 0 if put(arguments.page, MARKERS, new) else 1


if __name__ == "__main__":
    sys.exit(main())
