"""The order in which nodes leave: least recently used, leaves before parents, states before KV."""

from __future__ import annotations

import os
import time

import pytest
from core_support import open_store
from eviction_support import names, plan_of, victims
from gc_support import (
    DAY,
    HOUR,
    SECOND,
    TENANT,
    ahead,
    as_newer,
    forge_circle,
    manifests,
    prompt,
    publish,
    set_used,
    space_of,
    state,
)

from kvstore.admission import Warmth
from kvstore.eviction import FUTURE_NS, PROTECT_NS, Policy
from kvstore.scan import scan


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "s") as writer, ahead(tmp_path / "s") as later:
        later.writer = writer
        yield later


def test_a_conversation_goes_from_its_end(store):
    space = space_of(store.writer)
    publish(space, prompt(60))
    assert victims(store) == names(space, prompt(60))[::-1]


def test_the_least_recently_used_conversation_goes_first(store):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 300), (3, 200)):
        publish(space, prompt(40, seed))
        set_used(store.writer, space, prompt(40, seed), age)
    expected = [name for seed in (2, 3, 1) for name in names(space, prompt(40, seed))[::-1]]
    assert victims(store) == expected


def keys(space, tokens) -> list[str]:
    """What admission calls a prompt's nodes, root first."""
    return [name.split("-")[2] for name in names(space, tokens)]


def test_warmth_decides_where_the_files_times_do_not_show_the_uses(store):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 300)):
        publish(space, prompt(40, seed))
        set_used(store.writer, space, prompt(40, seed), age)
    warmth = Warmth()
    warmth.used(keys(space, prompt(40, 2)), time.time_ns() - 50 * SECOND)
    expected = [name for seed in (1, 2) for name in names(space, prompt(40, seed))[::-1]]
    assert victims(store, policy=Policy(warmth=warmth)) == expected


def test_what_this_process_used_since_is_known_although_no_file_shows_it(store):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 300)):
        publish(space, prompt(40, seed))
        set_used(store.writer, space, prompt(40, seed), age)
    last = space.lookup(prompt(40, 2)).steps[-1].where
    store.context.recent[last] = time.time_ns() - 50 * SECOND
    assert victims(store) == [name for seed in (1, 2) for name in names(space, prompt(40, seed))[::-1]]


@pytest.mark.parametrize("recent", [-1100 * SECOND, HOUR + 2 * FUTURE_NS], ids=["earlier", "by a wrong clock"])
def test_what_this_process_noted_makes_nothing_colder_nor_warm_for_ever(store, recent):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 300)):
        publish(space, prompt(10, seed))
        set_used(store.writer, space, prompt(10, seed), age)
        noted = time.time_ns() + recent + 300 * seed * SECOND
        store.context.recent[space.lookup(prompt(10, seed)).steps[0].where] = noted
    assert victims(store) == [*names(space, prompt(10, 2)), *names(space, prompt(10, 1))]


def test_the_warm_stay_whatever_is_needed_and_the_coldest_of_them_is_told(store):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 300), (3, 200)):
        publish(space, prompt(40, seed))
        set_used(store.writer, space, prompt(40, seed), age)
    limit = time.time_ns() - 150 * SECOND
    plan, gone = plan_of(store, Policy(warm_ns=limit))
    assert gone == [name for seed in (2, 3) for name in names(space, prompt(40, seed))[::-1]]
    coldest = min(os.stat(step.path).st_mtime_ns for step in space.lookup(prompt(40, 1)).steps)
    assert plan.coldest_ns == coldest > limit


def test_the_coldest_that_stays_is_told_when_enough_was_freed_and_when_nothing_may_go(store):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 300)):
        publish(space, prompt(10, seed))
        set_used(store.writer, space, prompt(10, seed), age)
    times = {seed: os.stat(space.lookup(prompt(10, seed)).steps[0].path).st_mtime_ns for seed in (1, 2)}
    assert plan_of(store, Policy(), need=1)[0].coldest_ns == times[1]
    assert plan_of(store, Policy(protect_ns=2 * HOUR))[0].coldest_ns == times[2]
    protected = frozenset(step.path for step in space.lookup(prompt(10, 2)).steps)
    assert plan_of(store, Policy(protect=protected, warm_ns=times[2] + 1))[0].coldest_ns == times[1]
    assert plan_of(store, Policy(protect=protected), need=0)[0].coldest_ns == times[1]
    assert victims(store, policy=Policy(warm_ns=times[2])) == []
    assert plan_of(store, Policy(protect=protected))[0].coldest_ns is None, "that one is known to who protects it"
    assert plan_of(store, Policy())[0].coldest_ns is None


