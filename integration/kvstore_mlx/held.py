"""States that recordings keep until the writer's queue has room: one bound for all recordings of a writer.

A server that answers many requests at once while its disk is slow has as many recordings that wait, so a bound for
each of them would be none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

__all__ = ["Held"]


class Held:
    """Bytes that each recording holds; those of one that is gone count no more."""

    def __init__(self) -> None:
        self._sizes: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def keep(self, recording: object, sizes: Sequence[int], most: int) -> int:
        """How many of these a recording may keep, from the first on, so that all recordings hold no more than most.

        It is taken to hold those, and nothing else, until it asks again.
        """
        with self._lock:
            self._sizes.pop(recording, None)
            room = most - sum(self._sizes.values())
            count = total = 0
            for size in sizes:
                if total + size > room:
                    break
                count, total = count + 1, total + size
            if count:
                self._sizes[recording] = total
            return count
