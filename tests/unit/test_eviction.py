"""The order in which nodes leave: contained tails, least recently used, leaves before parents, states before KV."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from core_support import open_store
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
from kvstore.eviction import FUTURE_NS, GRACE_NS, PROTECT_NS, Policy, choose, clock_was_ahead, young
from kvstore.lookup import chunks
from kvstore.manifest import decode, encode
from kvstore.marking import mark
from kvstore.scan import scan

EVERYTHING = 1 << 60


def victims(store, need=EVERYTHING, policy=None) -> list[str]:
    """File names of the victims, in order."""
    found = scan(store.context)
    marks = mark(store.context, found.nodes)
    plan = choose(store.context, marks, found.blocks, policy or Policy(), need=need, now_ns=store.context.clock())
    assert len(plan.victims) == len(set(plan.victims))
    return [marks.nodes[index].file.file for index in plan.victims]


def names(space, tokens, kind="kv") -> list[str]:
    """File names of a prompt's nodes, root first."""
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return [chunk.name.file(kind) for chunk in chunks(space._space, packed)]


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "s") as writer, ahead(tmp_path / "s") as later:
        later.writer = writer
        yield later


@pytest.fixture
def wide(tmp_path):
    """The same with chunks of 512 tokens, so that tails may have rungs (64 tokens)."""
    with open_store(tmp_path / "wide", 512) as writer, ahead(tmp_path / "wide") as later:
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


def plan_of(store, policy, need=EVERYTHING):
    found = scan(store.context)
    marks = mark(store.context, found.nodes)
    plan = choose(store.context, marks, found.blocks, policy, need=need, now_ns=store.context.clock())
    return plan, [marks.nodes[index].file.file for index in plan.victims]


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
    assert plan_of(store, Policy(protect=protected))[0].coldest_ns is None, "that one is known to who protects it"
    assert plan_of(store, Policy())[0].coldest_ns is None


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


def test_a_state_without_kv_can_go(store):
    space = space_of(store.writer)
    publish(space, prompt(10))
    space.publish_state(prompt(10), state())
    next(path for path in manifests(store.path) if path.suffix == ".kv").unlink()
    assert victims(store) == names(space, prompt(10), "state")


def test_contained_tails_go_before_anything_older(wide):
    space = space_of(wide.writer)
    publish(space, prompt(540, 1), 0, 512, 540)
    set_used(wide.writer, space, prompt(540, 1), 5000)
    grown = prompt(812)
    publish(space, grown, 0, 512, 582, 612, 812)
    kv = {end: names(space, grown[:end])[-1] for end in (512, 582, 612, 812)}
    assert victims(wide, 1) == [kv[582]]
    assert victims(wide)[:2] == [kv[582], kv[612]]
    assert victims(wide)[-2:] == [kv[812], kv[512]]


def test_losing_a_contained_tail_frees_its_manifest_only(wide):
    # The sibling grew from it, so they share the first block.
    store = wide
    space = space_of(store.writer)
    publish(space, prompt(128), 0, 64, 128)
    found = scan(store.context)
    marks = mark(store.context, found.nodes)
    plan = choose(store.context, marks, found.blocks, Policy(), need=1, now_ns=store.context.clock())
    assert [marks.nodes[index].file.tokens for index in plan.victims] == [64]
    assert plan.freed == 4096
    plan = choose(store.context, marks, found.blocks, Policy(), need=EVERYTHING, now_ns=store.context.clock())
    assert plan.freed == 4 * 4096


REASONS = ("state", "older sibling", "no block", "short block", "damaged block", "bare", "crowd")


@pytest.mark.parametrize("reason", REASONS)
def test_a_tail_that_would_be_missed_is_not_contained(wide, reason):
    store = wide
    space = space_of(store.writer)
    grown = prompt(140)
    publish(space, grown, 0, 70)
    publish(space, grown, 0, 140)
    publish(space, prompt(9, 1))
    set_used(store.writer, space, prompt(9, 1), 5000)
    for seed in range(7):
        publish(space, [*grown[:64], *prompt(90, 10 + seed)], 0, 154)
    tail, old = names(space, grown[:70])[0], names(space, prompt(9, 1))[0]
    assert victims(store, 1) == [tail]
    found = scan(store.context)
    (longer,) = (node for node in mark(store.context, found.nodes).nodes if node.file.tokens == 140)
    block = store.context.layout.block(longer.blocks[0][0])
    if reason == "state":
        space.publish_state(grown[:70], state())
    elif reason == "crowd":
        # A lookup opens eight of those that begin alike, the longest first.
        publish(space, [*grown[:64], *prompt(90, 20)], 0, 154)
    elif reason == "older sibling":
        os.utime(longer.file.path(store.context.layout), ns=(0, time.time_ns() - 100 * SECOND))
    elif reason == "no block":
        block.unlink()
    elif reason == "short block":
        block.write_bytes(b"x")
    elif reason == "bare":
        # Its name says that it has the tail's tokens; it holds nothing of them.
        path = longer.file.path(store.context.layout)
        path.write_bytes(encode(replace(decode(path.read_bytes()), blocks=())))
    else:
        store.context.damaged.add(block)
    assert victims(store, 1) == [old]


