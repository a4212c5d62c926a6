"""`bench break-even`: time to the first token against the length of the prompt, and from where on restoring pays.

Processes in turns, each with the model newly loaded: one has no cache directory and computes every prompt; another
restores it from files, saved by a process before it, and computes one token more, as the next request of a conversation
does. Nothing of a prompt is in any memory but the page cache; with --cold not even there: page cache,
dentries and inodes are dropped before each restore, which needs root and Linux. Then the same process is asked for the
prompt once more (repeat). A third is asked for prompts that an earlier process answered, the same to the last token
(restart), and for each again: then nothing is left to compute, because the logits of the next token are saved, too.
Each is held against a plain read of as many bytes of the same files and one decode step: a read into memory that was
touched before, which is what a process that was asked before can have, and a read into new memory in a process of its
own, which is what comes after a restart. What has a token to compute cannot go below that; what has none can. For
comparison: what mlx-lm alone takes for the one token more when it has the restored KV in its memory already.

What is timed is what a program waits for: stream_generate, from the call to its first response; a decode step is the
median of the waits for those that follow. (mlx-lm builds the step of the second token before it hands out the first: a
small model's first token takes two.)

The adapter's own gate (--kv-cache-min-tokens auto) is not in the way: the length from which restoring pays is looked
for, not used.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import make_smollm2
from bench_child import run_child
from bench_floors import engine_alone, likeliest, raw_read, raw_read_into_new, sums
from bench_machine import BenchError, OtherWork, conditions, data_folder, drop_all_caches, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, count_list, table
from bench_servers import TINY_LLAMA
from bench_stats import Sample, break_even, paired, rotated
from demo import MODEL
from fast_blas import find, preload_env

__all__ = [
    "HELP",
    "MODELS",
    "TOKEN_BYTES",
    "blas_environment",
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
_SAME = "same"
TOKEN_BYTES = {"tiny": 4 << 10, "smollm2": 46 << 10}
_WARM = {
    "repeat": "repeat, one token more",
    _SAME: "restart, the same prompt",
    "same_repeat": "repeat of that",
    "engine": "mlx-lm alone, one token more",
}
"""What else a process measures that restores from warm files, and its name for people."""
_FLOORED = {"restored": "over_floor", **{name: f"{name}_over_floor" for name in _WARM}}
"""Where each is held against raw read into touched memory + one step."""
_NEW_FLOORED = {"restored": "over_new_floor", _SAME: "same_over_new_floor"}
"""Where what comes after a restart is held against raw read into new memory + one step."""
_OTHER_TOKEN = 100
"""Added to the last token of a repeat: the end that its first request left in the directory is no part of it."""
_SAME_TOKEN = 99
"""The last token of the prompts that are answered while all is saved."""
_STEPS = 9
"""Decode steps whose median is the time of one."""
_VOCABULARY = 250
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
    saved = run_child("bench_breakeven", {**job, "task": "save"}, blas)
    other = OtherWork()
    modes = _MODES if cold else (*_MODES, _SAME)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for turn in range(rounds):
        for mode in rotated(modes, turn):
            one = run_child("bench_breakeven", {**job, "task": mode, "turn": turn}, blas)
            one["raw_new"] = {
                at: raw_read_into_new(job, size) for at, size in one["bytes"].items() if mode != "disabled"
            }
            found[mode].append(one)

    def of(mode: str, name: str) -> dict[str, list[float]]:
        return {str(length): [each[name][str(length)] for each in found[mode]] for length in lengths}

    seconds = {mode: of(mode, "seconds") for mode in modes}
    floors, new_floors = (
        {mode: sums(of(mode, raw), of(mode, "step")) for mode in modes[1:]} for raw in ("raw", "raw_new")
    )
    if not cold:
        seconds |= {"repeat": of("restored", "repeat"), "same_repeat": of(_SAME, "repeat")}
        seconds["engine"] = of("restored", "engine")
        floors |= {"repeat": floors["restored"], "same_repeat": floors[_SAME], "engine": floors["restored"]}
    first_tokens = [[each["first_token"] for each in found[mode]] for mode in _MODES]
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
        "floor_seconds": {length: Sample.of(values).document() for length, values in floors["restored"].items()},
        "new_floor_seconds": {
            length: Sample.of(values).document() for length, values in new_floors["restored"].items()
        },
        **{
            names[kind]: {n: paired(seconds[kind][n], floor[n]).document() for n in map(str, lengths)}
            for names, each in ((_FLOORED, floors), (_NEW_FLOORED, new_floors))
            for kind, floor in each.items()
        },
        "disagreed": sum(one != two for one, two in zip(*first_tokens, strict=True))
        + sum(each["first_token"] != saved["same_token"] for each in found.get(_SAME, [])),
    }


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
    from kvstore_mlx.boundaries import MIN_TOKENS  # noqa: PLC0415 - as above

    directory = None if job["task"] == "disabled" else job["store"]
    engine = load(job["model"])
    with kvstore_mlx.open(directory, *engine, path=job["model"], min_tokens=MIN_TOKENS) as session:
        if job["task"] == "save":
            for length in job["lengths"]:
                session.prefill(_prompt(length))
                session.flush()
            same = {str(length): _answered(session, _same(length)).token for length in job["lengths"]}
            # What is compared begins with the model's first use behind it, on a prompt that no other begins like.
            session.prefill(_prompt(_WARM_UP_TOKENS))
            session.flush()
            return {"same_token": same}
        _answered(session, [*_prompt(_WARM_UP_TOKENS), 1])
        return _timed(session, engine, job)


def _prompt(length: int) -> list[int]:
    """Tokens of which a prompt of another length shares one or two at most, too few to restore."""
    rng = random.Random(length)  # noqa: S311 - any tokens will do
    return [rng.randrange(1, _VOCABULARY) for _ in range(length)]


def _same(length: int) -> list[int]:
    """The prompt that is asked for with nothing more to compute."""
    return [*_prompt(length), _SAME_TOKEN]


@dataclass(frozen=True)
class _Answer:
    """seconds: to its first token. step: seconds of a decode step. restored: tokens and bytes read from files."""

    seconds: float
    token: int
    step: float
    restored: tuple[int, int]


def _answered(session: Any, tokens: list[int]) -> _Answer:
    """Ask for a few tokens, and wait until all is written."""
    before = _read_so_far(session)
    started = time.perf_counter()
    times, responses = [], []
    for response in session.stream_generate(tokens, max_tokens=1 + _STEPS, sampler=likeliest):
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


def _timed(session: Any, engine: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    names = ("seconds", "first_token", "step", "raw", "bytes", "repeat", "engine")
    result: dict[str, Any] = {name: {} for name in names}
    mode, cold, store = job["task"], job["cold"], Path(job["store"])
    for at in rotated(list(map(str, job["lengths"])), job["turn"]):
        length, same = int(at), mode == _SAME
        # Another token after the saved ones each time: the end of an earlier round is no part of this one.
        tokens = _same(length) if same else [*_prompt(length), 1 + job["turn"]]
        if mode == "restored" and cold:
            drop_all_caches()
        answer = _answered(session, tokens)
        result["seconds"][at], result["first_token"][at] = answer.seconds, answer.token
        result["step"][at], result["bytes"][at] = answer.step, answer.restored[1]
        if mode == "disabled":
            continue
        _check(answer, length + same)
        if not cold:
            again = tokens if same else [*tokens[:-1], tokens[-1] + _OTHER_TOKEN]
            repeat = _answered(session, again)
            _check(repeat, length + same)
            result["repeat"][at] = repeat.seconds
            if not same:
                result["engine"][at] = engine_alone(engine, session, [*again[:-1], again[-1] + 1], 1 + _STEPS)
        result["raw"][at] = raw_read(store, answer.restored[1], cold=cold)
    return result


def _check(answer: _Answer, tokens: int) -> None:
    if answer.restored[0] != tokens:
        raise AssertionError(f"{answer.restored[0]} of {tokens} tokens were restored")


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people: of each model the lengths, and what else warm files and the engine take."""
    return [
        made(document, name, found)
        for name, found in document["models"].items()
        for made in (_table, *([_warm_table] if "same" in found["seconds"] else []))
    ]


