"""Memory that nobody has touched gets its pages at once; what it holds and what is there already stay as they are."""

from __future__ import annotations

import errno
import mmap
import platform
import resource
import sys

import pytest
from core_support import INFO, open_store

from kvstore import Span, State, StateTensor, TensorBuffer, TensorSpec
from kvstore import populate as populate_module
from kvstore.populate import _System

MIB = 1 << 20
PAGE = mmap.PAGESIZE

linux = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux can be asked for pages, since 5.14",
)


@pytest.fixture
def memory():
    """4 MiB of plain memory that nobody has touched, without pages of 2 MiB."""
    region = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        region.madvise(mmap.MADV_NOHUGEPAGE)
    with memoryview(region) as view:
        yield view


def faults_of(action) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def write(view) -> None:
    for at in range(0, view.nbytes, PAGE):
        view[at] = 1


class Calls:
    """Stands in for the system: what is there, and what is asked of it. Addresses are sizes, to tell views apart."""

    def __init__(self, *, there: int = 0, failed: int = 0) -> None:
        self.there, self.failed = there, failed
        self.looks: list[int] = []
        self.asked: list[int] = []

    def look(self, at: int, _size: int) -> int:
        self.looks.append(at)
        return self.there

    def ask(self, _at: int, size: int) -> int:
        self.asked.append(size)
        return self.failed

    def system(self, monkeypatch) -> _System:
        monkeypatch.setattr(populate_module, "_find_calls", lambda: (lambda view: 0, self.look, self.ask))
        monkeypatch.setattr(sys, "platform", "linux")
        return _System()


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


@linux
def test_pages_are_there_before_they_are_written_to(memory):
    system = _System()
    # Neither begins nor ends with a page.
    some = memory[PAGE + 24 : MIB + 24]
    faults_of(lambda: system.populate(views(MIB)))
    assert faults_of(lambda: write(memory[2 * MIB : 3 * MIB])) >= MIB // PAGE // 2, "the system gives more than a page"
    system.populate([some])
    assert faults_of(lambda: write(some)) < MIB // PAGE // 8


@linux
def test_what_memory_holds_stays(memory):
    """Only its middle was never written to."""
    memory[:24] = memory[-24:] = b"what memory holds stays!"
    _System().populate([memory])
    assert bytes(memory[:24]) == bytes(memory[-24:]) == b"what memory holds stays!"
    assert not any(memory[24:-24])
    assert faults_of(lambda: write(memory)) < memory.nbytes // PAGE // 8


def test_memory_that_was_touched_is_only_looked_at(monkeypatch):
    calls = Calls(there=1)
    calls.system(monkeypatch).populate(views(MIB, MIB))
    assert (calls.looks, calls.asked) == ([MIB // 2], [])


@linux
def test_the_system_says_what_was_touched(memory, monkeypatch):
    asked = []
    address_of, resident, fault_in = populate_module._find_calls()
    monkeypatch.setattr(
        populate_module, "_find_calls", lambda: (address_of, resident, lambda *a: asked.append(a) or fault_in(*a))
    )
    write(memory[:MIB])
    system = _System()
    system.populate([memory[:MIB]])
    assert asked == []
    system.populate([memory[2 * MIB :]])
    assert asked == [(address_of(memory) + 2 * MIB, 2 * MIB)]
    system.populate([memory[2 * MIB :]])
    assert len(asked) == 1


def test_short_views_are_not_worth_a_call(monkeypatch):
    calls = Calls()
    system = calls.system(monkeypatch)
    system.populate(views(0, 1, (1 << 16) - 1))
    assert calls.looks == []
    system.populate(views(0, 1, 1 << 16, MIB))
    assert (calls.looks, calls.asked) == ([1 << 15], [1 << 16, MIB])


@pytest.mark.parametrize(
    ("code", "asked"), [(errno.EINVAL, 1), (errno.ENOSYS, 1), (errno.ENOMEM, 2), (errno.EFAULT, 2)]
)
def test_it_is_given_up_where_the_system_does_not_know_it(monkeypatch, code, asked):
    """EINVAL before Linux 5.14. A shortage of memory passes."""
    calls = Calls(failed=code)
    system = calls.system(monkeypatch)
    system.populate(views(MIB, MIB))
    system.populate(views(MIB))
    assert calls.asked == [MIB] * asked


@linux
def test_what_the_system_answers(memory):
    address_of, _, fault_in = populate_module._find_calls()
    assert fault_in(address_of(memory), MIB) == 0
    assert fault_in(0, MIB) == errno.ENOMEM, "nothing is there"


def test_a_restore_asks_for_the_pages_of_what_it_reads(tmp_path, monkeypatch):
    """Of the rows of a span and of a state, each before it is filled."""
    wide = TensorSpec("0.keys", "F32", 2, (1024,))
    data, whole = [b"k" * wide.span_bytes(64)], b"s" * (MIB + 100)
    asked: list[tuple[int, bytes]] = []

    def note(some):
        asked.extend((view.nbytes, bytes(view[:1])) for view in some)

    with open_store(tmp_path / "cache", interval=64) as opened:
        space = opened.namespace(INFO)
        space.publish(range(64), [Span(0, 64, (wide,), data)])
        space.publish_state(range(64), State((StateTensor("s", "U8", (len(whole),)),), [whole]))
        for name in ("scatter", "states"):
            monkeypatch.setattr(f"kvstore.{name}.populate", note)
        match = space.lookup(range(64))
        memory = {"0.keys": TensorBuffer(memoryview(bytearray(len(data[0]))), 64)}
        assert space.read(match, lambda specs, tokens: memory).tokens == 64
        assert asked == [(len(data[0]) // 2, b"\0")] * 2
        asked.clear()
        space.read_state(match, lambda tensors: {"s": memoryview(bytearray(len(whole)))})
    assert asked == [(MIB, b"\0"), (100, b"\0")]


@pytest.mark.parametrize("error", [ImportError("no _ctypes"), AttributeError("no mincore"), OSError("no libc")])
def test_it_is_given_up_where_there_are_no_such_calls(monkeypatch, error):
    tries = []

    def find():
        tries.append(1)
        raise error

    monkeypatch.setattr(populate_module, "_find_calls", find)
    monkeypatch.setattr(sys, "platform", "linux")
    system = _System()
    for _ in range(2):
        system.populate(views(MIB))
    assert tries == [1]


def test_other_systems_are_never_asked(monkeypatch):
    calls = Calls()
    system = calls.system(monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    _System().populate(views(MIB))
    assert calls.looks == []
    system.populate(views(MIB))
    assert len(calls.looks) == 1
