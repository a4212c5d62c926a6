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
    """One target: a ratio or an amount that should be at least (or, with at_most, at most) so much.

    detail: for what it was measured, where rows of one kind of target differ.
    """

    kind: str
    must: float
    aim: float
    sample: Sample | None = None
    conditions: str = ""
    unit: str = ""
    at_most: bool = False
    digits: int = 2
    detail: str = ""

    @property
    def what(self) -> str:
        """Its first cell."""
        return f"{self.kind}, {self.detail}" if self.detail else self.kind

    def limit(self, value: float) -> str:
        """A target as it is written."""
        return f"{'≤' if self.at_most else '≥'} {value:g} {self.unit}".strip()

    def verdict(self, limit: float) -> str:
        """Whether the median is as good as that."""
        if self.sample is None:
            return ""
        return "met" if self.meets(limit) else "**not met**"

    def meets(self, limit: float) -> bool:
        """Whether it was measured, and as good as that."""
        if self.sample is None:
            return False
        return self.sample.median <= limit if self.at_most else self.sample.median >= limit


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


_OVER: tuple[tuple[dict[str, str], float, float, tuple[str, ...]], ...] = (
    ({"raw1": "one-thread raw preadv"}, 0.80, 1.0, ("touched", "fresh")),
    (
        {"best_raw": "the best raw, 4 threads", "raw4": "raw preadv, 4 threads, not populated as kvstore does"},
        0.60,
        0.90,
        ("touched", "fresh"),
    ),
    ({"load_prompt_cache": "mlx-lm's load_prompt_cache"}, 1.0, 1.5, ("fresh",)),
    (
        {
            "mx_load_room": "mx.load + concatenate with the same room",
            "mx_load": "mx.load + concatenate, which leaves no room",
        },
        1.5,
        2.5,
        ("touched", "fresh"),
    ),
)
"""What restores are held against, by its name in a file; the second one is what older files have."""


def _restores(documents: Documents) -> Iterator[Row]:
    found = [
        (result, "warm" if document["page_cache"] == "warm" else "cold")
        for document in _of(documents, "restore")
        for result in document["results"]
    ]
    for names, must, aim, regimes in _OVER:
        what = "restore, digests verified, over"
        made = []
        for result, cache in found:
            if result["regime"] not in regimes or cache != "warm":
                continue
            over = dict(result["store_over"])
            if "store_over_best_raw" in result:
                over["best_raw"] = result["store_over_best_raw"]
            elif result["regime"] == "touched":
                # There is no other way with 4 threads: what was touched before needs no populating.
                over["best_raw"] = over["raw4"]
            name = next(name for name in names if name in over)
            made.append(
                Row(
                    f"{what} {names[name]}",
                    must,
                    aim,
                    Sample.of(over[name]["values"]),
                    f"{result['regime']} memory, page cache {cache}, {_cores(result)}",
                    detail=f"{result['tokens']} tokens",
                )
            )
        yield from made or [Row(f"{what} {next(iter(names.values()))}", must, aim)]
    memory = [
        Row(
            "restore, peak memory over the payload",
            16,
            1,
            Sample.of(value / _MIB for value in result["extra_peak_bytes"]["store"]["values"]),
            "fresh process",
            "MiB",
            at_most=True,
            detail=f"{result['tokens']} tokens",
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
            what,
            1.02,
            1.01,
            Sample.of(each["over_disabled"]["first_write"]["values"]),
            f"paired, two servers, {_cores(each)}",
            at_most=True,
            digits=3,
            detail=f"{MODEL_NAMES[each.get('model_name', 'tiny')]}, {each['prompt_tokens']} letters",
        )
        for each in _of(documents, "ttft")
    ]
    yield from made
    measured = {each.get("model_name", "tiny") for each in _of(documents, "ttft")}
    for name in [name for name in MODEL_NAMES if name not in measured]:
        yield Row(what, 1.02, 1.01, at_most=True, detail=MODEL_NAMES[name])
    yield from _decoding(documents)
    yield from _floors(documents)


def _decoding(documents: Documents) -> Iterator[Row]:
    what = "decode speed while a 300 MB chunk is being published, over without"
    made = [
        Row(
            what,
            0.97,
            0.99,
            Sample.of(found["ways"]["paced"]["over_alone"]["values"]),
            f"{each['payload_bytes'] / 1e6:.0f} MB, {_cores(found)}, {_pause(found['ways']['paced'])}",
            digits=3,
            detail=MODEL_NAMES[name],
        )
        for each in _of(documents, "decode")
        for name, found in each["models"].items()
    ]
    yield from made or [Row(what, 0.97, 0.99)]


def _pause(turns: Mapping[str, Any]) -> str:
    return f"one token waits {Sample.of(turns['pause_seconds']['values']).text(1e3, 0)} ms more, for the copy"


_ASKED = "the process that was asked before"
_FLOORS = (
    ("of a repeat", ("same_repeat_over_floor",), _ASKED),
    ("after a restart", ("same_over_new_floor", "same_over_floor"), "fresh process"),
    ("of a repeat with one token more", ("repeat_over_floor",), _ASKED),
    ("after a restart with one token more", ("over_new_floor", "over_floor"), "fresh process"),
)
"""When, where a file has it (the second is what older files have), and which process was asked."""


def _floors(documents: Documents) -> Iterator[Row]:
    """Of prompts long enough that a restore is what takes the time. What is cold is held against no target."""
    models = [
        each
        for document in _of(documents, "break-even")
        if document["page_cache"] == "warm"
        for each in document["models"].items()
    ]
    for when, keys, process in _FLOORS:
        made = []
        for name, found in models:
            if (key := next((key for key in keys if key in found), None)) is None:
                continue
            made += [
                Row(
                    _over_floor(when, key),
                    1.5,
                    1.1,
                    Sample.of(found[key][str(length)]["values"]),
                    f"{process}, {_cores(found)}{_engine_alone(found, key, length)}",
                    at_most=True,
                    detail=f"{MODEL_NAMES[name]}, {length} tokens",
                )
                for length in found["lengths"]
                if length >= 1024
            ]
        yield from made or [Row(_over_floor(when, keys[0]), 1.5, 1.1, at_most=True)]


def _engine_alone(found: Mapping[str, Any], key: str, length: int) -> str:
    """What mlx-lm takes for the same token with nothing to restore: no store can be below that."""
    if key != "repeat_over_floor" or "engine_over_floor" not in found:
        return ""
    alone = Sample.of(found["engine_over_floor"][str(length)]["values"])
    return f", mlx-lm alone with the KV in its memory: {alone.text()}"


def _over_floor(when: str, key: str) -> str:
    memory = "new" if key.endswith("over_new_floor") else "touched"
    return f"time to the first token {when} over (raw read into {memory} memory + one decode step)"


def _lookup(documents: Documents) -> Iterator[Row]:
    what = "fresh process: first lookup, 64 chunks deep, 1,000,000 nodes, warm"
    ends = ("the prompt ends at a chunk", "300 tokens behind the last chunk")
    made = []
    for document in _of(documents, "scale"):
        for name, part in document["parts"].items():
            if part["part"] == "lookup" and part["nodes"] >= 1_000_000 and part["page_cache"] == "kept":
                made += [
                    Row(
                        what,
                        2,
                        0.5,
                        figure.sample,
                        f"{name}: {_cores(part)}, page cache {figure.cache}",
                        "ms",
                        at_most=True,
                        detail=end,
                    )
                    for end, figure in zip(ends, bench_scale_figures.figures_of(part)[:2], strict=True)
                ]
    yield from made or [Row(what, 2, 0.5, unit="ms", at_most=True)]
