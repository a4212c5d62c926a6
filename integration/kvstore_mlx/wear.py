"""What writing costs the disk: a limit of bytes an hour, and an alarm when what is written is hardly ever read.

Pure arithmetic; the time is passed in, in seconds of any clock.
"""

from __future__ import annotations

import threading
from collections import deque

from kvstore.sizes import format_size

__all__ = ["Alarm", "WriteLimit"]

_HOUR_S = 3600.0
_MINUTE_S = 60.0
_MINUTES = 60

_ALARM_BYTES = 10 << 30
_ALARM_SHARE = 10
"""The alarm goes when more than _ALARM_BYTES were written and less than one in _ALARM_SHARE of them restored."""


class WriteLimit:
    """So many bytes in any hour: what was written in the last sixty minutes is remembered by the minute.

    Not a bucket that fills: one that begins full lets twice as much through in its first hour. What is larger than the
    limit is never written. Asked on an engine's thread while a writer's accounts for what it wrote.
    """

    def __init__(self, bytes_an_hour: int) -> None:
        self._most = bytes_an_hour
        self._minutes: deque[tuple[int, int]] = deque()
        self._written = 0
        self._lock = threading.Lock()

    def allows(self, size: int, now: float) -> bool:
        """Whether size bytes may be written now."""
        with self._lock:
            # The minute in which the hour began counts whole.
            while self._minutes and self._minutes[0][0] < now // _MINUTE_S - _MINUTES:
                self._written -= self._minutes.popleft()[1]
            return self._written + size <= self._most

    def take(self, size: int, now: float) -> None:
        """Account for bytes that were written: only then is known how many, and what is there costs none."""
        minute = int(now // _MINUTE_S)
        with self._lock:
            if self._minutes and self._minutes[-1][0] >= minute:
                minute, before = self._minutes.pop()
                self._minutes.append((minute, before + size))
            else:
                self._minutes.append((minute, size))
            self._written += size


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
