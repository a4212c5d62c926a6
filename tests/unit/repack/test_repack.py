"""Repacking: one block where there were several, the same bytes, and no more of them."""

from __future__ import annotations

import os
import time

import pytest
from core_support import INFO, SPECS, kv, open_store, prompt, restore
from gc_support import DAY, HOUR, TENANT, blocks, check_valid, manifests, named, state
from upkeep_support import (
    OLD_NS,
    assert_restores,
    counts,
    forget_tails,
    grow,
    later,
    named_bytes,
    read_state,
    refs,
    rest,
    snapshot,
)

import kvstore.joining
import kvstore.repack
from kvstore import Span
from kvstore.blocks import block_parts
from kvstore.fsck import check
from kvstore.gc import collect, usage
from kvstore.keys import block_digest
from kvstore.manifest import decode
from kvstore.repack import RepackReport, repack

TOKENS = prompt(40)


def test_every_node_gets_one_block(cold):
    assert counts(cold.path) == {16: [5, 6, 5], 32: [4, 12], 40: [1, 7]}
    before = named_bytes(cold.path)
    report = repack(cold.context)
    assert counts(cold.path) == {16: [16], 32: [16], 40: [8]}
    assert (report.nodes, report.replaced, report.written) == (3, 7, 3)
    assert (report.warm, report.bound, report.skipped, report.damaged, report.error) == (0, 0, 0, 0, "")
    assert report.replaced_bytes == before
    assert report.written_bytes == named_bytes(cold.path) < before
    assert_restores(cold.path, [(INFO, TOKENS)])
    check_valid(cold.path)
    assert not any((cold.path / "tmp").rglob("[0-9a-f]"))
    found = check(cold.context, read_data=True)
    assert (found.exit_code, found.counts.waiting) == (0, 7)


def test_the_joined_block_is_the_one_that_one_publish_would_have_written(cold):
    (first, *_) = refs(cold.path)[16]
    repack(cold.context)
    (ref,) = refs(cold.path)[16]
    parts, payload = block_parts(Span(0, 16, SPECS, kv(TOKENS, 0, 16), phase=first.payload % 64))
    assert (ref.payload, ref.size) == (payload, sum(memoryview(part).nbytes for part in parts))
    assert ref.digest == block_digest(parts)
    assert cold.context.layout.block(ref.digest).read_bytes() == b"".join(parts)


def test_the_manifest_keeps_all_but_its_blocks_and_its_writer(cold):
    before = {path: (decode(path.read_bytes()), path.stat().st_mtime_ns) for path in manifests(cold.path)}
    repack(cold.context)
    assert {path: path.stat().st_mtime_ns for path in before} == {path: mtime for path, (_, mtime) in before.items()}
    for path, (old, _) in before.items():
        new = decode(path.read_bytes())
        assert new.blocks != old.blocks
        for name in ("kind", "fingerprint", "parent", "key", "first", "interval", "tokens", "created_ns", "name"):
            assert getattr(new, name) == getattr(old, name)
        assert path.stat().st_mode & 0o777 == 0o600


def test_old_blocks_stay_for_the_grace_time_and_the_directory_is_smaller_afterwards(cold):
    before, old = usage(cold.context), set(blocks(cold.path))
    with later(cold.path, 3 * DAY) as store:  # by then the old blocks are past grace
        repack(store.context)
        assert old < set(blocks(cold.path))
        assert collect(store.context).blocks == 0, "a reader of the old manifest may still need them"
    with later(cold.path, 3 * DAY + 23 * HOUR) as store:
        assert collect(store.context).blocks == 0
    with later(cold.path, 5 * DAY) as store:
        assert collect(store.context).blocks == len(old)
    assert {path.name for path in blocks(cold.path)} == named(cold.path)
    assert usage(cold.context) < before
    assert_restores(cold.path, [(INFO, TOKENS)])


def test_again_there_is_nothing_to_do(cold):
    repack(cold.context)
    before = snapshot(cold.path)
    assert repack(cold.context) == RepackReport()
    assert snapshot(cold.path) == before


