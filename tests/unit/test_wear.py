"""What writing costs: the bucket of bytes an hour, and the alarm."""

from __future__ import annotations

from kvstore_mlx.wear import Alarm, WriteLimit

GIB = 1 << 30


def test_an_hours_worth_may_be_written_at_once_and_then_as_the_hour_goes_on():
    limit = WriteLimit(3600, 0)
    assert limit.allows(3600, 0)
    limit.take(3600)
    assert not limit.allows(1, 0)
    assert limit.allows(100, 100)
    assert not limit.allows(101, 100)


def test_no_more_is_saved_up_than_an_hours_worth():
    limit = WriteLimit(3600, 0)
    limit.take(3600)
    assert limit.allows(3600, 100_000)
    limit.take(3600)
    assert not limit.allows(1, 100_000)


def test_over_many_hours_the_limit_holds():
    limit = WriteLimit(3600, 0)
    written = 0
    for second in range(10 * 3600):
        if limit.allows(500, second):
            limit.take(500)
            written += 500
    assert 10 * 3600 <= written <= 11 * 3600


def test_what_is_larger_than_an_hours_worth_waits_for_a_full_bucket_and_overdraws_it():
    limit = WriteLimit(3600, 0)
    assert limit.allows(36_000, 0)
    limit.take(36_000)
    assert not limit.allows(1, 3600 * 9)
    assert limit.allows(36_000, 3600 * 10)


def test_a_clock_that_goes_back_gives_nothing():
    limit = WriteLimit(3600, 1000)
    limit.take(3600)
    assert not limit.allows(1, 0)


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
