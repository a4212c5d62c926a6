"""Why something is not written: what is told, how often, and what is found out anew."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from contextlib import ExitStack, nullcontext

import pytest
from core_support import prompt
from housekeeping_support import INTERVAL, NODE, servers

from kvstore import UnavailableError
from kvstore.gc import GcReport, collect
from kvstore.keys import pack_tokens
from kvstore.locks import gc_lock
from kvstore.states import State, StateTensor
from kvstore_mlx import housekeeping
from kvstore_mlx.refusals import Fate, Refusal


@pytest.fixture
def server(tmp_path):
    with servers(tmp_path) as make:
        yield make


def test_left_out_prompts_are_said_once_in_ten_minutes(server, caplog):
    caplog.set_level(logging.INFO, "kvstore")
    one = server(2.5)
    for seed in range(12):
        one.ahead += 0.01
        one.request(prompt(2 * INTERVAL, seed))
    said = [record.message for record in caplog.records if "wanted as much" in record.message]
    assert len(said) == 1
    one.ahead += 601
    one.request(prompt(2 * INTERVAL, 0))
    for seed in range(20, 24):
        one.request(prompt(2 * INTERVAL, seed))
    said = [record.message for record in caplog.records if "wanted as much" in record.message]
    assert len(said) == 2
    assert one.house.refused[Refusal.WARM] >= 12


def test_a_write_limit_stops_writing_until_the_hour_goes_on(server):
    one = server(write_limit=4 * NODE)
    for seed in range(4):
        assert one.request(prompt(INTERVAL, seed)) is None
    assert one.request(prompt(INTERVAL, 4)) is Refusal.LIMIT
    assert one.saved(prompt(INTERVAL, 4)) == 0
    one.ahead += 61 * 60
    assert one.request(prompt(INTERVAL, 4)) is None
    assert one.house.refused[Refusal.LIMIT] == 1


def test_why_nothing_was_collected_is_said_once_a_minute(server, monkeypatch, caplog):
    one = server(2.5)

    def failing(context, policy):
        report = collect(context, policy)
        report.error = "cannot read objects: input/output error"
        return report

    monkeypatch.setattr(housekeeping, "collect", failing)
    for seed in range(6):
        one.ahead += 5
        one.request(prompt(INTERVAL, seed))
    assert caplog.text.count("could not collect") == 1
    one.ahead += 60
    one.request(prompt(INTERVAL, 9))
    assert caplog.text.count("could not collect") == 2


def test_another_collection_that_is_over_soon_is_waited_for(server):
    one = server(4.5)
    one.request(prompt(4 * INTERVAL, 1))
    one.ahead += 100
    with ExitStack() as held:
        assert held.enter_context(gc_lock(one.store.context.layout))
        timer = threading.Timer(0.2, held.close)
        timer.start()
        assert one.request(prompt(INTERVAL, 2)) is None
        timer.join()
    assert one.saved(prompt(INTERVAL, 2)) == INTERVAL
    assert one.house.refused == {}


def test_a_long_collection_of_another_process_is_no_full_budget(server, monkeypatch):
    """Found by review: it was counted and said as a budget that is too small."""
    one = server(4.5)
    one.request(prompt(4 * INTERVAL, 1))
    one.ahead += 100
    naps = []
    monkeypatch.setattr(one.house._ended, "wait", naps.append)
    monkeypatch.setattr(housekeeping, "usage", lambda *_: pytest.fail("a look at all files, for nothing"))
    with gc_lock(one.store.context.layout):
        assert one.request(prompt(INTERVAL, 2)) is Refusal.BUSY
        waited = sum(naps)
        assert 0.5 < waited < 2
        for seed in range(3, 9):
            one.ahead += 2
            assert one.request(prompt(INTERVAL, seed)) is Refusal.BUSY
        assert sum(naps) == waited, "the queue does not stand still"
        one.ahead += 10
        assert one.request(prompt(INTERVAL, 9)) is Refusal.BUSY
        assert sum(naps) > waited
    assert one.house.refused == {Refusal.BUSY: 8}
    assert one.request(prompt(INTERVAL, 2)) is None


def test_a_collection_that_failed_is_no_full_budget(server, monkeypatch, caplog):
    one = server(4.5)
    one.request(prompt(4 * INTERVAL, 1))
    one.ahead += 100
    with monkeypatch.context() as broken:
        broken.setattr(housekeeping, "collect", lambda *_: GcReport(error="stopped, because input/output error"))
        for seed in range(2, 5):
            assert one.request(prompt(INTERVAL, seed)) is Refusal.FAILED
    assert one.house.refused == {Refusal.FAILED: 3}
    assert caplog.text.count("could not collect: stopped, because input/output error") == 1
    one.ahead += 100
    assert one.request(prompt(INTERVAL, 2)) is None


def test_a_prompt_is_refused_once(server):
    one = server(write_limit=NODE)
    one.house.wrote(NODE)
    fate = Fate()
    packed = pack_tokens(prompt(2 * INTERVAL, 1))
    assert one.house.refuses(NODE, one.space, packed, fate)
    assert one.house.make_room(NODE, one.space, packed, 0, fate) is Refusal.LIMIT
    assert one.house.make_room(NODE, one.space, packed, 0, Fate()) is Refusal.LIMIT
    assert one.house.refused == {Refusal.LIMIT: 2}
    assert one.store.counters.refused() == {"limit": 2}
    assert one.store.counters.snapshot()["refused_prompts"] == 2


def test_what_cannot_be_measured_is_the_documented_error(server, monkeypatch):
    one = server()

    def broken(_context, *_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(housekeeping, "usage", broken)
    with pytest.raises(UnavailableError, match="input/output error"):
        one.request(prompt(INTERVAL, 1))
    assert one.house.refused == {Refusal.FAILED: 1}


def test_what_cannot_be_measured_is_counted_and_not_looked_at_for_each_prompt(server, monkeypatch):
    """Found by review: nothing counted it, and each prompt had the whole directory scanned."""
    one = server()
    looks = []

    def broken(_context, *_):
        looks.append(1)
        one.ahead += 5
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(housekeeping, "usage", broken)
        fate = Fate()
        for _ in range(2):  # The second part of a prompt is none of another.
            with pytest.raises(UnavailableError):
                one.house.make_room(NODE, one.space, pack_tokens(prompt(INTERVAL, 1)), 0, fate)
            one.ahead += 200
        for seed in range(2, 6):
            one.ahead += 5
            with pytest.raises(UnavailableError) if seed == 2 else nullcontext():
                assert one.request(prompt(INTERVAL, seed)) is Refusal.FAILED
        assert len(looks) == 3
        assert one.house.refused == {Refusal.FAILED: 5}
    assert one.request(prompt(INTERVAL, 6)) is Refusal.FAILED
    one.ahead += 100
    assert one.request(prompt(INTERVAL, 6)) is None


def test_a_directory_that_was_emptied_is_measured_whatever_was_wrong_with_it(server, monkeypatch):
    one = server()

    def broken(_context, *_):
        one.ahead += 100
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(housekeeping, "usage", broken)
        with pytest.raises(UnavailableError):
            one.request(prompt(INTERVAL, 1))
    assert one.request(prompt(INTERVAL, 1)) is Refusal.FAILED
    for entry in list(one.store.path.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert one.request(prompt(INTERVAL, 1)) is None


def test_a_collection_after_which_nothing_can_be_measured_is_not_repeated_at_once(server, monkeypatch):
    one = server(4.5)
    one.request(prompt(4 * INTERVAL, 1))
    one.ahead += 100
    looks = []

    def broken(_context, *_):
        looks.append(1)
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(housekeeping, "collect", lambda *_: GcReport(error="stopped, because input/output error"))
        broken_disk.setattr(housekeeping, "usage", broken)
        with pytest.raises(UnavailableError):
            one.request(prompt(INTERVAL, 2))
        for seed in range(3, 6):
            assert one.request(prompt(INTERVAL, seed)) is Refusal.FAILED
    assert len(looks) == 1
    assert one.house.refused == {Refusal.FAILED: 4}


def test_a_budget_that_is_too_small_is_told_in_the_pause_as_well(server, monkeypatch):
    """Found by review: after one refusal that was said, all others counted as they should be."""
    one = server(2.5)
    looks = []
    look = housekeeping.collect
    monkeypatch.setattr(housekeeping, "collect", lambda *args: looks.append(1) or look(*args))
    for seed in (1, 1, 1, 2):
        one.ahead += 0.1
        assert one.request(prompt(8 * INTERVAL, seed)) is Refusal.FULL
    assert len(looks) == 1
    assert one.house.refused == {Refusal.FULL: 4}


def test_nothing_goes_for_what_is_larger_than_the_budget(server):
    one = server(2.5)
    one.request(prompt(2 * INTERVAL, 1))
    one.ahead += 100
    large = one.house.budget + 1
    assert one.house.make_room(large, one.space, pack_tokens(prompt(INTERVAL, 2))) is Refusal.FULL
    assert one.saved(prompt(2 * INTERVAL, 1)) == 2 * INTERVAL


def test_a_wait_that_was_for_something_is_none_for_nothing(server, monkeypatch):
    """Found by review: when the last try came in time the next collection was not waited for, either."""
    one = server(4.5)
    one.request(prompt(4 * INTERVAL, 1))
    one.ahead += 100
    naps = []
    with ExitStack() as held:
        assert held.enter_context(gc_lock(one.store.context.layout))

        def nap(seconds):
            naps.append(seconds)
            if len(naps) == housekeeping._BUSY_NAPS:
                held.close()

        monkeypatch.setattr(one.house._ended, "wait", nap)
        assert one.request(prompt(INTERVAL, 2)) is None
        assert len(naps) == housekeeping._BUSY_NAPS
    one.ahead += 15
    with gc_lock(one.store.context.layout):
        assert one.request(prompt(INTERVAL, 3)) is Refusal.BUSY
    assert len(naps) == 2 * housekeeping._BUSY_NAPS


def test_who_ends_waits_for_no_other_collection(server, monkeypatch):
    monkeypatch.setattr(housekeeping, "_BUSY_NAP_S", 30.0)
    one = server(4.5)
    one.request(prompt(4 * INTERVAL, 1))
    one.ahead += 100
    one.house.end()
    started = time.monotonic()
    with gc_lock(one.store.context.layout):
        assert one.request(prompt(INTERVAL, 2)) is Refusal.BUSY
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("kind", ["kv", "state"])
@pytest.mark.parametrize("why", [Refusal.WARM, Refusal.LIMIT])
def test_what_is_there_already_needs_no_room(server, kind, why):
    """Found by review: of two samples of one prompt the second was refused what the first had just saved."""
    one = server(2.5) if why is Refusal.WARM else server(write_limit=3 * NODE)
    tokens = prompt(2 * INTERVAL, 1)
    packed = pack_tokens(tokens)
    one.request(tokens)
    if kind == "state":
        one.space.publish_state(tokens, State((StateTensor("x", "U8", (1,)),), [b"x"]))
    one.house.wrote(NODE)
    assert one.house.make_room(NODE, one.space, packed, kind=kind) is None
    assert one.house.outlook(NODE, one.space, packed) is None
    one.request(prompt(INTERVAL, 2))
    refused = one.house.refused
    assert refused == {why: 1}
    assert one.house.make_room(NODE, one.space, packed, kind=kind) is None
    assert one.house.outlook(NODE, one.space, packed) is None
    path = one.space.lookup(tokens).steps[-1].path.with_suffix(f".{kind}")
    one.store.context.damaged.add(path)
    assert one.house.make_room(NODE, one.space, packed, kind=kind) is why, "it will be written again"
