"""What some commands share: bars for what takes long, sentences and warnings, one namespace by its id."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvstore.cli.app import console, namespace_ids, output, plain
from kvstore.errors import KVStoreError
from kvstore.sizes import format_size
from kvstore.store import Store, unavailable

__all__ = [
    "DryRunOption",
    "PrefixOption",
    "Told",
    "bar",
    "beginning",
    "one_namespace",
    "plain",
    "say",
    "stages",
    "unseen",
    "warn",
]

_EVERY_S = 0.1

_SHOWN = 20
"""Problems that are listed for people; --json has more."""

Told: TypeAlias = Callable[[int, int], None]
ToldStage: TypeAlias = Callable[[str, int, int], None]

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
PrefixOption = Annotated[
    str | None, typer.Option("--namespace", metavar="ID", help="Only namespaces whose id begins with this.")
]


class _Speed(ProgressColumn):
    """In the units of all other speeds; rich's own column counts by thousands."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("?" if speed is None else f"{format_size(speed)}/s", style="progress.data.speed")


@contextmanager
def bar(text: str, *, quiet: bool = False) -> Iterator[Told]:
    """A bar on stderr for bytes done of bytes in all, when that is a terminal."""
    columns = (TextColumn(text), BarColumn(), DownloadColumn(binary_units=True), _Speed())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=unseen(quiet)) as progress:
        task = progress.add_task(text, total=None)
        drawn = 0.0

        def told(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn > _EVERY_S or done >= total:
                drawn = now
                progress.update(task, completed=done, total=total)

        yield told


@contextmanager
def stages(texts: Mapping[str, str], *, quiet: bool = False) -> Iterator[ToldStage]:
    """A bar on stderr for each stage of some work, when that is a terminal; texts: what each stage does.

    Where nobody knows how much there is (a total of 0), the bar moves to and fro beside what was counted.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[far]:>5}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=unseen(quiet)) as progress:
        tasks = {name: progress.add_task(text, total=None, visible=False, far="") for name, text in texts.items()}
        drawn: dict[str, float] = {}

        def told(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if now - drawn.get(stage, 0.0) > _EVERY_S or 0 < total <= done:
                drawn[stage] = now
                far = f"{100 * done // total} %" if total else f"{done:,}"
                progress.update(tasks[stage], completed=done, total=total or None, visible=True, far=far)

        yield told


def unseen(quiet: bool) -> bool:
    """Whether a bar is for nobody. FORCE_COLOR makes rich take a file for a terminal, where a bar is only noise."""
    return quiet or not (console.is_terminal and sys.stderr.isatty())


def beginning(prefix: str | None) -> str:
    """What ids of namespaces shall begin with, nothing for all of them; raises KVStoreError.

    Nothing is no beginning that anybody would write: it is a variable that was not set.
    """
    if prefix == "":
        raise KVStoreError("--namespace is empty; `kvstore ls --by-namespace` shows the ids that it can name")
    return prefix or ""


def one_namespace(store: Store, prefix: str, otherwise: str = "") -> str:
    """The id of the only namespace that begins with prefix; raises KVStoreError. otherwise: see namespace_ids."""
    beginning(prefix)
    try:
        found = namespace_ids(store, prefix, otherwise)
    except OSError as error:
        raise unavailable(store.path, error) from error
    if len(found) > 1:
        raise KVStoreError(f"{len(found)} namespaces begin with {prefix!r}; write more of the one you mean")
    return found[0]


def say(lines: Iterable[str]) -> None:
    """Sentences for people, on stdout."""
    for line in lines:
        output().print(plain(line, keep="\n\t"), highlight=False, soft_wrap=True, markup=False)


def warn(problems: list[str]) -> None:
    """What went wrong on the way, on stderr, so that it is seen beside --json too."""
    for problem in problems[:_SHOWN]:
        console.print(f"kvstore: {plain(problem)}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    if len(problems) > _SHOWN:
        console.print(f"kvstore: … and more; --json lists {len(problems):,}", style="yellow", highlight=False)
