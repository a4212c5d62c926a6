"""docs/commands.md names every command of the store and every one of its options."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import typer

from kvstore.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
MODULES = sorted(path.stem for path in (PAGE.parents[1] / "kvstore" / "cli").glob("*.py"))
for module in MODULES:
    importlib.import_module(f"kvstore.cli.{module}")  # which registers its command
COMMANDS = typer.main.get_command(app).commands


def rows() -> dict[str, str]:
    found = re.findall(r"^\| `kvstore (\w+)[^|]*\|[^|]*\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    return dict(found)


def test_every_command_has_a_row():
    assert set(COMMANDS) <= set(rows())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_named(name):
    options = {option for each in COMMANDS[name].params for option in each.opts if option.startswith("--")}
    assert set(re.findall(r"--[\w-]+", rows()[name])) == options - {"--json"}
