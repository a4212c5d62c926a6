"""What a process looked up, or reads just now, is not collected by that same process (rule 9 of the design).

Found by review: a lookup noted nothing, and a restore only at its end, so a server that made room for one request took
the prefix that another was about to read. Blocks are opened some at a time, and the rest have only their names.
"""

from __future__ import annotations

import time

import pytest
from core_support import INFO, Memory, read_checked
from gc_support import HOUR, SECOND, ahead, open_store, prompt, publish, set_used, state
from interrupt_support import interrupted

import kvstore.context
import kvstore.restore
from kvstore.eviction import PROTECT_NS, Policy
from kvstore.gc import collect, usage
from kvstore.store import Store

TOKENS = prompt(100)
NODES = 7


@pytest.fixture
def later(tmp_path, store, space):
    """A store with a prompt and a state of an hour ago, whose process has not looked at them yet."""
    publish(space, TOKENS)
    space.publish_state(TOKENS, state())
    return ahead(tmp_path / "cache")


def of(store: Store):
    return store.namespace(INFO)


def test_what_was_looked_up_stays_as_long_as_a_request_may_need_to_read_it(later):
    assert of(later).lookup(TOKENS).count == len(TOKENS)
    assert collect(later.context, Policy(size=0)).nodes == 0
    assert collect(later.context, Policy(size=0, protect_ns=0)).nodes == NODES


def test_what_was_not_looked_up_goes(later):
    assert of(later).lookup(TOKENS[:32]).count == 32
    assert collect(later.context, Policy(size=0)).nodes == NODES - 2


@pytest.mark.parametrize("slow", [0, 11 * SECOND, 2 * PROTECT_NS, 2 * HOUR])
def test_what_is_read_stays_however_long_that_takes(tmp_path, store, space, monkeypatch, slow):
    publish(space, TOKENS)
    behind = [HOUR]
    one = open_store(tmp_path / "cache", None, clock=lambda: time.time_ns() + behind[0])
    monkeypatch.setattr(kvstore.restore, "_WINDOW", 2)
    real = kvstore.restore._open_window
    windows = []

    def opening(*args):
        windows.append(args)
        if len(windows) == 2:
            behind[0] += slow
            assert collect(one.context, Policy(size=0, protect_ns=10 * SECOND)).nodes == 0
        return real(*args)

    monkeypatch.setattr(kvstore.restore, "_open_window", opening)
    match = of(one).lookup(TOKENS)
    assert read_checked(of(one), match, TOKENS).tokens == len(TOKENS)
    assert collect(one.context, Policy(size=0, protect_ns=10 * SECOND)).nodes == 0, "it was used just now"
    behind[0] += 11 * SECOND
    assert collect(one.context, Policy(size=0, protect_ns=10 * SECOND)).nodes == NODES


def test_a_state_that_is_read_stays(later):
    space = of(later)
    match = space.lookup(TOKENS)
    later.context.recent.clear()
    reports = []

    def allocate(tensors):
        later.context.recent.clear()
        reports.append(collect(later.context, Policy(size=0, protect_ns=0)))
        return {tensor.name: memoryview(bytearray(tensor.nbytes)) for tensor in tensors}

    assert space.read_state(match, allocate) == {"n": 0}
    assert [(report.nodes, report.states) for report in reports] == [(0, 0)]


def test_what_is_read_no_more_is_held_no_more(later):
    space = of(later)

    def refuse(specs, count):
        raise MemoryError

    for allocate in (refuse, Memory()):
        try:
            space.read(space.lookup(TOKENS), allocate)
        except MemoryError:
            assert allocate is refuse
    assert collect(later.context, Policy(size=0, protect_ns=0)).nodes == NODES


def test_what_an_interrupt_kept_from_being_read_is_held_no_more(later):
    context = later.context
    manifest = context.layout.nodes / "a manifest"
    places = 0

    def read() -> None:
        with context.reading([str(manifest)]):
            pass

    with context.reading([str(manifest)]):
        # Others who read the same are not let go of.
        for places in interrupted(read, kvstore.context):  # noqa: B007
            assert context.is_read(manifest)
    assert not context.is_read(manifest)
    assert places > 10
    for _ in interrupted(read, kvstore.context):
        assert not context.is_read(manifest)


def test_a_use_before_the_clock_was_set_back_protects_nothing(tmp_path, store, space):
    publish(space, TOKENS)
    offset = [48 * HOUR]
    one = open_store(tmp_path / "cache", None, clock=lambda: time.time_ns() + offset[0])
    assert of(one).lookup(TOKENS).count == len(TOKENS)
    offset[0] = HOUR
    assert collect(one.context, Policy(size=0)).nodes == NODES


@pytest.mark.parametrize("point", ["scanned", "marked", "planned"])
@pytest.mark.parametrize("seconds", [60, 3 * 3600])
def test_what_is_looked_up_beside_a_collection_stays_however_long_that_takes(tmp_path, store, space, point, seconds):
    """Beside an engine at work it rests for minutes, of a large directory for hours, and what was looked up between its
    plan and its turn went.
    """
    publish(space, TOKENS)
    behind = [HOUR]
    one = open_store(tmp_path / "cache", None, clock=lambda: time.time_ns() + behind[0])

    def pause(reached):
        if reached == point:
            behind[0] += seconds * SECOND // 2
            assert of(one).lookup(TOKENS).count == len(TOKENS)
            behind[0] += seconds * SECOND // 2

    assert collect(one.context, Policy(size=0, protect_ns=10 * SECOND), pause=pause).nodes == 0
    behind[0] += 11 * SECOND
    assert collect(one.context, Policy(size=0, protect_ns=10 * SECOND)).nodes == NODES


@pytest.mark.parametrize("seconds", [60, 3 * 3600, -1800])
def test_others_make_room_for_what_is_looked_up_beside_a_collection(tmp_path, store, space, seconds):
    """It stayed, but was counted on: nothing else went for it, and the room was missing."""
    other = prompt(100, 1)
    for tokens, age in ((TOKENS, 5000), (other, 1000)):
        publish(space, tokens)
        set_used(store, space, tokens, age)
    behind = [HOUR]
    one = open_store(tmp_path / "cache", None, clock=lambda: time.time_ns() + behind[0])

    def pause(reached):
        if reached == "marked":
            behind[0] += seconds * SECOND // 2
            assert of(one).lookup(TOKENS).count == len(TOKENS)
            behind[0] += seconds * SECOND // 2

    report = collect(one.context, Policy(size=usage(one.context) - 1, spare=0, protect_ns=10 * SECOND), pause=pause)
    assert (report.nodes, report.skipped, report.unmet_bytes) == (1, 0, 0)
    assert of(one).lookup(TOKENS).count == len(TOKENS)
    left = of(one).lookup(other)
    assert left.count < len(other)
    assert report.coldest_ns == left.steps[-1].path.stat().st_mtime_ns


def test_what_is_looked_up_beside_a_collection_stays_when_the_clock_is_set_back(tmp_path, store, space):
    publish(space, TOKENS)
    behind = [2 * HOUR]
    one = open_store(tmp_path / "cache", None, clock=lambda: time.time_ns() + behind[0])

    def pause(reached):
        if reached == "planned":
            behind[0] -= HOUR // 2
            assert of(one).lookup(TOKENS).count == len(TOKENS)

    assert collect(one.context, Policy(size=0, protect_ns=10 * SECOND), pause=pause).nodes == 0
