"""What a server writes when its directory is full, and what it says about what it does not write."""

from __future__ import annotations

import gc
import logging
import shutil
import time

import pytest
from core_support import prompt
from gc_support import check_valid, manifests
from housekeeping_support import INTERVAL, NODE, SPECS, servers

from kvstore import NamespaceInfo, Span
from kvstore.gc import collect, usage
from kvstore.keys import pack_tokens
from kvstore.quotas import write_quota
from kvstore_mlx import housekeeping
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.refusals import Refusal


@pytest.fixture
def server(tmp_path):
    with servers(tmp_path) as make:
        yield make


def test_what_is_used_as_much_is_not_taken_for_another(server):
    """The thrashing of least recently used: two conversations that take turns, and room for one."""
    one = server(4.5)
    a, b = prompt(4 * INTERVAL, 1), prompt(4 * INTERVAL, 2)
    for _ in range(5):
        one.ahead += 5
        one.request(a)
        one.ahead += 5
        assert one.request(b) is Refusal.WARM
    assert (one.saved(a), one.saved(b)) == (len(a), 0)
    counters = one.store.context.counters
    assert counters.published_nodes == 1 + 4, "nothing was written in turn"
    assert counters.refused_prompts == 5
    assert counters.saved_tokens == len(a)


def test_a_conversation_that_rests_makes_room_for_one_that_does_not(server):
    one = server(4.5)
    a, b = prompt(4 * INTERVAL, 1), prompt(4 * INTERVAL, 2)
    for _ in range(3):
        one.ahead += 5
        one.request(a)
    for _ in range(20):
        one.ahead += 10
        one.request(b)
    assert (one.saved(a), one.saved(b)) == (0, len(b))


def test_after_a_restart_the_files_times_tell_what_rests(server, tmp_path):
    one = server(4.5)
    a, b = prompt(4 * INTERVAL, 1), prompt(4 * INTERVAL, 2)
    one.request(a)
    one.house = Housekeeping(one.store, one.house.budget, None, lambda: time.monotonic() + one.ahead)
    one.store.context.recent.clear()
    assert one.request(b) is Refusal.WARM
    one.ahead += 60
    one.store.context.recent.clear()
    assert one.request(b) is None
    assert one.saved(b) == len(b)


def test_a_prompt_larger_than_the_budget_keeps_its_beginning(server):
    one = server(3.5)
    tokens = prompt(8 * INTERVAL, 1)
    for _ in range(10):
        one.ahead += 30
        assert one.request(tokens) is Refusal.FULL
    assert one.saved(tokens) == 3 * INTERVAL


@pytest.mark.parametrize(("before", "wanted"), [(2 * INTERVAL, 3 * INTERVAL), (INTERVAL + 8, INTERVAL + 12)])
def test_what_a_publish_stands_on_is_not_taken_for_it_however_long_its_prefill_took(server, before, wanted):
    """Its parent, or the tail whose blocks it names again: both are cold by the time that what follows is computed."""
    one = server(2.5)
    tokens = prompt(wanted, 1)
    assert one.request(tokens[:before]) is None
    one.house.asked(one.space, one.space.lookup(tokens))
    one.ahead += 1000
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert one.house.make_room(NODE, one.space, packed) is Refusal.FULL
    assert one.saved(tokens) == before
    other = b"".join(token.to_bytes(4, "little") for token in prompt(INTERVAL, 2))
    one.ahead += 30
    assert one.house.make_room(NODE, one.space, other) is None, "for another prompt they go"


def test_a_refusal_mostly_takes_no_look_at_the_directory(server, monkeypatch):
    looks = []
    for name in ("collect", "usage"):
        look = getattr(housekeeping, name)
        monkeypatch.setattr(housekeeping, name, lambda *args, look=look: looks.append(1) or look(*args))
    one = server(4.5)
    a, b = prompt(4 * INTERVAL, 1), prompt(4 * INTERVAL, 2)
    one.request(a)
    one.ahead += 15
    assert one.request(b) is Refusal.WARM
    assert len(looks) == 2, "its size once, and how cold its coldest is"
    for _ in range(20):
        one.ahead += 0.1
        one.request(a)
        assert one.request(b) is Refusal.WARM
    assert len(looks) <= 5, "one more when the refused one got warmer than the coldest was by then"


