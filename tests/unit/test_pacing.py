"""A paced publish writes the same bytes, rests in proportion to its work, and stops when it is asked to."""

from __future__ import annotations

import sys

import pytest
from core_support import FAST, open_store, prompt

from kvstore import NamespaceInfo, Span, TensorSpec
from kvstore.pacing import Pace, slices

SPECS = (TensorSpec("k", "U8", 4, (512,)), TensorSpec("v", "U8", 4, (512,)))
COUNT = 2048
SLICE = 1 << 20


class Clock:
    """Each look at it costs this much processor time; sleeping costs none."""

    def __init__(self, monkeypatch, each: float) -> None:
        self.now, self.each, self.slept = 0.0, each, []
        monkeypatch.setattr("kvstore.pacing.time.thread_time", self.look)

    def look(self) -> float:
        self.now += self.each
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def paced(clock: Clock, share) -> Pace:
    pace = Pace(clock.sleep)
    pace.share = share
    return pace


def test_batches_are_the_same_bytes_small_parts_together():
    parts = [b"abc", b"", bytes(range(256)) * 10000, b"d" * 300, b"e" * SLICE, b"f" * 20]
    batches = [[bytes(piece) for piece in batch] for batch in Pace().batches(parts)]
    assert b"".join(piece for batch in batches for piece in batch) == b"".join(parts)
    sizes = [sum(map(len, batch)) for batch in batches]
    assert sizes[:-1] == [SLICE] * 3
    assert 0 < sizes[-1] < SLICE
    assert max(map(len, batches)) == 3
    assert list(Pace().batches([])) == []


def test_slices_are_the_same_bytes():
    part = bytes(range(256)) * (3 * SLICE >> 8) + b"end"
    assert b"".join(slices(part)) == part
    assert max(piece.nbytes for piece in slices(part)) == SLICE
    assert list(slices(b"")) == []


@pytest.mark.parametrize(("share", "rest"), [(1.0, 0.0), (0.5, 0.01), (0.2, 0.04), (0.01, 0.25)])
def test_rests_are_in_proportion_to_work(monkeypatch, share, rest):
    clock = Clock(monkeypatch, 0.01)
    batches = list(paced(clock, lambda: share).batches([bytes(3 * SLICE)]))
    assert len(batches) == 3
    assert sum(clock.slept) == pytest.approx(2 * rest), "between two slices, and not behind the last"
    assert max(clock.slept, default=0.0) <= 0.05, "it looks up again soon"


def test_what_is_done_at_once_is_no_reason_to_rest(monkeypatch):
    clock = Clock(monkeypatch, 0.00001)
    rest = paced(clock, lambda: 0.01).resting()
    for _ in range(145):
        rest()
    assert clock.slept == []
    for _ in range(10):
        rest()
    assert sum(clock.slept) == pytest.approx(99 * 0.0015, rel=0.05), "but many of them are"


def test_a_rest_ends_when_it_is_no_longer_wanted(monkeypatch):
    clock = Clock(monkeypatch, 1.0)
    pace = paced(clock, lambda: 0.01 if len(clock.slept) < 2 else 1.0)
    list(pace.batches([bytes(2 * SLICE)]))
    assert clock.slept == [0.05] * 2


@pytest.mark.parametrize("share", [None, 1.0, 0.25])
def test_a_publish_at_any_pace_writes_the_same(monkeypatch, tmp_path, share):
    clock = Clock(monkeypatch, 0.002)
    data = [bytes(range(256)) * (SPECS[0].span_bytes(COUNT) // 256), bytes(SPECS[1].span_bytes(COUNT))]
    with open_store(tmp_path, COUNT, FAST) as store:
        store.context.pace._sleep = clock.sleep
        store.context.pace.share = None if share is None else lambda: share
        space = store.namespace(NamespaceInfo({"model": "m"}))
        space.publish(prompt(COUNT, 1), [Span(0, COUNT, SPECS, data)])
        assert space.lookup(prompt(COUNT, 1)).count == COUNT
    (block,) = [path for path in (tmp_path / "objects" / "blocks").rglob("*") if path.is_file()]
    assert block.read_bytes().endswith(b"".join(data))
    # Whole slices, and the end of the last one, which the header has pushed out of it.
    assert len([nap for nap in clock.slept if nap > 0]) == (sum(map(len, data)) // SLICE if share == 0.25 else 0)


@pytest.mark.parametrize(("share", "short"), [(None, True), (1.0, True), (0.9, False), (0.1, False)])
def test_turns_are_short_at_full_speed_only(share, short):
    pace = Pace()
    pace.share = None if share is None else lambda: share
    before = sys.getswitchinterval()
    with pace.turns():
        assert (sys.getswitchinterval() < before) == short
    assert sys.getswitchinterval() == before