def test_blocks_that_shorter_nodes_share_one_by_one_are_left(tmp_path):
    with open_store(tmp_path) as store:
        grow(store.namespace(INFO), TOKENS, 5, 11, 16)
        rest(store)
        before = snapshot(tmp_path)
        report = repack(store.context)
        assert (report.nodes, report.bound) == (0, 2)
        assert snapshot(tmp_path) == before


def test_blocks_that_are_shared_together_are_joined_for_all_who_share_them(tmp_path):
    with open_store(tmp_path) as store:
        space = store.namespace(INFO)
        grow(space, TOKENS, 3, 7, 12, 16)
        forget_tails(tmp_path, 12)
        rest(store)
        assert counts(tmp_path) == {12: [3, 4, 5], 16: [3, 4, 5, 4]}
        before = named_bytes(tmp_path)
        report = repack(store.context)
        assert counts(tmp_path) == {12: [12], 16: [12, 4]}
        assert refs(tmp_path)[12][0] == refs(tmp_path)[16][0]
        assert (report.nodes, report.replaced, report.written) == (2, 3, 1)
        assert named_bytes(tmp_path) <= before
        assert_restores(tmp_path, [(INFO, TOKENS[:12]), (INFO, TOKENS[:16])])


def test_branches_keep_what_they_share(tmp_path):
    other = [*TOKENS[:7], *prompt(9, 1)]
    with open_store(tmp_path) as store:
        space = store.namespace(INFO)
        grow(space, TOKENS, 3, 7, 12, 16)
        for first, end in ((7, 9), (9, 16)):
            space.publish(other[:end], [Span(first, end - first, SPECS, kv(other, first, end))])
        forget_tails(tmp_path)
        rest(store)
        before = named_bytes(tmp_path)
        assert [len(decode(path.read_bytes()).blocks) for path in manifests(tmp_path)] == [4, 4]
        repack(store.context)
        # The first 7 tokens are one block that both name; what follows is one for each.
        both = [decode(path.read_bytes()).blocks for path in manifests(tmp_path)]
        assert [[ref.count for ref in each] for each in both] == [[7, 9], [7, 9]]
        assert both[0][0] == both[1][0]
        assert named_bytes(tmp_path) <= before
        assert_restores(tmp_path, [(INFO, TOKENS[:16]), (INFO, other)])


def test_prefill_and_decoding_stay_apart(tmp_path):
    with open_store(tmp_path) as store:
        grow(store.namespace(INFO), TOKENS, 2, 4, 7, 10, 13, 16, decode="..dd..")
        forget_tails(tmp_path)
        rest(store)
        repack(store.context)
        assert [(ref.count, ref.decode) for ref in refs(tmp_path)[16]] == [(4, False), (6, True), (6, False)]
        assert_restores(tmp_path, [(INFO, TOKENS[:16])])
    with open_store(tmp_path / "alternating") as store:
        grow(store.namespace(INFO), TOKENS, 4, 8, 12, 16, decode=".d.d")
        forget_tails(store.path)
        rest(store)
        report = repack(store.context)
        assert (report.nodes, report.bound) == (0, 1)


