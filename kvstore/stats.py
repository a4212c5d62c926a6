"""What a cache was good for, over all processes and restarts: small files of counters in the directory.

Every process that serves prompts has one file of its own, which only it writes, and whose counters only grow. So a kill
loses some seconds, copies taken at any two times can be put together by taking the larger number of each counter, and
nothing is ever locked for counting. Files of processes that are gone are folded into one. docs/format.md section 7.3
has the bytes; the files are optional, and whoever does not know them leaves them alone.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.commit import put_file
from kvstore.context import Context, Owner, this_process
from kvstore.directory import check_same
from kvstore.errors import KVStoreError
from kvstore.forks import renew_in_forks
from kvstore.fs import Durability
from kvstore.layout import Layout
from kvstore.locks import gc_lock
from kvstore.untrusted import JSON_ERRORS, parse

__all__ = ["COUNTERS", "MAX_STATS_BYTES", "Row", "Stats", "StatsFile", "fold", "merge_stats", "read_stats", "rows_in"]

COUNTERS = (
    "requests",
    "prompt_tokens",
    "memory_tokens",
    "disk_tokens",
    "generated_tokens",
    "read_bytes",
    "read_us",
    "written_tokens",
    "written_bytes",
    "failed_writes",
)
"""memory_tokens and disk_tokens: those of the prompts that were reused, by where they came from. read_us: microseconds
from the first open to caches that an engine can use, for what read_bytes counts. failed_writes: publishes that failed.
"""

MAX_ROWS = 500
"""Processes told apart; the oldest beyond are added up."""

FOLD_ABOVE = 16
"""Files of processes that are gone, before a process that starts folds them."""

_FORGOTTEN_S = 30 * 86400
"""A process of another machine that wrote nothing for so long is taken for gone. If it is not, it writes again."""

MAX_STATS_BYTES = 1 << 20
_MAX_FILES = 4096
_MAX_FOLDED = 3 * MAX_ROWS
_MAX_COUNT = 1 << 63
_FOLDED = re.compile(r"folded\.[0-9a-f]{8}\.json")
_OLDER = re.compile(r"older\.[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Row:
    """What one process counted. began, updated: seconds since the epoch."""

    began: int
    updated: int
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Stats:
    """rows: by writer, all files put together. files: names of those that were read. unreadable: how many were not."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    unreadable: int = 0

    def total(self, counter: str) -> int:
        """One counter over all processes."""
        return sum(row.counts.get(counter, 0) for row in self.rows.values())

    def read_speed(self, host: str | None = None) -> float | None:
        """Bytes a second at which prefixes were restored, on one machine or on all; None when nobody measured it.

        Older versions did not, so rows without a time are left out, and sums of old rows with them.
        """
        timed = [
            row
            for writer, row in self.rows.items()
            if row.counts.get("read_us") and (owner := Owner.parse(writer)) and host in {None, owner.host}
        ]
        size = sum(row.counts.get("read_bytes", 0) for row in timed)
        return size / sum(row.counts["read_us"] for row in timed) * 1e6 if size else None


