"""How old a file is: by the later of its times, as far as they can be true."""

from __future__ import annotations

import time

import pytest
from gc_support import DAY, HOUR, SECOND

from kvstore.eviction import FUTURE_NS, GRACE_NS, PROTECT_NS, clock_was_ahead, young


@pytest.mark.parametrize(
    ("mtime", "ctime", "expected"),
    [(0, 0, False), (2 * FUTURE_NS, 0, False), (0, 2 * FUTURE_NS, False), (FUTURE_NS, FUTURE_NS, False),
     (FUTURE_NS + 1, FUTURE_NS + 1, True), (365 * DAY, 2 * FUTURE_NS, True)],
)  # fmt: skip
def test_when_a_file_s_times_say_nothing(mtime, ctime, expected):
    now = time.time_ns()
    assert clock_was_ahead(now + mtime, now + ctime, now) is expected
    if expected:
        assert young(now + mtime, now + ctime, now, 0)


@pytest.mark.parametrize(
    ("mtime", "ctime", "expected"),
    [
        (0, 0, False),
        (95, 0, True),
        (0, 95, True),
        (90, 90, False),
        (91, 0, True),
        (100, 0, True),
        (101, 0, True),  # changed since the collection began
        (0, 101, True),
        (101 + FUTURE_NS, 0, False),
        (101 + FUTURE_NS, 95, True),
        (0, 101 + FUTURE_NS, False),
        (101 + FUTURE_NS, 101 + FUTURE_NS, True),
    ],
)
def test_young_goes_by_the_later_time_that_can_be_true(mtime, ctime, expected):
    assert young(mtime, ctime, 100, 10) is expected


def test_the_windows_are_in_order():
    assert SECOND < PROTECT_NS < HOUR < GRACE_NS
