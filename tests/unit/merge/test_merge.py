"""Merging: the second directory holds every prefix of either, and the first is only read."""

from __future__ import annotations

import os
import time

import pytest
from core_support import INFO, block_files, files, open_store, prompt
from gc_support import DAY, TENANT, check_valid, manifests, named, state
from merge_support import ONE, THREE, TWO, by_end
from upkeep_support import assert_restores, counts, forget_tails, grow, read_state, rest, snapshot

from kvstore import IntervalMismatchError, KVStoreError
from kvstore.merge import MergeReport, merge
from kvstore.repack import repack


def test_the_union_is_in_the_target_and_the_source_is_as_it_was(pair):
    a, b = pair
    before = snapshot(a.path)
    links = {path: path.stat() for path in block_files(a.path)}
    own = {path.name for path in block_files(b.path)}
    report = merge(a.context, b.context)
    assert (report.nodes, report.states, report.blocks, report.there) == (4, 1, 5, 1)
    assert (report.tokenizations, report.namespaces, report.damaged, report.error) == (1, 1, 0, "")
    assert snapshot(a.path) == before
    assert {path: path.stat().st_ctime_ns for path in links} == {path: s.st_ctime_ns for path, s in links.items()}
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO), (TENANT, THREE)])
    check_valid(b.path)
    assert read_state(b.namespace(INFO), ONE[:32]) == ({"n": 4}, {"s": bytes([4, 1, 2])})
    assert b.tokenizations(b"scope").get(b"request") == bytes(8)
    assert {path.name for path in block_files(b.path)} == named(b.path)
    brought = {path.name for path in block_files(b.path)} - own
    assert report.copied_bytes == sum(b.context.layout.block(bytes.fromhex(name)).stat().st_size for name in brought)


def test_again_nothing_is_copied(pair):
    a, b = pair
    merge(a.context, b.context)
    before = files(b.path)
    report = merge(a.context, b.context)
    assert report == MergeReport(there=6)
    assert files(b.path) == before


def test_both_ways_both_hold_the_same(pair):
    a, b = pair
    merge(a.context, b.context)
    merge(b.context, a.context)
    assert files(a.path).keys() == files(b.path).keys()
    inside = [{name: data for name, data in files(s.path).items() if "/nodes/" not in name} for s in pair]
    for each in inside:
        each.pop("kvstore.json")
        for name in [name for name in each if name.startswith("namespaces")]:
            each.pop(name)  # each says when it was first used there
    assert inside[0] == inside[1]


def test_into_an_empty_directory_whose_empty_folders_a_copy_left_out(pair, tmp_path):
    a, _ = pair
    with open_store(tmp_path / "c") as c:
        c.close()
        for folder in ("tmp", "quarantine", "objects/tokens", "namespaces"):
            (c.path / folder).rmdir()
        assert merge(a.context, c.context).nodes == 5
        assert {name for name in files(c.path) if name.startswith("objects")} == {
            name for name in files(a.path) if name.startswith("objects")
        }
    assert_restores(tmp_path / "c", [(INFO, ONE), (TENANT, THREE)])


def test_the_last_use_is_the_later_of_both(pair):
    a, b = pair
    now = time.time_ns()
    (state_file,) = (path for path in manifests(a.path) if path.suffix == ".state")
    for root, ages in ((a.path, {16: 5, 32: 5, 40: 6}), (b.path, {16: 9, 28: 9})):
        for end, path in by_end(root).items():
            os.utime(path, ns=(now, now - ages[end] * DAY))
    os.utime(state_file, ns=(now, now - 7 * DAY))
    merge(a.context, b.context)
    days = {end: round((now - path.stat().st_mtime_ns) / DAY) for end, path in by_end(b.path).items()}
    assert {end: days[end] for end in (16, 32, 28, 40)} == {16: 5, 32: 5, 28: 9, 40: 6}
    for root, ages in ((a.path, {16: 20}), (b.path, {16: 3})):
        os.utime(by_end(root)[16], ns=(now, now - ages[16] * DAY))
    merge(a.context, b.context)
    assert round((now - by_end(b.path)[16].stat().st_mtime_ns) / DAY) == 3


