"""Sizes and ages as people write them: ``20GiB`` and ``30d`` in, ``19.3 GiB`` and ``3 d`` out."""

from __future__ import annotations

import re
from fractions import Fraction

from kvstore.errors import SizeError

__all__ = ["exact_size", "format_age", "format_size", "parse_age", "parse_size"]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PATTERN = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*?)b?\s*", re.IGNORECASE | re.ASCII)
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE_PATTERN = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smhdw])\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes in a size such as ``20GiB``, ``500MB``, ``1.5G`` or ``1048576``; raises SizeError."""
    match = _PATTERN.fullmatch(text)
    factor = {**_UNITS, **_BINARY}.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise SizeError(f"{text!r} is not a size; write it like 20GiB, 500MB or 1048576")
    return int(Fraction(match[1]) * factor)


def parse_age(text: str) -> float:
    """Seconds in an age such as ``30d``, ``12h``, ``90m``, ``45s`` or ``1.5w``; raises SizeError.

    The unit must be there: nobody should have to guess whether 30 is seconds or days before something is removed.
    """
    match = _AGE_PATTERN.fullmatch(text)
    if match is None:
        raise SizeError(f"{text!r} is not an age; write it like 30d, 12h, 90m or 45s")
    return float(match[1]) * _AGES[match[2].lower()]


def format_size(size: float) -> str:
    """A size in the largest binary unit that keeps it at 1 or more, with three significant digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def exact_size(size: int) -> str:
    """A size that parse_size reads as exactly that: ``20GiB``, ``500MiB`` or ``1234567``."""
    for unit, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{unit[0].upper()}iB"
    return str(size)


def format_age(seconds: float) -> str:
    """An age in its largest unit: ``now``, ``45 s``, ``12 min``, ``5 h``, ``3 d``; a future time says so."""
    if seconds < -1:
        return "in the future"
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return "now" if seconds < 1 else f"{int(seconds / divisor)} {unit}"
    return f"{int(seconds / 86400)} d"
