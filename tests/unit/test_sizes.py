"""Sizes and ages as people write and read them."""

from __future__ import annotations

import pytest

from kvstore import SizeError, format_size, parse_size
from kvstore.sizes import format_age


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("20GiB", 20 * (1 << 30)),
        ("20gib", 20 * (1 << 30)),
        ("20 GiB", 20 * (1 << 30)),
        (" 20GiB ", 20 * (1 << 30)),
        ("20Gi", 20 * (1 << 30)),
        ("500MB", 500_000_000),
        ("500M", 500_000_000),
        ("1.5G", 1_500_000_000),
        ("1.5KiB", 1536),
        ("3TiB", 3 << 40),
        ("2T", 2 * 10**12),
        ("7b", 7),
        ("9007199254740993", 2**53 + 1),
        ("0.1GB", 100_000_000),
        ("1.001K", 1001),
    ],
)
def test_sizes_are_read_exactly(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1",
        "-5GiB",
        "1e9",
        "1..5G",
        ".5G",
        "20XiB",
        "20 G iB",
        "5bb",
        "5ib",
        "0x10",
        "inf",
        "nan",
        "1,5G",
    ],
)
def test_what_is_not_a_size_is_refused_with_an_example(text):
    with pytest.raises(SizeError, match="20GiB"):
        parse_size(text)


def test_a_size_of_thousands_of_digits_is_refused_like_any_other_nonsense():
    with pytest.raises(SizeError):
        parse_size("9" * 5000)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (100 * 1024, "100 KiB"),
        (1 << 20, "1.0 MiB"),
        (20 << 30, "20.0 GiB"),
        (500 << 30, "500 GiB"),
        (1 << 40, "1.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3600, "in the future"),
        (-0.5, "now"),
        (0, "now"),
        (1, "1 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (47 * 3600, "47 h"),
        (48 * 3600, "2 d"),
        (10 * 86400, "10 d"),
    ],
)
def test_ages_are_written_in_the_largest_unit(seconds, text):
    assert format_age(seconds) == text
