"""What docs/format.md says in numbers and lists is what the code has: nobody can read both and see them part."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from format_support import h

from kvstore.blocks import DTYPE_BYTES, MAX_HEADER_BYTES, MAX_NAMES, MAX_TENSORS
from kvstore.directory import _CONFIG_LIMIT, MIN_INTERVAL
from kvstore.fs import _HOLES, _HOLES_FROM
from kvstore.keys import namespace_fingerprint
from kvstore.layout import Layout
from kvstore.lookup import MAX_OPENED
from kvstore.manifest import MAX_INTERVAL, MAX_WRITER_BYTES
from kvstore.states import MAX_SIZE
from kvstore.tokenizations import MAX_TOKENS
from kvstore.untrusted import MAX_DIGITS, MAX_ELEMENTS, MAX_ITEMS

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "format.md").read_text().split())


@pytest.mark.parametrize(
    "sentence",
    [
        f"8 + N is at most {MAX_HEADER_BYTES:,}.",
        f"at most {MAX_TENSORS:,} `{{`, {MAX_NAMES:,} `:`, {MAX_ITEMS:,} `[` and `,` together, and {MAX_DIGITS} digits",
        f"no tensor has 2^{MAX_ELEMENTS.bit_length() - 1} elements",
        f"all less than 2^{MAX_SIZE.bit_length() - 1}",
        f"at most {_CONFIG_LIMIT >> 10} KiB",
        f"N from {MIN_INTERVAL} to {MAX_INTERVAL:,}",
        f"the writer's name, at most {MAX_WRITER_BYTES} ",
        f"at most 2^{MAX_TOKENS.bit_length() - 1} tokens",
        f"a file of {_HOLES_FROM >> 20} MiB or more",
        f"at most a {_HOLES}th is allocated, and the first hole begins in the first {_HOLES}th",
    ],
)
def test_a_limit_is_that_of_the_code(sentence):
    assert sentence in PAGE


def test_so_many_others_are_opened():
    assert MAX_OPENED == 8
    assert "opens up to eight others" in PAGE


def test_the_dtypes_are_all_of_them():
    rows = re.findall(r"\| ([1248]) \| ((?:`\w+`,? )+)\|", PAGE)
    assert {name: int(size) for size, names in rows for name in re.findall(r"`(\w+)`", names)} == DTYPE_BYTES


def test_the_tree_has_every_folder():
    for folder in Layout(Path("CACHE_DIR")).folders:
        assert f"{folder.relative_to('CACHE_DIR')}/" in PAGE


def canonical(value: object) -> str:
    """A description as section 2.1 has it, from its words."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        short = {'"': r"\"", "\\": r"\\", "\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r"}
        return '"' + "".join(short.get(c, c if c >= " " else rf"\u00{ord(c):02x}") for c in value) + '"'
    if isinstance(value, float):
        return number(value)
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def number(value: float) -> str:
    """The fewest digits that read back, and where the point goes among them."""
    shortest = next(text for places in range(17) if float(text := f"{abs(value):.{places}e}") == abs(value))
    sign = "-" if math.copysign(1, value) < 0 else ""
    digits, power = shortest[: shortest.index("e")].replace(".", ""), int(shortest[shortest.index("e") + 1 :])
    if value == 0 or 1e-4 <= abs(value) < 1e16:
        digits = "0" * -power + digits.ljust(power + 2, "0")
        point = max(power, 0) + 1
        return f"{sign}{digits[:point]}.{digits[point:]}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{'-' if power < 0 else '+'}{abs(power):02d}"


NUMBERS = [0.0, -0.0, 1.0, -1.5, 0.1, 1e-4, 9.9e-5, 1e-5, 1.5e16, 1e16, 9999999999999998.0, 123456789012345.6, 1e22]
NUMBERS += [5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 1 / 3, 100.0, 1e15, 12345e-8, -1e100]


@pytest.mark.parametrize(
    "value",
    [
        *NUMBERS,
        *[0, 7, -1, 10**30, True, False, None, [], {}],
        "".join(map(chr, range(0x180))) + "\u2028\ud7ff\ue000\uffff\U0001f600",
        {"b": 1, "a": [1, {"z": None}], "\uffff": 2, "\U00010000": 3, "\x7f": 4, "": 5},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_description_is_hashed_as_the_page_writes_it(value):
    text = canonical({"value": value})
    assert namespace_fingerprint({"value": value}, b"s") == h(b"kvstore/1 namespace", text.encode(), b"s")


def test_the_examples_of_numbers_are_right():
    listed = re.findall(
        r"`(-?\d[\d.]*(?:e[-+]\d+)?)`", PAGE[PAGE.index("integers without point") : PAGE.index("`salt`")]
    )
    assert [number(float(text)) for text in listed] == listed == ["1.0", "-0.0", "0.0001", "1e-05", "1.5e+16"]
