"""Ages as people write them."""

from __future__ import annotations

import pytest

from kvstore import SizeError
from kvstore.sizes import parse_age


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30d", 30 * 86400),
        ("12h", 43200),
        ("90m", 5400),
        ("45s", 45),
        ("2w", 14 * 86400),
        ("1.5d", 129600),
        (" 7 D ", 7 * 86400),
        ("0s", 0),
        ("999999999d", 999999999 * 86400),
    ],
)
def test_ages_are_read(text, seconds):
    assert parse_age(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-3d", "3 days", "1y", "1e3d", "inf", "nan", "3d4h", "٣d", "9" * 40 + "d"]
)
def test_what_is_not_an_age_is_refused_with_an_example(text):
    with pytest.raises(SizeError, match="is not an age; write it like 30d"):
        parse_age(text)
