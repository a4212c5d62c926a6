"""`bench ttft`: time to the first token with a cache directory and without, of prompts that nobody has seen before.

Two `kvstore serve` processes with the same tiny model stay up, one with a cache directory; each new prompt goes to both
of them, in turns to one or the other first. Then the one with the directory is started anew and asked for the same
prompts: its memory is empty, so what it does not compute comes from files. Before that both are asked for the last
prompts once more: what memory alone saves.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench_breakeven import MODELS, TOKEN_BYTES, model_folder
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, table
from bench_servers import TINY_LLAMA, Answer, Server
from bench_stats import Sample, paired, rotated
from fast_blas import find

__all__ = ["HELP", "configure", "panels", "run", "tables"]

HELP = "time to the first token: first write over disabled, and after a restart"

_WARM_UP = 2
_BEGINNINGS = string.ascii_letters + string.digits
_MOST_PAIRS = len(_BEGINNINGS) - _WARM_UP - 1
_NEW_TOKENS = 4
_LABELS = {
    "disabled": "disabled (mlx_lm.server)",
    "first_write": "first write",
    "control": "disabled, a second server",
    "repeat_disabled": "the same prompt again, disabled",
    "repeat": "the same prompt again",
    "restart": "after a restart",
}
_IN_MEMORY = 5
"""Prompts sent once more, at most: both servers keep the last ten in memory."""
_PAUSE_S = 0.3
"""Between two requests, so that none is charged for what the one before it still has to write."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument("--pairs", type=int, default=15, help="prompts, each sent to both servers (default: 15)")
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="length of a prompt (default: 3000)")
    parser.add_argument("--model", choices=MODELS, default="tiny", help="(default: tiny)")
    parser.add_argument("--control", action="store_true", help="a second server without a directory: the noise")
    parser.add_argument("--restarts", type=int, default=5, help="prompts sent again after a restart (default: 5)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure pairs, then restarts."""
    if not 1 <= options.pairs <= _MOST_PAIRS:
        raise BenchError(f"--pairs must be from 1 to {_MOST_PAIRS}: each prompt begins with a letter of its own")
    document: dict[str, Any] = {
        "command": "ttft",
        "conditions": conditions(options.dir.parent),
        "model": TINY_LLAMA if options.model == "tiny" else {"name": MODELS[options.model]},
        "model_name": options.model,
        "prompt_tokens": options.prompt_tokens,
        "blas": str(find() or "MLX's own"),
        "page_cache": "warm",
    }
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, (options.pairs + _WARM_UP) * options.prompt_tokens * TOKEN_BYTES[options.model])
        other = OtherWork()
        pairs = _Pairs(folder, model_folder(options.model, folder), options.prompt_tokens)
        first, again = pairs.measure(options.pairs, control=options.control)
        restart = pairs.restart(min(options.restarts, options.pairs))
    document["cores_used_by_others"] = other.cores()
    seconds = {name: [answer.first_token for answer in answers] for name, answers in first.items()}
    repeated = {name: [answer.first_token for answer in answers] for name, answers in again.items()}
    seconds["restart"] = [answer.first_token for answer in restart]
    document["seconds"] = {name: Sample.of(values).document() for name, values in seconds.items()}
    document["over_disabled"] = {
        name: paired(values, seconds["disabled"][: len(values)]).document()
        for name, values in seconds.items()
        if name != "disabled"
    }
    for name, values in repeated.items():
        document["seconds"][name] = Sample.of(values).document()
        document["over_disabled"][name] = paired(values, seconds["disabled"][-len(values) :]).document()
    document["cached_tokens_after_restart"] = [answer.cached_tokens for answer in restart]
    return Outcome(document, tables(document))


class _Pairs:
    """The two servers, and the prompts that they were sent."""

    def __init__(self, folder: Path, model: Path, tokens: int) -> None:
        self._folder = folder
        self._model = model
        self._tokens = tokens
        self._rng = random.Random(0)  # noqa: S311 - any letters will do
        self._beginnings = iter(_BEGINNINGS)
        self._prompts: list[str] = []

    def _server(self, name: str) -> Server:
        flags = ["--kv-cache-dir", str(self._folder / "store")] if name == "first_write" else []
        return Server(self._folder / f"{name}.log", self._model, flags)

    def _prompt(self) -> str:
        """Letters whose first one no prompt before had: not even one token of it is in any memory."""
        return next(self._beginnings) + "".join(self._rng.choices(string.ascii_letters, k=self._tokens - 1))

    def measure(self, pairs: int, *, control: bool) -> tuple[dict[str, list[Answer]], dict[str, list[Answer]]]:
        """Answers of each server, prompt by prompt; then of two of them to the last prompts once more."""
        found: dict[str, list[Answer]] = {name: [] for name in ("disabled", "first_write", "control")[: 2 + control]}
        with ExitStack() as stack:
            servers = {name: stack.enter_context(self._server(name)) for name in found}
            for turn in range(-_WARM_UP, pairs):
                prompt = self._prompt()
                asked = {name: _ask(servers[name], prompt) for name in rotated(list(found), turn)}
                if any(answer.cached_tokens for answer in asked.values()):
                    raise BenchError("a prompt that was made for this run was in memory already")
                if turn >= 0:
                    self._prompts.append(prompt)
                    for name, answers in found.items():
                        answers.append(asked[name])
            again: dict[str, list[Answer]] = {"repeat_disabled": [], "repeat": []}
            for prompt in self._prompts[-_IN_MEMORY:]:
                for name, server in zip(again, ("disabled", "first_write"), strict=True):
                    again[name].append(_ask(servers[server], prompt))
            if not all(answer.cached_tokens for answers in again.values() for answer in answers):
                raise BenchError("a prompt that was just answered was in no memory any more")
        return found, again

    def restart(self, prompts: int) -> list[Answer]:
        """Answers of a new server process to the first prompts, after one to a prompt of no interest."""
        with self._server("first_write") as server:
            _ask(server, self._prompt())
            found = [_ask(server, prompt) for prompt in self._prompts[:prompts]]
        missed = sum(not answer.cached_tokens for answer in found)
        if missed:
            raise BenchError(
                f"after its restart the server did not find {missed} of {prompts} prompts; --keep keeps its log"
            )
        return found


def _ask(server: Server, prompt: str) -> Answer:
    answer = server.ask(prompt, _NEW_TOKENS)
    time.sleep(_PAUSE_S)
    return answer


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    rows = []
    for name, measured in document["seconds"].items():
        sample = Sample.of(measured["values"])
        over = document["over_disabled"].get(name)
        rows.append(
            [_LABELS[name], str(sample.n), sample.text(1e3, 1), Sample.of(over["values"]).text(1, 3) if over else ""]
        )
    others = document["cores_used_by_others"]
    made = table(
        f"time to the first token, {document['prompt_tokens']} letters, {MODELS[document.get('model_name', 'tiny')]}",
        ["server", "n", "ms, median (min to max)", "over disabled, paired"],
        rows,
        f"page cache warm, BLAS: {Path(document['blas']).name}, "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """Bars of what a client waits, and the pairs one by one."""
    seconds = {name: Sample.of(each["values"]) for name, each in document["seconds"].items()}
    bars = {_LABELS[name]: sample for name, sample in seconds.items()}
    pairs = [
        Line(_LABELS[name], range(1, seconds[name].n + 1), [value * 1e3 for value in seconds[name].values])
        for name in ("disabled", "first_write", "control")
        if name in seconds
    ]
    return [
        Panel.of_bars("time to the first token", "ms", bars, 1e3),
        Panel("new prompts, one by one", "prompt", "ms", pairs),
    ]
