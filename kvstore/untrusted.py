"""JSON that somebody else may have written: parsed only when taking it apart is cheap.

A size alone does not bound the cost. 256 KiB of empty objects are 87,000 of them and cost a reader tens of
milliseconds, where a block's header of that size has 3,000. So what makes objects is counted before it is parsed.

Nothing here knows what a document should hold; callers never trust its shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["JSON_ERRORS", "MAX_ELEMENTS", "fits", "is_plain", "parse", "parse_exact"]

JSON_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What parsing and taking apart a document raises when it is not as it should be."""

MAX_OBJECTS = 3000
"""Opening braces: three tensors for each of 1,000 layers, nearly."""

MAX_ITEMS = 24_000
"""Commas and opening brackets: eight for each tensor."""

MAX_DIGITS = 200
"""Of one number; what it costs to read grows with their square."""

MAX_ELEMENTS = 1 << 63
"""Of an array."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def parse(data: bytes) -> Any:
    """The document in UTF-8 bytes; raises ValueError for what is none, is too much, or has a name twice in an object
    (two readers would understand it differently), and RecursionError for what is nested too deep.
    """
    return _decoded(data, _DECODER)


def parse_exact(data: bytes) -> Any:
    """As parse, for what readers in other languages must understand alike. Raises ValueError also for what Python takes
    and others do not: NaN, Infinity, and half of a surrogate pair. A number may be one that no double holds.
    """
    found = _decoded(data, _EXACT_DECODER)
    if _SURROGATE.search(data) is not None:
        json.dumps(found, ensure_ascii=False).encode()  # Python joins whole pairs, and cannot encode a half.
    return found


def _decoded(data: bytes, decoder: json.JSONDecoder) -> Any:
    if not is_plain(data):
        raise ValueError("more objects, items or digits than any such document has")
    return decoder.decode(str(data, "utf-8"))


def is_plain(data: bytes) -> bool:
    """Whether a document has no more parts than parse accepts. Those inside strings count: no writer needs many."""
    return (
        data.count(b"{") <= MAX_OBJECTS
        and data.count(b",") + data.count(b"[") <= MAX_ITEMS
        and _TOO_MANY_DIGITS not in data.translate(_AS_ZEROS)
    )


def fits(sizes: Iterable[int]) -> bool:
    """Whether an array of these sizes, zeros aside, can exist. Found without their product, which can be a number of
    200,000 digits and take a second.
    """
    total = 1
    for size in sizes:
        total *= size or 1
        if total >= MAX_ELEMENTS:
            return False
    return True


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)
"""Made once: json.loads with a hook makes one for every document."""

_EXACT_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_constant=_refuse)
