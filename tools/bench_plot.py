"""A benchmark's curves as an SVG or PNG beside its JSON file. matplotlib is optional: without it there is no picture.

What is drawn is described by plain values (Panel, Line), which each benchmark makes of its JSON document; only draw
knows matplotlib. The same document gives the same file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_stats import Sample

__all__ = ["Line", "Panel", "draw"]

_WIDTH, _HEIGHT = 5.0, 3.2
"""Inches of a panel."""

_IN_A_ROW = 2
"""More of them side by side would be too small to read on a page."""


@dataclass(frozen=True)
class Line:
    """One curve. low and high bound a band around it; without them there is none."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @classmethod
    def of(cls, label: str, x: Sequence[float], samples: Sequence[Sample], scale: float = 1) -> Line:
        """Medians, with minimum and maximum as the band."""
        return cls(
            label,
            x,
            [sample.median * scale for sample in samples],
            [sample.low * scale for sample in samples],
            [sample.high * scale for sample in samples],
        )


@dataclass(frozen=True)
class Panel:
    """One picture: curves, or with bars (their names) one bar for each value of its only line.

    mark: a value of x that bars are compared with, drawn as a line across them.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    bars: Sequence[str] = ()
    mark: float | None = None

    @classmethod
    def of_bars(
        cls,
        title: str,
        unit: str,
        samples: Mapping[str, Sample],
        scale: float = 1,
        *,
        log: bool = False,
        mark: float | None = None,
    ) -> Panel:
        """One bar for each sample, by its name."""
        line = Line.of(title, range(len(samples)), list(samples.values()), scale)
        return cls(title, unit, "", [line], log_x=log, bars=list(samples), mark=mark)


def draw(panels: Sequence[Panel], path: Path) -> str | None:
    """Write the panels as what the path ends in, two in a row at most; None when there is nothing to draw.

    Returns a line for people: where the picture is, or why there is none.
    """
    if not panels:
        return None
    try:
        import matplotlib as mpl  # noqa: PLC0415 - optional, and slow to import
        from matplotlib.figure import Figure  # noqa: PLC0415 - as above
    except ImportError:
        return "no plot: matplotlib is not installed (pip install 'kvstore-llm[bench]')"
    # A fixed salt and no date: the same values make the same bytes. Text stays text.
    with mpl.rc_context({"svg.hashsalt": "kvstore", "svg.fonttype": "none", "font.size": 8.0}):
        rows = -(-len(panels) // _IN_A_ROW)
        columns = -(-len(panels) // rows)
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(places, panels, strict=False):
            _fill(axes, panel)
        for axes in places[len(panels) :]:
            axes.set_axis_off()
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        kind = path.suffix[1:]
        figure.savefig(staged, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)
    staged.replace(path)
    return f"plot: {path}"


def _fill(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        if panel.bars:
            axes.barh(range(len(line.y)), line.y, xerr=_errors(line), height=0.6, color="#4c78a8", ecolor="#333333")
            continue
        (drawn,) = axes.plot(line.x, line.y, marker="o" if len(line.x) <= _MARKED else "", markersize=3, linewidth=1.2)
        drawn.set_label(line.label)
        if line.low:
            axes.fill_between(line.x, line.low, line.high, color=drawn.get_color(), alpha=0.15, linewidth=0)
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.bars:
        axes.set_yticks(range(len(panel.bars)), panel.bars)
        axes.invert_yaxis()
        if panel.mark is not None:
            axes.axvline(panel.mark, color="#e45756", linewidth=1)
        if panel.log_x:
            axes.set_xscale("log")
        return
    if panel.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for line in panel.lines for x in line.x})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, linewidth=0.3)
    axes.legend(frameon=False)


_MARKED = 32
"""Points of a line that are marked one by one; of more there would only be a smear."""


def _errors(line: Line) -> list[list[float]] | None:
    if not line.low:
        return None
    return [
        [y - low for y, low in zip(line.y, line.low, strict=True)],
        [high - y for y, high in zip(line.y, line.high, strict=True)],
    ]
