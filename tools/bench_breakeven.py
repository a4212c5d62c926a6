"""`bench break-even`: time to the first token against the length of the prompt, and from where on restoring pays.

Two processes in turns, each with the model newly loaded: one has no cache directory and computes every prompt; the
other restores it from files, saved by a process before it, and computes one token more, as the next request of a
conversation does. Nothing of a prompt is in any memory but the page cache; with --cold not even there: page cache,
dentries and inodes are dropped before each restore, which needs root and Linux. Then the same process is asked for the
prompt once more (repeat). Beside each restore stands what it cannot go below: a plain read of as many bytes of the same
files and one decode step.

What is timed is what a program waits for: stream_generate, from the call to its first response; a decode step is the
median of the waits for those that follow.

The adapter's own gate (--kv-cache-min-tokens auto) is not in the way: the length from which restoring pays is looked
for, not used.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import make_smollm2
from bench_child import run_child
from bench_machine import BenchError, OtherWork, conditions, data_folder, drop_all_caches, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, count_list, table
from bench_servers import TINY_LLAMA
from bench_stats import Sample, paired, rotated
from demo import MODEL
from fast_blas import find, preload_env

__all__ = [
    "HELP",
    "MODELS",
    "TOKEN_BYTES",
    "blas_environment",
    "break_even",
    "child",
    "configure",
    "model_folder",
    "panels",
    "run",
    "tables",
]

HELP = "time to the first token by prompt length, and the length from which restoring pays"

MODELS = {"tiny": f"a llama of {TINY_LLAMA['num_hidden_layers']} layers", "smollm2": "SmolLM2-135M-Instruct"}
_MODES = ("disabled", "restored")
TOKEN_BYTES = {"tiny": 4 << 10, "smollm2": 46 << 10}
_REPEAT = "repeat"
_OTHER_TOKEN = 100
"""Added to the last token of a repeat: the end that its first request left in the directory is no part of it."""
_STEPS = 9
"""Decode steps whose median is the time of one."""
_OVER_FLOOR = {"over_floor": "restored", "repeat_over_floor": _REPEAT}
_VOCABULARY = 250
_SPECIAL = 17
"""Token ids from here on end no answer."""
_WARM_UP_TOKENS = 300


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (default: both)")
    parser.add_argument(
        "--lengths",
        type=count_list,
        default=[64, 128, 256, 512, 1024, 2048, 4096, 8192],
        help="tokens of a prompt (default: 64 to 8192, doubling)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="processes of each kind, tiny llama (default: 7)")
    parser.add_argument(
        "--smollm2-longest", type=int, default=1024, help="longest prompt with SmolLM2 (default: 1024: it is slow)"
    )
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each restore (root, Linux)")
    parser.add_argument("--smollm2-rounds", type=int, default=3, help="the same with SmolLM2 (default: 3)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure one model after the other."""
    document: dict[str, Any] = {
        "command": "break-even",
        "conditions": conditions(options.dir.parent),
        "page_cache": "dropped before each restore (drop_caches)" if options.cold else "warm",
        "blas": str(find() or "MLX's own"),
        "models": {},
    }
    for name in options.model or list(MODELS):
        lengths = sorted(options.lengths)
        rounds = options.rounds
        if name == "smollm2":
            lengths = [length for length in lengths if length <= options.smollm2_longest]
            rounds = options.smollm2_rounds
        with data_folder(options.dir, keep=options.keep) as folder:
            need_disk(folder, 2 * TOKEN_BYTES[name] * sum(lengths))
            document["models"][name] = _measured(name, folder, lengths, rounds, cold=options.cold)
    return Outcome(document, tables(document))