def test_a_directory_of_few_files_is_emptied_no_further_than_needed(server):
    one = server(20.5)
    for seed in range(20):
        one.request(prompt(INTERVAL, seed))
    one.ahead += 100
    assert one.request(prompt(INTERVAL, 100)) is None
    assert sum(one.saved(prompt(INTERVAL, seed)) > 0 for seed in range(20)) == 19


def test_room_for_what_follows_is_made_in_one_look(server, monkeypatch):
    looks = []
    collect = housekeeping.collect
    monkeypatch.setattr(housekeeping, "collect", lambda *args: looks.append(1) or collect(*args))
    one = server(8.5)
    a, b = prompt(8 * INTERVAL, 1), prompt(8 * INTERVAL, 2)
    one.request(a)
    one.ahead += 100
    one.request(b, at_once=True)
    assert (one.saved(a), one.saved(b)) == (0, len(b))
    assert len(looks) == 1


@pytest.mark.parametrize("tokens", [INTERVAL, INTERVAL - 1], ids=["chunk", "tail"])
def test_what_the_write_limit_forbids_is_known_before_it_is_copied(server, tokens):
    one = server(write_limit=NODE)
    packed = pack_tokens(prompt(tokens, 1))
    assert not one.house.refuses(NODE, one.space, packed)
    one.house.wrote(1)
    assert one.house.refuses(NODE, one.space, packed)
    assert one.house.refused[Refusal.LIMIT] == 1
    one.ahead += 61 * 60
    assert not one.house.refuses(NODE, one.space, packed)


def test_the_alarm_says_when_hardly_anything_is_read_back(server, caplog):
    one = server()
    one.house.wrote(11 << 30, 1)
    one.house.wrote(1 << 30, 1)
    assert caplog.text.count("read back") == 1
    one.ahead += 3601
    one.house.wrote(1 << 30, 1)
    assert caplog.text.count("read back") == 2
    one.store.context.counters.add(restored_bytes=2 << 30)
    one.ahead += 3601
    one.house.wrote(1, 1)
    assert caplog.text.count("read back") == 2


def test_a_namespace_stays_within_its_quota_while_the_budget_is_far(server):
    """Looked at after each tenth of the quota; the other namespace of the directory is older, and keeps all it has."""
    one = server()
    other = one.store.namespace(NamespaceInfo({"model": "another"}))
    other.publish(prompt(INTERVAL, 500), [Span(0, INTERVAL, SPECS, [bytes(512 * INTERVAL)])])
    write_quota(one.store.context, one.space.id, 10 * NODE)
    most = 0
    for seed in range(40):
        assert one.request(prompt(INTERVAL, seed)) is None
        one.ahead += 20
        most = max(most, len(manifests(one.store.path)))
    assert 8 <= most - 1 <= 12
    assert one.saved(prompt(INTERVAL, 39)) == INTERVAL
    assert one.saved(prompt(INTERVAL, 0)) == 0
    assert other.lookup(prompt(INTERVAL, 500)).count == INTERVAL
    check_valid(one.store.path)


def test_a_quota_that_says_nothing_is_warned_of_and_limits_nothing(server, caplog):
    one = server()
    one.store.context.layout.quota_file(one.space.id).write_text("much")
    with caplog.at_level(logging.WARNING, "kvstore"):
        for seed in range(5):
            assert one.request(prompt(INTERVAL, seed)) is None
    assert caplog.text.count("does not hold a size") == 1
    assert len(manifests(one.store.path)) == 5


