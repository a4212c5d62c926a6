"""`bench quick`: the core of all benchmarks in less than five minutes, as one small JSON file of ratios.

Fewer rounds than the subcommands make by themselves, and the same code. What each figure is the ratio of is said in the
file beside it.
"""

from __future__ import annotations

import argparse
import time
from types import ModuleType
from typing import Any

import bench_amplification
import bench_publish
import bench_restore
import bench_ttft
from bench_machine import conditions
from bench_plot import Panel
from bench_report import Outcome, add_common, table
from bench_stats import Sample

__all__ = ["HELP", "configure", "panels", "run"]

HELP = "the core of the others in less than five minutes"

_SELECTION: dict[str, tuple[ModuleType, list[str]]] = {
    "restore": (bench_restore, ["--tokens", "2048,8192", "--rounds", "3", "--fresh-rounds", "5"]),
    "publish": (bench_publish, ["--rounds", "7"]),
    "amplification": (bench_amplification, []),
    "ttft": (bench_ttft, ["--pairs", "15", "--prompt-tokens", "2500", "--restarts", "3"]),
}
_HEADLINE_TOKENS = 8192


def configure(_parser: argparse.ArgumentParser) -> None:
    """It has no options of its own: that is what makes two of its files comparable."""


def run(options: argparse.Namespace) -> Outcome:
    """Run the selection, and pick the headline figures out of what it found."""
    began = time.monotonic()
    found = conditions(options.dir.parent)
    documents: dict[str, dict[str, Any]] = {}
    tables = []
    for name, (module, arguments) in _SELECTION.items():
        parser = argparse.ArgumentParser()
        add_common(parser)
        module.configure(parser)
        chosen = parser.parse_args([*arguments, "--dir", str(options.dir), *(["--keep"] if options.keep else [])])
        outcome = module.run(chosen)
        documents[name] = outcome.document
        tables += outcome.tables
    figures = headline(documents)
    document = {
        **{name: figure["median"] for name, figure in figures.items()},
        "figures": figures,
        "conditions": found,
        "seconds_taken": time.monotonic() - began,
        "documents": documents,
    }
    return Outcome(document, [*tables, _table(figures, document["seconds_taken"])])


def headline(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures by name, each with n, minimum, maximum and what it is the ratio of."""
    figures: dict[str, dict[str, Any]] = {}

    def add(name: str, measured: dict[str, Any], meaning: str) -> None:
        figures[name] = {"meaning": meaning, **{key: measured[key] for key in ("n", "median", "min", "max")}}

    results = {(each["tokens"], each["regime"]): each for each in documents["restore"]["results"]}
    touched, fresh = (results[_HEADLINE_TOKENS, regime] for regime in ("touched", "fresh"))
    tokens = f"{_HEADLINE_TOKENS} tokens"
    speed = "speed of a verified restore over that of"
    add("restore_over_raw1", touched["store_over"]["raw1"], f"{speed} preadv with 1 thread, {tokens}, touched memory")
    add("restore_over_raw4", touched["store_over"]["raw4"], f"{speed} preadv with 4 threads, {tokens}, touched memory")
    add("restore_over_raw1_fresh", fresh["store_over"]["raw1"], f"{speed} preadv with 1 thread, {tokens}, new process")
    add(
        "restore_over_load_prompt_cache_fresh",
        fresh["store_over"]["load_prompt_cache"],
        f"{speed} mlx-lm's load_prompt_cache, {tokens}, new process",
    )
    add("restore_over_mx_load_fresh", fresh["store_over"]["mx_load_room"], f"{speed} mx.load + concatenate, {tokens}")
    short = results[min(tokens for tokens, _ in results), "touched"]
    add("restore_over_raw1_short", short["store_over"]["raw1"], f"as restore_over_raw1, {short['tokens']} tokens")
    extra = fresh["extra_peak_bytes"]["store"]
    add("restore_extra_peak_bytes", extra, f"peak memory of a restore over its payload, {tokens}, new process")
    publish = documents["publish"]
    add(
        "publish_over_raw", publish["over"]["store"], "speed of a publish over that of os.write, both without fdatasync"
    )
    add("publish_over_raw_synced", publish["over"]["store_synced"], "the same, both with fdatasync")
    extra = publish["extra_peak_bytes"]
    add("publish_extra_peak_bytes", extra["publish"], "peak memory that a publish adds to what it is given")
    add("copy_and_publish_extra_peak_bytes", extra["copy_and_publish"], "and with the copy out of the engine's buffers")
    amplification = documents["amplification"]
    counted = Sample.of([amplification["written_over_new"]]).document()
    add("write_amplification", counted, f"bytes written over bytes of new KV, {amplification['turns']} turns")
    over = documents["ttft"]["over_disabled"]
    add("first_write_over_disabled", over["first_write"], "time to the first token of a new prompt, tiny llama, paired")
    add("restart_over_disabled", over["restart"], "the same after a restart, of a prompt that was saved")
    return figures


def _table(figures: dict[str, dict[str, Any]], seconds: float) -> Any:
    rows = [
        [name, *(f"{each[key]:.4g}" for key in ("median", "min", "max")), str(each["n"])]
        for name, each in figures.items()
    ]
    caption = f"taken in {seconds:.0f} s; the file says what each is the ratio of"
    return table("quick", ["figure", "median", "min", "max", "n"], rows, caption)


def panels(document: dict[str, Any]) -> list[Panel]:
    """The ratios as bars: for a speed more is better, for a time or bytes written less."""
    ratios = {
        name: Sample.of([each["median"], each["min"], each["max"]])
        for name, each in document["figures"].items()
        if not name.endswith("_bytes")
    }
    return [Panel.of_bars("the core of all benchmarks", "ratio", ratios, mark=1)]
