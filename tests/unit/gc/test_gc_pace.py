"""A server's collection rests between pieces of its work, and never while others wait for the publish lock."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager

import pytest
from core_support import FAST, INFO, open_store, prompt
from gc_support import HOUR, INTERVAL, ahead, check_valid, publish

from kvstore import sweep
from kvstore.gc import Policy, collect, usage
from kvstore.keys import pack_tokens
from kvstore.pacing import paced
from kvstore_mlx.housekeeping import Housekeeping

WORK = 0.002
"""Processor time between two looks at it."""


class Naps:
    """Stands in for processor time, each look at which costs some, and for sleep: naps by the phase they fell into."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.phase = 0.0, "look"
        self.naps: Counter[str] = Counter()
        self.seconds = 0.0
        self.locked = False
        monkeypatch.setattr("kvstore.pacing.time.thread_time", self.look)
        real = sweep.publish_lock

        @contextmanager
        def lock(layout):
            with real(layout):
                self.locked = True
                try:
                    yield
                finally:
                    self.locked = False

        monkeypatch.setattr("kvstore.sweep.publish_lock", lock)

    def look(self) -> float:
        self.now += WORK
        return self.now

    def sleep(self, seconds: float) -> None:
        assert not self.locked, "rested while others wait for the publish lock"
        self.naps[self.phase] += 1
        self.seconds += seconds

    def passed(self, point: str) -> None:
        if point != "batch":
            self.phase = point


def filled(path) -> int:
    """A directory of some conversations; what it takes."""
    with open_store(path, INTERVAL, FAST) as store:
        for number in range(8):
            publish(store.namespace(INFO), prompt(3 * INTERVAL, number))
        return usage(store.context)


def collected(path, naps, size, share):
    with ahead(path, 2 * HOUR) as store:
        store.context.pace._sleep = naps.sleep
        store.context.pace.share = share
        report = collect(store.context, Policy(size=size, spare=0), pause=naps.passed)
        rests = report.rested_seconds
        report.rested_seconds = report.mark_seconds = report.sweep_seconds = 0.0
        return report, rests


def test_it_rests_in_every_phase_but_never_under_the_lock(tmp_path, monkeypatch):
    size = filled(tmp_path) // 2
    naps = Naps(monkeypatch)
    report, rests = collected(tmp_path, naps, size, lambda: 0.5)
    assert report.nodes
    assert set(naps.naps) >= {"look", "scanned", "marked", "planned", "unnamed"}
    assert rests == pytest.approx(naps.seconds)
    check_valid(tmp_path)


@pytest.mark.parametrize("share", [None, lambda: 1.0])
def test_where_nobody_computes_beside_it_it_does_not_rest(tmp_path, monkeypatch, share):
    size = filled(tmp_path) // 2
    naps = Naps(monkeypatch)
    report, rests = collected(tmp_path, naps, size, share)
    assert report.nodes
    assert (rests, naps.naps) == (0, {})


def test_at_any_pace_it_removes_the_same(tmp_path, monkeypatch):
    reports = []
    for name, share in (("slow", lambda: 0.02), ("fast", None)):
        size = filled(tmp_path / name) // 2
        naps = Naps(monkeypatch)
        reports.append(collected(tmp_path / name, naps, size, share)[0])
        reports[-1].coldest_ns = None
    assert reports[0] == reports[1]


def test_a_look_at_what_a_directory_takes_keeps_the_pace(tmp_path, monkeypatch):
    size = filled(tmp_path)
    naps = Naps(monkeypatch)
    with open_store(tmp_path, None, FAST) as store:
        store.context.pace._sleep = naps.sleep
        store.context.pace.share = lambda: 0.5
        assert 0 < usage(store.context) <= size
    assert naps.naps["look"] > 3


def test_what_a_collection_took_is_told_without_its_rests(tmp_path, monkeypatch):
    """Else every collection beside an engine at work would free a tenth of the budget, and not come again for long."""
    filled(tmp_path)
    naps = Naps(monkeypatch)
    with ahead(tmp_path, 2 * HOUR) as store:
        house = Housekeeping(store, usage(store.context), monotonic=lambda: time.monotonic() + naps.seconds)
        store.context.pace._sleep = naps.sleep
        store.context.pace.share = lambda: 0.0001
        assert house.make_room(4096, store.namespace(INFO), pack_tokens(prompt(INTERVAL, 99))) is None
        assert naps.seconds > 10
        assert house._took < 5


def test_there_is_a_chance_to_rest_before_the_first_of_every_few():
    seen = []
    seen.extend(paced(range(5), lambda: seen.append("rest"), 2))
    assert seen == ["rest", 0, 1, "rest", 2, 3, "rest", 4]
