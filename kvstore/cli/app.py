"""What the commands share: opening a directory, tables on stderr, JSON on stdout, exit codes, errors as one sentence.

Exit codes: 0 done, 1 it could not be done (one sentence on stderr says why), 2 the command line is wrong. fsck has
codes of its own. A traceback is a bug of ours, never an answer to a mistake.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup

from kvstore._version import __version__
from kvstore.cli.adapters import add_adapter_commands
from kvstore.errors import KVStoreError, NotACacheDirectoryError, SizeError
from kvstore.interpreter import no_full_search_for_cycles
from kvstore.layout import Layout
from kvstore.locations import Place, place_of
from kvstore.store import Store

__all__ = [
    "DIRECTORY_DEFAULT",
    "Command",
    "DirectoryArgument",
    "JsonOption",
    "app",
    "complain",
    "console",
    "counted",
    "main",
    "named",
    "namespace_ids",
    "opened",
    "output",
    "plain",
    "print_json",
    "refuse",
    "writing",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


@contextmanager
def writing(code: int = 1) -> Iterator[None]:
    """Stdout to its last byte: a reader that left (``| head``) had what it wanted, a full disk is a sentence."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE | {errno.EPIPE} or error.filename is not None:
            raise
        # Python must not complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            raise typer.Exit(0) from error
        console.print(f"kvstore: cannot write to stdout: {error.strerror}", style="red", highlight=False)
        raise typer.Exit(code) from error


@contextmanager
def _one_sentence() -> Iterator[None]:
    """A wrong command line is one sentence on one line; typer would draw a box around it, as wide as the terminal."""
    try:
        yield
    except Exception as error:
        # Whatever class of whichever click it is. One of them says nothing but the help.
        message = getattr(error, "format_message", None)
        if message is None or type(error).__name__ == "NoArgsIsHelpError":
            raise
        context = getattr(error, "ctx", None)
        command = "kvstore" if context is None else context.command_path
        said = message()
        # What we say of a value, and a guess at what was meant, need no more words.
        more = "" if said.startswith("Invalid value: ") or said.endswith("?") else f"; see `{command} --help`"
        complain(f"{_reworded(said)}{more}")
        raise typer.Exit(error.exit_code) from error  # type: ignore[attr-defined]


def complain(sentence: str) -> None:
    """Say on stderr why a command is not done."""
    console.print(f"kvstore: {plain(sentence)}", style="red", highlight=False, soft_wrap=True, markup=False)


def _reworded(message: str) -> str:
    """What typer says of a value, without the words of the library that it asks."""
    text = re.sub(r"^Invalid value(?: for '?(.+?)'?)?: ", lambda found: f"{found[1]}: " if found[1] else "", message)
    text = text.replace("Value error, ", "").replace("Input should be", "it should be")
    text = text.replace(", unable to parse string as an integer", "").replace(
        ", unable to parse string as a number", ""
    )
    first = text.split(" ", 1)[0].rstrip(":")
    return (text if first.isupper() and len(first) > 1 else text[:1].lower() + text[1:]).rstrip(".")


class _Untyped:
    """Typer would say of each switch that it is a <bool> and of DIR that it is a <Path>, which helps nobody."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
            elif isinstance(each, TyperArgument):
                each.display_type_rich = _no_type  # type: ignore[method-assign]
        return params


def _no_type(ctx: Any) -> None:
    """What an argument's help says of its type."""


class Command(_Untyped, TyperCommand):
    """A command of kvstore's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does; an option without its value is told of which command it is, for the help to see."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise


class _App(typer.Typer):
    """Makes each command one of ours."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[_Function], _Function]:
        return super().command(*args, **{"cls": Command, **kwargs})


class _Commands(_Untyped, TyperGroup):
    """Typer would end with 1 for a reader that left, with a traceback where stdout is full, and with a box for words
    that it does not know.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with writing(), _one_sentence():
            return super().make_context(*args, **kwargs)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        with writing(), _one_sentence():
            return super().invoke(*args, **kwargs)


class _Output(Console):
    """Rich would end with 1 for a reader that left."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