def test_a_full_directory_that_was_emptied_is_not_full(server):
    """What was known of it would refuse all that is new, and the publish that sets it up would never come."""
    one = server(nodes=3.5)
    for number in range(5):
        one.request(prompt(INTERVAL, number))
    assert one.request(prompt(INTERVAL, 77)) is Refusal.WARM
    for entry in list(one.store.path.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert one.request(prompt(INTERVAL, 78)) is None
    assert one.saved(prompt(INTERVAL, 78)) == INTERVAL
    assert one.house.used <= one.house.budget


def test_a_budget_that_is_lowered_at_a_restart_holds_from_the_first_write_on(server):
    """Also for what was in use a minute ago, which a new chunk alone would not be let in for."""
    one = server(20)
    for number in range(4):
        one.ahead += 5
        one.request(prompt(4 * INTERVAL, number))
    before = usage(one.store.context)
    one.ahead += 11
    one.house = Housekeeping(one.store, before - 8 * NODE, None, lambda: time.monotonic() + one.ahead)
    one.request(prompt(INTERVAL, 9))
    assert usage(one.store.context) <= before - 8 * NODE
    assert 7 <= len(manifests(one.store.path)) <= 9, "and hardly more goes than has to"


def test_a_directory_over_a_quota_and_its_budget_is_cut_back_in_one_look(server, monkeypatch):
    """Another makes room for the node that is to come, if it is wanted more than others."""
    one = server(30)
    other = one.store.namespace(NamespaceInfo({"model": "another"}))
    other.publish(prompt(INTERVAL, 500), [Span(0, INTERVAL, SPECS, [bytes(512 * INTERVAL)])])
    for number in range(12):
        one.ahead += 5
        one.request(prompt(INTERVAL, number))
    one.ahead += 11
    collect, reports = housekeeping.collect, []
    monkeypatch.setattr(housekeeping, "collect", lambda *args: reports.append(collect(*args)) or reports[-1])
    write_quota(one.store.context, one.space.id, 10 * NODE)
    before = usage(one.store.context)
    one.house = Housekeeping(one.store, before - 8 * NODE, None, lambda: time.monotonic() + one.ahead)
    one.request(prompt(INTERVAL, 77))
    assert len(reports) == 2
    assert reports[0].after_bytes <= before - 8 * NODE
    assert not reports[0].over_quota_bytes
    assert not reports[0].unmet_bytes


@pytest.mark.parametrize(("took", "rested"), [(1.0, 0.0), (10.0, 9.0)], ids=["at once", "mostly resting"])
def test_a_small_quota_does_not_have_the_directory_looked_at_after_each_write(server, monkeypatch, took, rested):
    """Rests do not count: beside an engine at work a collection of seconds takes minutes, and twenty times those would
    be a day.
    """
    one = server()
    write_quota(one.store.context, one.space.id, 0)
    looks = []

    def slow(context, policy):
        looks.append(policy)
        one.ahead += took
        report = collect(context, policy)
        report.rested_seconds += rested
        return report

    monkeypatch.setattr(housekeeping, "collect", slow)
    for seed in range(8):
        one.request(prompt(INTERVAL, seed))
    one.ahead += 15
    one.request(prompt(INTERVAL, 8))
    assert len(looks) == 1
    one.ahead += 100  # Ten would do, but for what this machine took for the first.
    one.request(prompt(INTERVAL, 9))
    assert len(looks) == 2


def test_no_full_search_for_cycles_during_a_collection(server, monkeypatch):
    """It would walk a tuple a file with the interpreter's lock held, and the engine would wait."""
    one = server(nodes=2)
    before, during = gc.get_threshold(), []

    def watched(context, policy):
        during.append(gc.get_threshold()[2])
        return collect(context, policy)

    monkeypatch.setattr(housekeeping, "collect", watched)
    for seed in range(4):
        one.request(prompt(INTERVAL, seed))
        one.ahead += 3600
    assert during
    assert min(during) > 1 << 30
    assert gc.get_threshold() == before


def test_a_clock_that_was_set_back_stops_no_writes(server):
    """Found by review: what the last collection told was a day ahead, and so warmer than anything until a restart."""
    one = server(2.5)
    one.ahead = 86_400
    assert one.request(prompt(INTERVAL, 1)) is None
    assert one.request(prompt(INTERVAL, 2)) is None
    one.ahead += 12
    assert one.request(prompt(INTERVAL, 3)) is Refusal.WARM
    one.ahead += 60
    one.back = 86_400
    wanted = prompt(INTERVAL, 4)
    packed = pack_tokens(wanted)
    one.house.asked(one.space, one.space.lookup(wanted))
    assert not one.house.refuses(NODE, one.space, packed)
    assert one.house.make_room(NODE, one.space, packed) is None
