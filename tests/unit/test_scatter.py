"""Several threads read into an engine's memory: every byte right or the block is bad, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import xxhash
from core_support import FILL, SPECS, Memory, kv, open_store, prompt, span, spans

from kvstore import DamagedBlockError, NamespaceInfo, Span
from kvstore import scatter as scatter_module
from kvstore.blocks import block_parts
from kvstore.fs import preadv_full
from kvstore.manifest import BlockRef
from kvstore.scatter import OpenBlock, scatter

TOKENS = prompt(40)
THREADS = (1, 2, 4)


@pytest.fixture(autouse=True)
def _a_run_a_unit(monkeypatch):
    """Tests have small tensors; each run of one is a unit of its own, as two or four are of a real chunk."""
    monkeypatch.setattr(scatter_module, "UNIT_BYTES", 1)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = set(os.listdir("/dev/fd"))
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "kvstore-read"] == []
    assert set(os.listdir("/dev/fd")) == before


class Files:
    """Blocks on disk, opened, with room for one thing to be wrong with each."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.fds: list[int] = []

    def open(self, some: Span, change=lambda data: data) -> OpenBlock:
        parts, payload = block_parts(some)
        data = b"".join(bytes(part) for part in parts)
        ref = BlockRef(xxhash.xxh3_128(data).digest(), len(data), some.first, some.count, payload)
        path = self.folder / f"block-{some.first}"
        path.write_bytes(change(data))
        self.fds.append(os.open(path, os.O_RDONLY))
        return OpenBlock(ref, self.fds[-1], data[:payload], some.specs)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def files(tmp_path):
    made = Files(tmp_path)
    yield made
    made.close()


def flipped(at: int):
    def change(data: bytes) -> bytes:
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return change


def check(memory: Memory, first: int, end: int) -> None:
    for spec, expected in zip(SPECS, kv(TOKENS, first, end), strict=True):
        assert memory.rows(spec, first, end) == expected, f"wrong bytes in {spec.name}"


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("unit", [1, 100, 1 << 20])
def test_a_span_lands_at_its_tokens_and_nowhere_else(files, monkeypatch, threads, unit):
    monkeypatch.setattr(scatter_module, "UNIT_BYTES", unit)
    memory = Memory()
    block = files.open(span(TOKENS, 7, 20))
    assert scatter([block], memory(SPECS, 40), threads) == [None]
    check(memory, 7, 20)
    for spec in SPECS:
        untouched = memory.rows(spec, 0, 7) + memory.rows(spec, 20, memory.capacity)
        assert untouched == bytes([FILL]) * len(untouched)


@pytest.mark.parametrize(("unit", "calls"), [(1, 6), (140, 5), (1 << 20, 1)])
def test_tensors_of_a_short_span_share_a_call_and_those_of_a_long_one_are_cut(files, monkeypatch, unit, calls):
    """Each call lets go of the interpreter's lock, and beside a busy thread it takes milliseconds to get it back; and
    what is too long for the processor's cache is no longer in it when it is hashed.
    """
    monkeypatch.setattr(scatter_module, "UNIT_BYTES", unit)
    seen = []
    monkeypatch.setattr(scatter_module, "preadv_full", lambda *args: (seen.append(args), preadv_full(*args)))
    assert scatter([files.open(span(TOKENS, 7, 20))], Memory()(SPECS, 40), 2) == [None]
    assert len(seen) == calls


def test_each_thread_reads_a_block_of_its_own_while_there_are_enough(files, monkeypatch):
    """It hashes what it has read itself, and not what lies in another core's cache."""
    together = threading.Barrier(2)
    readers: dict[int, set[int]] = {}

    def in_step(fd, views, offset):
        together.wait(10)
        readers.setdefault(fd, set()).add(threading.get_ident())
        preadv_full(fd, views, offset)

    monkeypatch.setattr(scatter_module, "preadv_full", in_step)
    blocks = [files.open(span(TOKENS, first, first + 10)) for first in (0, 10, 20, 30)]
    memory = Memory()
    assert scatter(blocks, memory(SPECS, 40), 2) == [None] * 4
    check(memory, 0, 40)
    assert [len(readers[block.fd]) for block in blocks] == [1] * 4


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("tensor", range(len(SPECS)))
def test_a_flipped_bit_of_any_tensor_is_damage(files, tensor, threads):
    sizes = [spec.span_bytes(13) for spec in SPECS]
    good = files.open(span(TOKENS, 0, 7))
    bad = files.open(span(TOKENS, 7, 20), lambda data: flipped(len(data) - sum(sizes[tensor:]))(data))
    memory = Memory()
    first, second = scatter([good, bad], memory(SPECS, 40), threads)
    assert first is None
    assert isinstance(second, DamagedBlockError)
    check(memory, 0, 7)


