"""Keep the directory within its budget while a server runs.

Runs on the writer thread. The directory is measured once, before the first write, and again by each collection; in
between what was written is added up. Other processes' writes are noticed at the next measurement, which is forced after
a gibibyte of our own.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kvstore.errors import KVStoreError
from kvstore.gc import Policy, collect, usage
from kvstore.sizes import format_size
from kvstore.store import Store

__all__ = ["Housekeeping"]

log = logging.getLogger("kvstore")

_MEASURE_AFTER_BYTES = 1 << 30
_IN_USE_NS = 600 * 10**9


class Housekeeping:
    """The budget of one server's directory."""

    def __init__(self, store: Store, budget: int) -> None:
        self._store = store
        self._budget = budget
        self._used: int | None = None
        self._since = 0

    @property
    def budget(self) -> int:
        """Bytes the directory may take, in allocated blocks."""
        return self._budget

    def wrote(self, size: int) -> None:
        """Account for bytes that were just written."""
        if self._used is not None:
            self._used += size
        self._since += size

    def make_room(self, size: int) -> bool:
        """Whether size more bytes fit, after collecting if they would not have."""
        if self._used is None or self._since > _MEASURE_AFTER_BYTES:
            self._used, self._since = usage(self._store.context), 0
        if self._used + size <= self._budget:
            return True
        try:
            report = collect(self._store.context, Policy(size=max(0, self._budget - size), protect=self._in_use()))
        except KVStoreError as error:
            log.warning("kvstore: could not collect: %s", error)
            return False
        self._used, self._since = usage(self._store.context), 0
        log.info(
            "kvstore: collected %s; %s of %s used",
            format_size(report.freed_bytes),
            format_size(self._used),
            format_size(self._budget),
        )
        return self._used + size <= self._budget

    def _in_use(self) -> frozenset[Path]:
        """Manifests this server restored or published lately: evicting those would be computing them again at once."""
        recent = self._store.context.recent
        oldest = self._store.context.clock() - _IN_USE_NS
        for path, used in list(recent.items()):
            if used < oldest:
                del recent[path]
        return frozenset(recent)
