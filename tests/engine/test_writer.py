"""The writer's memory: warmed before it is needed, given back as it is written, gone when nothing happens."""

from __future__ import annotations

import errno
import os
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from core_support import SPECS, Memory, open_store, prompt
from writer_support import MIB, TOKENS, Form, eventually, job_of, rows

from kvstore import (
    FormatVersionError,
    IntervalMismatchError,
    LockTimeoutError,
    NamespaceInfo,
    NotACacheDirectoryError,
    PublishError,
    Span,
    TensorSpec,
    UnavailableError,
)
from kvstore.directory import unavailable
from kvstore.gc import usage
from kvstore.keys import pack_tokens
from kvstore.locks import gc_lock, publish_lock
from kvstore_mlx import housekeeping as housekeeping_module
from kvstore_mlx import writer as writer_module
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.jobs import Job
from kvstore_mlx.refusals import Refusal
from kvstore_mlx.writer import Writer


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "cache", interval=32) as made:
        yield made


@pytest.fixture
def form(store):
    return Form(store.namespace(NamespaceInfo({"model": "writer"})))


@pytest.fixture
def writer(store):
    made = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
    yield made
    made.close(10)


def test_what_lies_in_the_writer_s_memory_is_written_and_given_back(writer, form):
    job = job_of(writer, form, 0, 20, 32, 50)
    assert writer._pool.lent
    assert writer.offer(job)
    assert writer.drain(30)
    memory = Memory()
    assert form.namespace.read(form.namespace.lookup(TOKENS), memory).tokens == 50
    assert [memory.rows(spec, 0, 50) for spec in SPECS] == [rows(spec, 0, 50) for spec in SPECS]
    assert eventually(lambda: writer._pool.lent == 0)
    with pytest.raises(ValueError, match="released"):
        bytes(job.items[0].data[0])


def test_memory_is_given_back_span_by_span(writer, form, monkeypatch):
    """A long job does not hold what it has written already."""
    lent = []
    make_room = writer._housekeeping.make_room

    def looked(*args, **more):
        lent.append(writer._pool.lent)
        return make_room(*args, **more)

    monkeypatch.setattr(writer._housekeeping, "make_room", looked)
    assert writer.offer(job_of(writer, form, 0, 20, 32, 50))
    assert writer.drain(30)
    assert len(lent) == 3
    assert lent[0] > lent[1] > lent[2]


def test_trouble_is_what_became_of_the_last_write(writer, form, monkeypatch):
    told = []
    job = job_of(writer, form, 0, 20)
    job.on_written = lambda tokens, size, seconds: told.append((tokens, size > 0, seconds > 0))
    with monkeypatch.context() as patch:
        patch.setattr(form.namespace, "publish", failing(lambda: OSError(errno.ENOSPC, "full", "/home/me/kv/tmp/7")))
        assert writer.offer(job)
        assert writer.drain(30)
    assert writer.trouble == "not saved: the disk is full; free some space or lower the budget"
    assert told == []
    again = job_of(writer, form, 0, 20, 32)
    again.on_written = job.on_written
    assert writer.offer(again)
    assert writer.drain(30)
    assert writer.trouble == ""
    assert told == [(20, True, True), (12, True, True)]
    assert writer.queued == 0


def test_what_is_there_already_ends_no_trouble(writer, form, monkeypatch):
    """Another server's writes do not show that this one's disk has room again."""
    form.namespace.publish(TOKENS[:20], [Span(0, 20, SPECS, [rows(spec, 0, 20) for spec in SPECS])])
    with monkeypatch.context() as patch:
        patch.setattr(form.namespace, "publish", failing(lambda: OSError(errno.ENOSPC, "full", "/home/me/kv/tmp/7")))
        assert writer.offer(job_of(writer, form, 0, 20, 32))
        assert writer.drain(30)
    for borders, ended in (((0, 20), False), ((0, 20, 32), True)):
        assert writer.trouble
        assert writer.offer(job_of(writer, form, *borders))
        assert writer.drain(30)
        assert (writer.trouble == "") is ended


