"""docs/man/kvstore.1 and the table of cache flags in docs/commands.md, made of the command line itself: `make man`.

One page for all commands: none has more than a handful of options, and a reader who searches for a flag finds it
wherever it belongs. The page is committed, so that whoever packages kvstore needs nothing but the source tree, and the
wheel carries it to share/man/man1. Flags of mlx-lm are not in it: the page would depend on the release that happened
to be installed where it was made.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import kvstore.cli
from kvstore._version import __version__
from kvstore.cli.adapters import adapter_commands, parser_of, summary
from kvstore.cli.app import app
from man_text import ROOT_SECTIONS, TAIL_SECTIONS, literal, paragraphs, roff, tagged
from page import markers, put

__all__ = ["flags_table", "main", "page"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "man" / "kvstore.1"
FLAGS_PAGE = DOCS / "commands.md"
FLAGS = markers("cache-flags")

ENGINES = {"serve": "mlx_lm.server", "generate": "mlx_lm.generate", "chat": "mlx_lm.chat"}


def page() -> str:
    """The whole page, in man(7)'s macros."""
    lines = [
        r".\" Made by tools/man_page.py of the command line; run `make man` after changing that.",
        f'.TH KVSTORE 1 "" "kvstore {__version__}" "User Commands"',
        *ROOT_SECTIONS,
        ".SH COMMANDS",
    ]
    for name, command in sorted(_store_commands().items()):
        lines += _store_command(name, command)
    lines += [
        ".SH COMMANDS OF THE ENGINE",
        *paragraphs("These need mlx-lm: `pip install 'kvstore-llm[mlx]'`."),
    ]
    for entry in adapter_commands():
        lines += _adapter_command(entry.name, summary(entry))
    lines += [
        ".SH CACHE FLAGS",
        *paragraphs(
            "Of `kvstore serve`, `generate` and `chat`, beside all flags of the mlx-lm command of that name, which "
            "`--help` lists. Without `--kv-cache-dir` each is exactly mlx-lm's command."
        ),
        *_arguments(_cache_flags()),
        *TAIL_SECTIONS,
    ]
    return "\n".join(lines) + "\n"


def _cache_flags() -> argparse.ArgumentParser:
    parser = parser_of("serve", engine_flags=False)
    assert parser is not None
    return parser


def flags_table() -> str:
    """The cache flags with what `--help` says of each, as a table in Markdown."""
    rows = ["| flag | |", "|---|---|"]
    for action in _shown(_cache_flags()):
        name = str(action.metavar or action.dest).upper()
        value = "" if action.nargs == 0 else f" [{name}]" if action.nargs == "?" else f" {name}"
        text = (action.help or "").replace("%%", "%").replace("|", r"\|")
        rows.append(f"| `{action.option_strings[0]}{value}` | {text} |")
    return "\n".join(rows) + "\n"


def _store_commands() -> dict[str, Any]:
    for path in Path(kvstore.cli.__file__).parent.glob("[a-z]*.py"):
        importlib.import_module(f"kvstore.cli.{path.stem}")  # which registers its command
    command: Any = typer.main.get_command(app)
    return dict(command.commands)


def _store_command(name: str, command: Any) -> Iterator[str]:
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    options = [each for each in command.params if each.opts[0].startswith("-")]
    yield _heading(name, *(_placeholder(each) for each in arguments), *(["[options]"] if options else []))
    yield from paragraphs(command.help)
    for each in arguments:
        yield from tagged(rf"\fI{roff(each.metavar.strip('[]'))}\fR", _help(each))
    for each in options:
        yield from tagged(", ".join(literal(flag) for flag in each.opts) + _value(each), _help(each))
    if command.epilog:
        yield from paragraphs(command.epilog)


def _placeholder(argument: Any) -> str:
    metavar = str(argument.metavar)
    return metavar if argument.required or metavar.startswith("[") else f"[{metavar}]"


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    kind = option.type_descriptor if hasattr(option, "type_descriptor") else option.type  # typer's own, or click's
    choices = getattr(kind, "choices", None)
    if choices:
        return " " + "|".join(literal(str(getattr(each, "value", each))) for each in choices)
    assert option.metavar, f"{option.opts[0]} does not say what it takes"
    return rf" \fI{roff(option.metavar)}\fR"


def _help(parameter: Any) -> str:
    default = parameter.default
    said = not parameter.show_default or "default:" in parameter.help
    if said or default in {None, False, ""}:
        return str(parameter.help)
    return f"{parameter.help} Default: {getattr(default, 'value', default)}."


def _adapter_command(name: str, about: str) -> Iterator[str]:
    yield _heading(name, *(["[DIR]"] if name not in ENGINES else []), "[options]")
    if name in ENGINES:
        yield from paragraphs(f"{about} It takes every flag of {ENGINES[name]}, and those under CACHE FLAGS.")
        return
    yield from paragraphs(about)
    parser = parser_of(name, engine_flags=False)
    assert parser is not None, f"the adapter of `kvstore {name}` has no parser to show"
    yield from _arguments(parser)
    if parser.epilog:
        yield from paragraphs(parser.epilog)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in _shown(parser):
        name = str(action.metavar or action.dest).upper()
        value = "" if action.nargs == 0 else rf"[\fI{roff(name)}\fR]" if action.nargs == "?" else rf"\fI{roff(name)}\fR"
        flags = ", ".join(literal(flag) for flag in action.option_strings)
        text = (action.help or "").replace("%%", "%")
        yield from tagged(f"{flags} {value}".strip(), text if text.endswith(".") else f"{text}.")


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of an argparse parser, but --help."""
    actions = parser._actions  # noqa: SLF001 - argparse has no other way to ask
    return [each for each in actions if "--help" not in each.option_strings and each.help != argparse.SUPPRESS]


def _heading(name: str, *rest: str) -> str:
    return f'.SS "{roff(" ".join(["kvstore", name, *rest]))}"'


def main() -> int:
    """Write both, or with --check say whether the written page is as the command line."""
    parser = argparse.ArgumentParser(prog="man_page.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is another")
    options = parser.parse_args()
    text = page()
    if options.check:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'as the command line' if same else 'old: run make man'}")
        return int(not same)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0 if put(FLAGS_PAGE, FLAGS, flags_table()) else 1


if __name__ == "__main__":
    sys.exit(main())
