"""Why something is not written, and how often that was."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvstore.context import Counters
from kvstore_mlx.seldom import Seldom

__all__ = ["Fate", "Refusal", "Refusals"]

log = logging.getLogger("kvstore")

_SAY_EVERY_S = 600.0


class Refusal(Enum):
    """Why something is not written; the text is for the log, the name in small letters for counters."""

    FULL = "the budget (--kv-cache-size) is used up by what is in use; not saved"
    WARM = "the directory is full of what is wanted as much"
    LIMIT = "the write limit (--kv-cache-write-limit) is reached"
    BUSY = "the directory is full, and another process collects just now; not saved"
    FAILED = "no room could be made in the directory, or it could not be measured; the log says why; not saved"

    @property
    def meant(self) -> bool:
        """Whether it is as it should be; what is not is for a warning."""
        return self in {Refusal.WARM, Refusal.LIMIT}


@dataclass
class Fate:
    """What became of one prompt's saving, for all parts of it. refused: it was counted, which it is once. broken: a
    part was not written, nor would one be that comes after it.
    """

    refused: bool = False
    broken: bool = False


class Refusals:
    """How many prompts of one server were left unsaved from some point on. Counted on any thread."""

    def __init__(self, counters: Counters, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._said = Seldom(_SAY_EVERY_S, monotonic)
        self._counts: dict[Refusal, int] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> dict[Refusal, int]:
        """Prompts by the reason."""
        return dict(self._counts)

    def count(self, refusal: Refusal, fate: Fate | None) -> Refusal:
        """Count a refusal, once a prompt, and log what is meant to be; the refusal."""
        with self._lock:
            if fate is not None:
                if fate.refused:
                    return refusal
                fate.refused = True
            times = self._counts[refusal] = self._counts.get(refusal, 0) + 1
        self._counters.refuse(refusal.name.lower())
        if refusal.meant and self._said.due(refusal):
            log.info(
                "kvstore: %s: %d prompts were left unsaved from some point on since the server started",
                refusal.value,
                times,
            )
        return refusal
