"""What writing costs the disk: a limit of bytes an hour, and an alarm when what is written is hardly ever read.

Pure arithmetic; the time is passed in, in seconds of any clock.
"""

from __future__ import annotations

from kvstore.sizes import format_size

__all__ = ["Alarm", "WriteLimit"]

_HOUR_S = 3600.0

_ALARM_BYTES = 10 << 30
_ALARM_SHARE = 10
"""The alarm goes when more than _ALARM_BYTES were written and less than one in _ALARM_SHARE of them restored."""


class WriteLimit:
    """A token bucket: so many bytes an hour, of which an hour's worth may be written at once.

    What was written is taken after the fact, because only then its size is known (what is there already costs nothing),
    and so the last write may overdraw the bucket; the next ones wait for it.
    """

    def __init__(self, bytes_an_hour: int, now: float) -> None:
        self._rate = bytes_an_hour / _HOUR_S
        self._most = float(bytes_an_hour)
        self._left = self._most
        self._at = now

    def allows(self, size: int, now: float) -> bool:
        """Whether size bytes may be written now. What is more than an hour's worth may when the bucket is full."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left >= min(size, self._most)

    def take(self, size: int) -> None:
        """Account for bytes that were written."""
        self._left -= size


class Alarm:
    """Watches how much of what this process writes is ever read back."""

    def __init__(self) -> None:
        self._written = 0
        self._said: float | None = None

    def wrote(self, size: int, restored: int, now: float) -> str:
        """A sentence to be logged when it is time for one, at most once an hour. restored: bytes, so far."""
        self._written += size
        if self._written <= _ALARM_BYTES or restored * _ALARM_SHARE >= self._written:
            return ""
        if self._said is not None and now - self._said < _HOUR_S:
            return ""
        self._said = now
        return (
            f"{format_size(self._written)} were written since the server started and only {format_size(restored)} read "
            "back; if that goes on, a larger --kv-cache-size, a --kv-cache-write-limit or no cache at all spares the "
            "disk"
        )
