"""Two texts below each other, aligned: what `kvstore why` prints and a server logs with ``--kv-cache-explain``.

What differs is coloured on a terminal. Where there are no colours (a file, a pipe, NO_COLOR) a line of marks says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvstore.differences import Cell, Pair, lines, shown

__all__ = ["drawn", "has_colours"]

_BOTH, _SAVED, _PROMPT = "both    ", "saved   ", "prompt  "

_LEAD_LINES = 2
"""Of what both have in common before they part."""

_MIN_ROOM = 20


def has_colours(screen: Console) -> bool:
    """Whether what is printed there is coloured."""
    return screen.is_terminal and screen.color_system is not None and not screen.no_color


def drawn(before: str, pairs: Sequence[Pair], width: int, *, coloured: bool) -> list[Text]:
    """The end of what two texts have in common, and how each goes on, in lines of at most some width."""
    room = max(_MIN_ROOM, width - len(_PROMPT))
    lead = shown(before)[-_LEAD_LINES * room :]
    rows = [Text(f"{_BOTH}{lead[at : at + room]}", "dim" if coloured else "") for at in range(0, len(lead), room)]
    for line in lines(pairs, room):
        rows += _coloured(line) if coloured else _marked(line)
    return rows


def _coloured(line: Sequence[Cell]) -> list[Text]:
    saved, prompt = Text(_SAVED, "bold"), Text(_PROMPT, "bold")
    for same, run in groupby(line, key=lambda cell: cell.same):
        cells = list(run)
        saved.append("".join(cell.saved for cell in cells), "not bold dim" if same else "not bold red")
        prompt.append("".join(cell.prompt for cell in cells), "not bold dim" if same else "not bold green")
    return [saved, prompt]


def _marked(line: Sequence[Cell]) -> list[Text]:
    rows = [
        _SAVED + "".join(cell.saved for cell in line),
        _PROMPT + "".join(cell.prompt for cell in line),
        " " * len(_PROMPT) + "".join((" " if cell.same else "^") * cell_len(cell.prompt) for cell in line),
    ]
    return [Text(row.rstrip()) for row in rows if row.strip()]