def failing(make):
    """A publish that fails as one does whose operating system says this."""

    def publish(*_):
        error = make()
        raise unavailable(Path("/home/me/kv"), error) from error

    return publish


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_one_warning_a_minute_for_a_kind_of_trouble_whatever_file_it_names(writer, form, monkeypatch, caplog):
    """Each staging file has another name, and there may be hundreds in a minute."""
    numbers = count()
    kinds = [errno.EIO, errno.EISDIR]
    for kind in kinds:
        make = lambda: OSError(kind, os.strerror(kind), f"/home/me/kv/tmp/{next(numbers)}")  # noqa: B023, E731
        monkeypatch.setattr(form.namespace, "publish", failing(make))
        for _ in range(5):
            assert writer.offer(job_of(writer, form, 0, 20))
            assert writer.drain(30)
            assert "/home" not in writer.trouble
    assert next(numbers) == 10
    said = warnings_of(caplog)
    assert [text[: text.index(" in it: ")] for text in said] == [
        "kvstore: not saved: cannot use the cache directory /home/me/kv: 0",
        "kvstore: not saved: cannot use the cache directory /home/me/kv: 5",
    ]


def test_a_bug_is_said_once_a_minute_with_where_it_was_and_in_the_health(writer, form, monkeypatch, caplog):
    """A traceback for each node of a long prompt would bury what else the log says."""

    bugs = [ZeroDivisionError("in the writer"), KeyError("in the writer")] * 3
    left = iter(bugs)

    def publish(*_):
        raise next(left)

    monkeypatch.setattr(form.namespace, "publish", publish)
    for _ in bugs:
        job = job_of(writer, form, 0, 20)
        assert writer.offer(job)
        assert writer.drain(30)
        assert job.fate.broken
    assert writer.trouble == "not saved, and this is a bug in kvstore; please report it"
    said = [record.exc_info[0] for record in caplog.records if record.levelname == "ERROR"]
    assert said == [ZeroDivisionError, KeyError]


@pytest.mark.parametrize(
    "kind",
    [
        LockTimeoutError,
        FormatVersionError,
        IntervalMismatchError,
        NotACacheDirectoryError,
        UnavailableError,
        PublishError,
    ],
)
def test_no_trouble_names_a_file(writer, form, monkeypatch, caplog, kind):
    """Whoever reaches the server may read what it is."""

    def publish(*_):
        raise kind("/home/me/kv/locks/publish.lock is held") from TimeoutError("/home/me")

    monkeypatch.setattr(form.namespace, "publish", publish)
    assert writer.offer(job_of(writer, form, 0, 20))
    assert writer.drain(30)
    assert writer.trouble.startswith("not saved: ")
    assert "/home" not in writer.trouble
    assert warnings_of(caplog) == ["kvstore: not saved: /home/me/kv/locks/publish.lock is held"]


