"""Publish in the background: one thread that sees plain bytes and never MLX.

The generation thread hands over copies and goes on; it never waits. What is queued is bounded in bytes: when the disk
cannot keep up, an offer is refused, the recording keeps its place, and the next boundary catches up, so nothing is ever
published after a hole. Whatever fails here is counted and logged once a minute, and never reaches a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.blocks import Span
from kvstore.errors import KVStoreError, MissingParentError
from kvstore.store import Namespace
from kvstore_mlx.buffers import has_non_finite
from kvstore_mlx.housekeeping import Housekeeping

__all__ = ["Job", "Writer"]

log = logging.getLogger("kvstore")

MAX_QUEUED_BYTES = 1 << 30
"""Copies that wait to be written. A chunk of an 8B model is 288 MiB, so three of them."""

_WARN_EVERY_S = 60.0


@dataclass
class Job:
    """Spans of one prompt to be published. on_failure runs on the writer thread when they are not."""

    namespace: Namespace
    tokens: bytes
    spans: list[Span]
    on_failure: Callable[[], None] = field(default=lambda: None)

    @property
    def size(self) -> int:
        """Bytes of KV the job holds in memory."""
        return sum(span.payload_bytes for span in self.spans)


class Writer:
    """The background thread of one server and its queue."""

    def __init__(self, housekeeping: Housekeeping, max_queued: int = MAX_QUEUED_BYTES) -> None:
        self._housekeeping = housekeeping
        self._max_queued = max_queued
        self._queue: deque[Job] = deque()
        self._queued = 0
        self._closing = False
        self._busy = False
        self._changed = threading.Condition()
        self._warned: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="kvstore-writer", daemon=True)
        self._thread.start()

    def offer(self, job: Job) -> bool:
        """Queue a job without waiting; False when the queue is full (an empty queue takes a job of any size)."""
        with self._changed:
            if self._closing or (self._queued and self._queued + job.size > self._max_queued):
                return False
            self._queue.append(job)
            self._queued += job.size
            self._changed.notify_all()
            return True

    def drain(self, timeout: float) -> bool:
        """Wait until everything queued is written; False when that took longer than timeout seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._queue or self._busy:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
            return True

    def close(self, timeout: float) -> bool:
        """Write what is queued, then end the thread; False when timeout seconds were not enough."""
        done = self.drain(timeout)
        with self._changed:
            self._closing = True
            if not done:
                self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout if done else 0.1)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._busy = True
            try:
                self._write(job)
            finally:
                size = job.size
                del job
                with self._changed:
                    self._queued -= size
                    self._busy = False
                    self._changed.notify_all()

    def _write(self, job: Job) -> None:
        try:
            for span in job.spans:
                # Span by span: copies are freed as they are written, and a hole stops the rest.
                if any(has_non_finite(part, spec.dtype) for part, spec in zip(span.data, span.specs, strict=True)):
                    self._warn("NaN or infinity in the KV cache; not saved")
                    job.on_failure()
                    return
                if not self._housekeeping.make_room(span.payload_bytes):
                    self._warn("the budget (--kv-cache-size) is used up by what is in use; not saved")
                    job.on_failure()
                    return
                published = job.namespace.publish(job.tokens[: span.end * 4], [span])
                self._housekeeping.wrote(published.written)
        except MissingParentError as error:
            log.debug("kvstore: not saved: %s", error)
            job.on_failure()
        except KVStoreError as error:
            self._warn(f"not saved: {error}")
            job.on_failure()
        except Exception:
            log.exception("kvstore: not saved, and this is a bug in kvstore; please report it")
            job.on_failure()

    def _warn(self, text: str) -> None:
        """One warning a minute for each kind of trouble: a full disk must not fill the log as well."""
        now = time.monotonic()
        if now - self._warned.get(text, -_WARN_EVERY_S) >= _WARN_EVERY_S:
            self._warned[text] = now
            log.warning("kvstore: %s", text)