def _table(document: dict[str, Any], name: str, found: dict[str, Any]) -> Any:
    over = [Sample.of(found["over_disabled"][str(length)]["values"]).median for length in found["lengths"]]
    even = break_even(found["lengths"], over)
    shortest = found["lengths"][0]
    pays = "restoring does not pay at any length" if even is None else f"restoring pays from {even:.0f} tokens on"
    if even == shortest:
        pays = f"restoring pays at {shortest} tokens, the shortest, already"
    rows = [
        [
            length,
            *(Sample.of(found["seconds"][mode][length]["values"]).text(1e3, 1) for mode in _MODES),
            Sample.of(found["over_disabled"][length]["values"]).text(1, 3),
            *(
                f"{Sample.of(found[seconds][length]['values']).text(1e3, 1)}: "
                f"{Sample.of(found[over][length]['values']).text(1, 2)}"
                if seconds in found
                else "not measured"
                for seconds, over in (
                    ("new_floor_seconds", _NEW_FLOORED["restored"]),
                    ("floor_seconds", _FLOORED["restored"]),
                )
            ),
        ]
        for length in map(str, found["lengths"])
    ]
    columns = [
        "saved tokens",
        "disabled ms",
        "restored ms",
        "restored over disabled",
        "ms of a raw read into new memory + one step: restored over it",
        "into touched memory + one step: restored over it",
    ]
    return table(
        f"time to the first token by length, {_title(document, name)}: {pays}", columns, rows, _note(document, found)
    )


def _warm_table(document: dict[str, Any], name: str, found: dict[str, Any]) -> Any:
    new = _NEW_FLOORED[_SAME]
    rows = [
        [
            length,
            *(
                f"{Sample.of(found['seconds'][kind][length]['values']).text(1e3, 1)}: "
                f"{Sample.of(found[_FLOORED[kind]][length]['values']).text(1, 2)}"
                for kind in _WARM
            ),
            Sample.of(found[new][length]["values"]).text(1, 2) if new in found else "not measured",
        ]
        for length in map(str, found["lengths"])
    ]
    return table(
        f"ms to the first token, and that over raw read into touched memory + one step, {_title(document, name)}",
        ["saved tokens", *_WARM.values(), f"{_WARM[_SAME]}, over raw read into new memory + one step"],
        rows,
        _note(document, found),
    )


def _title(document: dict[str, Any], name: str) -> str:
    return MODELS[name] + ("" if document["page_cache"] == "warm" else ", cold files")


def _note(document: dict[str, Any], found: dict[str, Any]) -> str:
    others = found["cores_used_by_others"]
    return (
        f"n = {found['seconds']['disabled'][str(found['lengths'][0])]['n']} fresh processes each, median (min to max), "
        f"page cache {document['page_cache']}, BLAS: {Path(document['blas']).name}, "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores"
    )


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves."""
    made = []
    for name, found in document["models"].items():
        lines = [
            Line.of(
                mode,
                found["lengths"],
                [Sample.of(found["seconds"][mode][str(length)]["values"]) for length in found["lengths"]],
                1e3,
            )
            for mode in (*_MODES, "repeat", "same")
            if mode in found["seconds"]
        ]
        made.append(Panel(_title(document, name), "tokens of the prompt", "ms to the first token", lines, True, True))
    return made