def test_too_little_memory_is_no_bug(writer, form, monkeypatch, caplog):
    """Found by review: the log, and the health, asked for a report."""

    class ArrayMemoryError(MemoryError):
        """As numpy has one."""

    def publish(*_):
        raise ArrayMemoryError("Unable to allocate 288 MiB")

    monkeypatch.setattr(form.namespace, "publish", publish)
    assert writer.offer(job_of(writer, form, 0, 20))
    assert writer.drain(30)
    assert writer.trouble == "not saved: there was not enough memory for it; answer fewer prompts at once"
    assert warnings_of(caplog) == [f"kvstore: {writer.trouble}"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


WIDE = (TensorSpec("0.keys", "U8", 1, (2048,)),)
CHUNK = 32 * 2048


def wide_job(form, seed: int) -> Job:
    """One chunk of another prompt."""
    tokens = pack_tokens(prompt(32, seed))
    return Job(form, tokens, [Span(0, 32, WIDE, [tokens * (CHUNK // len(tokens))])])


@pytest.mark.parametrize("kept", [Refusal.LIMIT, Refusal.FAILED])
def test_what_failed_publishes_leave_behind_is_written_and_used(store, form, monkeypatch, kept):
    """Their blocks stay for a day, so where every commit fails they would fill the disk."""
    monkeypatch.setattr("kvstore.locks.publish_lock.__wrapped__.__defaults__", (0.01,))
    looks = []
    look = housekeeping_module.usage
    monkeypatch.setattr(housekeeping_module, "usage", lambda *args: looks.append(look(*args)) or looks[-1])
    most = 10 * (CHUNK + 8192)
    limited = kept is Refusal.LIMIT
    house = Housekeeping(store, 1 << 30 if limited else usage(store.context) + most, most if limited else None)
    writer = Writer(house)
    with publish_lock(store.context.layout):
        for seed in range(40):
            job = wide_job(form, seed)
            assert writer.offer(job)
            assert writer.drain(30)
            assert job.fate.broken
    assert writer.close(10)
    lying = len([path for path in store.context.layout.blocks.rglob("*") if path.is_file()])
    assert 5 * CHUNK <= lying * CHUNK <= most
    assert kept in house.refused
    assert sum(house.refused.values()) == 40 - lying
    assert house.used >= lying * CHUNK
    assert store.counters.written_bytes >= lying * CHUNK
    assert len(looks) > 1, "what others did meanwhile is seen, too"


def test_a_look_after_a_failed_publish_waits_for_the_pause(store, form, monkeypatch):
    """One takes long in a large directory, and nothing is written meanwhile."""
    monkeypatch.setattr("kvstore.locks.publish_lock.__wrapped__.__defaults__", (0.01,))
    now, looks = [0.0], []

    def slow(*_):
        now[0] += 5.0
        looks.append(now[0])
        return 0

    monkeypatch.setattr(housekeeping_module, "usage", slow)
    writer = Writer(Housekeeping(store, 1 << 30, None, lambda: now[0]))
    with publish_lock(store.context.layout):
        for seed in range(30):
            now[0] += 10.0
            assert writer.offer(wide_job(form, seed))
            assert writer.drain(30)
    assert writer.close(10)
    assert len(looks) == 3


def test_a_refused_job_gives_its_memory_back(writer, form):
    job = job_of(writer, form, 0, 20)
    writer._closing = True
    assert not writer.offer(job)
    assert writer._pool.lent == 0
    writer._closing = False


def test_a_job_that_fails_gives_its_memory_back(writer, form):
    # Its parent is not there.
    job = job_of(writer, form, 32, 50, 64)
    assert writer.offer(job)
    assert writer.drain(30)
    assert eventually(lambda: writer._pool.lent == 0)
    assert job.fate.broken


def test_a_full_queue_lends_nothing(writer):
    loans = [writer.lend(4 * MIB), writer.lend(4 * MIB - 1)]
    assert all(loans)
    assert writer.lend(1) is None


def test_memory_that_is_expected_is_touched_before(writer):
    writer.expect(3 * MIB)
    assert eventually(lambda: writer._pool.resident >= 3 * MIB)
    assert writer._pool.lent == 0


def test_no_request_waits_while_memory_goes_back(store, form, monkeypatch):
    """Neither for the trim, nor for the memory of a job that is refused."""
    monkeypatch.setattr(writer_module, "_TRIM_AFTER_S", 0.1)
    writer = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
    free = []

    def look() -> None:
        # From another thread: the lock is one that its own holder may take again.
        def ask() -> None:
            if taken := writer._changed.acquire(timeout=0.2):
                writer._changed.release()
            free.append(taken)

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()

    trim, give_back = writer._pool.trim, Job.give_back
    monkeypatch.setattr(writer._pool, "trim", lambda: (look(), trim())[1])
    writer.expect(MIB)
    assert eventually(lambda: free)
    assert eventually(lambda: writer._pool.resident == 0)
    assert all(free)

    free.clear()
    monkeypatch.setattr(Job, "give_back", lambda job, *item: (look(), give_back(job, *item))[1])
    job = job_of(writer, form, 0, 20)
    writer._closing = True
    assert not writer.offer(job)
    writer._closing = False
    assert free, "of the job, and the rest"
    assert all(free)
    writer.close(10)


def test_memory_goes_back_to_the_system_when_nothing_happens(store, monkeypatch):
    monkeypatch.setattr(writer_module, "_TRIM_AFTER_S", 0.2)
    writer = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
    writer.expect(MIB)
    assert eventually(lambda: writer._pool.resident == 0)
    loan = writer.lend(MIB)
    time.sleep(0.5)
    assert writer._pool.resident
    loan.give_back()
    writer.expect(1)
    assert eventually(lambda: writer._pool.resident == 0)
    writer.close(10)


def test_a_close_that_nobody_waits_for_ends_after_the_node_under_way(writer, form, monkeypatch):
    """What is written when the store is closed would leave a staging folder that nobody removes."""
    begun, go = threading.Event(), threading.Event()
    publish = form.namespace.publish

    def slow(*args):
        begun.set()
        assert go.wait(30)
        return publish(*args)

    monkeypatch.setattr(form.namespace, "publish", slow)
    job = job_of(writer, form, 0, 20, 32, 50)
    assert writer.offer(job)
    assert begun.wait(30)
    assert not writer.close(0)
    go.set()
    assert eventually(lambda: not writer._thread.is_alive())
    assert form.namespace.lookup(TOKENS).count == 20
    assert job.fate.broken
    assert writer._pool.lent == 0


def test_a_close_that_nobody_waits_for_waits_for_no_other_collection(store, form, monkeypatch):
    monkeypatch.setattr(housekeeping_module, "_BUSY_NAP_S", 30.0)
    house = Housekeeping(store, usage(store.context) + CHUNK + 8192)
    writer = Writer(house)
    assert writer.offer(wide_job(form, 1))
    assert writer.drain(30)
    waiting, wait = threading.Event(), house._ended.wait
    monkeypatch.setattr(house._ended, "wait", lambda seconds: waiting.set() or wait(seconds))
    with gc_lock(store.context.layout) as mine:
        assert mine
        assert writer.offer(wide_job(form, 2))
        assert waiting.wait(30)
        assert not writer.close(0)
        assert eventually(lambda: not writer._thread.is_alive())
    assert house.refused == {Refusal.BUSY: 1}


class TestClosed:
    """Of what the writer had memory for, none stays with whoever still holds it."""

    def test_memory_goes_back_at_the_end(self, store, form):
        writer = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
        assert writer.offer(job_of(writer, form, 0, 20))
        writer.expect(3 * MIB)
        assert eventually(lambda: writer._pool.resident >= 3 * MIB)
        assert writer.close(10)
        assert writer._pool.resident == 0
        assert writer.lend(1) is None

    def test_what_was_lent_before_goes_back_when_it_is_refused(self, store, form):
        writer = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
        job = job_of(writer, form, 0, 20)
        assert writer.close(10)
        assert writer._pool.resident
        assert not writer.offer(job)
        assert writer._pool.resident == 0

    def test_what_was_not_written_in_time_goes_back(self, store, form, monkeypatch):
        written, go_on = [], threading.Event()
        monkeypatch.setattr(Writer, "_write", lambda _, job: (written.append(job), go_on.wait(10)))
        writer = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
        assert writer.offer(job_of(writer, form, 0, 20))
        assert eventually(lambda: written)
        assert writer.offer(job_of(writer, form, 0, 32))
        assert not writer.close(0.05)
        written.clear()
        go_on.set()
        writer._thread.join(10)
        assert writer._pool.resident == 0

    def test_left_it_ends_in_its_own_time(self, store, form):
        """By a finalizer, within any lock."""
        seen = []
        writer = Writer(
            Housekeeping(store, 1 << 30),
            max_queued=8 * MIB,
            afterwards=lambda: seen.append((writer.queued, writer._pool.resident)),
        )
        with writer._changed:
            assert writer.offer(job_of(writer, form, 0, 20))
            writer.leave()
            assert seen == []
        writer._thread.join(10)
        assert seen == [(0, 0)]
        assert form.namespace.lookup(TOKENS).count == 20
        assert not writer.offer(job_of(writer, form, 0)), "nothing is queued any more"