def test_a_tail_without_a_rung_is_not_contained(wide):
    space = space_of(wide.writer)
    publish(space, prompt(140), 0, 63, 140)
    publish(space, prompt(9, 1))
    set_used(wide.writer, space, prompt(9, 1), 5000)
    assert victims(wide, 1) == names(space, prompt(9, 1))


def test_a_tail_that_stays_keeps_others_of_its_crowd_and_one_that_goes_does_not(wide):
    """Nine that begin alike, of which two are contained in a third: a lookup opens eight."""
    space = space_of(wide.writer)
    publish(space, prompt(9, 1))
    set_used(wide.writer, space, prompt(9, 1), 5000)
    grown = prompt(300)
    publish(space, grown, 0, 70, 100, 300)
    set_used(wide.writer, space, grown[:70], 50)
    for seed in range(6):
        publish(space, [*grown[:64], *prompt(90, 10 + seed)], 0, 154)
    tails = [names(space, grown[:end])[0] for end in (70, 100)]
    assert victims(wide, 1) == tails[:1]
    assert victims(wide, 4097) == tails
    publish(space, [*grown[:64], *prompt(90, 20)], 0, 154)
    assert victims(wide, 4097) == names(space, prompt(9, 1))


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


class Watched(list):
    """Nodes that count how often one of them is looked at."""

    looks = 0

    def __iter__(self):
        for node in super().__iter__():
            self.looks += 1
            yield node

    def __getitem__(self, at):
        self.looks += 1
        return super().__getitem__(at)


def test_many_quotas_look_at_no_more_nodes_than_one(wide):
    """A server may have a hundred tenants, and what chooses holds the collector's lock."""
    ids = []
    for number in range(12):
        space = space_of(wide.writer, replace(TENANT, salt=b"%d" % number))
        for tokens in (100, 300):  # a tail and what contains it
            publish(space, prompt(tokens), 0, tokens)
        ids.append(space.id)
    found = scan(wide.context)
    marks = mark(wide.context, found.nodes)
    now, nodes = wide.context.clock(), marks.nodes
    assert len(marks.containers) == 12

    def looks(over):
        marks.nodes = Watched(nodes)
        plan = choose(wide.context, marks, found.blocks, Policy(), need=0, now_ns=now, over=over)
        assert {nodes[index].file.namespace for index in plan.victims} == set(over)
        return marks.nodes.looks

    # Each node is looked at a few times in its own namespace's turn, whose nodes are 1 of 12.
    assert looks(dict.fromkeys(ids, 1)) < 4 * looks(dict.fromkeys(ids[:1], 1))


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


@pytest.mark.parametrize(
    ("mtime", "ctime", "expected"),
    [(0, 0, False), (2 * FUTURE_NS, 0, False), (0, 2 * FUTURE_NS, False), (FUTURE_NS, FUTURE_NS, False),
     (FUTURE_NS + 1, FUTURE_NS + 1, True), (365 * DAY, 2 * FUTURE_NS, True)],
)  # fmt: skip
def test_when_a_file_s_times_say_nothing(mtime, ctime, expected):
    now = time.time_ns()
    assert clock_was_ahead(now + mtime, now + ctime, now) is expected
    if expected:
        assert young(now + mtime, now + ctime, now, 0)


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
    found = scan(store.context)
    plan = choose(
        store.context, mark(store.context, found.nodes), found.blocks, Policy(), need=1, now_ns=store.context.clock()
    )
    assert plan.freed == 4096


@pytest.mark.parametrize(
    ("mtime", "ctime", "expected"),
    [
        (0, 0, False),
        (95, 0, True),
        (0, 95, True),
        (90, 90, False),
        (91, 0, True),
        (100, 0, True),
        (101, 0, True),  # changed since the collection began
        (0, 101, True),
        (101 + FUTURE_NS, 0, False),
        (101 + FUTURE_NS, 95, True),
        (0, 101 + FUTURE_NS, False),
        (101 + FUTURE_NS, 101 + FUTURE_NS, True),
    ],
)
def test_young_goes_by_the_later_time_that_can_be_true(mtime, ctime, expected):
    assert young(mtime, ctime, 100, 10) is expected


def test_the_windows_are_in_order():
    assert SECOND < PROTECT_NS < HOUR < GRACE_NS
