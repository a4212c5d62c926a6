"""Tails that a longer sibling contains leave before anything else."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from core_support import open_store
from eviction_support import names, plan_of, victims
from gc_support import SECOND, TENANT, ahead, prompt, publish, set_used, space_of, state

from kvstore.eviction import Policy, choose
from kvstore.manifest import decode, encode
from kvstore.marking import mark
from kvstore.scan import scan


@pytest.fixture
def wide(tmp_path):
    """Chunks of 512 tokens, so that tails may have rungs (64 tokens), looked at an hour later."""
    with open_store(tmp_path / "wide", 512) as writer, ahead(tmp_path / "wide") as later:
        later.writer = writer
        yield later


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
    space = space_of(wide.writer)
    publish(space, prompt(128), 0, 64, 128)
    plan, gone = plan_of(wide, Policy(), need=1)
    assert gone == names(space, prompt(64))
    assert plan.freed == 4096
    assert plan_of(wide, Policy())[0].freed == 4 * 4096


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
