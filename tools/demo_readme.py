"""Put the demo's table into README.md, between its markers: `make demo && python tools/demo_readme.py`.

No figure of the README is typed by hand; this is where they come from.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from page import markers, put

ROOT = Path(__file__).resolve().parent.parent
MARKERS = markers("demo-table")
TITLES = {
    "disabled": "without a cache directory",
    "first_write": "first time, being saved",
    "repeat": "the same again",
    "appended_turn": "next turn appended",
    "branch": "last message changed",
    "restart": "**server killed and restarted**",
    "restart_cold": "restarted, page cache dropped",
}


def table(document: dict[str, Any]) -> str:
    """The cases of a demo.json as a Markdown table, with the conditions below."""
    rows = [
        "| | time to first token | reused tokens | from | restore | written |",
        "|---|---|---|---|---|---|",
    ]
    for case in document["cases"]:
        restored = case["name"].startswith("restart") and case["restore_ms"]
        cells = (
            TITLES[case["name"]],
            f"{case['ttft_s']:.2f} s",
            f"{case['reused_tokens']:,} of {case['prompt_tokens']:,}",
            (case["source"] if case["reused_tokens"] else None) or "-",
            f"{case['restore_ms']:.0f} ms" if restored else "-",
            f"{case['written_mib']:.0f} MiB" if case["written_mib"] else "-",
        )
        rows.append(f"| {' | '.join(cells)} |")
    conditions = document["conditions"]
    versions = conditions["versions"]
    blas = "OpenBLAS preloaded" if conditions["blas"] else "reference BLAS"
    where = f"{conditions['cores']} cores ({blas}; mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']})"
    rows.append("")
    rows.append(
        f"SmolLM2-135M in float32 on {where}, medians of {conditions['repeats']}, greedy; answers are the same token "
        "for token. `make demo` prints this table for your machine."
    )
    return "\n".join(rows) + "\n"


def main() -> int:
    """Rewrite the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "demo.json", help="what make demo wrote")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args()
    if not arguments.json.is_file():
        print(f"{arguments.json} is not there; run make demo first", file=sys.stderr)
        return 1
    return 0 if put(arguments.readme, MARKERS, table(json.loads(arguments.json.read_text()))) else 1


if __name__ == "__main__":
    sys.exit(main())
