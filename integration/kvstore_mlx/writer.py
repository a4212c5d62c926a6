"""Publish in the background: one thread that sees plain bytes and never MLX.

The generation thread hands over copies and goes on; it never waits. What is queued is bounded in bytes: when the disk
cannot keep up, an offer is refused, the recording keeps its place, and the next boundary catches up, so nothing is ever
published after a hole. Whatever fails here is counted and logged once a minute, and never reaches a request.
"""

from __future__ import annotations

import _thread
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvstore.blocks import Span
from kvstore.errors import KVStoreError, MissingParentError
from kvstore.forks import renew_in_forks
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.forms import Form
from kvstore_mlx.held import Held
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.jobs import Boundary, Job, non_finite
from kvstore_mlx.live import EXTRA
from kvstore_mlx.pool import Loan, Pool
from kvstore_mlx.refusals import Fate
from kvstore_mlx.seldom import Seldom, alike
from kvstore_mlx.trouble import BUG, in_words, kind_of
from kvstore_mlx.verification import differs

__all__ = ["Writer"]

log = logging.getLogger("kvstore")

MAX_QUEUED_BYTES = 1 << 30
"""Copies that wait to be written. A chunk of an 8B model is 288 MiB, so three of them."""

BUSY_SHARE = 0.0075
"""The part of its time that the thread works while the engine makes tokens: a chunk of an 8B model is then some ten
seconds on its way, and costs one or two hundredths of their tokens; at full speed it would cost a third of the tokens
of a fraction of a second (`bench decode` measures both)."""

PREFILL_SHARE = 0.1
"""The same during a prefill, which such a chunk delays by the same in all, fast or slow: what counts is that the copies
of two chunks seldom lie in memory at once. Copies of less than PREFILL_BYTES take less of it: most of their writing can
wait until the first token is out, and then nobody waited for it."""

PREFILL_BYTES = 1 << 27

_RELAXED = 0.35
"""The part of the queue up to which there is that much time. A fuller one is written faster, from three times of it on
at full speed: what it has no room for has to be computed again."""

_PREFILL_S = 30.0
"""How long the engine is taken to be at work after a lookup or a piece of a prefill, unless it says that it is not."""

_STEP_S = 1.0
"""The same after a token."""

_QUIET_S = 0.05
"""How long the choice of a first token is waited for, at most. That of a small model takes some milliseconds, and two
more with this thread beside it; one that takes longer does not notice."""

_WARN_EVERY_S = 60.0

_TRIM_AFTER_S = 10.0
"""Longer than the prefill of a chunk mostly takes, and no time to keep hundreds of megabytes for nothing."""


