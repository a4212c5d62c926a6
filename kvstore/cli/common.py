"""What some commands share: a bar for long copies, sentences and warnings, one namespace by its id."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kvstore.cli.app import console, namespace_ids, output, plain
from kvstore.errors import KVStoreError
from kvstore.store import Store, unavailable

__all__ = ["DryRunOption", "PrefixOption", "Told", "bar", "beginning", "one_namespace", "plain", "say", "warn"]

_EVERY_S = 0.1

_SHOWN = 20
"""Problems that are listed for people; --json has more."""

Told: TypeAlias = Callable[[int, int], None]

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
PrefixOption = Annotated[
    str | None, typer.Option("--namespace", metavar="PREFIX", help="Only namespaces whose id begins with this.")
]


@contextmanager
def bar(text: str) -> Iterator[Told]:
    """A bar on stderr for bytes done of bytes in all, when that is a terminal."""
    columns = (TextColumn(text), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(text, total=None)
        drawn = 0.0

        def told(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn > _EVERY_S or done >= total:
                drawn = now
                progress.update(task, completed=done, total=total)

        yield told


def beginning(prefix: str | None) -> str:
    """What ids of namespaces shall begin with, nothing for all of them; raises KVStoreError.

    Nothing is no beginning that anybody would write: it is a variable that was not set.
    """
    if prefix == "":
        raise KVStoreError("--namespace is empty; `kvstore ls --by-namespace` shows the ids that it can name")
    return prefix or ""


def one_namespace(store: Store, prefix: str) -> str:
    """The id of the only namespace that begins with prefix; raises KVStoreError."""
    beginning(prefix)
    try:
        found = namespace_ids(store, prefix)
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
