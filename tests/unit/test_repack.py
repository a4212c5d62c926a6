"""Repacking: one block where there were several, the same bytes, and no more of them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import FAST, INFO, SPECS, kv, open_store, prompt, restore
from gc_support import DAY, HOUR, TENANT, blocks, check_valid, manifests, named, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upkeep_support import (
    HARM,
    OLD_NS,
    assert_restores,
    counts,
    flip,
    forget_tails,
    grow,
    invoke,
    invoke_json,
    later,
    named_bytes,
    read_state,
    refs,
    rest,
    snapshot,
)

import kvstore.joining
import kvstore.repack
from kvstore import DamagedManifestError, FileSystem, MissingParentError, Span, Store, TensorSpec
from kvstore.blocks import block_parts
from kvstore.fsck import check
from kvstore.gc import Policy, collect, usage
from kvstore.joining import join
from kvstore.keys import block_digest
from kvstore.locks import publish_lock
from kvstore.manifest import decode
from kvstore.repack import RepackReport, repack
from kvstore.scan import scan

TOKENS = prompt(40)


@pytest.fixture
def cold(tmp_path) -> Store:
    """A conversation of 40 tokens (chunks of 16) that grew in turns, rests, and has lost its contained tails."""
    with open_store(tmp_path / "s") as store:
        grow(store.namespace(INFO), TOKENS, 5, 11, 16, 20, 32, 33, 40)
        forget_tails(store.path)
        rest(store)
        yield store


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


# Damage.


DAMAGE = HARM | {
    "header": lambda path: path.write_bytes(path.read_bytes().replace(b"BF16", b"FB16")),
}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_block_leaves_its_node_alone(cold, how, which):
    path = cold.context.layout.block(refs(cold.path)[16][which].digest)
    DAMAGE[how](path)
    report = repack(cold.context)
    assert (report.nodes, report.damaged) == (2, 1)
    assert len(report.problems) == 1
    assert path.name in report.problems[0]
    assert counts(cold.path) == {16: [5, 6, 5], 32: [16], 40: [8]}
    assert not any((cold.path / "tmp").rglob("[0-9a-f]"))


def test_blocks_with_other_tensors_are_not_joined(tmp_path):
    with open_store(tmp_path) as store:
        space = store.namespace(INFO)
        space.publish(TOKENS[:8], [Span(0, 8, SPECS, kv(TOKENS, 0, 8))])
        # A publish that cannot see what is before it, as one of another kvstore may not ask.
        (block,) = blocks(tmp_path)
        data = block.read_bytes()
        block.write_bytes(bytes(len(data)))
        space.publish(TOKENS[:16], [Span(8, 8, SPECS[:1], kv(TOKENS, 8, 16, SPECS[:1]))])
        block.write_bytes(data)
        forget_tails(tmp_path)
        rest(store)
        before = snapshot(tmp_path)
        report = repack(store.context)
        assert (report.nodes, report.damaged) == (0, 1)
        assert "different tensors" in report.problems[0]
        assert snapshot(tmp_path) == before


def test_nodes_beside_a_damaged_manifest_are_left_because_it_may_name_their_blocks(cold):
    sibling = [*TOKENS[:16], *prompt(5, 3)]
    cold.namespace(INFO).publish(sibling, [Span(16, 5, SPECS, kv(sibling, 16, 21))])
    path = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 21)
    rest(cold)
    path.write_bytes(path.read_bytes()[:-1])
    report = repack(cold.context)
    # The second chunk is its sibling; the others have nothing to do with it.
    assert counts_of_whole(cold.path) == {16: [16], 32: [4, 12], 40: [8]}
    assert (report.nodes, report.damaged) == (2, 1)
    assert "fsck" in report.problems[0]


def counts_of_whole(root: Path) -> dict[int, list[int]]:
    found = {}
    for path in manifests(root):
        try:
            manifest = decode(path.read_bytes())
        except DamagedManifestError:
            continue
        found[manifest.end] = [ref.count for ref in manifest.blocks]
    return found


def test_a_manifest_under_another_name_is_left(cold):
    path = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 16)
    other = path.with_name(path.name.replace("-16-", "-15-"))
    path.rename(other)
    rest(cold)
    report = repack(cold.context)
    assert (report.nodes, report.damaged) == (2, 1)
    assert other.name in report.problems[0]


def test_a_full_disk_ends_it_with_a_sentence_and_nothing_lost(cold):
    @dataclass(frozen=True)
    class Full(FileSystem):
        def allocate(self, fd, size):
            raise OSError(errno.ENOSPC, "No space left on device")

    before = snapshot(cold.path)
    with open_store(cold.path, None, Full()) as store:
        report = repack(store.context)
    assert "the disk is full" in report.error
    assert report.nodes == 0
    assert snapshot(cold.path) == before


# Races.


@dataclass(frozen=True)
class Hooked(FileSystem):
    """Calls hook once, after the first call of a kind on a path that ends so."""

    durability: object = FAST.durability
    call: str = ""
    suffix: str = ""
    hook: object = None
    done: list[bool] = field(default_factory=list)

    def _after(self, call, path):
        if call == self.call and str(path).endswith(self.suffix) and not self.done:
            self.done.append(True)
            self.hook()

    def read_file(self, path, limit):
        found = super().read_file(path, limit)
        self._after("read_file", path)
        return found

    def open_fd(self, path):
        found = super().open_fd(path)
        self._after("open_fd", path)
        return found

    def sync_file(self, fd):
        super().sync_file(fd)
        self._after("sync_file", "")


def test_a_reader_that_read_the_old_manifest_finds_the_old_blocks(cold):
    def meanwhile() -> None:
        with later(cold.path, 10 * DAY) as other:
            assert repack(other.context).nodes == 3
            report = collect(other.context, Policy())
            assert (report.blocks, report.waiting) == (0, 7)

    fs = Hooked(call="read_file", suffix=".kv", hook=meanwhile)
    with open_store(cold.path, None, fs) as store:
        assert restore(store.namespace(INFO), TOKENS).tokens == 40
        assert fs.done
        assert store.counters.missing == store.counters.damaged == 0
    assert counts(cold.path)[16] == [16]


def test_a_node_that_is_used_while_its_blocks_are_joined_keeps_its_manifest(cold):
    path = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 16)
    fs = Hooked(call="sync_file", hook=lambda: os.utime(path))
    with open_store(cold.path, None, fs) as store:
        report = repack(store.context)
    assert fs.done
    assert (report.nodes, report.skipped) == (2, 1)
    assert counts(cold.path) == {16: [5, 6, 5], 32: [16], 40: [8]}
    assert not any((cold.path / "tmp").rglob("[0-9a-f]"))


def test_a_node_that_is_removed_while_its_blocks_are_joined_stays_removed(cold):
    leaf = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 40)
    with open_store(cold.path, None, Hooked(call="sync_file", hook=leaf.unlink)) as store:
        report = repack(store.context)
    assert (report.nodes, report.skipped) == (2, 1)
    assert not leaf.exists()
    check_valid(cold.path)


def test_a_collector_that_marked_the_old_manifest_removes_nothing_that_the_new_one_needs(cold):
    """The joined block is there already, unreferenced and old (a repack was killed before its rename)."""
    with later(cold.path, 0) as store:
        joined = [join(store.context, each, lambda _: None)[0] for each in refs(cold.path).values()]

    def meanwhile(point: str) -> None:
        if point == "marked":
            with later(cold.path, 10 * DAY) as other:
                assert repack(other.context).nodes == 3

    with later(cold.path, 10 * DAY) as store:
        report = collect(store.context, Policy(size=0), pause=meanwhile)
    assert report.nodes == 0
    assert report.skipped >= 3
    assert {ref.digest.hex() for ref in joined} == named(cold.path)
    assert_restores(cold.path, [(INFO, TOKENS)])


def test_a_publish_that_goes_on_from_an_old_border_meanwhile_succeeds(cold):
    """It read the old manifest to find the border; the block before it is still there when it commits."""
    longer = [*TOKENS[:33], *prompt(6, 9)]
    fs = Hooked(call="read_file", suffix=".kv", hook=lambda: repack(cold.context))
    with open_store(cold.path, None, fs) as store:
        store.namespace(INFO).publish(longer, [Span(33, 6, SPECS, kv(longer, 33, 39))])
        assert fs.done
    assert_restores(cold.path, [(INFO, TOKENS), (INFO, longer)])


def test_two_at_once_do_no_harm(cold):
    start = threading.Barrier(2)
    reports = []

    def run() -> None:
        with open_store(cold.path, None) as store:
            start.wait()
            reports.append(repack(store.context))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.error for report in reports] == ["", ""]
    assert sum(report.nodes for report in reports) == 3
    assert counts(cold.path) == {16: [16], 32: [16], 40: [8]}
    assert_restores(cold.path, [(INFO, TOKENS)])


def test_a_lock_that_is_never_free_is_a_sentence(cold, monkeypatch):
    monkeypatch.setattr("kvstore.locks.PUBLISH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("kvstore.replacing.publish_lock", lambda layout: publish_lock(layout, 0.05))
    before = snapshot(cold.path)
    with publish_lock(cold.context.layout):
        report = repack(cold.context)
    assert "is held by another process" in report.error
    assert {name: found for name, found in snapshot(cold.path).items() if "/nodes/" in name} == {
        name: found for name, found in before.items() if "/nodes/" in name
    }


@pytest.mark.parametrize("tokens", [TOKENS])
def test_memory_does_not_grow_with_the_blocks(tmp_path, tokens):
    """A chunk of 48 MiB in three blocks, joined in a few MiB."""
    specs = tuple(TensorSpec(f"{layer}.keys", "F32", 4, (1 << 15,)) for layer in range(6))
    with open_store(tmp_path) as store:
        space = store.namespace(INFO)
        for first, end in ((0, 3), (3, 10), (10, 16)):
            data = [bytes([first]) * spec.span_bytes(end - first) for spec in specs]
            space.publish(tokens[:end], [Span(first, end - first, specs, data)])
        forget_tails(tmp_path)
        rest(store)
        del data
        tracemalloc.start()
        try:
            report = repack(store.context)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert report.written_bytes > 48 << 20
        assert peak < 8 << 20
    shutil.rmtree(tmp_path)


@st.composite
def conversations(draw):
    """Conversations that share beginnings: each is a prompt of a few tokens' variety, cut into turns, some decoded."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        branch = draw(st.sampled_from([0, 5, 16, 21]))
        tokens = [*prompt(branch), *prompt(40 - branch, draw(st.integers(0, 1)))]
        length = draw(st.integers(branch + 1, 40))
        cuts = draw(st.sets(st.integers(1, length), max_size=8))
        borders = sorted({*cuts, *range(16, length + 1, 16), length, *([branch] if branch else [])})
        found.append((tokens, borders, draw(st.text("d.", min_size=len(borders), max_size=len(borders)))))
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations(), st.data())
def test_whatever_is_stored_restores_the_same_and_takes_no_more(tmp_path, found, data):
    shutil.rmtree(tmp_path / "s", ignore_errors=True)
    with open_store(tmp_path / "s") as store:
        space = store.namespace(INFO)
        for tokens, borders, decoded in found:
            # Another conversation may have other borders in this chunk.
            with suppress(MissingParentError):
                grow(space, tokens, *borders, decode=decoded)
        # Some tails go, as under a budget.
        tails = [path for path in manifests(store.path) if "-16-" not in path.name]
        for path in data.draw(st.sets(st.sampled_from(tails), max_size=len(tails))) if tails else ():
            path.unlink()
        rest(store)
        known = [tokens for tokens, *_ in found]
        before = [restore(space, tokens).tokens for tokens in known]
        flags = {path.name: _flags(path) for path in manifests(store.path)}
        size, names = named_bytes(store.path), len(named(store.path))
        rest(store)
        report = repack(store.context)
        assert (report.damaged, report.skipped, report.error) == (0, 0, "")
        assert [restore(space, tokens).tokens for tokens in known] == before
        assert {path.name: _flags(path) for path in manifests(store.path)} == flags
        assert named_bytes(store.path) <= size
        assert len(named(store.path)) == names - report.replaced + report.written
        check_valid(store.path)
        rest(store)
        assert repack(store.context).nodes == 0


