"""What `bench scale` measures, one function a part, and which figures and targets follow from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from bench_machine import peak_memory
from bench_stats import Sample
from kvstore import NamespaceInfo, Span, Store, TensorSpec, pack_tokens
from kvstore.eviction import Policy
from kvstore.fsck import check
from kvstore.fsck.data import Headers
from kvstore.fsck.findings import Report
from kvstore.fsck.reading import inspect_node
from kvstore.fsck.tree import Misfits, folders
from kvstore.fsck.values import Reader
from kvstore.gc import collect
from kvstore.keys import unpack_tokens
from kvstore.layout import Kind
from kvstore.listing import listing
from kvstore.manifest import BlockRef
from kvstore.marking import mark
from kvstore.scan import Tally, nodes, scan
from make_big_store import conversation_tokens

__all__ = ["MEASURE", "Figure", "figures_of", "make_data", "peak_memory"]

_SETTLED_NS = 48 * 3600 * 10**9
"""How far the clock is put forward for gc: nothing that was made today is young then."""

_clock = time.perf_counter


def _open(job: Mapping[str, Any], **options: Any) -> Store:
    return Store.open(Path(job["store"]), create=False, **options)


def _lookup(job: Mapping[str, Any]) -> dict[str, float]:
    """The first lookup of this process, and the same again. The prompt may go on behind what is saved."""
    packed = b"".join(conversation_tokens(job["number"], chunk, 2048) for chunk in range(job["depth"]))
    tokens = [*unpack_tokens(packed), *range(job["rest"])]
    started = _clock()
    store = _open(job)
    opened = _clock()
    space = store.namespace(NamespaceInfo({"model": "big"}))
    named = _clock()
    text = pack_tokens(tokens)
    packed_at = _clock()
    match = space.lookup(text)
    found = _clock()
    space.lookup(text)
    again = _clock()
    if match.count != len(tokens) - job["rest"]:
        raise AssertionError(f"{match.count} of {len(tokens)} tokens were found")
    return {
        "open": opened - started,
        "namespace": named - opened,
        "pack": packed_at - named,
        "lookup": found - packed_at,
        "again": again - found,
    }


def _marking(job: Mapping[str, Any]) -> dict[str, float]:
    """The manifests' names and times, then everything's, then what each manifest names: gc's first half."""
    context = _open(job).context
    started = _clock()
    count = len(list(nodes(context.layout, Tally())))
    listed = _clock()
    found = scan(context)
    scanned = _clock()
    marks = mark(context, found.nodes)
    marked = _clock()
    return {
        "nodes": count,
        "files": len(found.nodes) + len(found.blocks),
        "blocks_named": len(marks.named),
        "scan_nodes": listed - started,
        "scan": scanned - listed,
        "mark": marked - scanned,
    }


def _ls(job: Mapping[str, Any]) -> dict[str, float]:
    context = _open(job).context
    started = _clock()
    found = listing(context)
    return {"seconds": _clock() - started, "conversations": len(found.conversations)}


def _fsck(job: Mapping[str, Any]) -> dict[str, float]:
    return _clean(check(_open(job).context, jobs=job["jobs"]))


def _data(job: Mapping[str, Any]) -> dict[str, float]:
    context = _open(job).context
    without = _clean(check(context, jobs=job["jobs"]))["seconds"]
    report = check(context, jobs=job["jobs"], read_data=True)
    return {**_clean(report), "without_data": without, "bytes": report.counts.verified_bytes}


def _clean(report: Report) -> dict[str, float]:
    if report.error or report.errors:
        raise AssertionError(report.error or report.findings[0].sentence)
    return {"seconds": report.seconds, "manifests": report.counts.manifests, "blocks": report.counts.blocks}


class _AllGood(Headers):
    """Takes every block for good without a look, to time the manifests alone."""

    def check(self, ref: BlockRef, kind: Kind) -> None:
        """Say nothing against it."""


def _manifests(job: Mapping[str, Any]) -> dict[str, float]:
    """Manifests alone, without the blocks that they name: read, checksum, key from the tokens, place and name."""
    context = _open(job).context
    reader = Reader.of(context, context.clock())
    good = _AllGood(reader)
    started = _clock()
    count = bad = 0
    for folder in folders(context.layout, "nodes", Misfits()):
        for name in folder.names:
            one = inspect_node(reader, folder.namespace, name, good)
            count += 1
            bad += one is None or one.fault is not None
    seconds = _clock() - started
    if bad:
        raise AssertionError(f"{bad} of {count} manifests are not whole")
    return {"seconds": seconds, "manifests": count}