def test_what_lost_its_continuation_is_as_cold_as_the_next_collection_finds_it(store):
    """A prompt that grew and was not restored since: an admission must know of the place of its old beginning."""
    space = space_of(store.writer)
    publish(space, prompt(48))
    set_used(store.writer, space, prompt(48), 100)
    set_used(store.writer, space, prompt(32), 5000)
    plan, gone = plan_of(store, Policy(), need=1)
    assert gone == names(space, prompt(48))[2:]
    last = space.lookup(prompt(48)).steps[2].path
    assert plan_of(store, Policy())[0].horizon_ns == os.stat(last).st_mtime_ns, "the beginning went after it"
    last.unlink()
    assert plan.coldest_ns == plan_of(store, Policy(), need=0)[0].coldest_ns
    assert plan.coldest_ns == os.stat(space.lookup(prompt(32)).steps[1].path).st_mtime_ns


def test_who_knows_better_may_protect_for_a_shorter_time(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(40))
        with ahead(tmp_path / "s", 11 * SECOND) as later:
            assert victims(later) == []
            assert len(victims(later, policy=Policy(protect_ns=10 * SECOND))) == 3


def test_no_more_goes_than_is_needed(store):
    space = space_of(store.writer)
    publish(space, prompt(60))
    assert victims(store, 0) == []
    assert victims(store, 1) == names(space, prompt(60))[:-2:-1]
    # A node of these is one block and one manifest, 4 KiB each.
    assert len(victims(store, 3 * 8192)) == 3
    assert len(victims(store, 3 * 8192 + 1)) == 4


def test_a_beginning_is_as_recently_used_as_what_continues_it(store):
    # The shared beginning has the oldest time of all, as after a publish; its last continuation keeps it.
    space = space_of(store.writer)
    beginning = prompt(32)
    branches = [beginning + prompt(16, seed) for seed in (1, 2)]
    for tokens, age in zip(branches, (100, 300), strict=True):
        publish(space, tokens)
        set_used(store.writer, space, tokens, age)
    set_used(store.writer, space, beginning, 10_000)
    other = prompt(32, 3)
    publish(space, other)
    set_used(store.writer, space, other, 200)
    assert victims(store) == [
        names(space, branches[1])[-1],
        *names(space, other)[::-1],
        *names(space, branches[0])[::-1],
    ]


def test_a_state_goes_right_before_its_kv(store):
    space = space_of(store.writer)
    publish(space, prompt(48))
    for end in (16, 48):
        space.publish_state(prompt(end), state(end))
    kv, states = names(space, prompt(48)), names(space, prompt(48), "state")
    assert victims(store) == [states[2], kv[2], kv[1], states[0], kv[0]]


def test_a_node_with_a_state_goes_before_its_parent_however_old_that_is(store):
    space = space_of(store.writer)
    publish(space, prompt(32))
    space.publish_state(prompt(32), state())
    set_used(store.writer, space, prompt(32), 100)
    set_used(store.writer, space, prompt(16), 5000)
    kv = names(space, prompt(32))
    assert victims(store) == [names(space, prompt(32), "state")[1], kv[1], kv[0]]


def test_a_state_is_as_recently_used_as_its_kv(store):
    """A lookup finds both by the time of the one."""
    space = space_of(store.writer)
    for seed in (1, 2):
        publish(space, prompt(16, seed))
        set_used(store.writer, space, prompt(16, seed), 300 * seed)
    space.publish_state(prompt(16, 1), state())
    (old,) = (path for path in manifests(store.path) if path.suffix == ".state")
    os.utime(old, ns=(0, time.time_ns() - 5000 * SECOND))
    set_used(store.writer, space, prompt(16, 2), 1000)
    one, two = (names(space, prompt(16, seed)) for seed in (1, 2))
    assert victims(store) == [*two, old.name, *one]


def test_a_state_without_kv_can_go(store):
    space = space_of(store.writer)
    publish(space, prompt(10))
    space.publish_state(prompt(10), state())
    next(path for path in manifests(store.path) if path.suffix == ".kv").unlink()
    assert victims(store) == names(space, prompt(10), "state")


def test_what_was_just_written_stays(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(40))
        assert victims(store) == []
        with ahead(tmp_path / "s", PROTECT_NS + SECOND) as later:
            assert len(victims(later)) == 3


def test_a_copy_with_old_times_was_just_written(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(40))
        for path in manifests(store.path):
            os.utime(path, ns=(0, 0))
        assert victims(store) == []


