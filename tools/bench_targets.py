"""The targets of this project's benchmarks, and the measured figures that meet or miss them.

Pure: nothing here measures, prints or opens anything. A target that no file has a figure for is a row that says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import bench_scale_figures
from bench_stats import Sample

__all__ = ["Row", "rows"]

_MIB = 2**20

MODEL_NAMES = {"tiny": "tiny llama", "smollm2": "SmolLM2"}

Documents = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One target: a ratio or an amount that should be at least (or, with at_most, at most) so much."""

    what: str
    must: float
    aim: float
    sample: Sample | None = None
    conditions: str = ""
    unit: str = ""
    at_most: bool = False
    digits: int = 2

    def limit(self, value: float) -> str:
        """A target as it is written."""
        return f"{'≤' if self.at_most else '≥'} {value:g} {self.unit}".strip()

    def verdict(self, limit: float) -> str:
        """Whether the median is as good as that."""
        if self.sample is None:
            return ""
        good = self.sample.median <= limit if self.at_most else self.sample.median >= limit
        return "met" if good else "**not met**"


def rows(documents: Documents) -> list[Row]:
    """Every target, once for each figure that was measured for it."""
    return [
        *_restores(documents),
        *_publishes(documents),
        *_amplification(documents),
        *_first_tokens(documents),
        *_lookup(documents),
    ]


def _of(documents: Documents, command: str) -> Iterator[Mapping[str, Any]]:
    yield from (document for document in documents.values() if document["command"] == command)


def _cores(document: Mapping[str, Any]) -> str:
    others = document["cores_used_by_others"]
    return f"others used {'?' if others is None else f'{others:.2f}'} cores"


_OVER = (
    ("raw1", "one-thread raw preadv", 0.80, 1.0, ("touched", "fresh")),
    ("raw4", "the best raw, 4 threads", 0.60, 0.90, ("touched", "fresh")),
    ("load_prompt_cache", "mlx-lm's load_prompt_cache", 1.0, 1.5, ("fresh",)),
    ("mx_load", "mx.load + concatenate", 1.5, 2.5, ("touched", "fresh")),
)


def _restores(documents: Documents) -> Iterator[Row]:
    found = [
        (result, "warm" if document["page_cache"] == "warm" else "cold")
        for document in _of(documents, "restore")
        for result in document["results"]
    ]
    for name, label, must, aim, regimes in _OVER:
        what = f"restore, digests verified, over {label}"
        made = [
            Row(
                f"{what}, {result['tokens']} tokens",
                must,
                aim,
                Sample.of(result["store_over"][name]["values"]),
                f"{result['regime']} memory, page cache {cache}, {_cores(result)}",
            )
            for result, cache in found
            if result["regime"] in regimes and cache == "warm"
        ]
        yield from made or [Row(what, must, aim)]
    memory = [
        Row(
            f"restore, peak memory over the payload, {result['tokens']} tokens",
            16,
            1,
            Sample.of(value / _MIB for value in result["extra_peak_bytes"]["store"]["values"]),
            "fresh process",
            "MiB",
            at_most=True,
        )
        for result, cache in found
        if result["regime"] == "fresh" and cache == "warm"
    ]
    yield from memory or [Row("restore, peak memory over the payload", 16, 1, unit="MiB", at_most=True)]


def _publishes(documents: Documents) -> Iterator[Row]:
    found = list(_of(documents, "publish"))
    for name, label in (("store", "neither synced"), ("store_synced", "both synced")):
        what = f"publish with xxh3 over raw os.write, {label}"
        made = [
            Row(what, 0.85, 1.0, Sample.of(each["over"][name]["values"]), f"{each['count']} tokens, {_cores(each)}")
            for each in found
        ]
        yield from made or [Row(what, 0.85, 1.0)]
    labels = {"publish": "the publish itself", "copy_and_publish": "with the copy out of the engine's buffers"}
    for name, label in labels.items():
        what = f"publish, extra peak memory, {label}"
        memory = [
            Row(
                what,
                8,
                1,
                Sample.of(value / _MIB for value in each["extra_peak_bytes"][name]["values"]),
                f"a chunk of {each['payload_bytes'] / _MIB:.0f} MiB, fresh process",
                "MiB",
                at_most=True,
                digits=1,
            )
            for each in found
        ]
        yield from memory or [Row(what, 8, 1, unit="MiB", at_most=True)]


