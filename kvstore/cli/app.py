"""What the commands share: opening a directory, tables on stderr, JSON on stdout, exit codes, errors as one sentence.

Exit codes: 0 done, 1 it could not be done (one sentence on stderr says why), 2 the command line is wrong. fsck has
codes of its own. A traceback is a bug of ours, never an answer to a mistake.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvstore._version import __version__
from kvstore.errors import KVStoreError
from kvstore.fs import FileSystem
from kvstore.store import Store

__all__ = ["DirectoryArgument", "JsonOption", "app", "console", "main", "opened", "print_json"]

app = typer.Typer(
    name="kvstore",
    help="A persistent KV cache for LLM engines that is nothing but files.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

console = Console(stderr=True)

DirectoryArgument = Annotated[
    Path, typer.Argument(envvar="KVSTORE_DIR", help="The cache directory.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of a table.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A persistent KV cache for LLM engines that is nothing but files."""


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """An existing cache directory for one command; every KVStoreError becomes a sentence and exit code 1."""
    with sentences(), Store.open(directory, create=False, fs=FileSystem()) as store:
        yield store


@contextmanager
def sentences() -> Iterator[None]:
    """Turn the errors that are made for people into one sentence on stderr and exit code 1."""
    try:
        yield
    except KVStoreError as error:
        console.print(f"kvstore: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        raise typer.Exit(1) from error


def print_json(document: Any) -> None:
    """One JSON document on stdout, for programs."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _add_adapter_command(entry: EntryPoint) -> None:
    """A command that an engine adapter provides. It parses its own flags, and is imported only when it runs."""

    def run(context: typer.Context) -> None:
        try:
            command = entry.load()
        except ImportError as error:
            console.print(
                f"kvstore: `kvstore {entry.name}` needs the {error.name} package; "
                "install it with: pip install 'kvstore-llm[mlx]'",
                style="red",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
            raise typer.Exit(1) from error
        raise typer.Exit(command(list(context.args)))

    app.command(
        entry.name,
        help=f"Provided by {entry.value.partition('.')[0]}; see kvstore {entry.name} --help.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(run)


def main() -> None:
    """Entry point of the console script."""
    from kvstore.cli import gc, ls  # noqa: F401, PLC0415 - importing a command module registers it, and only here

    for entry in sorted(entry_points(group="kvstore.commands")):
        _add_adapter_command(entry)
    try:
        app()
    except BrokenPipeError:
        # `kvstore ls | head`: the reader has what it wanted. Python must not complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
