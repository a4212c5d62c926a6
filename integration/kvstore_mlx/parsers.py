"""The flags of serve, generate and chat without mlx-lm, for shell completion and the man page.

mlx-lm's own flags are read from its source. To import it takes a second and more, and on some machines a GPU; a key
press must not cost that.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvstore_mlx.flags import CacheArguments

__all__ = ["parser"]

_ENGINES = {"serve": "server", "generate": "generate", "chat": "chat"}


def parser(command: str, *, engine_flags: bool = True) -> argparse.ArgumentParser:
    """The parser of one command: kvstore's flags, and mlx-lm's when asked for and when it is installed."""
    engine = _ENGINES[command]
    made = argparse.ArgumentParser(f"kvstore {command}")
    if engine_flags:
        for flags, more in _engine_flags(engine):
            made.add_argument(*flags, **more)
    CacheArguments.add_to(made, f"mlx_lm.{engine}")
    return made


def _engine_flags(module: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The literal parts of each add_argument of a module of mlx_lm; what is computed is not needed to complete."""
    for call in _calls(module):
        flags = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if not flags or not all(flag.startswith("-") for flag in flags):
            continue
        more: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg in {"action", "choices", "help", "nargs"}:
                try:
                    more[keyword.arg] = ast.literal_eval(keyword.value)
                except ValueError:
                    continue
        yield flags, more


def _calls(module: str) -> Iterator[ast.Call]:
    """The calls of add_argument, in order; none when mlx-lm is not installed, or its source is not there."""
    spec = find_spec("mlx_lm")  # finding a package that is not inside another imports nothing
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            tree = ast.parse((Path(folder) / f"{module}.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                yield node
