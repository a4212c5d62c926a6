"""What long tests count, written down where docs/reliability.md's table is made of.

A test counts with pytest's record_property; ``what`` is the row that it belongs to, every other property a number.
``make test`` and ``make soak`` name the folder in KVSTORE_RECORD; without it nothing is written.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from bench_machine import conditions

__all__ = ["Tally", "counted", "record"]


def record(report: pytest.TestReport) -> None:
    """Write down what a test counted, failed or not: a table of what went well only would be worth little."""
    folder = os.environ.get("KVSTORE_RECORD")
    figures = dict(report.user_properties)
    what = figures.pop("what", None)
    if not folder or report.when != "call" or what is None:
        return
    target = "soak" if "soak" in report.keywords else "test"
    document = {
        "test": report.nodeid,
        "what": what,
        "command": f"make {target} TESTS={report.nodeid.partition('::')[0]}",
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        "figures": figures,
        "conditions": {**_conditions(folder), "load_average": list(os.getloadavg())},
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", report.nodeid.removeprefix("tests/")).strip("-")
    (Path(folder) / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


@cache
def _conditions(folder: str) -> dict[str, Any]:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return conditions(Path(folder))


class Tally(dict[str, int]):
    """Histories that ended well and the steps they were made of."""

    def __init__(self) -> None:
        super().__init__(histories=0, steps=0)


def counted(machine: type[RuleBasedStateMachine], tally: Tally) -> type[RuleBasedStateMachine]:
    """The machine, counting."""

    class Counting(machine):
        @invariant()
        def count_a_step(self) -> None:
            tally["steps"] += 1

        def teardown(self) -> None:
            super().teardown()
            tally["histories"] += 1

    return Counting
