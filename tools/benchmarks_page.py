"""Write docs/benchmarks.md from the raw values in docs/bench: no figure on it is typed by hand.

    python tools/bench.py restore                      # and so on: build/bench/restore.json
    python tools/benchmarks_page.py --take restore     # into docs/bench, with its plot, and the page anew
    python tools/benchmarks_page.py                    # the page anew

Several files may be of one subcommand: --take build/bench/restore-32k.json is one more of `restore`. A file holds the
conditions that it was measured under, and they stand beside its table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_plot
from bench import SUBCOMMANDS
from bench_machine import ROOT
from bench_report import RESULTS
from bench_targets import Row, rows
from kvstore.sizes import format_size

__all__ = ["RAW", "load", "main", "page"]

RAW = ROOT / "docs" / "bench"

_OPENING = """\
# Benchmarks

Written by `python tools/benchmarks_page.py` (`make bench-page`) from the raw values in `docs/bench`; no figure is
typed by hand. Each benchmark is one command, `python tools/bench.py SUBCOMMAND` (`--help` says more). Methods take
turns in one run, a warm-up is thrown away, ratios are of pairs of the same round, and what stands in a cell is the
median (minimum to maximum). A million nodes are on [a page of their own](scale.md).

What other processes used of the cores while a benchmark ran is said with each table; where it is much, the figure is
worth less. A benchmark that was run with other arguments than its own defaults says so in its title or caption.

## Targets

"Must" is what this project set itself before the code was written, "aim" what it would like.
"""


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The raw values by name of their file, in the order of the subcommands."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    order = list(SUBCOMMANDS)
    known = {name: document for name, document in found.items() if document.get("command") in order}
    return dict(sorted(known.items(), key=lambda each: (order.index(each[1]["command"]), len(each[0]), each[0])))


def page(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    found = rows(documents)
    lines = [_OPENING, *_summary(found), *_targets(found), ""]
    shown = {name: document for name, document in documents.items() if document["command"] != "scale"}
    lines += ["## Conditions", "", *_conditions(shown), ""]
    seen: set[str] = set()
    for name, document in shown.items():
        command = document["command"]
        if command not in seen:
            lines += [f"## {command}", "", *_paragraphs(SUBCOMMANDS[command].__doc__ or ""), ""]
            seen.add(command)
        lines += _section(name, document)
    return "\n".join(lines).rstrip() + "\n"


def _summary(found: Sequence[Row]) -> Iterator[str]:
    """How many targets are met, and the musts that are not, one line a kind."""
    measured = [row for row in found if row.sample is not None]
    musts = sum(row.meets(row.must) for row in measured)
    aims = sum(row.meets(row.aim) for row in measured)
    text = f"{musts} of {len(measured)} musts are met, {aims} of {len(measured)} aims."
    if others := len(found) - len(measured):
        text += f" Not measured: {others}."
    missed: dict[str, list[Row]] = {}
    for row in measured:
        if not row.meets(row.must):
            missed.setdefault(row.kind, []).append(row)
    yield from (text + (" Musts that are not met:" if missed else ""), "")
    for kind, group in missed.items():
        must, all_rows = group[0].limit(group[0].must), sum(row.kind == kind for row in measured)
        yield f"- {kind}: {_range(group)} (must {must}), {len(group)} of {all_rows} rows"
    if missed:
        yield ""


def _range(group: Sequence[Row]) -> str:
    """The lowest and the highest median, the way the table writes them."""
    row = group[0]
    ends = sorted({f"{each.sample.median:.{row.digits}f}" for each in group if each.sample}, key=float)
    return " to ".join(ends[:: max(1, len(ends) - 1)]) + f" {row.unit}".rstrip()


def _targets(found: Sequence[Row]) -> Iterator[str]:
    yield "| what | must | aim | measured | n | conditions | must | aim |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found:
        if row.sample is None:
            yield f"| {row.what} | {row.limit(row.must)} | {row.limit(row.aim)} | not measured | | | | |"
            continue
        cells = (
            row.what,
            row.limit(row.must),
            row.limit(row.aim),
            f"{row.sample.text(1, row.digits)} {row.unit}".strip(),
            str(row.sample.n),
            row.conditions,
            row.verdict(row.must),
            row.verdict(row.aim),
        )
        yield f"| {' | '.join(cells)} |"


def _conditions(documents: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The machines, by letters where there are several, and which of them a file is of."""
    machines = list(dict.fromkeys(_machine(document["conditions"]) for document in documents.values()))
    letters = {machine: chr(ord("A") + number) for number, machine in enumerate(machines)}
    several = len(machines) > 1
    for machine in machines:
        yield from (f"{letters[machine]}: {machine}", "") if several else (machine, "")
    yield "| raw values | measured at (UTC) | commit | load average before it |" + (" machine |" if several else "")
    yield "|---|---|---|---|" + ("---|" if several else "")
    for name, document in documents.items():
        where = document["conditions"]
        load_average = f"{where['load_average'][0]:.1f}"
        row = f"| [{name}](bench/{name}.json) | {where['date'][:16]} | {where['commit']} | {load_average} |"
        yield f"{row} {letters[_machine(where)]} |" if several else row


def _machine(where: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items() if number)
    memory = format_size(where["memory_bytes"])
    return (
        f"{where['machine']}, {where['cores']} cores, {memory} of memory, {where['file_system']}, {where['system']}, "
        f"Python {where['python']}, {versions}."
    )


def _paragraphs(text: str) -> list[str]:
    """A module's docstring without the name of its command."""
    first, _, rest = text.strip().partition(": ")
    words = rest if first.startswith("`bench ") else text.strip()
    return [words[:1].upper() + words[1:]]


def _section(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    module = SUBCOMMANDS[document["command"]]
    for made in module.tables(document):
        yield f"**{made.title}** ([raw values](bench/{name}.json))"
        yield ""
        columns = [str(column.header) for column in made.columns]
        yield f"| {' | '.join(columns)} |"
        yield "|" + "---|" * len(columns)
        for cells in zip(*(list(column.cells) for column in made.columns), strict=True):
            yield f"| {' | '.join(map(str, cells))} |"
        yield ""
        yield f"{made.caption}."
        yield ""
    if module.panels(document):
        yield f"![{document['command']}](bench/{name}.svg)"
        yield ""


def main(arguments: list[str] | None = None) -> int:
    """Take new raw values, draw their plots, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--take",
        nargs="+",
        default=[],
        metavar="NAME",
        help="a subcommand whose build/bench/NAME.json is taken, or a file",
    )
    parser.add_argument("--draw", action="store_true", help="draw every plot anew (what is taken is drawn anyway)")
    parser.add_argument("--raw", type=Path, default=RAW, help="raw values (default: docs/bench)")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args(arguments)
    for name in options.take:
        path = Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"
        if not path.is_file():
            print(f"{path} is not there; run the benchmark first", file=sys.stderr)
            return 1
        document = json.loads(path.read_text(encoding="utf-8"))
        options.raw.mkdir(parents=True, exist_ok=True)
        # Not one value a line, as bench writes them.
        (options.raw / path.name).write_text(json.dumps(document) + "\n", encoding="utf-8")
        _draw(document, options.raw / f"{path.stem}.svg")
    if options.draw:
        for name, document in load(options.raw).items():
            _draw(document, options.raw / f"{name}.svg")
    options.page.write_text(page(load(options.raw)), encoding="utf-8")
    return 0


def _draw(document: Mapping[str, Any], path: Path) -> None:
    if line := bench_plot.draw(SUBCOMMANDS[document["command"]].panels(document), path):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