def test_a_last_use_in_the_future_counts_as_now(pair):
    a, b = pair
    os.utime(by_end(a.path)[40], ns=(0, time.time_ns() + 50 * DAY))
    merge(a.context, b.context)
    assert by_end(b.path)[40].stat().st_mtime_ns <= time.time_ns()


def test_a_parent_is_never_older_than_what_is_put_upon_it(pair):
    """The source lost its first chunk; the target has it, unused for long."""
    a, b = pair
    now = time.time_ns()
    os.utime(by_end(b.path)[16], ns=(now, now - 30 * DAY))
    for path in manifests(a.path):
        os.utime(path, ns=(now, now - 2 * DAY))
    by_end(a.path)[16].unlink()
    report = merge(a.context, b.context)
    assert report.without_parent == 0
    ages = {end: round((now - path.stat().st_mtime_ns) / DAY) for end, path in by_end(b.path).items()}
    assert ages[16] == ages[32] == 2
    assert_restores(b.path, [(INFO, ONE)])


def test_a_node_of_both_keeps_the_targets_blocks(pair):
    """Repacked in one of them: nothing is copied, whichever way round."""
    with open_store(pair[0].path.parent / "c") as c, open_store(pair[0].path.parent / "d") as d:
        for store in (c, d):
            grow(store.namespace(INFO), ONE, 5, 11, 16)
            forget_tails(store.path)
            rest(store)
        assert repack(c.context).nodes == 1
        assert merge(c.context, d.context) == MergeReport(there=1)
        assert merge(d.context, c.context) == MergeReport(there=1)
        assert (counts(c.path), counts(d.path)) == ({16: [16]}, {16: [5, 6, 5]})


def test_a_dry_run_changes_nothing_and_says_the_same(pair):
    a, b = pair
    grow(a.namespace(INFO), prompt(12, 5), 5, 12)  # two nodes with one block, which is copied once
    a.namespace(INFO).publish_state(ONE, state(6))  # at a tail, which nothing else can lie upon
    before = snapshot(b.path)
    would = merge(a.context, b.context, dry_run=True)
    assert snapshot(b.path) == before
    did = merge(a.context, b.context)
    would.dry_run = False
    assert would == did


def test_progress_is_told_up_to_the_end(pair):
    told: list[tuple[int, int]] = []
    report = merge(pair[0].context, pair[1].context, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert {total for _, total in told} == {report.copied_bytes}
    assert told[-1][0] == report.copied_bytes


def test_one_directory_is_not_two(pair, tmp_path):
    a, _ = pair
    (tmp_path / "link").symlink_to(a.path)
    with open_store(tmp_path / "link", None) as same, pytest.raises(KVStoreError, match="are the same directory"):
        merge(a.context, same.context)


@pytest.mark.parametrize("outer", ["source", "target"])
def test_a_directory_inside_the_other_is_refused(tmp_path, outer):
    with open_store(tmp_path / "x") as x, open_store(tmp_path / "x" / "deep" / "y") as y:
        (tmp_path / "link").symlink_to(tmp_path / "x" / "deep")
        with open_store(tmp_path / "link" / "y", None) as y:  # noqa: PLW2901
            one, other = (x, y) if outer == "source" else (y, x)
            with pytest.raises(KVStoreError, match="lies inside"):
                merge(one.context, other.context)


def test_another_interval_is_refused(pair, tmp_path):
    before = snapshot(pair[1].path)
    with (
        open_store(tmp_path / "c", 32) as c,
        pytest.raises(IntervalMismatchError, match=r"an interval of 32 tokens and .* of 16"),
    ):
        merge(c.context, pair[1].context)
    assert snapshot(pair[1].path) == before
