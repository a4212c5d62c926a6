"""What a server's cache does, counted: for each request, for /metrics, and for the counters in the directory.

Told by the generation thread (what was fetched), the HTTP threads (when the first token came) and the writer thread
(what was written). Nothing here may fail a request or make one wait for a disk.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kvstore.errors import KVStoreError
from kvstore.forks import renew_in_forks
from kvstore.stats import FOLD_ABOVE, StatsFile, fold
from kvstore.store import Store
from kvstore_mlx.refusals import Refusal

__all__ = ["Fetched", "Metrics", "Served", "Tier", "Wrote"]

log = logging.getLogger("kvstore")

Tier: TypeAlias = Literal["memory", "disk", "none"]

Wrote: TypeAlias = Callable[[int, int, float], None]
"""Told of each part of a prompt that was written: tokens, bytes, seconds. On the writer thread."""

FLUSH_S = 5.0
"""Counters are written to the directory so long after they changed: what a kill may lose."""

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds: from a lookup to the prefill of a very long prompt."""


@dataclass(frozen=True)
class Fetched:
    """What a lookup gave one prompt. matched: tokens that the nearest saved prompt begins with too, None when nobody
    looked; differs: whether that one goes on with other tokens. A prompt with images is looked up in memory only.
    """

    tokens: int
    reused: int = 0
    tier: Tier = "none"
    restored_bytes: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    matched: int | None = None
    differs: bool = False


@dataclass
class Served:
    """One request on its way. at: when its lookup ended (time.perf_counter)."""

    fetched: Fetched | None = None
    at: float = 0.0
    prefill_s: float | None = None
    written_tokens: int = 0
    written_bytes: int = 0
    publish_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """The ``kv_cache`` object of a response: what is known when it is sent."""
        fetched = self.fetched or Fetched(0)
        from_disk = fetched.tier == "disk"
        return {
            "tier": fetched.tier,
            "prompt_tokens": fetched.tokens,
            "reused_tokens": fetched.reused,
            "restored_tokens": fetched.reused if from_disk else 0,
            "restored_bytes": fetched.restored_bytes,
            "matched_tokens": fetched.matched,
            "differs_at": fetched.matched if fetched.differs else None,
            "written_tokens": self.written_tokens,
            "written_bytes": self.written_bytes,
            "lookup_seconds": round(fetched.lookup_s, 6),
            "restore_seconds": round(fetched.restore_s, 6),
            "prefill_seconds": None if self.prefill_s is None else round(self.prefill_s, 6),
            "publish_seconds": round(self.publish_s, 6),
        }


class Histogram:
    """How long something took, in buckets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        with self._lock:
            self._counts[bisect_left(BUCKETS, seconds)] += 1
            self._sum += seconds

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, as Prometheus has them, and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        rows, cumulative = [], 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            cumulative += count
            rows.append((bound, float(cumulative)))
        return rows, total


@dataclass
class _Totals:
    """Counts since the server started. reused: by where from."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused: dict[Tier, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})