def _gc(job: Mapping[str, Any]) -> dict[str, float]:
    """Remove the conversations that were used longest ago, for real."""
    with _open(job, clock=lambda: time.time_ns() + _SETTLED_NS) as store:
        context = store.context
        times = sorted(file.mtime_ns for file in nodes(context.layout, Tally()))
        limit = times[min(job["remove"], len(times) - 1)]
        points: dict[str, float] = {}

        def passed(point: str) -> None:
            points.setdefault(point, _clock())

        started = _clock()
        policy = Policy(older_than_ns=context.clock() - limit)
        report = collect(context, policy, pause=passed)
        done = _clock()
    if report.error:
        raise AssertionError(report.error)
    return {
        "look": points["marked"] - started,
        "plan": points["planned"] - points["marked"],
        "remove": done - points["planned"],
        "files": report.nodes + report.states + report.blocks,
    }


MEASURE: dict[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "lookup": _lookup,
    "marking": _marking,
    "ls": _ls,
    "fsck": _fsck,
    "manifests": _manifests,
    "data": _data,
    "gc": _gc,
}


def make_data(path: Path, size: int) -> None:
    """A directory with size bytes of blocks of their real size: 256 MiB each, no two alike."""
    spec = TensorSpec("k", "U8", 1, (1 << 17,))
    count = 2048
    with Store.open(path) as store:
        space = store.namespace(NamespaceInfo({"model": "data"}))
        for number in range(max(1, size // spec.span_bytes(count))):
            tokens = pack_tokens([number] * count)
            data = [os.urandom(1 << 20)] * (spec.span_bytes(count) >> 20)
            space.publish(tokens, [Span(0, count, (spec,), data)])


@dataclass(frozen=True)
class Figure:
    """One line of the table: what, in which unit, how much, and what was wished for (at most or at least)."""

    what: str
    unit: str
    sample: Sample
    cache: str = ""
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


def figures_of(part: str, found: Mapping[str, Any]) -> list[Figure]:
    """The figures of one part. Targets are for a warm page cache and for 1,000,000 nodes."""
    results = found["results"]
    read = max(result["read_bytes"] for result in results)
    cold = found["page_cache"] == "dropped"
    cache = "dropped" if cold else f"kept, {read / 2**30:.1f} GiB read" if read else "warm"
    figures = _FIGURES[part](results)
    if cold:
        figures = [replace(figure, at_most=None, at_least=None) for figure in figures]
    return [replace(figure, cache=cache) for figure in figures]


_Results: TypeAlias = Sequence[Mapping[str, Any]]


def _seconds(results: _Results, key: str, what: str, at_most: float | None = None) -> Figure:
    return Figure(what, "s", Sample.of(result[key] for result in results), at_most=at_most, digits=1)


def _ms(results: _Results, key: str, what: str, at_most: float | None = None) -> Figure:
    return Figure(what, "ms", Sample.of(result[key] * 1e3 for result in results), at_most=at_most)


def _by_jobs(results: _Results) -> list[tuple[int, _Results]]:
    return [(jobs, [result for result in results if result["job"]["jobs"] == jobs]) for jobs in (1, 2)]


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
    ]


def _marking_figures(results: _Results) -> list[Figure]:
    count, files = results[0]["nodes"], results[0]["files"]
    peaks = Sample.of(result["peak_bytes"] / 2**30 for result in results)
    return [
        _seconds(results, "scan_nodes", f"scan with stat, {count:,} manifests", 5),
        _seconds(results, "scan", f"scan with stat, all {files:,} files"),
        _seconds(results, "mark", f"marking, {count:,} manifests read", 20),
        Figure("peak memory of scan and marking", "GiB", peaks),
    ]


def _ls_figures(results: _Results) -> list[Figure]:
    peaks = Sample.of(result["peak_bytes"] / 2**30 for result in results)
    return [
        _seconds(results, "seconds", f"`kvstore ls`, {results[0]['conversations']:,} conversations"),
        Figure("peak memory of ls", "GiB", peaks),
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
    rates = Sample.of(result["manifests"] / result["seconds"] for result in results)
    return [Figure("fsck of manifests alone, one process", "/s", rates, at_least=60_000, digits=0)]


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
        Figure("gc: files unlinked, their folders synced", "files/s", rates, at_least=7_000, digits=0),
    ]


_FIGURES: dict[str, Callable[[_Results], list[Figure]]] = {
    "lookup": _lookup_figures,
    "marking": _marking_figures,
    "ls": _ls_figures,
    "fsck": _fsck_figures,
    "manifests": _manifests_figures,
    "data": _data_figures,
    "gc": _gc_figures,
}
