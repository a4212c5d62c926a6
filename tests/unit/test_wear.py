"""What writing costs: the limit of bytes an hour, and the alarm."""

from __future__ import annotations

from kvstore_mlx.wear import Alarm, WriteLimit

GIB = 1 << 30


def test_an_hours_worth_may_be_written_at_once_and_then_nothing_for_an_hour():
    limit = WriteLimit(3600)
    assert limit.allows(3600, 30)
    limit.take(3600, 30)
    assert not limit.allows(1, 30)
    assert not limit.allows(1, 30 + 3600)
    assert limit.allows(3600, 30 + 3660)


def test_no_hour_has_more_than_the_limit():
    """Also the first one, and those that begin anywhere."""
    limit = WriteLimit(3600)
    written = []
    for second in range(5 * 3600):
        if limit.allows(50, second):
            limit.take(50, second)
            written.append(second)
    hours = [sum(50 for at in written if begin <= at < begin + 3600) for begin in range(0, 4 * 3600, 100)]
    assert max(hours) == 3600
    assert sum(hours) / len(hours) > 0.9 * 3600


def test_what_is_larger_than_an_hours_worth_is_never_written():
    limit = WriteLimit(3600)
    assert not limit.allows(3601, 0)
    assert not limit.allows(3601, 100_000)


def test_what_was_written_beyond_the_limit_counts():
    """The size of a block is known when it is there: its header comes on top."""
    limit = WriteLimit(3600)
    limit.take(4000, 0)
    assert not limit.allows(1, 3600)
    assert limit.allows(1, 3660)


def test_a_clock_that_goes_back_gives_nothing():
    limit = WriteLimit(3600)
    limit.take(3000, 10_000)
    limit.take(600, 0)
    assert not limit.allows(1, 0)
    assert not limit.allows(1, 10_000)
    assert limit.allows(3600, 13_700)


def test_no_alarm_for_little_or_for_what_is_read_back():
    alarm = Alarm()
    assert alarm.wrote(10 * GIB, 0, 0) == ""
    assert alarm.wrote(10 * GIB, 2 * GIB, 0) == ""
    assert "20.0 GiB" in alarm.wrote(1, 2 * GIB - 1, 0)


def test_the_alarm_goes_once_an_hour():
    alarm = Alarm()
    assert alarm.wrote(20 * GIB, 0, 0)
    assert not alarm.wrote(20 * GIB, 0, 3599)
    assert alarm.wrote(1, 0, 3600)