class Writer:
    """The background thread of one server and its queue.

    trouble: why the last thing that should have been saved was not; empty when it was. Whoever reaches the server may
    read it, so it names no file. held: what recordings keep until the queue has room. afterwards: called by the thread
    when it ends, however late that is.
    """

    def __init__(
        self,
        housekeeping: Housekeeping,
        max_queued: int = MAX_QUEUED_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
        afterwards: Callable[[], None] = lambda: None,
    ) -> None:
        self._housekeeping = housekeeping
        self._pace = housekeeping.pace
        self._pace.share = self._share
        self._monotonic = monotonic
        self._prefill_until = self._steps_until = self._quiet_until = 0.0
        self._hurried: set[object] = set()
        self._max_queued = max_queued
        self._pool = Pool(max_queued, address_phase())
        self.held = Held()
        self._expected = 0
        self._queue: deque[Job] = deque()
        self._queued = 0
        self._closing = self._given_up = False
        self._busy = False
        self._afterwards = afterwards
        self._changed = threading.Condition()
        self._warned = Seldom(_WARN_EVERY_S, monotonic)
        self.trouble = ""
        self._verified: set[tuple[str, type]] = set()
        renew_in_forks(self)
        self._thread = threading.Thread(target=self._run, name="kvstore-writer", daemon=True)
        self._thread.start()

    def forked(self) -> None:
        """See kvstore.forks. The thread is the parent's, and so is what is queued: here nothing is taken any more, and
        who closes waits for nothing.
        """
        self._changed = threading.Condition()
        self._closing, self._busy = True, False
        self._queue.clear()
        self._queued = 0

    @property
    def queued(self) -> int:
        """Bytes that wait to be written."""
        return self._queued

    def expect(self, size: int) -> None:
        """Say that so many bytes will be copied soon: the thread touches the memory for them while it has nothing else
        to do, so that the engine's thread need not.
        """
        with self._changed:
            self._expected = max(self._expected, size)
            self._changed.notify_all()

    def asked(self, form: Form, match: Match) -> None:
        """Say that a request looked a prompt up, whatever it found; called on the engine's thread."""
        self._housekeeping.asked(form.namespace, match)

    def prepare(self, form: Form, tokens: bytes, size: int) -> None:
        """Say that size bytes will be copied for the node at the end of these tokens. Nothing is made ready for what
        would be refused; called on the engine's thread.
        """
        if self._housekeeping.outlook(size, form.namespace, tokens) is None:
            self.expect(size)

    def prefilling(self) -> None:
        """Say that the engine computes a prompt just now."""
        self._prefill_until = self._monotonic() + _PREFILL_S

    def prefilled(self) -> None:
        """Say that a prompt is computed for somebody who may make tokens of it, and will not say so."""
        self._prefill_until = 0.0
        self.stepped()

    def stepped(self) -> None:
        """Say that the engine made a token, and will make another one."""
        self._steps_until = self._monotonic() + _STEP_S

    def choosing(self) -> None:
        """Say that a first token is about to be chosen: what is queued now is begun when the request ends, or a moment
        later. A thread that has work already goes on, or many answers in turn would keep it from it.
        """
        if not self._queued:
            self._quiet_until = self._monotonic() + _QUIET_S

    def idle(self) -> None:
        """Say that a request ended. Another one that is under way makes itself known by its next token."""
        self._prefill_until = self._steps_until = 0.0
        if self._quiet_until:
            with self._changed:
                self._quiet_until = 0.0
                self._changed.notify_all()

    def _share(self) -> float:
        """See Pace.share."""
        now = self._monotonic()
        if self._hurried or self._closing or now >= max(self._prefill_until, self._steps_until):
            return 1.0
        least = BUSY_SHARE
        if now >= self._steps_until:
            least += (PREFILL_SHARE - BUSY_SHARE) * min(1.0, self._queued / PREFILL_BYTES)
        filled = self._queued / self._max_queued
        return min(1.0, least + max(0.0, filled - _RELAXED) / (2 * _RELAXED))

    def refuses(self, form: Form, tokens: bytes, size: int, fate: Fate | None = None) -> bool:
        """Whether the node at the end of these tokens would not be written; called on the engine's thread."""
        return self._housekeeping.refuses(size, form.namespace, tokens, fate)

    @property
    def room(self) -> float:
        """Bytes that an offer may have just now. What has no room need not be copied first."""
        return self._max_queued - self._queued if self._queued else math.inf

    def lend(self, size: int) -> Loan | None:
        """Memory to copy a span into, which goes into its job; None when the queue is full. Never waits."""
        return None if self._closing else self._pool.lend(size)

    def offer(self, job: Job) -> bool:
        """Queue a job without waiting; False when the queue is full (an empty queue takes a job of any size).

        What a refused job was lent is given back.
        """
        with self._changed:
            taken = not self._closing and job.size <= self.room
            if taken:
                self._queue.append(job)
                self._queued += job.size
                self._changed.notify_all()
        if not taken:
            job.give_back()
            if self._closing:
                self._pool.trim()
        return taken

    def drain(self, timeout: float) -> bool:
        """Wait until everything queued is written; False when that took longer than timeout seconds."""
        deadline = time.monotonic() + timeout
        me = object()
        with self._changed:
            try:
                # In here: an interrupt before the try would leave the writer without rests for good.
                self._hurried.add(me)
                self._changed.notify_all()
                while self._queue or self._busy:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        return False
                return True
            finally:
                self._hurried.discard(me)

    def close(self, timeout: float) -> bool:
        """Write what is queued, then end the thread; False, and a warning, when timeout seconds were not enough. The
        thread then ends after the node under way, and waits for no other process's collection.
        """
        done = self.drain(timeout)
        left: list[Job] = []
        with self._changed:
            self._closing = True
            warn = not (done or self._given_up)
            if not done:
                self._given_up = True
                left += self._queue
                self._queue.clear()
            self._changed.notify_all()
        if warn:
            log.warning("kvstore: stopped before everything was written; what is missing will be computed again")
        if not done:
            self._housekeeping.end()
        left.clear()  # Their memory, which nobody who wants the lock should wait for.
        self._thread.join(timeout if done else 0.1)
        self._pool.trim()
        return done

    def leave(self) -> None:
        """Close without waiting. For a finalizer: whatever its thread holds, a lock of threading's too, it waits for
        nothing.
        """
        with suppress(RuntimeError):  # Threads can no longer be started, and the process ends.
            _thread.start_new_thread(self._leave, ())

    def _leave(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        self._work()
        self._pool.trim()
        self._afterwards()

    def _work(self) -> None:
        """Write what is queued until there is no more to come."""
        while True:
            with self._changed:
                woken = True
                while not (self._due or self._closing or self._expected) and (woken or self._queue):
                    idle_s = _TRIM_AFTER_S if self._pool.resident else None
                    woken = self._changed.wait(self._quiet_s if self._queue else idle_s)
                job = self._queue.popleft() if self._due else None
                if job is not None:
                    self._busy = True
                elif self._closing:
                    return
                else:
                    expected, self._expected = self._expected, 0
            if job is None:
                # Neither under the lock: both take long, and the generation thread takes it for each request.
                if expected:
                    self._pool.warm(expected)
                else:
                    self._pool.trim()
                continue
            try:
                self._write(job)
            finally:
                size = job.size
                job.give_back()
                del job
                with self._changed:
                    self._queued -= size
                    self._busy = False
                    self._changed.notify_all()

    @property
    def _quiet_s(self) -> float:
        """How long nothing is to be begun yet."""
        return 0.0 if self._hurried or self._closing else max(0.0, self._quiet_until - self._monotonic())

    @property
    def _due(self) -> bool:
        """Whether a job is to be written now."""
        return bool(self._queue) and not self._quiet_s

    def _write(self, job: Job) -> None:
        # What comes after a part that was not written would not be either, and others might have to go for it.
        job.fate.broken = job.fate.broken or not self._whole(job)

    def _whole(self, job: Job) -> bool:
        """Whether all of a job was published."""
        try:
            ahead = job.size
            for item in job.items:
                ahead -= item.payload_bytes
                # One by one: memory is given back as it is written, and a hole stops the rest.
                if self._given_up or job.form.trouble or not self._item(job, item, ahead):
                    return False
                job.give_back(item)
        except MissingParentError as error:
            log.debug("kvstore: not saved: %s", error)
        except (KVStoreError, MemoryError) as error:
            self._warn(f"not saved: {in_words(error)}", f"not saved: {kind_of(error)}")
        except Exception as error:
            self.trouble = BUG
            if self._warned.due(alike(error)):
                log.exception("kvstore: %s", BUG)
        else:
            return True
        return False

    def _item(self, job: Job, item: Span | Boundary, ahead: int) -> bool:
        """Publish one span or state; False, with a warning, when it must not be or there is no room."""
        if (name := non_finite(item, self._pace)) is not None:
            hooks = name.startswith(EXTRA)
            where = f"the extras hook's tensor {name.removeprefix(EXTRA)}" if hooks else "the KV cache"
            self._warn(f"NaN or infinity in {where}; not saved")
            return False
        tokens = job.tokens[: item.end * TOKEN_BYTES]
        refusal = self._housekeeping.make_room(
            item.payload_bytes,
            job.form.namespace,
            tokens,
            ahead,
            job.fate,
            kind="kv" if isinstance(item, Span) else "state",
        )
        if refusal is not None:
            if not refusal.meant:
                self._warn(refusal.value)
            return False
        started = time.perf_counter()
        with self._housekeeping.publishing():
            if isinstance(item, Span):
                published = job.form.namespace.publish(tokens, [item])
            else:
                published = job.form.namespace.publish_state(tokens, item.state)
        new = item.count if isinstance(item, Span) and published.nodes else 0
        self._housekeeping.wrote(published.written, new)
        if published.written:  # What is there already says nothing about a disk that is full.
            self.trouble = ""
        if job.on_written is not None:
            job.on_written(new, published.written, time.perf_counter() - started)
        kind = type(item)
        # Only what was written just now: a block that lay there, and was damaged since, is no lie of this disk's, and a
        # node that another process published meanwhile is its own, with other bytes if it computed in other pieces.
        if published.nodes and published.blocks and (job.form.namespace.id, kind) not in self._verified:
            if trouble := differs(job.form, tokens, item if isinstance(item, Span) else item.state):
                job.form.trouble = trouble
                log.error("kvstore: caching is off for this model: %s", trouble)
                return False
            self._verified.add((job.form.namespace.id, kind))
        return True

    def _warn(self, text: str, kind: str = "") -> None:
        """One warning a minute for each kind of trouble.

        kind: the text without what is another one each time, if it has any: the name of a file.
        """
        self.trouble = kind = kind or text
        if self._warned.due(kind):
            log.warning("kvstore: %s", text)
