"""Say the same thing once in a while: a full disk must not fill the log as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from traceback import walk_tb

__all__ = ["Seldom", "alike"]


class Seldom:
    """Tells for each kind of message whether it may be said: the first, and then one in every_s seconds.

    For the threads of one server: two of them at the same moment may both be told yes.
    """

    def __init__(self, every_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._monotonic = monotonic
        self._said: dict[Hashable, float] = {}

    def due(self, kind: Hashable) -> bool:
        """Whether to say it now; it counts as said then."""
        now = self._monotonic()
        said = self._said.get(kind)
        if said is not None and now - said < self._every_s:
            return False
        # What may be said again need not be remembered: of kinds there may be any number in time.
        for other, at in list(self._said.items()):
            if now - at >= self._every_s:
                self._said.pop(other, None)
        self._said[kind] = now
        return True


def alike(error: Exception) -> Hashable:
    """What tells one trouble from others: not its text, which names a file or a number that is another each time."""
    own = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in {"kvstore", "kvstore_mlx"}
    ]
    numbers = [each.errno for each in (error, error.__cause__) if isinstance(each, OSError)]
    return type(error), type(error.__cause__), *numbers, *own[-1:]
