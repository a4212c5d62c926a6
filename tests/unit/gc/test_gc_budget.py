"""What a collection removes to keep a budget, an age or a quota, and what it leaves."""

from __future__ import annotations

import pytest
from core_support import files, open_store
from gc_support import (
    DAY,
    HOUR,
    INTERVAL,
    SECOND,
    TENANT,
    ahead,
    blocks,
    check_valid,
    fill,
    gc,
    manifests,
    prompt,
    publish,
    restore,
    set_used,
    space_of,
    spans,
)

from kvstore.fsck import check
from kvstore.gc import usage


def test_without_a_limit_nothing_that_is_named_goes(writer):
    fill(writer)
    before = files(writer.path)
    report = gc(writer.path, 400 * DAY)
    assert files(writer.path) == before
    assert (report.nodes, report.blocks, report.freed_bytes, report.error, report.busy) == (0, 0, 0, "", False)
    assert report.before_bytes == report.after_bytes == usage(writer.context)


def test_the_budget_is_met_with_a_tenth_to_spare_oldest_first(writer):
    space = fill(writer, 10)
    before = usage(writer.context)
    budget = before - 20_000
    report = gc(writer.path, size=budget)
    check_valid(writer.path)
    assert usage(writer.context) == report.after_bytes <= budget * 9 // 10
    assert report.after_bytes > budget * 9 // 10 - 2 * 8192, "more was removed than needed"
    assert report.freed_bytes == before - report.after_bytes
    assert report.unmet_bytes == 0
    left = [restore(space, prompt(40, seed)).tokens for seed in range(10)]
    assert left == sorted(left), "a younger conversation lost more than an older one"
    assert left[0] == 0
    assert left[-1] == 40


def test_what_is_spared_is_the_callers_choice(writer):
    fill(writer, 10)
    budget = usage(writer.context) - 20_000
    report = gc(writer.path, size=budget, spare=0)
    assert budget - 8192 < report.after_bytes <= budget
    assert gc(writer.path, size=budget, spare=10**9, protect_ns=HOUR * 2).nodes == 0
    gc(writer.path, size=budget - 8192, spare=10**9)
    assert manifests(writer.path) == []


def test_the_coldest_that_was_left_is_reported(writer):
    space = fill(writer, 10)
    report = gc(writer.path, size=usage(writer.context) - 20_000, spare=0)
    left = [path.stat().st_mtime_ns for path in manifests(writer.path)]
    assert report.coldest_ns == min(left)
    publish(space, prompt(40, 99))
    assert gc(writer.path, size=0, warm_ns=min(left)).coldest_ns == min(left)
    check_valid(writer.path)


def test_a_short_protection_leaves_no_block_without_its_manifest(writer):
    fill(writer)
    publish(space_of(writer), prompt(40, 99))
    report = gc(writer.path, 20 * SECOND, size=0, protect_ns=10 * SECOND)
    assert manifests(writer.path) == blocks(writer.path) == []
    assert report.nodes == 15


def test_a_budget_that_is_met_removes_nothing(writer):
    fill(writer)
    report = gc(writer.path, size=usage(writer.context))
    assert (report.nodes, report.unmet_bytes) == (0, 0)


def test_a_budget_smaller_than_one_prompt_keeps_its_beginning(writer):
    space = space_of(writer)
    tokens = prompt(20 * INTERVAL)
    publish(space, tokens)
    report = gc(writer.path, size=usage(writer.context) - 60_000)
    kept = restore(space, tokens).tokens
    assert 0 < kept < len(tokens)
    assert kept % INTERVAL == 0
    assert report.nodes == 20 - kept // INTERVAL
    check_valid(writer.path)
    # And it goes on keeping it: the same budget, asked again, removes nothing more.
    assert gc(writer.path, size=report.after_bytes).nodes == 0


def test_a_budget_that_cannot_be_met_says_by_how_much(writer):
    fill(writer)
    report = gc(writer.path, size=1)
    assert manifests(writer.path) == blocks(writer.path) == []
    assert report.unmet_bytes == usage(writer.context) - 1
    assert report.error == ""


def test_what_was_just_written_outlives_any_budget(writer):
    space = fill(writer)
    report = gc(writer.path, 0, size=0)
    assert report.nodes == 0
    assert report.unmet_bytes == report.after_bytes
    assert restore(space, prompt(40, 0)).tokens == 40