@pytest.mark.parametrize("threads", THREADS)
def test_a_file_cut_after_it_was_opened_is_damage(files, threads):
    block = files.open(span(TOKENS, 7, 20), lambda data: data[:-1])
    (error,) = scatter([block], Memory()(SPECS, 40), threads)
    assert "early" in str(error)


def test_the_digest_is_of_the_bytes_in_memory(files, monkeypatch):
    """Not of those in the file: what an engine will see was hashed where it lies."""

    def corrupting(fd, views, offset):
        preadv_full(fd, views, offset)
        views[-1][-1] ^= 1

    monkeypatch.setattr(scatter_module, "preadv_full", corrupting)
    (error,) = scatter([files.open(span(TOKENS, 0, 9))], Memory()(SPECS, 40), 2)
    assert "digest" in str(error)


def test_units_that_are_read_out_of_order_are_hashed_in_order(files, monkeypatch):
    """The first unit is held back until another thread has read all that follow."""
    others = threading.Event()
    seen = []
    block = files.open(span(TOKENS, 0, 9))

    def late(fd, views, offset):
        if offset == block.ref.payload:
            assert others.wait(10)
        preadv_full(fd, views, offset)
        seen.append(offset)
        if len(seen) == sum(spec.outer for spec in SPECS) - 1:
            others.set()

    monkeypatch.setattr(scatter_module, "preadv_full", late)
    memory = Memory()
    assert scatter([block], memory(SPECS, 40), 2) == [None]
    assert seen[-1] == block.ref.payload
    check(memory, 0, 9)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_whatever_the_threads_race_to_only_the_bad_block_is_bad(files, monkeypatch, threads):
    borders = list(range(0, 41, 4))
    bad = 6
    blocks = [
        files.open(span(TOKENS, first, end), flipped(-1) if number == bad else lambda data: data)
        for number, (first, end) in enumerate(pairwise(borders))
    ]
    rng = random.Random(threads)

    def jittery(fd, views, offset):
        time.sleep(rng.choice((0, 0, 1e-4)))
        preadv_full(fd, views, offset)

    monkeypatch.setattr(scatter_module, "preadv_full", jittery)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            memory = Memory()
            outcome = scatter(blocks, memory(SPECS, 40), threads)
            assert [error is None for error in outcome] == [number != bad for number in range(10)]
            check(memory, 0, borders[bad])
            check(memory, borders[bad + 1], 40)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RuntimeError])
def test_what_is_not_a_block_s_fault_is_raised_wherever_it_happens(files, monkeypatch, error, threads):
    blocks = [files.open(span(TOKENS, first, first + 4)) for first in range(0, 40, 4)]
    count = threading.local()

    def failing(fd, views, offset):
        # The second call of each thread: it happens to whichever comes first.
        count.calls = getattr(count, "calls", 0) + 1
        if count.calls == 2:
            raise error("on purpose")
        time.sleep(1e-3)
        preadv_full(fd, views, offset)

    monkeypatch.setattr(scatter_module, "preadv_full", failing)
    with pytest.raises(error, match="on purpose"):
        scatter(blocks, Memory()(SPECS, 40), threads)


def test_an_error_of_the_disk_is_the_block_s(files, monkeypatch):
    blocks = [files.open(span(TOKENS, first, first + 20)) for first in (0, 20)]

    def failing(fd, views, offset):
        if fd == blocks[1].fd:
            raise OSError(errno.EIO, "Input/output error")
        preadv_full(fd, views, offset)

    monkeypatch.setattr(scatter_module, "preadv_full", failing)
    first, second = scatter(blocks, Memory()(SPECS, 40), 2)
    assert first is None
    assert isinstance(second, OSError)


