"""Put the table of `bench scale` into docs/scale.md, between its markers, and the raw values beside it.

    python tools/bench.py scale && python tools/scale_page.py

No figure of the page's table is typed by hand; this is where they come from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_plot
from bench_machine import ROOT
from bench_report import RESULTS
from bench_scale import panels
from bench_scale_figures import figures
from kvstore.sizes import format_size
from page import markers, put

__all__ = ["MARKERS", "block", "main"]

MARKERS = markers("scale-table")


def block(document: Mapping[str, Any]) -> str:
    """The figures, and the conditions that each part of them was measured under, as Markdown."""
    rows = ["| | nodes | page cache | n | median (min to max) | target | |", "|---|---|---|---|---|---|---|"]
    for each in figures(document):
        verdict = "**missed**" if each.verdict() == "missed" else each.verdict()
        cells = (each.what, f"{each.nodes:,}", each.cache, str(each.sample.n), f"{each.text()} {each.unit}")
        rows.append(f"| {' | '.join(cells)} | {each.target_text()} | {verdict} |")
    rows += ["", "| part | measured at (UTC) | commit | load average | cores used by others |", "|---|---|---|---|---|"]
    for name, part in document["parts"].items():
        others = part["cores_used_by_others"]
        used = "unknown" if others is None else f"{others:.1f}"
        commit = part["commit"] or "unknown"
        rows.append(f"| {name} | {part['date'][:16]} | {commit} | {part['load_average'][0]:.1f} | {used} |")
    where = document["conditions"]
    memory = format_size(where["memory_bytes"])
    machine = f"{where['machine']}, {where['cores']} cores, {memory} of memory, {where['file_system']}"
    shape = f"{document['interval']:,} tokens a chunk, conversations of {document['depth']} chunks"
    rows += ["", f"{machine}, {where['system']}, Python {where['python']}; {shape}."]
    rows += ["", "![scale](bench/scale.svg)"]
    return "\n".join(rows) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the page's block and the JSON beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "scale.json", help="what bench scale wrote")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "scale.md")
    parser.add_argument("--raw", type=Path, default=ROOT / "docs" / "bench" / "scale.json", help="where a copy goes")
    options = parser.parse_args(arguments)
    if not options.json.is_file():
        print(f"{options.json} is not there; run tools/bench.py scale first", file=sys.stderr)
        return 1
    raw = options.json.read_text(encoding="utf-8")
    if not put(options.page, MARKERS, block(json.loads(raw))):
        return 1
    options.raw.parent.mkdir(parents=True, exist_ok=True)
    options.raw.write_text(raw, encoding="utf-8")
    if line := bench_plot.draw(panels(json.loads(raw)), options.raw.with_suffix(".svg")):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