def test_free_space_is_made_on_the_file_system(writer, monkeypatch):
    fill(writer)
    monkeypatch.setattr("kvstore.gc.free_bytes", lambda context: 100_000)
    assert gc(writer.path, min_free=100_000).nodes == 0
    report = gc(writer.path, min_free=110_000)
    assert (report.nodes, report.unmet_bytes) == (3, 0)  # 10,000 and a tenth of 110,000, at 8,192 a node
    check_valid(writer.path)
    monkeypatch.setattr("kvstore.gc.free_bytes", lambda context: 0)
    report = gc(writer.path, min_free=1 << 40)
    assert manifests(writer.path) == []
    assert report.unmet_bytes == (1 << 40) - report.freed_bytes


def test_of_two_limits_the_one_that_asks_for_more_counts(writer, monkeypatch):
    fill(writer)
    used = usage(writer.context)
    monkeypatch.setattr("kvstore.gc.free_bytes", lambda context: 100_000)
    for size, free, missing in ((used - 20_000, 101_000, 20_000), (used - 1000, 120_000, 20_000)):
        assert gc(writer.path, 0, size=size, min_free=free).unmet_bytes == missing
    for size, free in ((used - 10, 101_000), (used - 10, 115_000)):
        report = gc(writer.path, dry_run=True, size=size, spare=20_000, min_free=free)
        assert report.freed_bytes == (32_768 if free == 115_000 else 24_576)


@pytest.mark.parametrize("by", [365 * DAY, 5 * HOUR])
def test_what_was_written_while_the_clock_was_ahead_is_counted_and_repaired(writer, by):
    """A machine that starts with the wrong year or the wrong zone and learns the right one later."""
    fill(writer, 2)
    report = gc(writer.path, -by, size=0)
    assert (report.nodes, report.future) == (0, 12)
    assert report.unmet_bytes == report.before_bytes
    assert gc(writer.path, -by, size=1 << 40).future == 0, "nobody misses their room"
    assert gc(writer.path, -by, quotas={space_of(writer).id: 0}).future == 12
    with ahead(writer.path, -by) as now:
        found = check(now.context, repair=True).findings
        assert [(finding.code, finding.corrected) for finding in found] == [("mtime-future", True)] * 12
    report = gc(writer.path, HOUR - by, size=0)
    assert (report.nodes, report.future) == (6, 0)


@pytest.mark.parametrize("branches", [7, 12])
def test_a_warm_prompt_loses_no_token_while_there_is_a_cold_leaf(tmp_path, branches):
    """Its tail may go only where a lookup finds a longer one that contains it, among all that begin alike."""
    with open_store(tmp_path / "wide", 512) as store:
        space = space_of(store)
        cold, system = prompt(400, 77), prompt(300)
        for tokens in (cold, system, [*system, *prompt(10, 99)]):
            space.publish(tokens, spans(tokens, 0, len(tokens)))
        for seed in range(branches):
            other = [*system[:260], *prompt(200, 1000 + seed)]
            space.publish(other, spans(other, 0, len(other)))
        set_used(store, space, cold, 40 * DAY / SECOND)
        report = gc(store.path, size=usage(store.context) - 1, spare=0)
        assert report.nodes == 1
        assert space.lookup([*system, *prompt(100, 7)]).count == 300
        assert space.lookup(cold).count == (0 if branches == 12 else 400)


def test_age_removes_whatever_the_room(writer):
    space = fill(writer, 2)
    set_used(writer, space, prompt(40, 0), 100_000)
    report = gc(writer.path, older_than_ns=HOUR + 50_000 * SECOND)
    assert (report.nodes, report.blocks) == (3, 3)
    assert restore(space, prompt(40, 0)).tokens == 0
    assert restore(space, prompt(40, 1)).tokens == 40


def test_a_namespace_has_a_quota_of_its_own(writer):
    fill(writer)
    tenant = space_of(writer, TENANT)
    publish(tenant, prompt(10 * INTERVAL, 9))
    report = gc(writer.path, namespace=tenant.id, size=8 * 8192)
    # 80 KiB of manifests and blocks, of which nine tenths of 64 KiB may stay.
    assert restore(tenant, prompt(10 * INTERVAL, 9)).tokens == 7 * INTERVAL
    assert report.unmet_bytes == 0
    assert [restore(space_of(writer), prompt(40, seed)).tokens for seed in range(4)] == [40] * 4