def _measured(name: str, folder: Path, lengths: list[int], rounds: int, *, cold: bool) -> dict[str, Any]:
    job: dict[str, Any] = {"model": str(model_folder(name, folder)), "store": str(folder / "store"), "lengths": lengths}
    job["cold"] = cold
    blas = blas_environment()
    run_child("bench_breakeven", {**job, "task": "save"}, blas)
    other = OtherWork()
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in _MODES}
    for turn in range(rounds):
        for mode in rotated(_MODES, turn):
            found[mode].append(run_child("bench_breakeven", {**job, "task": mode, "turn": turn}, blas))
    seconds = {
        mode: {str(length): [each["seconds"][str(length)] for each in results] for length in lengths}
        for mode, results in found.items()
    }
    if not cold:
        seconds[_REPEAT] = {
            str(length): [each[_REPEAT][str(length)] for each in found["restored"]] for length in lengths
        }
    floor = {
        str(length): [each["raw"][str(length)] + each["step"][str(length)] for each in found["restored"]]
        for length in lengths
    }
    return {
        "lengths": lengths,
        "cores_used_by_others": other.cores(),
        "restored_bytes": found["restored"][0]["bytes"],
        "seconds": {
            mode: {length: Sample.of(values).document() for length, values in each.items()}
            for mode, each in seconds.items()
        },
        "over_disabled": {
            str(length): paired(seconds["restored"][str(length)], seconds["disabled"][str(length)]).document()
            for length in lengths
        },
        "floor_seconds": {length: Sample.of(values).document() for length, values in floor.items()},
        **{
            key: {length: paired(seconds[mode][length], floor[length]).document() for length in map(str, lengths)}
            for key, mode in _OVER_FLOOR.items()
            if mode in seconds
        },
        "disagreed": sum(one["first_token"] != two["first_token"] for one, two in zip(*found.values(), strict=True)),
    }


def break_even(lengths: Sequence[int], over: Sequence[float]) -> float | None:
    """The shortest length from which on restoring is the faster one, at every longer one that was measured too.

    over: restored over disabled. Between two measured lengths it is where a straight line reaches 1. The shortest
    measured length says no more than that it pays there already; None when it does not pay at the longest.
    """
    if over[-1] >= 1:
        return None
    first = next((at for at in range(len(over), 0, -1) if over[at - 1] >= 1), 0)
    if first == 0:
        return float(lengths[0])
    before, after = over[first - 1], over[first]
    return lengths[first - 1] + (lengths[first] - lengths[first - 1]) * (before - 1) / (before - after)


def blas_environment() -> dict[str, str]:
    """The variable that gives a child the fast BLAS, if there is one."""
    return {"LD_PRELOAD": preload_env({}).get("LD_PRELOAD", "")}