def test_what_was_just_used_keeps_its_ancestors_and_its_state(store):
    space = space_of(store.writer)
    publish(space, prompt(40))
    publish(space, prompt(32) + prompt(8, 1))
    for end in (32, 40):
        space.publish_state(prompt(end), state(end))
    touched = names(space, prompt(40))[1]
    path = next(path for path in manifests(store.path) if path.name == touched)
    os.utime(path, ns=(store.context.clock(), store.context.clock()))
    assert set(victims(store)) == {
        names(space, prompt(40), "state")[-1],
        names(space, prompt(40))[-1],
        names(space, prompt(32) + prompt(8, 1))[-1],
    }


def test_what_the_caller_protects_stays_with_its_ancestors_and_its_state(store):
    space = space_of(store.writer)
    publish(space, prompt(60))
    space.publish_state(prompt(48), state())
    protected = frozenset(step.path for step in space.lookup(prompt(48)).steps)
    assert victims(store, policy=Policy(protect=protected)) == names(space, prompt(60))[:2:-1]


def test_what_this_process_just_restored_or_published_stays(store):
    space = space_of(store.writer)
    publish(space, prompt(60))
    path = space.lookup(prompt(32)).steps[-1].where
    store.context.recent[path] = store.context.clock()
    assert victims(store) == names(space, prompt(60))[:1:-1]
    store.context.recent[path] -= PROTECT_NS
    assert len(victims(store)) == 4


def test_a_namespace_filter_spares_the_others(store):
    publish(space_of(store.writer), prompt(40))
    tenant = space_of(store.writer, TENANT)
    publish(tenant, prompt(20))
    assert victims(store, policy=Policy(namespace=tenant.id)) == names(tenant, prompt(20))[::-1]


def test_an_age_is_a_limit_of_its_own(store):
    space = space_of(store.writer)
    for seed, age in ((1, 100), (2, 5000)):
        publish(space, prompt(20, seed))
        set_used(store.writer, space, prompt(20, seed), age)
    # The collector's clock is an hour ahead.
    older = Policy(older_than_ns=HOUR + 1000 * SECOND)
    assert victims(store, 0, older) == names(space, prompt(20, 2))[::-1]
    assert victims(store, 0, Policy(older_than_ns=HOUR + 6000 * SECOND)) == []
    assert len(victims(store, 3 * 8192, older)) == 3


def test_a_time_in_the_future_keeps_nothing_for_ever(store):
    """It counts as used when the file came here."""
    space = space_of(store.writer)
    for seed, ahead_s in ((1, 1000 * 86400), (2, 1)):
        publish(space, prompt(20, seed))
        set_used(store.writer, space, prompt(20, seed), -ahead_s)
    assert victims(store) == [*names(space, prompt(20, 1))[::-1], *names(space, prompt(20, 2))[::-1]]


def test_a_damaged_manifest_keeps_its_siblings_and_ancestors(store):
    space = space_of(store.writer)
    tokens = prompt(32)
    publish(space, tokens, 0, 16, 20, 25, 32)
    publish(space, prompt(9, 1))
    bad = next(path for path in manifests(store.path) if path.name == names(space, tokens[:25])[-1])
    bad.write_bytes(bad.read_bytes()[:-1])
    # Other siblings of that parent may share its blocks; the other conversation cannot.
    assert victims(store) == names(space, prompt(9, 1))
    with ahead(store.path, DAY + HOUR) as tomorrow:
        assert victims(tomorrow) == [*names(space, prompt(9, 1)), bad.name]


def test_a_manifest_of_a_newer_version_is_never_a_victim(store):
    space = space_of(store.writer)
    publish(space, prompt(40))
    last = next(path for path in manifests(store.path) if path.name == names(space, prompt(40))[-1])
    as_newer(last)
    with ahead(store.path, 400 * DAY) as later:
        assert victims(later) == []


def test_a_flipped_bit_in_the_format_s_number_is_damage(store):
    """Were it taken for a newer version, nothing of its chunk would ever leave, and no orphan of the directory."""
    space = space_of(store.writer)
    publish(space, prompt(40))
    last = next(path for path in manifests(store.path) if path.name == names(space, prompt(40))[-1])
    whole = last.read_bytes()
    for bit in range(32):
        data = bytearray(whole)
        data[8 + bit // 8] ^= 1 << bit % 8
        last.write_bytes(data)
        with ahead(store.path, 400 * DAY) as later:
            assert last.name in victims(later)


def test_forged_names_in_a_circle_end(store):
    space = space_of(store.writer)
    publish(space, prompt(9))
    good = forge_circle(store.path)
    assert victims(store) == [good.name]


def test_a_block_that_is_young_is_not_counted_as_freed(store):
    space = space_of(store.writer)
    publish(space, prompt(16))
    (digest,) = scan(store.context).blocks
    now = store.context.clock()
    os.utime(store.context.layout.block(digest), ns=(now, now))
    assert plan_of(store, Policy(), need=1)[0].freed == 4096
