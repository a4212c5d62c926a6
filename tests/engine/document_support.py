"""Code in README and docs: what of it is there, and whether the commands and flags that it names exist.

A fenced block says what it is. ``sh`` and ``python`` are run (see desk_support); ``json``, ``yaml`` and ``toml`` are
parsed; the others are shown. ``<!-- not run: REASON -->`` in the line above a block keeps it from being run; what it
names is checked all the same. Code that is only indented says nothing, so there is none.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import dedent

import typer
import yaml

import kvstore.cli
from kvstore.cli.adapters import adapter_commands, parser_of
from kvstore.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

RUN = {"sh", "python"}
PARSED = {"json", "yaml", "toml"}
SHOWN = {"text", "console", "mermaid", "diff"}

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*(.*?)\s*$")
_NOT_RUN = re.compile(r"^\s*<!-- not run: (.+?) -->$")
_CONTAINER = re.compile(r"^(?:[-*+] |\d+[.)] |!!! |\?\?\?\+? |=== |\[\^)")


@dataclass
class Block:
    """A fenced block of a page. line: of its first line of code. follows: the run block right above, if any."""

    page: Path
    line: int
    language: str
    code: str
    reason: str = ""
    follows: Block | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and not self.reason


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order; AssertionError where one does not end."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    at, above = 0, ""
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if not opening:
            above = lines[at] if lines[at].strip() else above
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == opening[2]), None)
        assert end is not None, f"{page.name}:{at + 1} opens a block that does not end"
        indent = " " * len(opening[1])
        code = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end]) + "\n"
        reason = _NOT_RUN.match(above)
        follows = found[-1] if found and found[-1].runs and not above else None
        language = opening[3].split(" ")[0].strip("{.}")
        found.append(Block(page, at + 2, language, code, reason[1] if reason else "", follows))
        at, above = end + 1, ""
    return found


def indented_code(page: Path) -> list[int]:
    """Lines where code begins that is only indented: not in a fence, a list, or a box of the site."""
    found, fence, inside, blank = [], "", False, True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        opening = _FENCE.match(line)
        if opening and (not fence or line.strip() == fence):
            fence = "" if fence else opening[2]
        elif not fence:
            if line.strip() and not line.startswith(" "):
                inside = bool(_CONTAINER.match(line))
            if line.startswith("    ") and blank and not inside:
                found.append(number)
            blank = not line.strip()
    return found


def parse(block: Block) -> object:
    """What a block of data holds; ValueError when it is not what it says."""
    if block.language == "json":
        return json.loads(block.code)
    return tomllib.loads(block.code) if block.language == "toml" else list(yaml.safe_load_all(block.code))


@cache
def flags() -> dict[str, set[str]]:
    """The flags of each command of kvstore, with those of the engine."""
    for path in Path(kvstore.cli.__file__).parent.glob("[a-z]*.py"):
        importlib.import_module(f"kvstore.cli.{path.stem}")
    root = typer.main.get_command(app)
    found = {name: {opt for each in command.params for opt in each.opts} for name, command in root.commands.items()}
    found[""] = {opt for each in root.params for opt in each.opts}
    for entry in adapter_commands():
        parser = parser_of(entry.name)
        assert parser is not None
        found[entry.name] = {flag for action in parser._actions for flag in action.option_strings}
    return {name: {*options, "--help"} for name, options in found.items()}


def unknown(words: list[str]) -> str:
    """What of a command line of kvstore does not exist; empty when all does. It ends at a pipe or the like."""
    rest = words[1:]
    command = rest.pop(0) if rest and re.fullmatch(r"[a-z]+", rest[0]) else ""
    if command not in flags():
        return f"there is no `kvstore {command}`"
    for word in rest:
        if word in {"|", ">", ">>", "&&", "||", ";", "&", "<", "2>"}:
            break
        flag = word.partition("=")[0].rstrip("…")
        if flag.startswith("-") and flag != "-" and not word.endswith("…") and flag not in flags()[command]:
            return f"`kvstore {command}` has no {flag}"
    return ""


def shown_in(block: Block) -> Iterator[list[str]]:
    """The command lines of kvstore in a block that is only shown: a transcript, or the file of a service."""
    for found in re.finditer(r"(?:^|[\s/])(kvstore [a-z]+(?: .*)?)$", block.code, re.MULTILINE):
        yield found[1].split()


def named_in(block: Block) -> Iterator[list[str]]:
    """The command lines of a block of shell, word by word."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for at, word in enumerate(words):
            if word.rpartition("(")[2] in {"kvstore", "python"}:
                yield words[at:]


def named_in_prose(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Each `kvstore …` of a page's text, with its line."""
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^( *)(`{3,}|~{3,})[^`]*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
    text = fenced.sub(lambda found: "\n" * found[0].count("\n"), text)
    for found in re.finditer(r"`(kvstore (?:[a-z-]|…)[^`]*)`", text):
        words = found[1].replace("\\|", "|").replace("[", " ").replace("]", " ").split()
        yield text.count("\n", 0, found.start()) + 1, [word.strip("'\"") for word in words]


def unknown_to_tool(words: list[str]) -> str:
    """What of `python tools/….py …` does not exist, by its own --help."""
    script, *rest = words[1:]
    if not (ROOT / script).is_file():
        return f"there is no {script}"
    sub = [rest[0]] if rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]) else []
    asked = subprocess.run(
        [sys.executable, ROOT / script, *sub, "--help"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if asked.returncode != 0:
        return f"{script} {' '.join(sub)} --help ends with {asked.returncode}: {asked.stderr}"
    missing = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in asked.stdout.split()]
    missing = [word for word in missing if not re.search(rf"{re.escape(word)}\b", asked.stdout)]
    return f"{script} has no {', '.join(missing)}" if missing else ""


def first_words(text: str) -> set[str]:
    """What lines begin with, as far as it is words: no number, no name of a file, no drawing."""
    starts = (line.strip().split(" ")[0].rstrip(":,.") for line in text.splitlines() if line.strip())
    return {word for word in starts if re.fullmatch(r"[A-Za-z]{2,}", word)}


def addresses(document: object) -> set[str]:
    """All addresses of a server of ours in a document."""
    return set(re.findall(r"http://(?:127\.0\.0\.1|localhost):8080[\w/]*", json.dumps(document, default=str)))


def keys(document: object) -> set[str]:
    """All keys of a document, however deep."""
    if isinstance(document, dict):
        return set(document).union(*(keys(value) for value in document.values()))
    return set().union(*(keys(value) for value in document)) if isinstance(document, list) else set()


def python_of(block: Block) -> ast.Module:
    """The code of a block of Python, with the page's lines in tracebacks."""
    return ast.increment_lineno(ast.parse(dedent(block.code), block.name), block.line - 1)