def test_what_was_used_of_late_is_left(cold):
    now = time.time_ns()
    by_end = {decode(path.read_bytes()).end: path for path in manifests(cold.path)}
    os.utime(by_end[16], ns=(now, now - 2 * DAY))
    os.utime(by_end[32], ns=(now, now - HOUR))
    os.utime(by_end[40], ns=(now, now + 50 * DAY))  # a wrong clock: it came here just now
    report = repack(cold.context)
    assert (report.nodes, report.warm) == (1, 2)
    assert counts(cold.path) == {16: [16], 32: [4, 12], 40: [1, 7]}
    assert repack(cold.context, older_than_ns=HOUR // 2).nodes == 1
    assert counts(cold.path)[32] == [16]
    assert repack(cold.context, older_than_ns=0).nodes == 1
    assert counts(cold.path)[40] == [8]


def test_what_this_process_just_restored_is_left_though_its_times_are_old(cold):
    assert restore(cold.namespace(INFO), TOKENS).tokens == 40
    for path in manifests(cold.path):
        os.utime(path, ns=(OLD_NS, OLD_NS))
    assert repack(cold.context).warm == 3


def test_a_shared_block_with_one_warm_user_is_left(tmp_path):
    with open_store(tmp_path) as store:
        grow(store.namespace(INFO), TOKENS, 3, 7, 12, 16)
        forget_tails(tmp_path, 12)
        rest(store)
        warm = next(path for path in manifests(tmp_path) if decode(path.read_bytes()).end == 12)
        os.utime(warm)
        before = snapshot(tmp_path)
        report = repack(store.context)
        assert (report.nodes, report.warm, report.bound) == (0, 1, 1)
        assert snapshot(tmp_path) == before


def test_one_namespace_only(cold):
    other = cold.namespace(TENANT)
    grow(other, prompt(16, 1), 5, 16)
    forget_tails(cold.path)
    rest(cold)
    assert repack(cold.context, namespaces=[other.id]).nodes == 1
    assert repack(cold.context, namespaces=[other.id]).nodes == 0
    assert repack(cold.context).nodes == 3


def test_blocks_of_two_namespaces_are_joined_for_both_or_not_at_all(cold):
    """Equal bytes are one block, whoever they belong to."""
    other = cold.namespace(TENANT)
    grow(other, TOKENS, 5, 11, 16)
    forget_tails(cold.path)
    rest(cold)
    before = named_bytes(cold.path)
    assert repack(cold.context, namespaces=[other.id]).bound == 1
    assert repack(cold.context).nodes == 4
    assert named_bytes(cold.path) < before
    assert_restores(cold.path, [(INFO, TOKENS), (TENANT, TOKENS[:16])])


def test_a_dry_run_changes_nothing_and_says_the_same(cold):
    before = snapshot(cold.path)
    would = repack(cold.context, dry_run=True)
    assert snapshot(cold.path) == before
    did = repack(cold.context)
    assert would.dry_run
    for name in ("nodes", "replaced", "replaced_bytes", "written", "warm", "bound"):
        assert getattr(would, name) == getattr(did, name) or name == "dry_run"
    assert would.written_bytes >= did.written_bytes > would.written_bytes // 2


def test_a_boundary_state_beside_the_node_stays(tmp_path):
    with open_store(tmp_path) as store:
        space = store.namespace(INFO)
        grow(space, TOKENS, 5, 16)
        space.publish_state(TOKENS[:16], state(7))
        forget_tails(tmp_path)
        rest(store)
        before = read_state(space, TOKENS[:16])
        assert before[1] == {"s": bytes([7, 1, 2])}
        rest(store)
        assert repack(store.context).nodes == 1
        assert read_state(space, TOKENS[:16]) == before


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_the_buffer_may_end_anywhere(cold, monkeypatch, size):
    monkeypatch.setattr(kvstore.joining, "BUFFER_BYTES", size)
    assert repack(cold.context).nodes == 3
    assert_restores(cold.path, [(INFO, TOKENS)])
    check_valid(cold.path)


def test_very_many_blocks_are_joined_in_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(kvstore.repack, "MAX_SOURCES", 3)
    with open_store(tmp_path) as store:
        grow(store.namespace(INFO), TOKENS, *range(2, 17, 2))
        forget_tails(tmp_path)
        rest(store)
        seen = [counts(tmp_path)[16]]
        while repack(store.context).nodes:
            seen.append(counts(tmp_path)[16])
        assert seen == [[2] * 8, [6, 6, 4], [16]]
        assert_restores(tmp_path, [(INFO, TOKENS[:16])])


def test_progress_is_told_up_to_the_end(cold):
    told: list[tuple[int, int]] = []
    repack(cold.context, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1] > 0
    assert len({done for done, _ in told}) > 3
