"""How the demo talks to people: what it is doing, the table, what went wrong."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo_report import Case, Problem, table
from demo_servers import tail

__all__ = ["Steps", "show", "steps", "tell"]

_LOG_LINES = 20
_WIDTH = 120


class Steps(Protocol):
    """Where the demo is."""

    def begin(self, text: str) -> None:
        """Something starts that takes a while."""

    def done(self, text: str) -> None:
        """One of the measurements is made."""


class _Bar:
    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def begin(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def done(self, _text: str) -> None:
        self._bar.advance(self._task)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def begin(self, text: str) -> None:
        """Nothing: what is done is enough for a log."""

    def done(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"{elapsed:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def steps(console: Console, total: int) -> Iterator[Steps]:
    """A bar on a terminal, a line for each measurement elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar, total)


def show(result: Mapping[str, Any], cases: Mapping[str, Case], *, as_json: bool) -> None:
    """The result on stdout."""
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)
    console.print(table(cases))
    console.print(_conditions(result["conditions"]), style="dim")


def _conditions(conditions: Mapping[str, Any]) -> str:
    """What the numbers depend on, the most important of it."""
    versions = conditions["versions"]
    blas = f"BLAS {conditions['blas']}" if conditions["blas"] else "no BLAS preloaded"
    return (
        f"Medians of {conditions['repeats']}, {conditions['cores']} cores, {blas}, Python {conditions['python']}, "
        f"mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}. Model load: {conditions['model_load']}. "
        f"Warm-up: {conditions['warm_up']}. Page cache before restart_cold: {conditions['page_cache']}. "
        f"Peak: {conditions['peak_memory']}."
    )


def tell(problems: Sequence[Problem], console: Console) -> None:
    """What went wrong, a sentence each, below the end of each log that it happened in."""
    for log in dict.fromkeys(problem.log for problem in problems if problem.log is not None):
        console.print(f"--- {log}, last {_LOG_LINES} lines", style="dim", highlight=False, markup=False, soft_wrap=True)
        console.print(tail(log, _LOG_LINES), style="dim", highlight=False, markup=False, soft_wrap=True)
    for problem in problems:
        console.print(f"demo: {problem.sentence}", style="red", highlight=False, markup=False, soft_wrap=True)
