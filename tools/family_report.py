"""The table of model families, for a terminal and for docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Row", "document", "table"]


@dataclass
class Row:
    """What the table says of a family. checks: for each scenario an empty string, or what is wrong."""

    name: str
    caches: str = ""
    stateful: bool | None = None
    refused: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What differs, in words."""
        return [f"{name}: {problem}" for name, problem in self.checks.items() if problem]

    @property
    def right(self) -> bool:
        """Whether it was cached, and everything was as an uninterrupted run."""
        return not self.problems and not self.refused

    def found(self, prefix: str, outcome: Any) -> None:
        """Add the checks and notes of a family_scenarios.Outcome; a check that failed stays so."""
        for name, problem in outcome.checks.items():
            self.checks[prefix + name] = self.checks.get(prefix + name) or problem
        self.notes += [prefix + note for note in outcome.notes]

    def add(self, other: Row) -> None:
        """Add what another process found of the same family."""
        self.caches, self.stateful, self.refused = other.caches, other.stateful, other.refused
        self.found("", other)


_HEADER = ("family", "caches", "resumes", "result", "kv-bits", "batch of 4", "kept of batches")


def table(rows: Sequence[Row]) -> str:
    """Columns for a terminal."""
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    if row.refused:
        return (row.name, row.caches, "-", f"served without the cache: {row.refused}", "", "", "")
    own = {name: problem for name, problem in row.checks.items() if not name.startswith(("kv-bits", "batch", "kept"))}
    return (
        row.name,
        row.caches,
        {True: "at states", False: "at any token", None: "?"}[row.stateful],
        _result(own),
        ", ".join(_bits(row, bits) for bits in (4, 8)) if "kv-bits" in str([*row.checks, *row.notes]) else "-",
        _batch(row),
        _kept(row),
    )


def _result(checks: Mapping[str, str]) -> str:
    wrong = [f"{name}: {problem}" for name, problem in checks.items() if problem]
    return "; ".join(wrong) or f"identical ({len(checks)})"


def _bits(row: Row, bits: int) -> str:
    checks = {name: problem for name, problem in row.checks.items() if name.startswith(f"kv-bits {bits}")}
    if not checks:
        return f"{bits}: -"
    return f"{bits}: {'differs' if any(checks.values()) else 'identical'}"


def _batch(row: Row) -> str:
    checks = [problem for name, problem in row.checks.items() if name.startswith("batch")]
    if not checks:
        return "-"
    return "differs" if any(checks) else "identical"


def _kept(row: Row) -> str:
    checks = {name: problem for name, problem in row.checks.items() if name.startswith("kept")}
    if not checks:
        return "-"
    if any(checks.values()):
        return "differs"
    labels = [name.removeprefix("kept, ") for name in checks]
    left_out = [label for label in labels if any(note.endswith(f"what is computed {label}") for note in row.notes)]
    return f"not {' or '.join(left_out)}" if left_out else "all"


_BITS = re.compile(r"^(kv-bits \d, )?[^:]*: (mlx-lm's cache in memory gives other bits) \(logits differ by [^)]*\)$")


def _other_bits(note: re.Match[str]) -> str:
    """One note for all branches and sizes of what rounding makes of them."""
    return f"{note[2]} than a run that is cut at its end" + (", with --kv-bits" if note[1] else "")


def document(rows: Sequence[Row], unbuildable: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """docs/models.md."""
    right = sum(row.right for row in rows)
    lines = [_INTRODUCTION.format(right=right, count=len(rows), mlx=versions["mlx"], mlx_lm=versions["mlx-lm"])]
    lines += [f"| {' | '.join(_HEADER)} |", "|" + "---|" * len(_HEADER)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(row))} |" for row in rows]
    lines += ["", "## Not in the table", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in sorted(unbuildable.items())]
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in dict.fromkeys(_BITS.sub(_other_bits, note) for note in row.notes):
            notes.setdefault(note, []).append(row.name)
    if notes:
        lines += ["", "## Notes", ""]
        lines += [f"- {note}: {', '.join(f'`{name}`' for name in names)}." for note, names in sorted(notes.items())]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
# Model families

Generated by `make models` with mlx {mlx} and mlx-lm {mlx_lm} on a CPU: {right} of {count} rows are as an uninterrupted
run. Every module of `mlx_lm.models` with an arguments class is built from it with 2 to 5 layers, each kind of layer
among them, seeded random float32 weights, windows of 32 tokens and chunks of 128, so that a prompt of 300 tokens
rotates and crosses all of them.

**result** counts what gave the same 12 greedy tokens and the same bits of all their logits as an uninterrupted run
whose prefill has the same cuts: without a directory, first write, repeat, restart in a new process, appended turn, a
prompt that leaves another inside a chunk, at a chunk's end, one token before it and one after it, one that leaves the
appended turn, prompts shorter than a chunk; and a control (the first token of the prompt, and what each single cache
holds, change the logits, and the output does not repeat itself). After the restart each prompt runs twice, so that what
was written after a restore is restored too, and the number of restored tokens must be the expected one. **kv-bits**
repeats all of it with caches quantized to 4 and 8 bits. **batch of 4** compares the tokens of four prompts of unequal
lengths in one batch: plain mlx-lm, everything saved, and everything restored. **kept of batches** looks at what memory
and disk have afterwards of those four prompts, and of a prompt that joins while a longer one is answered: each, with
its answer and three more tokens, must have the logits that it has alone, to a thousandth (a batch rounds otherwise).

A prefix that is cut in the middle of a piece of the prefill holds rows of the longer piece. Where a run with a cut at
that token has other last bits, the run that is compared is mlx-lm's own cache in memory, trimmed there (if those are
all that differs); such families are among the notes.

Some families do not mask, in every layer, the padding of a batch: mlx-lm itself then answers otherwise than for each
prompt alone (see the notes). kvstore looks at that when a sequence is padded for the first time, and keeps nothing, in
memory or on disk, that the padding of such a family has reached: "not with longer ones" is of prompts that are filled
up to the longest of a batch, "not beside a longer one" of what is answered behind padding.

Families that resume **at any token** are cut where a prompt differs, from 64 tokens into a chunk on. The others resume
**at states**: chunk borders, the end of a prompt, the end of an answer. Of a model whose rope stretches with the
prompt ("dynamic") nothing is saved of more tokens than its limit, and nothing longer in memory is cut: beyond it rows
depend on where the piece ended that computed them. "-" is what mlx-lm does not do with a family; with --kv-bits it
quantizes entries that are a KVCache, and fails where one is a RotatingKVCache.
"""
