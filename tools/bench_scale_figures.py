"""What follows from the measurements of `bench scale`: figures, with the targets that they meet or miss.

Pure: nothing here measures, prints or opens anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from bench_stats import Sample

__all__ = ["Figure", "figures", "figures_of"]


@dataclass(frozen=True)
class Figure:
    """One line of the table: what, in which unit, how much, and what was wished for (at most or at least).

    always: the target is for any state of the page cache.
    """

    what: str
    unit: str
    sample: Sample
    cache: str = ""
    nodes: int = 0
    always: bool = False
    at_most: float | None = None
    at_least: float | None = None
    digits: int = 2

    def text(self) -> str:
        """``median (min to max)``."""
        values = (f"{value:,.{self.digits}f}" for value in (self.sample.median, self.sample.low, self.sample.high))
        median, low, high = values
        return f"{median} ({low} to {high})"

    def target_text(self) -> str:
        """The target with its unit, or nothing."""
        if self.at_most is not None:
            return f"at most {self.at_most:g} {self.unit}"
        if self.at_least is not None:
            return f"at least {self.at_least:,g} {self.unit}"
        return ""

    def verdict(self) -> str:
        """Whether the median meets the target."""
        if self.at_most is not None:
            return "met" if self.sample.median <= self.at_most else "missed"
        if self.at_least is not None:
            return "met" if self.sample.median >= self.at_least else "missed"
        return ""


def figures(document: Mapping[str, Any]) -> list[Figure]:
    """All figures of a JSON file."""
    return [figure for part in document["parts"].values() for figure in figures_of(part)]


def figures_of(found: Mapping[str, Any]) -> list[Figure]:
    """The figures of one part.

    Targets are for a warm page cache, so one that is missed while files came from the disk says nothing and is left
    out, but for figures that are always judged: what was read came before them. Times have their targets for 1,000,000
    nodes only.
    """
    results = found["results"]
    read = max(result["read_bytes"] for result in results)
    warm = found["page_cache"] != "dropped" and read <= _NOTHING
    cache = "warm" if warm else f"{found['page_cache']}, {read / 2**30:.1f} GiB read"
    given = [replace(figure, cache=cache, nodes=found["nodes"]) for figure in _FIGURES[found["part"]](results)]
    if found["nodes"] < _MANY:
        given = [replace(figure, at_most=None) for figure in given]
    if not warm:
        given = [
            _without_targets(figure) if figure.verdict() == "missed" and not figure.always else figure
            for figure in given
        ]
    return given


def _without_targets(figure: Figure) -> Figure:
    return replace(figure, at_most=None, at_least=None)


_NOTHING = 16 << 20
"""What a process may read from the disk that is still called warm: code that was paged out, a folder or two."""

_MANY = 900_000
"""From so many nodes on a target for 1,000,000 is a target: gc may have removed some before."""


_Results: TypeAlias = Sequence[Mapping[str, Any]]


def _seconds(results: _Results, key: str, what: str, at_most: float | None = None) -> Figure:
    return Figure(what, "s", Sample.of(result[key] for result in results), at_most=at_most, digits=1)


def _ms(results: _Results, key: str, what: str, at_most: float | None = None) -> Figure:
    return Figure(what, "ms", Sample.of(result[key] * 1e3 for result in results), at_most=at_most)


def _by_jobs(results: _Results) -> list[tuple[int, _Results]]:
    chosen = sorted({result["job"]["jobs"] for result in results})
    return [(jobs, [result for result in results if result["job"]["jobs"] == jobs]) for jobs in chosen]


def _lookup_figures(results: _Results) -> list[Figure]:
    whole = [result for result in results if not result["job"]["rest"]]
    more = [result for result in results if result["job"]["rest"]]
    depth = results[0]["job"]["depth"]
    return [
        _ms(whole, "lookup", f"first lookup of a fresh process, {depth} chunks", 0.5),
        _ms(more, "lookup", "the same with 300 tokens behind them: one listing"),
        _ms(whole, "again", f"second lookup, {depth} chunks"),
        _ms(more, "again", "second lookup with 300 tokens behind them"),
        _ms(results, "open", "opening the store"),
        _ms(results, "namespace", "opening the namespace"),
        _ms(results, "pack", "token list to bytes"),
        _ms(results, "keys", "of a lookup: SHA-256 of the chunks"),
        _ms(results, "rungs", "of a lookup: the rungs in the names"),
        _ms(results, "stat", "of a lookup: `stat` of files not looked at before"),
        _ms(results, "stat_again", "of a lookup: `stat` of files just looked at"),
    ]


def _scan_figures(results: _Results) -> list[Figure]:
    return [
        _seconds(results, "scan_nodes", "scan with stat, manifests", 5),
        _seconds(results, "scan", f"scan with stat, all {results[0]['files']:,} files"),
        _peak(results, "peak memory of the scan"),
    ]


def _marking_figures(results: _Results) -> list[Figure]:
    rates = Sample.of(result["nodes"] / result["mark"] for result in results)
    return [
        _seconds(results, "mark", "marking", 20),
        Figure("the same: manifests", "/s", rates, at_least=50_000, digits=0),
        _peak(results, "peak memory of marking"),
    ]


def _peak(results: _Results, what: str) -> Figure:
    return Figure(what, "GiB", Sample.of(result["peak_bytes"] / 2**30 for result in results))


def _ls_figures(results: _Results) -> list[Figure]:
    return [
        _seconds(results, "seconds", f"`kvstore ls`, {results[0]['conversations']:,} conversations"),
        _peak(results, "peak memory of ls"),
    ]


def _fsck_figures(results: _Results) -> list[Figure]:
    figures = []
    for jobs, some in _by_jobs(results):
        rates = Sample.of(result["manifests"] / result["seconds"] for result in some)
        figures += [
            _seconds(some, "seconds", f"`kvstore fsck --jobs {jobs}` without data"),
            Figure("the same: manifests, each with its block's stat and header", "/s", rates, digits=0),
        ]
    return figures


def _manifests_figures(results: _Results) -> list[Figure]:
    figures = []
    for jobs, some in _by_jobs(results):
        rates = Sample.of(result["manifests"] / result["seconds"] for result in some)
        what = f"fsck of manifests alone, {jobs} process{'es' * (jobs > 1)}"
        figures.append(Figure(what, "/s", rates, at_least=60_000, digits=0))
    return figures


def _data_figures(results: _Results) -> list[Figure]:
    figures = []
    for jobs, some in _by_jobs(results):
        rates = Sample.of(each["bytes"] / (each["seconds"] - each["without_data"]) / 1e9 for each in some)
        what = f"fsck of data, {jobs} thread{'s' * (jobs > 1)}, blocks of 256 MiB"
        figures.append(Figure(what, "GB/s", rates, at_least=5, digits=1))
    return figures


def _gc_figures(results: _Results) -> list[Figure]:
    rates = Sample.of(result["files"] / result["remove"] for result in results)
    return [
        _seconds(results, "look", "gc: scan and marking"),
        _seconds(results, "plan", "gc: garbage, and the choice of what goes"),
        Figure("gc: files unlinked, their folders synced", "files/s", rates, at_least=7_000, digits=0, always=True),
        _peak(results, "peak memory of gc"),
    ]


_FIGURES: dict[str, Callable[[_Results], list[Figure]]] = {
    "lookup": _lookup_figures,
    "scan": _scan_figures,
    "marking": _marking_figures,
    "ls": _ls_figures,
    "fsck": _fsck_figures,
    "manifests": _manifests_figures,
    "data": _data_figures,
    "gc": _gc_figures,
}