def _amplification(documents: Documents) -> Iterator[Row]:
    what = "bytes written for each byte of new KV"
    made = [
        Row(
            what,
            1.10,
            1.02,
            Sample.of([each["written_over_new"]]),
            f"{each['turns']} turns, counted by {each['counted_by']}",
            at_most=True,
            digits=3,
        )
        for each in _of(documents, "amplification")
    ]
    yield from made or [Row(what, 1.10, 1.02, at_most=True)]


def _first_tokens(documents: Documents) -> Iterator[Row]:
    what = "time to the first token, first write over disabled"
    made = [
        Row(
            f"{what}, {MODEL_NAMES[each.get('model_name', 'tiny')]}, {each['prompt_tokens']} letters",
            1.02,
            1.01,
            Sample.of(each["over_disabled"]["first_write"]["values"]),
            f"paired, two servers, {_cores(each)}",
            at_most=True,
            digits=3,
        )
        for each in _of(documents, "ttft")
    ]
    yield from made
    measured = {each.get("model_name", "tiny") for each in _of(documents, "ttft")}
    for name in [name for name in MODEL_NAMES if name not in measured]:
        yield Row(f"{what}, {MODEL_NAMES[name]}", 1.02, 1.01, at_most=True)
    yield from _decoding(documents)
    yield from _floors(documents)


def _decoding(documents: Documents) -> Iterator[Row]:
    what = "decode speed while a 300 MB chunk is being published, over without"
    made = [
        Row(
            f"{what}, {MODEL_NAMES[name]}",
            0.97,
            0.99,
            Sample.of(found["ways"]["paced"]["over_alone"]["values"]),
            f"{each['payload_bytes'] / 1e6:.0f} MB, {_cores(found)}",
            digits=3,
        )
        for each in _of(documents, "decode")
        for name, found in each["models"].items()
    ]
    yield from made or [Row(what, 0.97, 0.99)]


def _floors(documents: Documents) -> Iterator[Row]:
    """Of prompts long enough that a restore is what takes the time. What is cold is held against no target."""
    for when, key, process in (
        ("of a repeat", "same_repeat_over_floor", "the process that was asked before"),
        ("after a restart", "same_over_floor", "fresh process"),
        ("of a repeat with one token more", "repeat_over_floor", "the process that was asked before"),
        ("after a restart with one token more", "over_floor", "fresh process"),
    ):
        what = f"time to the first token {when} over (raw read of its bytes + one decode step)"
        made = [
            Row(
                f"{what}, {MODEL_NAMES[name]}, {length} tokens",
                1.5,
                1.1,
                Sample.of(found[key][str(length)]["values"]),
                f"{process}, {_cores(found)}",
                at_most=True,
            )
            for each in _of(documents, "break-even")
            if each["page_cache"] == "warm"
            for name, found in each["models"].items()
            if key in found
            for length in found["lengths"]
            if length >= 1024
        ]
        yield from made or [Row(what, 1.5, 1.1, at_most=True)]


def _lookup(documents: Documents) -> Iterator[Row]:
    what = "fresh process: first lookup, 64 chunks deep, 1,000,000 nodes, warm"
    made = []
    for document in _of(documents, "scale"):
        for name, part in document["parts"].items():
            if part["part"] == "lookup" and part["nodes"] >= 1_000_000 and part["page_cache"] == "kept":
                (first, *_) = bench_scale_figures.figures_of(part)
                made.append(
                    Row(
                        what,
                        2,
                        0.5,
                        first.sample,
                        f"{name}: {_cores(part)}, page cache {first.cache}",
                        "ms",
                        at_most=True,
                    )
                )
    yield from made or [Row(what, 2, 0.5, unit="ms", at_most=True)]
