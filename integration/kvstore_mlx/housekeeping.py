"""Keep the directory within its budget while a server runs, and its writes worth their wear.

Runs on the writer thread, but for asked, refuses and outlook. The directory is measured once, before the first write,
and again by each collection; in between what was written is added up. Other processes' writes are noticed at the next
measurement, which is forced after a gibibyte of our own, or a tenth of the smallest quota of a namespace, and after a
publish that failed and left a block behind: no node has it, so nothing but its grace time ends takes it away.

A full directory takes a new node only when it is warmer than the coldest leaf (kvstore.admission). How warm that one is
the last collection told, and a leaf only gets warmer, so mostly no look at the directory is needed to say no.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.admission import JUST_USED_NS, Warmth
from kvstore.context import FUTURE_NS
from kvstore.directory import unavailable
from kvstore.errors import KVStoreError
from kvstore.gc import GcReport, Policy, collect, usage
from kvstore.interpreter import no_full_search_for_cycles
from kvstore.keys import TOKEN_BYTES
from kvstore.layout import Kind
from kvstore.lookup import Match
from kvstore.pacing import Pace
from kvstore.quotas import read_quotas
from kvstore.sizes import format_size
from kvstore.store import Namespace, Store
from kvstore_mlx.refusals import Fate, Refusal, Refusals
from kvstore_mlx.seldom import Seldom
from kvstore_mlx.wear import Alarm, WriteLimit

__all__ = ["Housekeeping"]

log = logging.getLogger("kvstore")

_MEASURE_AFTER_BYTES = 1 << 30

_PAUSE = 20.0
"""A collection that made no room is not repeated for this many times what it took, and a second at least; nor is a look
at the whole directory, which the smallest of quotas would have after each write."""

_SPARE_S = 1.0
"""A collection that takes this long frees a tenth of the budget beyond what is needed, a shorter one in proportion:
looking at few files costs little, and room that is made for nobody was a prefix that somebody wanted."""

_WARN_EVERY_S = 60.0

_BUSY_NAPS = 20
_BUSY_NAP_S = 0.05
"""How long another process's collection is waited for. What cannot be written then is dropped with the rest of its
prompt, and most collections take less."""

_PATIENT_AFTER_S = 20.0
"""After a wait for nothing the next ones are dropped at once for so long: the queue must not stand still behind a
collection of minutes."""


class Housekeeping:
    """The budget of one server's directory. write_limit: bytes an hour."""

    def __init__(
        self,
        store: Store,
        budget: int,
        write_limit: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._budget = budget
        self._monotonic = monotonic
        self._limit = None if write_limit is None else WriteLimit(write_limit)
        self._alarm = Alarm()
        self._warmth = Warmth()
        self._used: int | None = None
        self._since = 0
        self._left_behind = False
        self._measure_after = _MEASURE_AFTER_BYTES
        self._coldest: int | None = None
        self._not_before = self._look_after = self._patient_after = 0.0
        self._last = Refusal.WARM
        self._ended = threading.Event()
        self._took = self._rested = 0.0
        self._warned = Seldom(_WARN_EVERY_S, monotonic)
        self._refusals = Refusals(store.counters, monotonic)

    @property
    def pace(self) -> Pace:
        """The pace of what is written to the directory."""
        return self._store.context.pace

    @property
    def budget(self) -> int:
        """Bytes the directory may take, in allocated blocks."""
        return self._budget

    @property
    def used(self) -> int | None:
        """Bytes that the directory takes, as far as this process knows; None before the first write."""
        return self._used

    @property
    def refused(self) -> dict[Refusal, int]:
        """How many prompts were left unsaved from some point on, since the server started."""
        return self._refusals.counts

    def asked(self, namespace: Namespace, match: Match) -> None:
        """A request looked this prompt up, whatever it found: its nodes are wanted. On the generation thread."""
        now = self._store.context.clock()
        path = namespace.names(match.tokens)
        self._warmth.used(path, now)
        if match.steps and (tail := match.steps[-1].name.key) not in path:
            self._warmth.used([tail], now)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Around a publish: what one that fails left in the directory is accounted for, and soon looked at.

        Whatever else this process published meanwhile is taken for it; the look tells.
        """
        counters = self._store.context.counters
        before = counters.written_bytes
        try:
            yield
        except BaseException:
            if (size := counters.written_bytes - before) > 0:
                self._left_behind = True
                self.wrote(size)
            raise

    def wrote(self, size: int, tokens: int = 0) -> None:
        """Account for bytes that were just written, for so many new tokens."""
        if self._coldest is not None:
            # A new node may be the coldest, where all others are ahead of the clock.
            self._coldest = min(self._coldest, self._store.context.clock())
        if self._used is not None:
            self._used += size
        self._since += size
        if self._limit is not None:
            self._limit.take(size, self._monotonic())
        self._store.context.counters.add(saved_tokens=tokens)
        counted = self._store.context.counters.snapshot()
        if text := self._alarm.wrote(size, counted["restored_bytes"], self._monotonic()):
            log.warning("kvstore: %s", text)

    def make_room(
        self,
        size: int,
        namespace: Namespace,
        tokens: bytes,
        ahead: int = 0,
        fate: Fate | None = None,
        *,
        kind: Kind = "kv",
    ) -> Refusal | None:
        """None when size more bytes, for the node at the end of these tokens, may be written; room was made if need be.
        What is there already (another request published it meanwhile) needs none. kind: state for that of the node.

        Otherwise why not; it is counted and, if it is meant, logged here. ahead: bytes of what will follow at once and
        will be as warm, for which room is made in the same collection. fate: of the prompt that it is a part of. Raises
        KVStoreError, which is counted as well, when the directory cannot be looked at, or is another one now.
        """
        try:
            refusal = self._room(size, namespace, tokens, ahead, kind)
        except (KVStoreError, MemoryError):
            self._refusals.count(Refusal.FAILED, fate)
            raise
        return None if refusal is None else self._refusals.count(refusal, fate)

    def _room(self, size: int, namespace: Namespace, tokens: bytes, ahead: int, kind: Kind) -> Refusal | None:
        """As make_room, and nothing is counted."""
        if self._limits(size) and not namespace.has_node(tokens, kind):
            return Refusal.LIMIT
        if self._store.renew():
            # What was known is about a directory that is not there any more; a full one would refuse this node.
            self._used, self._coldest = None, None
            self._not_before = self._look_after = 0.0
        due = self._used is None or self._left_behind or self._since > self._measure_after
        if due and self._monotonic() >= self._look_after:
            started = self._worked()
            try:
                self._used = self._look(namespace.standing(tokens).stands_on)
                self._left_behind = False
            finally:
                self._look_after = self._monotonic() + _PAUSE * (self._worked() - started)
        if self._used is not None and self._used + size <= self._budget:
            return None
        if namespace.has_node(tokens, kind):
            return None
        return Refusal.FAILED if self._used is None else self._replace(size, namespace, tokens, ahead)

    def _limits(self, size: int) -> bool:
        """Whether the write limit forbids so many bytes now."""
        return self._limit is not None and not self._limit.allows(size, self._monotonic())

    def refuses(self, size: int, namespace: Namespace, tokens: bytes, fate: Fate | None = None) -> bool:
        """Whether the outlook of a node is a no; counted as a no of make_room is."""
        refusal = self.outlook(size, namespace, tokens)
        if refusal is not None:
            self._refusals.count(refusal, fate)
        return refusal is not None

    def outlook(self, size: int, namespace: Namespace, tokens: bytes) -> Refusal | None:
        """What make_room would say to the node at the end of these tokens, as far as is known without a look.

        On the generation thread: what will not be written need not be copied first. Of a full directory the last
        collection tells, of full chunks only.
        """
        if self._limits(size):
            return None if namespace.has_node(tokens) else Refusal.LIMIT
        if len(tokens) % (namespace.interval * TOKEN_BYTES):
            return None
        coldest, used = self._known_coldest(), self._used
        if coldest is None or used is None or used + size <= self._budget:
            return None
        path = namespace.names(tokens)
        parent = path[-2] if len(path) > 1 else None
        warmth = self._warmth.wanted(path[-1], parent, self._store.context.clock())
        warm_enough = coldest < warmth - self._warmth.margin_ns
        return None if warm_enough or namespace.has_node(tokens) else Refusal.WARM

    def _known_coldest(self) -> int | None:
        """How warm the coldest leaf was at the last collection; None when nobody knows.

        Nobody does where the clock has been set back since: it would be warmer than anything new for as long.
        """
        coldest = self._coldest
        if coldest is None or coldest > self._store.context.clock() + FUTURE_NS:
            return None
        return coldest

    def _look(self, stands_on: Container[Path]) -> int:
        """What the directory takes, cut back to its budget and its namespaces' quotas: the budget was lowered at a
        restart, or others write, too. It is not one node for another, then, so how much each is wanted decides the
        order alone. Raises UnavailableError.
        """
        quotas = read_quotas(self._store.context)
        for problem in quotas.problems:
            if self._warned.due(problem):
                log.warning("kvstore: %s", problem)
        self._measure_after = min([_MEASURE_AFTER_BYTES, *(size // 10 for size in quotas.sizes.values())])
        if not quotas.sizes:
            self._since = 0
            used = self._usage()
            if used <= self._budget:
                return used
        policy = Policy(
            size=self._budget,
            quotas=quotas.sizes,
            spare=0,
            protect=stands_on,
            protect_ns=JUST_USED_NS,
            warmth=self._warmth,
        )
        return self._measure(self._collect(policy))

    def _replace(self, size: int, namespace: Namespace, tokens: bytes, ahead: int) -> Refusal | None:
        """Collect if the node is warm enough for another to go, and if that was not just found to be of no use."""
        if size > self._budget:
            return Refusal.FULL  # All that is cold would go, and for nothing.
        node = namespace.standing(tokens)
        warmth = self._warmth.wanted(node.name, node.parent, self._store.context.clock())
        limit = warmth - self._warmth.margin_ns
        coldest = self._known_coldest()
        if coldest is not None and coldest >= limit:
            return Refusal.WARM
        if self._monotonic() < self._not_before:
            return self._last
        policy = Policy(
            size=max(0, self._budget - size),
            quotas=read_quotas(self._store.context).sizes,
            protect=node.stands_on,
            spare=max(ahead, int(self._budget // 10 * min(1.0, self._took / _SPARE_S))),
            protect_ns=JUST_USED_NS,
            warmth=self._warmth,
            warm_ns=limit,
        )
        report, took = self._patiently(policy)
        if report.busy:
            # Nothing was learnt: a measurement would take a look at all files, and the next try makes one anyway.
            return Refusal.BUSY
        self._took = took
        # Before it is measured, which may fail: neither is done anew for each prompt then.
        self._not_before, self._last = self._monotonic() + max(1.0, _PAUSE * took), Refusal.FAILED
        if self._measure(report) + size <= self._budget:
            self._not_before = 0.0
            return None
        if not report.error:
            # Not cold, so wanted as much; or nothing could go at all, and the budget is too small for this prompt.
            self._last = Refusal.FULL if self._coldest is None else Refusal.WARM
        return self._last

    def _patiently(self, policy: Policy) -> tuple[GcReport, float]:
        """Collect, after another process's collection if that is over soon, and how long it took."""
        patient = self._monotonic() >= self._patient_after
        naps = _BUSY_NAPS if patient else 0
        while True:
            started = self._worked()
            report = self._collect(policy)
            if not report.busy:
                return report, self._worked() - started
            if not naps or self._ended.wait(_BUSY_NAP_S):
                break
            naps -= 1
        if patient:
            self._patient_after = self._monotonic() + _PATIENT_AFTER_S
        return report, 0.0

    def end(self) -> None:
        """Say that nobody waits for what is written any longer, so that this waits for no other process."""
        self._ended.set()

    def _collect(self, policy: Policy) -> GcReport:
        with no_full_search_for_cycles():
            report = collect(self._store.context, policy)
        self._rested += report.rested_seconds
        return report

    def _usage(self) -> int:
        """Bytes on disk; UnavailableError when that cannot be found out."""
        rest = self.pace.resting()
        try:
            return usage(self._store.context, rest)
        except OSError as error:
            raise unavailable(self._store.path, error) from error
        finally:
            self._rested += rest.seconds

    def _worked(self) -> float:
        """A clock that stands still during rests: what a look or a collection costs is not how long it took its time
        beside an engine at work.
        """
        return self._monotonic() - self._rested

    def _measure(self, report: GcReport) -> int:
        """What the directory takes after a collection."""
        if report.error:
            self._could_not(report.error)
        if report.future and self._warned.due("future"):
            log.warning(
                "kvstore: %d files cannot make room, because they were written while the clock was ahead; "
                "run `kvstore fsck --repair`",
                report.future,
            )
        if report.busy or report.error:
            self._coldest = None
            self._used = self._usage()
        else:
            self._coldest = report.coldest_ns
            self._used = report.after_bytes
        self._since = 0
        if report.freed_bytes:
            log.info(
                "kvstore: collected %s; %s of %s used",
                format_size(report.freed_bytes),
                format_size(self._used),
                format_size(self._budget),
            )
        return self._used

    def _could_not(self, why: str) -> None:
        if self._warned.due("collect"):
            log.warning("kvstore: could not collect: %s", why)
