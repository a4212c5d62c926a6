"""`bench restore`: saved KV into an engine's buffers, against the limit of this machine and against others.

Two memory regimes, never mixed, because the first touch of memory costs more than anything else here: `touched` reuses
memory (methods in turns, in a few processes, because where the system puts the memory of one decides much), `fresh` has
memory that nobody has touched (a process for each measurement). There raw reads with 4 threads are made in two ways,
because what touches memory first decides: left to the copy, or a mebibyte at a time right before it, as kvstore does.

What is restored should be what an engine goes on with. kvstore leaves room for 256 tokens more, and so does mx.load +
concatenate, as mlx-lm grows a cache; raw preadv and load_prompt_cache leave none, so that an engine would copy all of
it at its first token.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_kv import Shape, add_shape, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Panel
from bench_report import Outcome, count_list, table
from bench_restore_methods import METHODS, POPULATED, ROOM
from bench_stats import Sample, paired, rotated
from kvstore import DEFAULT_INTERVAL
from kvstore.sizes import format_size

__all__ = ["HELP", "KEEP_MEMORY", "best_raw", "configure", "panels", "run", "tables"]

HELP = "restore of saved KV against raw reads, mlx-lm's load_prompt_cache and mx.load"

_REGIMES = ("touched", "fresh")
_FULL_TOKENS = 32768
_GRANULE = 256
_MODULE = "bench_restore_methods"
# How often the KV lies in memory at once: store's, raw's, mlx-lm's arrays; and the page cache of both files.
_COPIES = {"touched": 5.3, "fresh": 3.3}
# MLX's CPU backend takes memory from malloc, and glibc's gives large blocks back to the system at once unless told to
# keep them: then nothing would be touched memory but plain reads'. (Variables of other systems' malloc are ignored.)
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 60)}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--tokens", type=count_list, default=[2048, 8192], help="prompt lengths (default: 2048,8192)")
    parser.add_argument("--full", action="store_true", help=f"also {_FULL_TOKENS} tokens")
    parser.add_argument(
        "--span", type=int, default=0, help="tokens a block, as a conversation leaves them (default: a chunk)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a process in touched memory (default: 4)")
    parser.add_argument("--processes", type=int, default=3, help="processes in touched memory (default: 3)")
    parser.add_argument("--fresh-rounds", type=int, default=7, help="rounds of new processes (default: 7)")
    parser.add_argument("--regime", choices=_REGIMES, action="append", help="only this one (default: both)")
    parser.add_argument("--threads", type=count_list, default=[], help="the store with so many threads too: 1,2,4")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each reading")


def run(options: argparse.Namespace) -> Outcome:
    """Measure every length and regime that was asked for."""
    shape = shape_of(options)
    lengths = sorted({*options.tokens, *([_FULL_TOKENS] if options.full else [])})
    if any(tokens % _GRANULE for tokens in lengths):
        raise BenchError(f"prompt lengths must be multiples of {_GRANULE}, in which mlx-lm's caches grow")
    regimes = options.regime or list(_REGIMES)
    document: dict[str, Any] = {
        "command": "restore",
        "conditions": conditions(options.dir.parent),
        "shape": shape.document(),
        "block_tokens": options.span or DEFAULT_INTERVAL,
        "page_cache": "dropped before each reading (posix_fadvise)" if options.cold else "warm",
        "results": [],
    }
    with data_folder(options.dir, keep=options.keep) as folder:
        for tokens in lengths:
            job = _prepared(folder, shape, tokens, options)
            for regime in regimes:
                document["results"].append(_measured(job, regime, options))
            for name in ("store", "file"):
                _forget(Path(job[name]), keep=options.keep)
    return Outcome(document, tables(document))


def _prepared(folder: Path, shape: Shape, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    size = shape.token_bytes * tokens
    need_disk(folder, 2 * size)
    job = {
        "task": "make",
        "store": str(folder / f"store-{tokens}"),
        "file": str(folder / f"prompt-cache-{tokens}.safetensors"),
        "tokens": tokens,
        "shape": shape.fields(),
        "cold": options.cold,
        "span": options.span,
    }
    run_child(_MODULE, job)
    return job


def _forget(path: Path, *, keep: bool) -> None:
    """Remove what was measured before the next length needs the room."""
    if keep:
        return
    if path.is_dir():
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
    else:
        path.unlink()


def _measured(job: dict[str, Any], regime: str, options: argparse.Namespace) -> dict[str, Any]:
    size = shape_of(options).token_bytes * job["tokens"]
    need_memory(int(_COPIES[regime] * size))
    methods = [*METHODS, *(f"store{threads}" for threads in options.threads)]
    if regime == "touched":
        methods.remove(POPULATED)
    other = OtherWork()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    extra: dict[str, list[float]] = {}
    touched_new = 0
    if regime == "touched":
        for _ in range(options.processes):
            task = {**job, "task": regime, "methods": methods, "rounds": options.rounds}
            result = run_child(_MODULE, task, KEEP_MEMORY)
            for name, values in result["seconds"].items():
                seconds[name] += values
            touched_new = max(touched_new, result["touched_new_bytes"])
    else:
        extra = {name: [] for name in methods}
        for turn in range(options.fresh_rounds):
            for name in rotated(methods, turn):
                result = run_child(_MODULE, {**job, "task": regime, "method": name})
                seconds[name].append(result["seconds"])
                extra[name].append(result["extra_peak"])
    return {
        "tokens": job["tokens"],
        "regime": regime,
        "payload_bytes": size,
        "cores_used_by_others": other.cores(),
        "touched_new_bytes": touched_new if regime == "touched" else None,
        "seconds": {name: Sample.of(values).document() for name, values in seconds.items()},
        "extra_peak_bytes": {name: Sample.of(values).document() for name, values in extra.items()},
        # Speeds, so above 1 the store is the faster one: time of the other over the store's in the same round.
        "store_over": {name: paired(seconds[name], seconds["store"]).document() for name in methods if name != "store"},
        "store_over_best_raw": best_raw(seconds).document(),
    }


def best_raw(seconds: Mapping[str, Sequence[float]]) -> Sample:
    """The store against whichever way of reading with 4 threads was the faster one in its round."""
    ways = [seconds[name] for name in ("raw4", POPULATED) if name in seconds]
    return paired([min(each) for each in zip(*ways, strict=True)], seconds["store"])


def tables(document: dict[str, Any]) -> list[Any]:
    """A table for each length and regime."""
    return [_table(result, document) for result in document["results"]]


def _table(result: dict[str, Any], document: dict[str, Any]) -> Any:
    size = result["payload_bytes"]
    rows = []
    for name, measured in result["seconds"].items():
        sample = Sample.of(measured["values"])
        over = result["store_over"].get(name)
        extra = result["extra_peak_bytes"].get(name)
        rows.append(
            [
                _label(name),
                sample.text(1e3, 1),
                f"{size / sample.median / 1e9:.2f}",
                "" if over is None else Sample.of(over["values"]).text(),
                "" if extra is None else f"{extra['median'] / 2**20:.1f}",
            ]
        )
    shape = document["shape"]
    others, new = result["cores_used_by_others"], result["touched_new_bytes"]
    cold = "" if document["page_cache"] == "warm" else ", cold files"
    return table(
        f"restore, {result['tokens']} tokens of {shape['token_bytes'] / 1024:g} KiB, "
        f"{result['regime']} memory{cold}, blocks of {document['block_tokens']} tokens",
        ["method", "ms, median (min to max)", "GB/s", "kvstore over it", "extra peak MiB"],
        rows,
        f"n = {result['seconds']['store']['n']}, page cache {document['page_cache']}, "
        f"{'' if new is None else f'at most {format_size(new)} touched for the first time, '}"
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores; {_rooms(result)}",
    )


def panels(document: dict[str, Any]) -> list[Panel]:
    """Bars of speed, a picture for each length and regime."""
    cold = "" if document["page_cache"] == "warm" else ", cold files"
    return [
        Panel.of_bars(
            f"{result['tokens']} tokens, {result['regime']} memory{cold}",
            "GB/s",
            {
                _label(name): Sample.of(result["payload_bytes"] / value / 1e9 for value in measured["values"])
                for name, measured in result["seconds"].items()
            },
        )
        for result in document["results"]
    ]


_NO_ROOM = "mx_load"
"""What older files hold instead of mx_load_room."""


def _rooms(result: dict[str, Any]) -> str:
    """Who leaves the engine room."""
    if _NO_ROOM in result["seconds"]:
        return "kvstore leaves an engine room for 256 tokens more, the others none"
    return (
        f"kvstore and mx.load leave an engine room for {ROOM} tokens more, which mx.load fills with zeros (its extra "
        "peak is that room, too), raw preadv and load_prompt_cache none"
    )


def _label(name: str) -> str:
    if name == _NO_ROOM:
        return "mx.load + concatenate a layer, no room"
    return METHODS.get(name) or f"kvstore, {name[5:]} thread{'s' * (name[5:] != '1')}"
