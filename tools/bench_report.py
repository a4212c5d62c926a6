"""What a benchmark leaves: a JSON file below build/bench, and tables for people."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench_machine import ROOT

__all__ = ["RESULTS", "Outcome", "add_common", "count_list", "emit", "table", "write_json"]

RESULTS = ROOT / "build" / "bench"

_WIDTH = 140


@dataclass
class Outcome:
    """The result of one subcommand: what goes into its JSON file, and its tables."""

    document: dict[str, Any]
    tables: list[Table] = field(default_factory=list)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that every subcommand has."""
    parser.add_argument(
        "--dir", type=Path, default=RESULTS / "data", help="where temporary data go (default: build/bench/data)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the temporary data there")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: build/bench/SUBCOMMAND.json)")


def count_list(text: str) -> list[int]:
    """Positive whole numbers between commas, as an argument's type."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers; write it like 2048,8192")
    return numbers


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        made.add_row(*row)
    return made


def write_json(path: Path, document: dict[str, Any]) -> None:
    """A whole file or none: a reader may be waiting for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    staged.replace(path)


def emit(outcome: Outcome, path: Path) -> None:
    """Write the JSON and print the tables."""
    write_json(path, outcome.document)
    # A pipe or a file has no width of its own; 80 columns would break every number.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    for each in outcome.tables:
        console.print(each)
    console.print(f"raw values: {path}", highlight=False, soft_wrap=True)
