"""The interpreter's lock while a restore is waited for."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from kvstore.interpreter import TURN_S, no_search_for_cycles, short_turns


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


def test_cycles_are_not_searched_for_inside_and_are_again_after():
    assert gc.isenabled()
    with no_search_for_cycles():
        with no_search_for_cycles():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), no_search_for_cycles():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_does_without_the_search_still_does():
    gc.disable()
    try:
        with no_search_for_cycles():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
