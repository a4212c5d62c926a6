"""What the tests of merge share."""

from __future__ import annotations

from pathlib import Path

from core_support import INFO, prompt

from kvstore.layout import Layout
from kvstore.manifest import decode

ONE = prompt(40)
TWO = [*ONE[:16], *prompt(12, 1)]
THREE = prompt(20, 2)


def by_end(root: Path) -> dict[int, Path]:
    """KV manifests of the one namespace by the length of their prefix."""
    found = sorted((Layout(root).nodes / INFO.id).rglob("*.kv"))
    return {decode(path.read_bytes()).end: path for path in found}
