"""Bars of commands that take long, on a real terminal: drawn on stderr, and never on anything else."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from core_support import INFO, open_store, prompt
from gc_support import DAY
from pty_support import Seen, after, plain, run_at
from rich.console import Console
from upkeep_support import forget_tails, grow, later, rest

from kvstore.cli import common

TOKENS = prompt(48)
BAR = "━"

TOMORROW = after("import time", "now = time.time_ns", "time.time_ns = lambda: now() + 3 * 86400 * 10**9")
"""Nothing young is removed, and a file's ctime cannot be set."""

COMMANDS = {
    "gc": (
        ["gc", "{}", "--older-than", "1d"],
        ["looking at files", "reading manifests", "removing"],
        "Removed 3 nodes, 6 blocks",
    ),
    "gc --dry-run": (
        ["gc", "{}", "--older-than", "1d", "--dry-run"],
        ["looking at files", "reading manifests", "adding up"],
        "Would remove 3 nodes, 6 blocks",
    ),
    "fsck": (["fsck", "{}", "--read-data"], ["reading manifests", "reading data"], "Read 6 blocks"),
    "merge": (["merge", "{}", "{other}"], ["copying blocks"], "Copied 3 nodes"),
    "repack": (["repack", "{}", "--older-than", "0s"], ["joining blocks"], "Joined 5 blocks of 2 nodes"),
}
"""For each its words, what is written beside its bars, and what it did."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A conversation of several turns that rests, so that there is something to remove, to copy and to join."""
    root = tmp_path_factory.mktemp("bars")
    with open_store(root / "s") as store:
        grow(store.namespace(INFO), TOKENS, 4, 9, 16, 32, 40, 48)
        forget_tails(store.path)
        rest(store)
    with open_store(root / "other"):
        pass
    return root


@pytest.fixture
def root(filled, tmp_path) -> Path:
    return shutil.copytree(filled, tmp_path / "stores", copy_function=shutil.copy2)


def run(root: Path, command: str, *more: str, terminal: str | None = "err", **env: str) -> Seen:
    words = [word.format(root / "s", other=root / "other") for word in COMMANDS[command][0]]
    return run_at(terminal, *words, *more, program=TOMORROW, env=env)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bar_is_drawn_where_somebody_looks(root, command):
    seen = run(root, command)
    drawn = plain(seen.err)
    assert seen.code == 0, seen
    assert BAR in drawn
    for text in COMMANDS[command][1]:
        assert text in drawn
    # Sentences of what was done and nothing else: no bar, no escape.
    assert COMMANDS[command][2] in seen.out
    assert BAR not in seen.out
    assert "\x1b" not in seen.out


def test_a_speed_has_the_units_of_the_tables(monkeypatch):
    now = [0.0]
    drawn = Console(file=io.StringIO(), force_terminal=True, width=110, get_time=lambda: now[0])
    monkeypatch.setattr(common, "console", drawn)
    monkeypatch.setattr(common, "unseen", lambda quiet: False)
    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with common.bar("copying") as told:
        for second in range(1, 4):
            now[0] = float(second)
            told(second << 20, 4 << 20)
        told(4 << 20, 4 << 20)
    assert "4.0/4.0 MiB 1.5 MiB/s" in plain(drawn.file.getvalue())


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_drawn_where_nobody_looks(root, command):
    # Not even where colours are asked for: a log file is no place for a bar.
    seen = run(root, command, terminal=None, FORCE_COLOR="1")
    assert seen.code == 0, seen
    assert COMMANDS[command][2] in plain(seen.out)
    for text in (BAR, *COMMANDS[command][1]):
        assert text not in seen.err + seen.out


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_drawn_beside_a_document(root, command):
    seen = run(root, command, "--json")
    assert seen.code == 0, seen
    assert BAR not in seen.err
    assert json.loads(seen.out)


@pytest.mark.parametrize("terminal", ["err", None])
@pytest.mark.parametrize("document", [True, False])
def test_clear_only_says_that_it_looks(root, terminal, document):
    more = ["--json"] if document else []
    seen = run_at(terminal, "clear", str(root / "s"), "--all", "--dry-run", *more, env={"FORCE_COLOR": "1"})
    assert seen.code == 0, seen
    assert ("looking at everything" in plain(seen.err)) == (terminal is not None and not document)


def test_bars_end_where_they_ought_to(root):
    """What is told last is all of it, and a bar of bytes counts up."""
    from kvstore.gc import Policy, collect

    told: list[tuple[str, int, int]] = []
    with later(root / "s", 3 * DAY) as store:
        report = collect(store.context, Policy(older_than_ns=10**9), progress=lambda *far: told.append(far))
    assert (report.error, report.nodes) == ("", 3)
    found = {stage: [(done, total) for name, done, total in told if name == stage] for stage, *_ in told}
    assert list(found) == ["files", "manifests", "bytes"]
    assert [total for _, total in found["files"]] == [0] * len(found["files"])
    assert found["files"][-1][0] == 3 + report.blocks
    assert found["manifests"] == [(0, 3), (3, 3)]
    assert found["bytes"] == sorted(found["bytes"])
    assert found["bytes"][0][0] < found["bytes"][-1][0] == found["bytes"][-1][1] == report.freed_bytes