def _flags(path: Path) -> list[bool]:
    """For each token of a node, whether its KV was made by decoding."""
    return [ref.decode for ref in decode(path.read_bytes()).blocks for _ in range(ref.count)]


# The command.


def test_the_command_joins_and_says_so(cold):
    code, out, err = invoke("repack", cold.path)
    assert (code, err) == (0, "")
    assert out.startswith("Joined 7 blocks of 3 nodes into 3 (")
    assert counts(cold.path) == {16: [16], 32: [16], 40: [8]}
    assert invoke("repack", cold.path)[1] == "Joined nothing.\n"


def test_the_command_in_json_and_dry(cold):
    document = invoke_json("repack", cold.path, "--dry-run", "--namespace", cold.namespace(INFO).id[:6])
    assert (document["directory"], document["nodes"], document["dry_run"]) == (str(cold.path), 3, True)
    assert counts(cold.path)[16] == [5, 6, 5]
    for path in manifests(cold.path):
        os.utime(path)
    assert invoke_json("repack", cold.path)["warm"] == 3
    assert invoke_json("repack", cold.path, "--older-than", "0s")["nodes"] == 3


def test_damage_is_warned_of_and_no_failure(cold):
    flip(cold.context.layout.block(refs(cold.path)[16][0].digest))
    code, out, err = invoke("repack", cold.path)
    assert code == 0
    assert "1 node was left alone because of damage." in out
    assert "digest does not match" in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "sentence", "exit_code"),
    [(["--older-than", "5"], "is not an age", 2), (["--namespace", "zz"], "no namespace begins with", 1)],
)
def test_mistakes_are_one_sentence(cold, options, sentence, exit_code):
    code, out, err = invoke("repack", cold.path, *options)
    assert (code, out) == (exit_code, "")
    assert sentence in err


def test_not_a_cache_directory(tmp_path):
    code, _, err = invoke("repack", tmp_path)
    assert code == 1
    assert "is not a cache directory" in " ".join(err.split())


def test_modes_of_a_shared_directory_are_kept(tmp_path):
    old = os.umask(0o002)
    try:
        with Store.open(tmp_path / "s", interval=16, shared=True) as store:
            grow(store.namespace(INFO), TOKENS, 5, 16)
            forget_tails(store.path)
            rest(store)
        assert invoke("repack", tmp_path / "s")[0] == 0
        assert {path.stat().st_mode & 0o777 for path in [*manifests(store.path), *blocks(store.path)]} == {0o664}
    finally:
        os.umask(old)


def test_the_scan_that_other_commands_use_sees_one_block_more_for_each(cold):
    before = len(scan(cold.context).blocks)
    repack(cold.context)
    assert len(scan(cold.context).blocks) == before + 3
