"""Commands that an engine adapter brings, listed, described and completed without importing the engine.

Each is an entry point of the group ``kvstore.commands``: a function of the command line's words that returns an exit
code, and parses its own flags. Its module may have ``parser(command, engine_flags=True)``, the argparse parser of its
commands made without the engine; completion and the man page ask it what there is. engine_flags: with those of the
engine itself, as far as they are known.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

__all__ = [
    "Completion",
    "adapter_commands",
    "add_adapter_commands",
    "completions",
    "parser_of",
    "summary",
]

_GROUP = "kvstore.commands"


@dataclass(frozen=True)
class Completion:
    """One word that may come next, with what it is for; the attributes that typer asks of one."""

    value: str
    help: str | None = None
    type: str = "plain"


class _Command(TyperCommand):
    """A command that parses its own flags. Typer only sees words, so it is told here what may follow them."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The flags, and the values of a flag that has some to choose from; nothing lets the shell offer files."""
        try:
            parser = parser_of(self.name or "")
        except Exception:
            # A shell that waits for words has no use for a traceback.
            parser = None
        return [] if parser is None else list(completions(parser, ctx.args, incomplete))


def adapter_commands() -> list[EntryPoint]:
    """The commands of all adapters that are installed, by name."""
    return sorted(entry_points(group=_GROUP))


def parser_of(command: str, *, engine_flags: bool = True) -> argparse.ArgumentParser | None:
    """The parser of an adapter's command, or None when its adapter has none to show; see the module."""
    for entry in entry_points(group=_GROUP, name=command):
        module = importlib.import_module(entry.module)
        make: Callable[..., argparse.ArgumentParser] | None = getattr(module, "parser", None)
        if make is not None:
            return make(command, engine_flags=engine_flags)
    return None


def completions(parser: argparse.ArgumentParser, words: Sequence[str], incomplete: str) -> Iterator[Completion]:
    """What may come after words and begins with incomplete."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001 - argparse has no other way to ask
    # Shells may hand over --flag=value as three words.
    before = [word for word in words if word != "="]
    last = actions.get(before[-1]) if before else None
    if incomplete.startswith("-"):
        for flag, action in actions.items():
            if flag.startswith(incomplete) and action.help != argparse.SUPPRESS:
                yield Completion(flag, action.help)
    elif last is not None and last.nargs != 0:
        for choice in last.choices or ():
            if str(choice).startswith(incomplete):
                yield Completion(str(choice))


def summary(entry: EntryPoint) -> str:
    """The first sentence of an adapter command's docstring, read and not imported: engines take a second to import."""
    module, _, function = entry.value.partition(":")
    with suppress(ImportError, OSError, SyntaxError, ValueError):
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and node.name == function and (text := ast.get_docstring(node)):
                    return f"{text.partition('; ')[0].rstrip('.')}."
    return f"Provided by {module.partition('.')[0]}."


def add_adapter_commands(app: typer.Typer, missing: Callable[[str], None]) -> None:
    """Add them to the program. missing is told the sentence about an adapter whose engine is not installed."""
    for entry in adapter_commands():
        _add(app, entry, missing)


def _add(app: typer.Typer, entry: EntryPoint, missing: Callable[[str], None]) -> None:
    """It is imported only when it runs, or is completed."""

    def run(context: typer.Context) -> None:
        try:
            command = entry.load()
        except ImportError as error:
            missing(
                f"`kvstore {entry.name}` needs the {error.name} package; "
                "install it with: pip install 'kvstore-llm[mlx]'"
            )
            raise typer.Exit(1) from error
        raise typer.Exit(command(list(context.args)))

    app.command(
        entry.name,
        cls=_Command,
        help=summary(entry),
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(run)
