"""Settings of the interpreter: turns while a restore is waited for, and no full search for cycles in a pass."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
from interrupt_support import interrupted

import kvstore.interpreter
from kvstore.interpreter import TURN_S, no_full_search_for_cycles, short_turns


@pytest.fixture(autouse=True)
def before():
    found = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield sys.getswitchinterval()
    sys.setswitchinterval(found)


def test_turns_are_short_inside_and_as_they_were_after(before):
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    assert sys.getswitchinterval() == before


def test_also_after_an_error(before):
    with pytest.raises(ZeroDivisionError), short_turns():
        raise ZeroDivisionError
    assert sys.getswitchinterval() == before


def test_the_last_one_to_leave_puts_it_back(before):
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with short_turns():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with short_turns():
        pass
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("microseconds", range(1, 100, 7))
def test_shorter_ones_are_let_be(microseconds):
    """To the microsecond, which the interpreter rounds."""
    sys.setswitchinterval((microseconds + 0.5) / 1e6)
    before = sys.getswitchinterval()
    for _ in range(3):
        with short_turns():
            assert sys.getswitchinterval() == before
        assert sys.getswitchinterval() == before


def test_what_somebody_set_meanwhile_stays():
    with short_turns():
        sys.setswitchinterval(0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_only_young_objects_are_searched_for_cycles_inside_and_all_again_after():
    before = gc.get_threshold()
    with no_full_search_for_cycles():
        with no_full_search_for_cycles():
            assert gc.get_threshold()[:2] == before[:2]
            assert gc.get_threshold()[2] > 1 << 30
        assert gc.get_threshold()[2] > 1 << 30
        assert gc.isenabled()
    assert gc.get_threshold() == before
    with pytest.raises(ZeroDivisionError), no_full_search_for_cycles():
        raise ZeroDivisionError
    assert gc.get_threshold() == before


def test_no_full_search_happens_inside_and_young_ones_do():
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    def searches() -> list[int]:
        return [each["collections"] for each in gc.get_stats()]

    with no_full_search_for_cycles():
        before, kept = searches(), []
        for _ in range(100_000):
            Cycle()
            kept.append((object(),))
        young, middle, full = (now - then for now, then in zip(searches(), before, strict=True))
    assert young > 20
    assert middle > 2
    assert full == 0


def test_thresholds_that_somebody_set_meanwhile_stay():
    before = gc.get_threshold()
    try:
        with no_full_search_for_cycles():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("deep", [1, 2])
@pytest.mark.parametrize(
    ("setting", "read"),
    [(short_turns, sys.getswitchinterval), (no_full_search_for_cycles, gc.get_threshold)],
    ids=["turns", "search"],
)
def test_an_interrupt_between_any_two_steps_leaves_nothing_changed(setting, read, deep):
    before, places = read(), 0

    def enter(times: int) -> None:
        with setting():
            if times > 1:
                enter(times - 1)

    for places in interrupted(lambda: enter(deep), kvstore.interpreter):  # noqa: B007
        assert read() == before
        with setting():
            assert read() != before
        assert read() == before
    assert places > 20 * deep


def test_an_interrupt_puts_nothing_back_that_another_thread_wants(before):
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with short_turns():
            inside.set()
            leave.wait(30)

    def enter() -> None:
        with short_turns():
            pass

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    for _ in interrupted(enter, kvstore.interpreter):
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    leave.set()
    thread.join()
    assert sys.getswitchinterval() == before
