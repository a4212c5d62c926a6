"""Memory that nobody has touched gets its pages at once; what it holds and what is there already stay as they are."""

from __future__ import annotations

import mmap
import resource
import sys

import pytest

from kvstore import populate as populate_module
from kvstore.populate import _System

MIB = 1 << 20
PAGE = mmap.PAGESIZE

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for pages")


@pytest.fixture
def memory():
    """4 MiB of plain memory that nobody has touched, without pages of 2 MiB."""
    region = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        region.madvise(mmap.MADV_NOHUGEPAGE)
    with memoryview(region) as view:
        yield view


def faults_of(action) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


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


def test_it_is_given_up_where_the_system_refuses(monkeypatch):
    """EINVAL before Linux 5.14, or no memory."""
    calls = Calls(failed=-1)
    system = calls.system(monkeypatch)
    system.populate(views(MIB, MIB))
    system.populate(views(MIB))
    assert calls.asked == [MIB]


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
