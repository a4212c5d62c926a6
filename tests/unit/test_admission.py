"""Warmth: the order of what was used, and when a new node is worth the place of an old one."""

from __future__ import annotations

import threading
from time import sleep

import pytest

from kvstore.admission import Warmth

SECOND = 10**9
START = 1_700_000_000 * SECOND
DAY = 86_400


def at(seconds: float) -> int:
    return START + int(seconds * SECOND)


def visit(warmth: Warmth, *times: float, path: tuple[str, ...] = ("a",)) -> Warmth:
    for time in times:
        warmth.used(path, at(time))
    return warmth


def test_what_nobody_knows_of_is_as_warm_as_its_file():
    assert Warmth().of("a", at(5)) == at(5)


def test_one_use_is_as_warm_as_its_time():
    warmth = visit(Warmth(), 7)
    assert warmth.of("a", 0) == at(7)
    assert warmth.of("a", at(9)) == at(9), "another process touched the file since"


def test_each_use_adds_the_more_the_closer_it_follows():
    often = visit(Warmth(), 0, 5, 10, 15, 20).of("a", 0)
    seldom = visit(Warmth(), 0, 20).of("a", 0)
    once = visit(Warmth(), 20).of("a", 0)
    assert often > seldom > once


def test_after_a_long_rest_earlier_uses_count_for_nothing():
    rested = visit(Warmth(), 0, 5, 10, 3600).of("a", 0)
    assert at(3600) <= rested < at(3601)


def test_uses_of_one_request_are_one():
    assert visit(Warmth(), 0, 0.1, 0.2).of("a", 0) == at(0)


def test_a_parent_is_never_colder_than_its_child():
    warmth = Warmth()
    for time in range(0, 60, 7):
        visit(warmth, time, path=("a", "b") if time % 2 else ("a",))
        assert warmth.of("a", 0) >= warmth.of("b", 0)


def test_the_first_continuation_is_as_warm_as_what_it_continues_and_a_branch_is_not():
    warmth = visit(Warmth(), 0, 5, 10)
    now = at(10)
    assert warmth.wanted("continuation", "a", now) == warmth.of("a", 0) > now
    assert warmth.wanted("branch", "a", now) == now


def test_a_prompt_that_is_left_out_again_and_again_gets_warm():
    # What is not in the store is remembered all the same: else it would never be admitted beside one that is.
    warmth = Warmth()
    first = [warmth.wanted("a", None, at(0))]
    for time in (5, 10, 15):
        visit(warmth, time)
        first.append(warmth.wanted("a", None, at(time)) - at(time))
    assert first[-1] > 5 * SECOND


def test_the_pace_follows_what_is_seen():
    warmth = Warmth()
    assert warmth.margin_ns == 1.3 * 20 * SECOND
    visit(warmth, *range(0, 120 * 60, 120))
    assert warmth.margin_ns == 1.3 * 120 * SECOND
    fast = visit(Warmth(), *range(0, 8 * 60, 8))
    assert fast.margin_ns == pytest.approx(1.3 * 8 * SECOND)


@pytest.mark.parametrize(("gap", "pace"), [(1.5, 5), (86_400, 300)])
def test_the_pace_has_bounds(gap, pace):
    assert visit(Warmth(), *(gap * i for i in range(100))).margin_ns == 1.3 * pace * SECOND


def test_a_clock_that_goes_back_takes_no_warmth_away():
    warmth = visit(Warmth(), 0, 10)
    before = warmth.of("a", 0)
    visit(warmth, -1000)
    assert warmth.of("a", 0) >= before


def test_what_is_remembered_is_bounded():
    warmth = Warmth()
    for number in range(40_000):
        warmth.wanted(f"{number}", None, at(number))
    assert warmth.of("39999", 0) == at(39_999)
    assert warmth.of("0", 0) == 0
    assert len(warmth._uses) <= 1 << 15


class Slow(dict):
    """A dictionary that lets other threads run while it changes."""

    def pop(self, *args):
        found = super().pop(*args)
        sleep(0)
        return found

    def __contains__(self, key):
        found = super().__contains__(key)
        sleep(0)
        return found


def test_it_is_asked_at_once_from_the_engines_thread_and_the_writers():
    warmth, path = Warmth(), tuple(f"{number}" for number in range(10))
    warmth._uses = Slow()
    warmth.used(path, at(0))
    wrong = []

    def work(call) -> None:
        try:
            wrong.extend(turn for turn in range(300) if (call(at(turn * 2)) or at(0)) < at(0))
        except Exception as error:
            wrong.append(error)

    calls = (
        lambda now: warmth.used(path, now),
        lambda now: warmth.wanted(path[-1], path[-2], now),
        lambda now: warmth.of(path[-1], at(-1)),
    )
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_clock_that_was_set_back_makes_nothing_warm_for_ever():
    """Found by review: a full server refused all writes for as long as its clock had been ahead."""
    warmth = visit(Warmth(), 0, 5)
    visit(warmth, DAY, DAY + 5, path=("ahead",))
    now = at(60)
    assert warmth.wanted("new", None, now) == now
    assert warmth.of("ahead", at(30)) == at(30)
    assert at(5) < warmth.of("a", 0) < now, "what was used before the jump is known still"
    warmth.used(("a",), now)
    assert now <= warmth.of("a", 0) < at(120)


def test_a_clock_that_is_corrected_by_a_little_costs_nothing():
    warmth = visit(Warmth(), 0, 5)
    warm = warmth.of("a", 0)
    visit(warmth, -60, path=("b",))
    assert warmth.of("a", 0) == warm