app = _App(
    name="kvstore",
    cls=_Commands,
    help="A persistent KV cache for LLM engines that is nothing but files.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

console = Console(stderr=True)

_PIPE_WIDTH = 240

DIRECTORY_DEFAULT = "(default: $KVSTORE_DIR, or kvstore/kv among your caches)"


def named(text: str) -> Path:
    """A directory of the command line. An empty name is a variable that was not set, and no name of ``.``."""
    if not text:
        raise typer.BadParameter("the name of the directory is empty")
    return Path(text)


DirectoryArgument = Annotated[
    Path | None,
    typer.Argument(parser=named, metavar="DIR", help=f"The cache directory {DIRECTORY_DEFAULT}.", show_default=False),
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
def opened(directory: Path | None) -> Iterator[Store]:
    """An existing cache directory for one command; every KVStoreError becomes a sentence and exit code 1.

    None looks where kvstore.locations says. What is not there is said with where it was looked for, and why there.
    A command may make millions of small objects, and ends with them: they are not searched for cycles.
    """
    with sentences(), no_full_search_for_cycles(), _existing(place_of(directory)) as store:
        yield store


def _existing(place: Place) -> Store:
    if not os.path.lexists(place.path):
        raise NotACacheDirectoryError(
            f"there is no {place.path} (looked there because {place.why}); check the path, or let "
            "`kvstore serve --kv-cache-dir` make one"
        )
    try:
        return Store.open(place.path, create=False)
    except NotACacheDirectoryError as error:
        refuse(place, error)


def refuse(place: Place, error: NotACacheDirectoryError) -> NoReturn:
    """Raise what is wrong with a place, and why that one was looked at, unless the command line names it."""
    if place.source == "given":
        raise error
    raise NotACacheDirectoryError(f"{error} (looked there because {place.why})") from error


@contextmanager
def sentences() -> Iterator[None]:
    """Turn the errors that are made for people into one sentence on stderr and exit code 1 (2: a wrong size or age)."""
    try:
        yield
    except KVStoreError as error:
        complain(str(error))
        raise typer.Exit(2 if isinstance(error, SizeError) else 1) from error


def plain(text: str, keep: str = "") -> str:
    """Text from a file or a name that anybody may have made: nothing in it that a terminal would obey."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in text)


def output() -> Console:
    """Where data for people goes: stdout. Wide when it is not a terminal, so that a pipe gets whole rows."""
    return _Output(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: ``1 node``, ``1,200 nodes``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def namespace_ids(store: Store, prefix: str, otherwise: str = "") -> list[str]:
    """Ids of the namespaces that begin with prefix; raises KVStoreError when there is none, and OSError.

    otherwise: what to say that there is, where there is no namespace at all.
    """
    try:
        names = sorted(name for name in os.listdir(store.context.layout.nodes) if Layout.is_namespace_id(name))
    except FileNotFoundError:  # a copy leaves out folders that are empty
        names = []
    if otherwise and not names:
        raise KVStoreError(f"{store.path} holds no conversation yet, so there is {otherwise}")
    found = [name for name in names if name.startswith(prefix.lower())]
    if not found:
        raise KVStoreError(f"no namespace begins with {prefix!r}; `kvstore ls` shows what there is")
    return found


def print_json(document: Any) -> None:
    """One JSON document on stdout, for programs; escaped where its encoding, or any, lacks a character."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = json.dumps(document, indent=2)
    typer.echo(text)


def _tolerate() -> None:
    """Let stdout write ? for what its encoding lacks, in names of files and models; where it is closed, nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Entry point of the console script."""
    # Importing a command module registers it, and only here.
    from kvstore.cli import clear, du, fsck, gc, ls, merge, quota, repack, report, show, stats, top, tree, why  # noqa: F401, PLC0415

    add_adapter_commands(app, complain)
    _tolerate()
    app()