class StatsFile:
    """This process's counters, and the file that they are written to when told. Safe to use from several threads.
    Writes that fail need not be added: the directory's own counters tell.

    A fork of the process counts from zero, into a file of its own: a file has one writer, whose counters only grow.
    """

    def __init__(self, context: Context) -> None:
        self._durable = context
        # Nothing waits for the disk for the sake of counters; what is written last is made durable.
        self._context = replace(context, fs=replace(context.fs, durability=Durability.NONE))
        self.forked()
        renew_in_forks(self)

    def forked(self) -> None:
        """Begin at zero: as an object that is new, and as one that a fork took along (kvstore.forks)."""
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._changed = False
        self._failed_before = self._context.counters.failed_publishes
        me = this_process()
        self._writer = f"{me.host}.{me.boot}.{me.pid}.{secrets.token_hex(4)}"
        # Last: the clock is the caller's, and if it fails in a fork nothing of the parent's is counted twice.
        self._began = self._context.clock() // 10**9

    @property
    def path(self) -> Path:
        """The file."""
        return self._context.layout.stats / f"{self._writer}.json"

    @property
    def changed(self) -> bool:
        """Whether anything was added since the last flush, or that one could not be written."""
        return self._changed

    def add(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount
            self._changed = True

    def flush(self, *, durable: bool = False) -> bool:
        """Write the counters if they changed. False, and they are kept, when that cannot be done; never raises.

        Whoever counts meanwhile does not wait for the disk.
        """
        with self._writing:
            with self._lock:
                failed = self._context.counters.failed_publishes
                if not self._changed and failed == self._failed_before:
                    return True
                self._counts["failed_writes"] += failed - self._failed_before
                self._failed_before = failed
                row = Row(self._began, self._context.clock() // 10**9, dict(self._counts))
                self._changed = False
            try:
                check_same(self._context)
                put_file(self._durable if durable else self._context, self.path, [_encode({self._writer: row})])
            except (OSError, KVStoreError):
                with self._lock:
                    self._changed = True
                return False
            return True

    def close(self) -> None:
        """Write what is left. The object must not be used afterwards."""
        self.flush(durable=True)
        self._context.staging.close()


def read_stats(context: Context) -> Stats:
    """Everything that was counted. Never raises: what cannot be read counts as nothing."""
    rows: dict[str, Row] = {}
    files, unreadable = [], 0
    for name in _names(context):
        found = _read(context, name)
        if found is None:
            unreadable += 1
        else:
            files.append(name)
            _join(rows, found)
    return Stats(rows, tuple(files), unreadable)


def fold(context: Context, above: int = 0) -> None:
    """Put the files of processes that are gone into one, if there are more than above. Never raises.

    Killed anywhere it leaves some rows in two files, which count once. Only the last step, which adds old rows up,
    must not happen beside another fold; so one that finds the collector's lock taken leaves.
    """
    with suppress(OSError, KVStoreError), gc_lock(context.layout) as mine:
        if mine:
            _fold(context, above)


def _fold(context: Context, above: int) -> None:
    now = context.clock() // 10**9
    files = {name: found for name in _names(context) if (found := _read(context, name)) is not None}
    rows: dict[str, Row] = {}
    gone = []
    size = 0
    for name, found in files.items():
        if not (_FOLDED.fullmatch(name) or _is_gone(name, found, now)):
            continue
        more = len(_encode(found))
        if len(rows) + len(found) <= _MAX_FOLDED and size + more <= MAX_STATS_BYTES:
            _join(rows, found)
            size += more
            gone.append(name)
    if len(gone) > max(above, 1):
        put_file(context, context.layout.stats / f"folded.{secrets.token_hex(4)}.json", [_encode(rows)])
        for name in gone:
            context.fs.unlink(context.layout.stats / name)
        return
    for name, found in files.items():
        others = {writer for other in files if other != name for writer in files[other]}
        if _FOLDED.fullmatch(name) and len(found) > MAX_ROWS and others.isdisjoint(found):
            # In place, by one rename: a row is either there or added up, and in no other file.
            put_file(context, context.layout.stats / name, [_encode(_shortened(found))])


def _is_gone(name: str, found: Mapping[str, Row], now: int) -> bool:
    owner = Owner.parse(name.removesuffix(".json"))
    if owner is None:
        return False
    return owner.surely_gone() or all(row.updated < now - _FORGOTTEN_S for row in found.values())


def _shortened(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The newest half of the rows, and what the others add up to as one more."""
    by_age = sorted(rows, key=lambda writer: (not _OLDER.fullmatch(writer), rows[writer].updated, writer))
    old, new = by_age[: -MAX_ROWS // 2], by_age[-MAX_ROWS // 2 :]
    name = old[0] if _OLDER.fullmatch(old[0]) else f"older.{secrets.token_hex(4)}"
    total = Row(
        min(rows[writer].began for writer in old),
        max(rows[writer].updated for writer in old),
        {counter: sum(rows[writer].counts.get(counter, 0) for writer in old) for counter in COUNTERS},
    )
    return {name: total, **{writer: rows[writer] for writer in new}}


def merge_stats(source: Context, target: Context) -> None:
    """Bring what was counted in one directory into another; what both know counts once. Raises OSError."""
    theirs, ours = read_stats(source).rows, read_stats(target).rows
    new = {writer: _larger(row, ours.get(writer)) for writer, row in theirs.items()}
    new = {writer: row for writer, row in new.items() if row != ours.get(writer)}
    for data in _documents(new) if new else ():
        put_file(target, target.layout.stats / f"folded.{secrets.token_hex(4)}.json", [data])


def _names(context: Context) -> list[str]:
    try:
        names = sorted(os.listdir(context.layout.stats))
    except OSError:
        return []
    return [name for name in names if Layout.is_stats_name(name)][:_MAX_FILES]


def _read(context: Context, name: str) -> dict[str, Row] | None:
    """The rows of a file; None when it is none of ours after all."""
    try:
        return rows_in(parse(context.fs.read_file(context.layout.stats / name, MAX_STATS_BYTES)[0]))
    except (OSError, *JSON_ERRORS):
        return None


def rows_in(document: Any) -> dict[str, Row]:
    """The rows of a file, parsed; raises one of JSON_ERRORS for what is none of ours after all."""
    if document["format"] != 1:
        raise ValueError("another format")
    return {writer: _row(row) for writer, row in document["rows"].items()}


def _row(row: Mapping[str, object]) -> Row:
    """A row as another process wrote it; raises ValueError or TypeError. Counters that we do not know stay in it."""
    numbers: dict[str, int] = {}
    for name, value in row.items():
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise ValueError(f"{name} is no count")
        numbers[name] = value
    return Row(numbers.pop("began", 0), numbers.pop("updated", 0), numbers)


def _documents(rows: Mapping[str, Row]) -> Iterator[bytes]:
    """Rows as files that a reader takes: neither too many nor too many bytes. One row that is too large stays out."""
    data = _encode(rows)
    if len(rows) <= MAX_ROWS and len(data) <= MAX_STATS_BYTES:
        yield data
    elif len(rows) > 1:
        items, half = list(rows.items()), len(rows) // 2
        yield from _documents(dict(items[:half]))
        yield from _documents(dict(items[half:]))


def _encode(rows: Mapping[str, Row]) -> bytes:
    document = {
        "format": 1,
        "rows": {
            writer: {"began": row.began, "updated": row.updated, **row.counts} for writer, row in sorted(rows.items())
        },
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _join(rows: dict[str, Row], others: Mapping[str, Row]) -> None:
    for writer, row in others.items():
        rows[writer] = _larger(row, rows.get(writer))


def _larger(row: Row, other: Row | None) -> Row:
    """Two states of one row put together: counters only grow, so the larger of each is the later."""
    if other is None:
        return row
    names: Iterable[str] = {**row.counts, **other.counts}
    return Row(
        min(row.began, other.began),
        max(row.updated, other.updated),
        {name: max(row.counts.get(name, 0), other.counts.get(name, 0)) for name in names},
    )