def model_folder(name: str, folder: Path) -> Path:
    """One of MODELS; the tiny one is made below folder."""
    if name == "tiny":
        run_child("bench_servers", {"folder": str(folder / "model")})
        return folder / "model"
    try:
        make_smollm2.make(MODEL, None)
    except make_smollm2.ToolError as error:
        raise BenchError(str(error)) from None
    return MODEL


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Save all prompts, or measure each of them once."""
    from mlx_lm import load  # noqa: PLC0415 - imports the engine

    import kvstore_mlx  # noqa: PLC0415 - as above

    directory = None if job["task"] == "disabled" else job["store"]
    with kvstore_mlx.open(directory, *load(job["model"]), path=job["model"]) as session:
        if job["task"] == "save":
            for length in job["lengths"]:
                session.prefill(_prompt(length))
                session.flush()
            # What is compared begins with the model's first use behind it, on a prompt that no other begins like.
            session.prefill(_prompt(_WARM_UP_TOKENS))
            session.flush()
            return {}
        _answered(session, [*_prompt(_WARM_UP_TOKENS), 1])
        return _timed(session, job)


def _prompt(length: int) -> list[int]:
    """Tokens of which a prompt of another length shares one or two at most, too few to restore."""
    rng = random.Random(length)  # noqa: S311 - any tokens will do
    return [rng.randrange(1, _VOCABULARY) for _ in range(length)]


@dataclass(frozen=True)
class _Answer:
    """seconds: to its first token. step: seconds of a decode step. restored: tokens and bytes read from files."""

    seconds: float
    token: int
    step: float
    restored: tuple[int, int]


def _likeliest(logprobs: Any) -> Any:
    """The best token that ends no answer."""
    import mlx.core as mx  # noqa: PLC0415

    return mx.argmax(logprobs[..., _SPECIAL:], axis=-1) + _SPECIAL


def _answered(session: Any, tokens: list[int]) -> _Answer:
    """Ask for a few tokens, and wait until all is written."""
    before = _read_so_far(session)
    started = time.perf_counter()
    times, responses = [], []
    for response in session.stream_generate(tokens, max_tokens=1 + _STEPS, sampler=_likeliest):
        times.append(time.perf_counter())
        responses.append(response)
    after = _read_so_far(session)
    session.flush()
    step = statistics.median(later - earlier for earlier, later in pairwise(times))
    return _Answer(times[0] - started, responses[0].token, step, (after[0] - before[0], after[1] - before[1]))


def _read_so_far(session: Any) -> tuple[int, int]:
    """Tokens and bytes that a session restored until now."""
    store = session._store  # noqa: SLF001 - an answer does not say
    if store is None:
        return 0, 0
    counted = store.context.counters.snapshot()
    return counted["restored_tokens"], counted["restored_bytes"]


def _timed(session: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    names = ("seconds", "first_token", "step", "raw", "bytes", _REPEAT)
    result: dict[str, Any] = {name: {} for name in names}
    restored, cold = job["task"] == "restored", job["cold"]
    for length in rotated(list(map(str, job["lengths"])), job["turn"]):
        # Another token after the saved ones each time: the end of an earlier round is no part of this one.
        tokens = [*_prompt(int(length)), 1 + job["turn"]]
        if restored and cold:
            drop_all_caches()
        answer = _answered(session, tokens)
        result["seconds"][length], result["first_token"][length] = answer.seconds, answer.token
        result["step"][length], result["bytes"][length] = answer.step, answer.restored[1]
        if restored:
            _check(answer, length)
            if not cold:
                again = _answered(session, [*tokens[:-1], tokens[-1] + _OTHER_TOKEN])
                _check(again, length)
                result[_REPEAT][length] = again.seconds
            result["raw"][length] = _raw(Path(job["store"]), answer.restored[1], cold=cold)
    return result


def _check(answer: _Answer, length: str) -> None:
    if answer.restored[0] != int(length):
        raise AssertionError(f"{answer.restored[0]} of {length} tokens were restored")


def _raw(store: Path, size: int, *, cold: bool) -> float:
    """Seconds to read so many bytes of blocks with plain preadv, once the memory for them has been touched."""
    memory = bytearray(size)
    seconds = 0.0
    for _ in range(2):
        if cold:
            drop_all_caches()
        at = 0
        seconds = 0.0
        for path in sorted((store / "objects" / "blocks").rglob("*"), key=lambda path: -path.stat().st_size):
            if at == size or not path.is_file():
                continue
            started = time.perf_counter()
            fd = os.open(path, os.O_RDONLY)
            view = memoryview(memory)[at:]
            offset = 0
            while view.nbytes and (got := os.preadv(fd, [view], offset)):
                view, offset, at = view[got:], offset + got, at + got
            os.close(fd)
            seconds += time.perf_counter() - started
    return seconds


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    return [_table(document, name, found) for name, found in document["models"].items()]


def _table(document: dict[str, Any], name: str, found: dict[str, Any]) -> Any:
    rows = []
    for length in map(str, found["lengths"]):
        samples = [Sample.of(found["seconds"][mode][length]["values"]) for mode in _MODES]
        ratios = [Sample.of(found[key][length]["values"]).text(1, 3) for key in ("over_disabled", "over_floor")]
        repeat = []
        if again := found["seconds"].get(_REPEAT):
            over_floor = Sample.of(found["repeat_over_floor"][length]["values"])
            repeat = [Sample.of(again[length]["values"]).text(1e3, 1), over_floor.text(1, 3)]
        rows.append([length, *(sample.text(1e3, 1) for sample in samples), *ratios, *repeat])
    over = [Sample.of(found["over_disabled"][str(length)]["values"]).median for length in found["lengths"]]
    even = break_even(found["lengths"], over)
    shortest = found["lengths"][0]
    pays = "restoring does not pay at any length" if even is None else f"restoring pays from {even:.0f} tokens on"
    if even == shortest:
        pays = f"restoring pays at {shortest} tokens, the shortest, already"
    others = found["cores_used_by_others"]
    columns = ["saved tokens", "disabled ms", "restored ms", "restored over disabled", "over raw read + one step"]
    if _REPEAT in found["seconds"]:
        columns += ["repeat ms", "repeat over raw read + one step"]
    cold = "" if document["page_cache"] == "warm" else ", cold files"
    return table(
        f"time to the first token by length, {MODELS[name]}{cold}: {pays}",
        columns,
        rows,
        f"n = {found['seconds']['disabled'][str(shortest)]['n']} fresh processes each, median (min to max), page cache "
        f"{document['page_cache']}, BLAS: {Path(document['blas']).name}, "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves."""
    made = []
    cold = "" if document["page_cache"] == "warm" else ", cold files"
    for name, found in document["models"].items():
        lines = [
            Line.of(
                mode,
                found["lengths"],
                [Sample.of(found["seconds"][mode][str(length)]["values"]) for length in found["lengths"]],
                1e3,
            )
            for mode in (*_MODES, _REPEAT)
            if mode in found["seconds"]
        ]
        made.append(Panel(f"{MODELS[name]}{cold}", "tokens of the prompt", "ms to the first token", lines, True, True))
    return made