class Metrics:
    """All that one server counts. now: time.perf_counter, or a test's."""

    def __init__(self, store: Store, now: Callable[[], float] = time.perf_counter) -> None:
        self._store = store
        self._now = now
        self._stats = StatsFile(store.context)
        self._closed = False
        self._current: Served | None = None
        self.totals = _Totals()
        self.seconds = {name: Histogram() for name in ("lookup", "restore", "prefill", "publish")}
        self.forked()
        renew_in_forks(self)
        fold(store.context, FOLD_ABOVE)

    def forked(self) -> None:
        """As an object that is new, and as one that a fork took along (kvstore.forks): the timer is the parent's."""
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def begin(self, served: Served | None) -> None:
        """The request whose prompt is fetched next; on the generation thread."""
        self._current = served

    def fetched(self, fetched: Fetched) -> Wrote:
        """A prompt was looked up; on the generation thread. What is returned wants to be told what is written of it."""
        served, self._current = self._current or Served(), None
        served.fetched, served.at = fetched, self._now()
        with self._lock:
            self.totals.requests += 1
            self.totals.prompt_tokens += fetched.tokens
            if fetched.tier != "none":
                self.totals.reused[fetched.tier] += fetched.reused
        self.seconds["lookup"].observe(fetched.lookup_s)
        if fetched.tier == "disk":
            self.seconds["restore"].observe(fetched.restore_s)
        self._count(
            requests=1,
            prompt_tokens=fetched.tokens,
            memory_tokens=fetched.reused if fetched.tier == "memory" else 0,
            disk_tokens=fetched.reused if fetched.tier == "disk" else 0,
            read_bytes=fetched.restored_bytes,
            read_us=round(fetched.restore_s * 1e6) if fetched.tier == "disk" else 0,
        )

        return self.writing(served)

    def writing(self, served: Served) -> Wrote:
        """What wants to be told what is written of a prompt. One that was never looked up has no request."""

        def wrote(tokens: int, size: int, seconds: float) -> None:
            served.written_tokens += tokens
            served.written_bytes += size
            served.publish_s += seconds
            self.seconds["publish"].observe(seconds)
            self._count(written_tokens=tokens, written_bytes=size)

        return wrote

    def watched(self, served: Served, responses: Iterator[Any]) -> Iterator[Any]:
        """A request's responses, with the first token timed and each of them counted; on an HTTP thread.

        Closing this closes them. Nothing else is done then: what is never closed the collector ends, on any thread and
        within any lock, those that counting takes too.
        """
        try:
            for response in responses:
                self.generated(1)
                if served.prefill_s is None and served.fetched is not None:
                    served.prefill_s = self._now() - served.at
                    self.seconds["prefill"].observe(served.prefill_s)
                yield response
        finally:
            if isinstance(responses, Generator):
                responses.close()

    def generated(self, tokens: int) -> None:
        """So many tokens of an answer were generated."""
        with self._lock:
            self.totals.generated_tokens += tokens
        self._count(generated_tokens=tokens)

    def close(self) -> None:
        """Write the counters to the directory once more. What is counted afterwards (tokens of an answer that a client
        still takes) is written at once: a timer might be too late, and leave a staging folder that nobody removes.
        """
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._stats.close()

    def _count(self, **amounts: int) -> None:
        """Add to the counters of the directory, which are written soon."""
        self._stats.add(**amounts)
        with self._lock:
            closed = self._closed
            if not closed and self._timer is None:
                self._timer = self._started()
        if closed:
            # With a staging folder of its own, before the store's would be made anew for it.
            self._stats.flush()
            self._stats.close()

    def _started(self) -> threading.Timer | None:
        """The timer of the next flush; None where there are no more threads, and the next count tries again."""
        timer = threading.Timer(FLUSH_S, self._flush)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:
            log.debug("kvstore: counters are not written yet: %s", error)
            return None
        return timer

    def _flush(self) -> None:
        """One at a time: of a disk that hangs every few seconds another thread would wait for the end."""
        written = False
        try:
            written = self._stats.flush()
        finally:
            with self._lock:
                again = written and self._stats.changed and not self._closed
                self._timer = self._started() if again else None

    def refused(self) -> dict[str, int]:
        """Prompts that were left unsaved from some point on since the server started, by reason."""
        counted = self._store.counters.refused()
        return {reason: counted.get(reason, 0) for reason in (refusal.name.lower() for refusal in Refusal)}

    # Prometheus.

    def exposition(self, accept: str, gauges: dict[str, tuple[str, float]]) -> tuple[bytes, str]:
        """Everything as text for Prometheus, and its content type. gauges: values of the moment, each with its help.

        Raises KVStoreError when the prometheus-client package is not there.
        """
        try:
            core = importlib.import_module("prometheus_client.core")
            encoding = importlib.import_module("prometheus_client.exposition")
            registry_module = importlib.import_module("prometheus_client.registry")
        except ImportError as error:
            raise KVStoreError(
                "/metrics needs the prometheus-client package; install it with: pip install prometheus-client"
            ) from error
        registry = registry_module.CollectorRegistry()
        registry.register(_Collector(lambda: self._families(core, gauges)))
        encoder, content_type = encoding.choose_encoder(accept)
        return encoder(registry), content_type

    def _families(self, core: Any, gauges: dict[str, tuple[str, float]]) -> Iterator[Any]:
        counted = self._store.counters.snapshot()
        with self._lock:
            totals = self.totals
            values = {
                "requests": ("Prompts that were looked up", totals.requests),
                "prompt_tokens": ("Tokens of all prompts", totals.prompt_tokens),
                "generated_tokens": ("Tokens that were generated", totals.generated_tokens),
            }
            reused = dict(totals.reused)
        for name, text in _COUNTED.items():
            if name in counted:
                values[name] = (text, counted[name])
        for name, (text, value) in values.items():
            yield core.CounterMetricFamily(f"kvstore_{name}", text, value=value)
        family = core.CounterMetricFamily(
            "kvstore_reused_tokens",
            "Tokens of prompts that were not computed, by where they came from",
            labels=["tier"],
        )
        for tier, value in reused.items():
            family.add_metric([tier], value)
        yield family
        family = core.CounterMetricFamily(
            "kvstore_refused_prompts",
            "Prompts that were left unsaved from some point on, by the reason",
            labels=["reason"],
        )
        for reason, prompts in self.refused().items():
            family.add_metric([reason], prompts)
        yield family
        for name, histogram in self.seconds.items():
            rows, total = histogram.snapshot()
            yield core.HistogramMetricFamily(f"kvstore_{name}_seconds", _TIMED[name], buckets=rows, sum_value=total)
        for name, (text, number) in gauges.items():
            yield core.GaugeMetricFamily(f"kvstore_{name}", text, value=number)


_COUNTED = {
    "restored_bytes": "Bytes read to restore prompts",
    "saved_tokens": "Tokens written to the directory",
    "written_bytes": "Bytes written to the directory",
    "published_nodes": "Nodes written to the directory",
    "failed_publishes": "Writes that failed",
    "damaged": "Files found damaged, and not used",
    "missing": "Files that were gone when they were wanted",
    "collected_nodes": "Nodes removed to keep the budget",
    "collected_bytes": "Bytes removed to keep the budget",
}

_TIMED = {
    "lookup": "Seconds to find the longest prefix in memory and in the directory",
    "restore": "Seconds to read a prefix from the directory",
    "prefill": "Seconds from the end of the lookup to the first token",
    "publish": "Seconds to write a span or a state, in the background",
}


class _Collector:
    """What a registry asks for metric families."""

    def __init__(self, collect: Callable[[], Iterator[Any]]) -> None:
        self.collect = collect
