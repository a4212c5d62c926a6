"""Blocks of documents that a tool writes: what stands between two comments, so that no figure is typed by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["markers", "put"]


def markers(name: str) -> re.Pattern[str]:
    """What finds a block with its comments: ``<!-- name: begin …-->`` and ``<!-- name: end -->``."""
    return re.compile(rf"(<!-- {re.escape(name)}: begin[^\n]*-->\n).*?(<!-- {re.escape(name)}: end -->)", re.DOTALL)


def put(page: Path, block: re.Pattern[str], text: str) -> bool:
    """Replace a block of a page; False, and a sentence on stderr, when the page has none."""
    before = page.read_text(encoding="utf-8")
    if not block.search(before):
        print(f"{page} has no markers for the table", file=sys.stderr)
        return False
    page.write_text(block.sub(lambda found: found[1] + text + found[2], before), encoding="utf-8")
    return True
