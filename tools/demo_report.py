"""What the demo concludes from its measurements: medians, ratios, what went wrong, the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

from rich.table import Table

__all__ = ["CASES", "Case", "Problem", "Run", "check", "document", "ratios", "table"]

CASES = ("disabled", "first_write", "repeat", "appended_turn", "branch", "restart", "restart_cold")
SAME_TOKENS = ("disabled", "first_write", "repeat", "restart", "restart_cold")
"""These send the same request and must get the same answer."""

RESTART_REUSE_AT_LEAST = 0.95
RESTART_TTFT_AT_MOST = 1 / 40
FIRST_WRITE_TTFT_AT_MOST = 1.05


@dataclass(frozen=True)
class Run:
    """One measurement. source: where reused tokens came from, None without a cache directory. log: the server's."""

    ttft_s: float
    wall_s: float
    prompt_tokens: int
    reused_tokens: int
    restore_ms: float | None
    written_mib: float
    peak_memory_mib: float | None
    output_ids: list[int]
    source: str | None = None
    read: str | None = None
    page_cache: str | None = None
    log: Path | None = None


@dataclass(frozen=True)
class Case:
    """All measurements of one case."""

    name: str
    runs: Sequence[Run]

    def middle(self, value: Callable[[Run], float | None]) -> float | None:
        """The median of what was measured."""
        values = [found for run in self.runs if (found := value(run)) is not None]
        return median(values) if values else None

    @property
    def ttft_s(self) -> float:
        """Median seconds to the first piece of text."""
        return median(run.ttft_s for run in self.runs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the request."""
        return median_low([run.prompt_tokens for run in self.runs])

    @property
    def reused_tokens(self) -> int:
        """Median tokens that were not computed."""
        return median_low([run.reused_tokens for run in self.runs])


class Problem(NamedTuple):
    """One sentence about what went wrong, and the log of the server that it happened in."""

    sentence: str
    log: Path | None


def check(cases: Mapping[str, Case]) -> list[Problem]:
    """Everything that the measurements must show and do not."""
    disabled, first_write, restart = (cases[name] for name in ("disabled", "first_write", "restart"))
    problems = [_other_tokens(cases[name], disabled.runs[0].output_ids) for name in SAME_TOKENS]
    least = min(restart.runs, key=lambda run: run.reused_tokens / run.prompt_tokens)
    share = least.reused_tokens / least.prompt_tokens
    if share < RESTART_REUSE_AT_LEAST:
        sentence = (
            f"restart reused only {least.reused_tokens} of {least.prompt_tokens} prompt tokens ({share:.1%}); "
            f"at least {RESTART_REUSE_AT_LEAST:.0%} were wanted."
        )
        problems.append(Problem(sentence, least.log))
    if restart.ttft_s > disabled.ttft_s * RESTART_TTFT_AT_MOST:
        sentence = (
            f"restart took {restart.ttft_s:.3f} s to the first token, 1/{disabled.ttft_s / restart.ttft_s:.1f} of "
            f"disabled's {disabled.ttft_s:.3f} s; at most 1/{1 / RESTART_TTFT_AT_MOST:.0f} was wanted."
        )
        problems.append(Problem(sentence, restart.runs[-1].log))
    if first_write.ttft_s > disabled.ttft_s * FIRST_WRITE_TTFT_AT_MOST:
        sentence = (
            f"first_write took {first_write.ttft_s:.3f} s to the first token, "
            f"{first_write.ttft_s / disabled.ttft_s:.3f} times disabled's {disabled.ttft_s:.3f} s; "
            f"at most {FIRST_WRITE_TTFT_AT_MOST} times was wanted."
        )
        problems.append(Problem(sentence, first_write.runs[-1].log))
    return [problem for problem in problems if problem is not None]


def _other_tokens(case: Case, expected: list[int]) -> Problem | None:
    for number, run in enumerate(case.runs, 1):
        ids = run.output_ids
        if ids != expected:
            both = min(len(ids), len(expected))
            at = next((index for index in range(both) if ids[index] != expected[index]), both)
            sentence = f"{case.name} gave other output tokens than disabled (repeat {number}, from token {at + 1} on)."
            return Problem(sentence, run.log)
    return None


def ratios(cases: Mapping[str, Case]) -> dict[str, float]:
    """Every case's time to the first token as a part of disabled's, and the share of tokens that a restart reuses."""
    base = cases["disabled"].ttft_s
    found = {f"{name}_ttft_to_disabled": cases[name].ttft_s / base for name in CASES[1:]}
    restart = cases["restart"]
    return {**found, "restart_reused_share": restart.reused_tokens / restart.prompt_tokens}


def document(cases: Mapping[str, Case], conditions: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """What is written as JSON: medians of each case, its runs, and under which conditions they were measured."""
    return {
        "cases": [_case_document(case) for case in cases.values()],
        "ratios": ratios(cases),
        "conditions": dict(conditions),
        "problems": [problem.sentence for problem in problems],
    }


def _case_document(case: Case) -> dict[str, Any]:
    runs = [{name: value for name, value in asdict(run).items() if name != "log"} for run in case.runs]
    return {
        "name": case.name,
        "ttft_s": case.ttft_s,
        "wall_s": case.middle(lambda run: run.wall_s),
        "prompt_tokens": case.prompt_tokens,
        "reused_tokens": case.reused_tokens,
        "source": case.runs[-1].source,
        "restore_ms": case.middle(lambda run: run.restore_ms),
        "written_mib": case.middle(lambda run: run.written_mib),
        "peak_memory_mib": case.middle(lambda run: run.peak_memory_mib),
        "output_ids": case.runs[0].output_ids,
        "runs": runs,
    }


_COLUMNS: tuple[tuple[str, str], ...] = (
    ("case", "left"),
    ("reused tokens", "right"),
    ("from", "left"),
    ("TTFT s", "right"),
    ("of disabled", "right"),
    ("wall s", "right"),
    ("restore ms", "right"),
    ("written MiB", "right"),
    ("peak MiB", "right"),
)


def table(cases: Mapping[str, Case]) -> Table:
    """The medians for people."""
    result = Table(header_style="bold")
    for name, justify in _COLUMNS:
        result.add_column(name, justify="left" if justify == "left" else "right", no_wrap=True)
    base = cases["disabled"].ttft_s
    for case in cases.values():
        result.add_row(
            case.name,
            f"{case.reused_tokens:,} of {case.prompt_tokens:,}",
            (case.runs[-1].source or "nothing").replace("nothing", "-"),
            f"{case.ttft_s:.3f}",
            "1" if case.name == "disabled" else _part(case.ttft_s / base),
            _number(case.middle(lambda run: run.wall_s), 2),
            _number(case.middle(lambda run: run.restore_ms), 1),
            _number(case.middle(lambda run: run.written_mib), 1),
            _number(case.middle(lambda run: run.peak_memory_mib), 0),
        )
    return result


def _part(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio > 0.5 else f"1/{1 / ratio:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