@pytest.mark.parametrize("threads", THREADS)
def test_memory_of_a_bad_block_is_let_go_at_once(files, monkeypatch, threads):
    """A view that lives on in a traceback would pin the engine's memory until the next garbage collection."""

    def failing(fd, views, offset):
        if offset > blocks[0].ref.payload:
            raise OSError(errno.EIO, "Input/output error")
        preadv_full(fd, views, offset)

    memory = Memory()
    blocks = [files.open(span(TOKENS, 0, 9)), files.open(span(TOKENS, 9, 12), lambda data: data[:-1])]
    monkeypatch.setattr(scatter_module, "preadv_full", failing)
    gc.disable()
    try:
        outcome = scatter(blocks, memory(SPECS, 12), threads)
        assert all(outcome)
        for data in memory.data.values():
            data.append(0)  # A BufferError says that somebody still looks at it.
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", THREADS)
def test_memory_is_let_go_when_what_fails_is_no_block(files, monkeypatch, threads):
    """Units were left that nobody had read."""
    ahead = threading.Event()

    def failing(fd, views, offset):
        preadv_full(fd, views, offset)
        if offset != block.ref.payload:
            ahead.set()
            return
        if threads > 1:
            ahead.wait(10)
        raise MemoryError

    memory = Memory()
    block = files.open(span(TOKENS, 0, 9))
    monkeypatch.setattr(scatter_module, "preadv_full", failing)
    gc.disable()
    try:
        with pytest.raises(MemoryError):
            scatter([block], memory(SPECS, 12), threads)
        for data in memory.data.values():
            data.append(0)
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", THREADS)
def test_a_block_without_tensors_keeps_nobody_from_the_others(files, threads):
    bare = replace(files.open(span(TOKENS, 0, 9)), specs=())
    good = files.open(span(TOKENS, 9, 12))
    assert scatter([bare, good], Memory()(SPECS, 40), threads)[1] is None


def test_threads_that_cannot_be_started_are_done_without(files, monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    memory = Memory()
    gc.disable()
    try:
        assert scatter([files.open(span(TOKENS, 0, 9))], memory(SPECS, 9), 4) == [None]
        check(memory, 0, 9)
        for data in memory.data.values():
            data.append(0)
    finally:
        gc.enable()


@pytest.fixture
def two_blocks(tmp_path, monkeypatch):
    """A namespace, a match of two blocks in it, and the files that a restore has closed. Ctrl-C works meanwhile."""
    space = open_store(tmp_path / "cache", interval=64).namespace(NamespaceInfo({"model": "x"}))
    space.publish(TOKENS, spans(TOKENS, 0, 20, 40))
    match, closed = space.lookup(TOKENS), []

    def close(fd: int) -> None:
        closed.append(fd)
        os.close(fd)

    monkeypatch.setattr("kvstore.restore.close_read", close)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield space, match, closed
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("often", [1, 3])
def test_files_are_closed_after_the_last_thread_ended(two_blocks, monkeypatch, often):
    """The caller has read its own share, and is interrupted, once or more, while it waits for the other thread's."""
    space, match, closed = two_blocks
    inside, seen = threading.Event(), []

    def slow(fd, views, offset):
        if threading.current_thread() is threading.main_thread():
            assert inside.wait(10)
        elif not inside.is_set():
            inside.set()
            for _ in range(often):
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            seen.append(list(closed))
        preadv_full(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(scatter_module, "preadv_full", slow)
        with pytest.raises(KeyboardInterrupt):
            space.read(match, Memory())
    assert seen == [[]], "a file was closed under the thread that reads it"
    assert len(closed) == 2
    assert match.space.context.damaged == set(), "no block is to blame"
    assert space.read(space.lookup(TOKENS), Memory()).tokens == len(TOKENS)


def test_a_thread_that_was_started_while_somebody_interrupted_is_waited_for(two_blocks, monkeypatch):
    space, match, closed = two_blocks
    start, seen, began = threading.Thread.start, [], threading.Event()

    def interrupted_start(thread):
        start(thread)
        assert began.wait(10)
        raise KeyboardInterrupt

    def slow(fd, views, offset):
        began.set()
        time.sleep(0.2)
        seen.append(list(closed))
        preadv_full(fd, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(scatter_module, "preadv_full", slow)
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            space.read(match, Memory())
    assert seen == [[]]
    assert len(closed) == 2


def test_a_thread_that_had_no_turn_yet_is_waited_for(two_blocks, monkeypatch):
    """It would hold the engine's memory for as long as it has none."""
    space, match, _ = two_blocks
    run = scatter_module._Helper._run
    monkeypatch.setattr(scatter_module._Helper, "_run", lambda helper: (time.sleep(0.3), run(helper)))
    assert space.read(match, Memory()).tokens == len(TOKENS)
    assert [each.name for each in threading.enumerate() if each.name == "kvstore-read"] == []


def test_a_thread_that_begins_when_all_is_over_reads_nothing(files, monkeypatch):
    late, start = [], threading.Thread.start
    memory = Memory()

    def not_yet(thread):
        late.append(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", not_yet)
        assert scatter([files.open(span(TOKENS, 0, 9))], memory(SPECS, 9), 2) == [None]
    monkeypatch.setattr(scatter_module, "preadv_full", None)
    for thread in late:
        start(thread)
        thread.join()
    assert len(late) == 1
    check(memory, 0, 9)
