"""Merging: the second directory holds every prefix of either; the first is only read; damage does not travel."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import tracemalloc
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from core_support import FAST, INFO, block_files, files, open_store, prompt, restore, span
from gc_support import DAY, HOUR, TENANT, as_newer, check_valid, manifests, named, publish, set_used, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upkeep_support import (
    HARM,
    assert_restores,
    counts,
    flip,
    forget_tails,
    grow,
    invoke,
    invoke_json,
    read_state,
    refs,
    rest,
    snapshot,
)

from kvstore import FileSystem, IntervalMismatchError, KVStoreError, NamespaceInfo, Span, Store, TensorSpec
from kvstore.gc import Policy, collect
from kvstore.keys import checksum
from kvstore.layout import Layout
from kvstore.locks import publish_lock
from kvstore.manifest import decode, encode
from kvstore.merge import MergeReport, merge
from kvstore.repack import repack

ONE = prompt(40)
TWO = [*ONE[:16], *prompt(12, 1)]
THREE = prompt(20, 2)


@pytest.fixture
def pair(tmp_path) -> tuple[Store, Store]:
    """Two directories whose conversations share a first chunk; the first has a tenant, a state, a tokenization."""
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        publish(a.namespace(INFO), ONE)
        a.namespace(INFO).publish_state(ONE[:32], state(4))
        publish(a.namespace(TENANT), THREE)
        a.tokenizations(b"scope").put(b"request", bytes(8))
        publish(b.namespace(INFO), TWO)
        yield a, b


def by_end(root: Path) -> dict[int, Path]:
    """KV manifests of the one namespace by the length of their prefix."""
    found = sorted((Layout(root).nodes / INFO.id).rglob("*.kv"))
    return {decode(path.read_bytes()).end: path for path in found}


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


# Refusals.


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


# Damage in the source.


DAMAGE = HARM | {
    "link": lambda path: (path.rename(f"{path}.away"), path.symlink_to(f"{path}.away")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_block_stays_behind_with_all_that_continues_its_node(pair, how):
    a, b = pair
    (ref,) = decode(by_end(a.path)[32].read_bytes()).blocks
    path = a.context.layout.block(ref.digest)
    DAMAGE[how](path)
    report = merge(a.context, b.context)
    assert report.damaged >= 1
    assert report.problems
    assert all(path.name in sentence or by_end(a.path)[32].name in sentence for sentence in report.problems)
    # The tail after it, and the state at it; the tenant has nothing to do with it.
    assert (report.without_parent, report.nodes, report.states, report.error) == (2, 2, 0, "")
    check_valid(b.path)
    assert_restores(b.path, [(INFO, TWO), (TENANT, THREE)])
    with open_store(b.path, None) as store:
        assert restore(store.namespace(INFO), ONE).tokens == 16
    assert not b.context.layout.block(ref.digest).exists()
    assert not any((b.path / "tmp").rglob("[0-9a-f]"))


@pytest.mark.parametrize("how", [how for how in DAMAGE if how not in ("gone", "link", "fifo")])
def test_a_damaged_manifest_stays_behind(pair, how):
    a, b = pair
    path = by_end(a.path)[32]
    DAMAGE[how](path)
    report = merge(a.context, b.context)
    assert (report.damaged, report.without_parent, report.nodes) == (1, 2, 2)
    assert path.name in report.problems[0]
    assert not (b.path / path.relative_to(a.path)).exists()


def without_blocks(path: Path) -> None:
    path.write_bytes(encode(replace(decode(path.read_bytes()), blocks=())))


def test_a_node_without_blocks_does_not_come_between_others(pair):
    """It is whole in itself, and a restore over it would take what was never filled for saved."""
    a, b = pair
    without_blocks(by_end(a.path)[32])
    report = merge(a.context, b.context)
    assert (report.damaged, report.without_parent) == (1, 2)
    assert "one has no blocks" in report.problems[0]
    assert by_end(b.path).keys() == {16, 28}
    assert restore(b.namespace(INFO), ONE).tokens == 16


def test_a_node_without_blocks_in_the_target_gives_way_to_one_that_has_some(pair):
    a, b = pair
    publish(b.namespace(INFO), ONE[:16])
    without_blocks(by_end(b.path)[16])
    merge(a.context, b.context)
    assert restore(b.namespace(INFO), ONE).tokens == 40
    assert len(list((b.path / "quarantine").iterdir())) == 1


def test_blocks_are_not_put_upon_a_node_that_has_none(pair):
    """The source's own chunk is damaged, so the target's stays, and what continues it in the source is left out."""
    a, b = pair
    by_end(a.path)[16].write_bytes(b"damaged")
    without_blocks(by_end(b.path)[16])
    report = merge(a.context, b.context)
    assert any("one has no blocks" in problem for problem in report.problems)
    assert by_end(b.path).keys() == {16, 28}


def test_a_newer_manifest_of_the_target_stays(pair):
    a, b = pair
    first = by_end(b.path)[16]
    as_newer(first)
    before = first.read_bytes()
    foreseen = merge(a.context, b.context, dry_run=True)
    report = merge(a.context, b.context)
    assert first.read_bytes() == before
    assert not list((b.path / "quarantine").iterdir())
    assert (report.there, report.damaged) == (1, 0), "it is there, and not brought"
    assert (foreseen.there, foreseen.nodes) == (report.there, report.nodes)


def test_a_manifest_of_another_prefix_stays_behind(pair):
    a, b = pair
    ends = by_end(a.path)
    wrong = ends[40].with_name(ends[40].name.replace("-8-", "-7-"))
    ends[40].rename(wrong)
    report = merge(a.context, b.context)
    assert (report.damaged, report.nodes) == (1, 3)
    assert wrong.name in report.problems[0]


def test_a_damaged_block_that_two_nodes_name_is_read_and_reported_once(tmp_path):
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        grow(a.namespace(INFO), ONE, 5, 9, 12)
        flip(a.context.layout.block(refs(a.path)[5][0].digest))
        report = merge(a.context, b.context)
        assert (report.nodes, report.blocks) == (0, 0)
        assert len(report.problems) == 1
        assert report.damaged == 4  # the block, and three manifests that name it


def tokenization_of(root: Path) -> Path:
    (found,) = (path for path in (root / "objects" / "tokens").rglob("*") if path.is_file())
    return found


def newer_tokenization(path: Path) -> bytes:
    """Make a tokenization one of a format to come, with a field more, whole in itself."""
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    body = bytes(data[:-16]) + bytes(8)
    path.write_bytes(body + checksum(body))
    return path.read_bytes()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_newer_tokenization_of_the_target_stays(pair, dry_run):
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    path = tokenization_of(b.path)
    before = newer_tokenization(path)
    report = merge(a.context, b.context, dry_run=dry_run)
    assert (report.tokenizations, report.damaged, report.newer) == (0, 0, 0)
    assert path.read_bytes() == before


def test_a_damaged_tokenization_of_the_target_gives_way(pair):
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    tokenization_of(b.path).write_bytes(b"short")
    assert merge(a.context, b.context).tokenizations == 1
    assert b.tokenizations(b"scope").get(b"request") == bytes(8)


def test_what_a_newer_kvstore_wrote_stays_behind_and_is_no_damage(pair):
    a, b = pair
    as_newer(by_end(a.path)[40])
    newer_tokenization(tokenization_of(a.path))
    report = merge(a.context, b.context)
    assert (report.newer, report.damaged, report.nodes, report.tokenizations) == (2, 0, 3, 0)
    assert all("has format 2, which a newer kvstore wrote; merge with that one" in each for each in report.problems)
    assert "2 files of a newer kvstore left out; merge with that one." in invoke("merge", a.path, b.path)[1]


def test_damaged_tokenizations_and_descriptions_stay_behind(pair):
    a, b = pair
    (tokenization,) = (path for path in (a.path / "objects" / "tokens").rglob("*") if path.is_file())
    flip(tokenization)
    description = a.context.layout.namespace_file(a.namespace(TENANT).id)
    description.write_text("{")
    report = merge(a.context, b.context)
    assert (report.tokenizations, report.namespaces, report.damaged) == (0, 0, 2)
    assert not b.context.layout.namespace_file(a.namespace(TENANT).id).exists()
    assert_restores(b.path, [(TENANT, THREE)])


def test_foreign_files_are_left_behind_and_counted(pair):
    a, b = pair
    folder = by_end(a.path)[40].parent
    for name in (".DS_Store", "._x", ".nfs0001", f"{by_end(a.path)[40].name} (conflicted copy)"):
        (folder / name).write_bytes(b"?")
    (a.path / "objects" / "tokens" / "notes.txt").write_bytes(b"?")
    report = merge(a.context, b.context)
    assert (report.nodes, report.foreign, report.damaged) == (4, 5, 0)
    assert all(Path(name).name not in {".DS_Store", "._x", "notes.txt"} for name in files(b.path))


# Damage in the target, which the source can heal.


def test_a_block_that_the_target_lost_is_brought_back(pair):
    a, b = pair
    (ref,) = decode(by_end(b.path)[16].read_bytes()).blocks
    b.context.layout.block(ref.digest).unlink()
    report = merge(a.context, b.context)
    assert (report.there, report.blocks) == (1, 6)
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO)])


def test_a_manifest_that_is_damaged_in_the_target_is_set_aside_for_the_good_one(pair):
    a, b = pair
    flip(by_end(b.path)[16])
    report = merge(a.context, b.context)
    assert (report.nodes, report.there) == (5, 0)
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO)])
    assert [path.name.partition(".")[2] for path in (b.path / "quarantine").iterdir()] == [by_end(b.path)[16].name]


def test_a_manifest_whose_blocks_nobody_has_gives_way_to_one_whose_blocks_are_there(tmp_path):
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        publish(a.namespace(INFO), ONE[:16])
        b.namespace(INFO).publish(ONE[:16], [span(ONE, 0, 16, phase=8)])
        (ref,) = refs(b.path)[16]
        assert ref != refs(a.path)[16][0]
        b.context.layout.block(ref.digest).unlink()
        report = merge(a.context, b.context)
        assert (report.nodes, report.damaged) == (1, 0)
        assert_restores(b.path, [(INFO, ONE[:16])])


# Both in use.


@dataclass(frozen=True)
class Hooked(FileSystem):
    """Calls hook once, before the first call of a kind on a path that holds a part."""

    durability: object = FAST.durability
    call: str = ""
    part: str = ""
    hook: object = None
    done: list[bool] = field(default_factory=list)

    def _before(self, call, path):
        if call == self.call and self.part in str(path) and not self.done:
            self.done.append(True)
            self.hook()

    def open_fd(self, path):
        self._before("open_fd", path)
        return super().open_fd(path)

    def rename(self, source, target):
        self._before("rename", target)
        super().rename(source, target)

    def touch(self, path, time_ns):
        self._before("touch", path)
        return super().touch(path, time_ns)


def test_a_source_that_is_repacked_and_collected_meanwhile_is_read_again(tmp_path):
    """Its old block vanishes between the manifest and the block; the new manifest names another."""
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        grow(a.namespace(INFO), ONE, 5, 11, 16)
        forget_tails(a.path)
        rest(a)
        (first, *others) = refs(a.path)[16]

        def meanwhile() -> None:
            assert repack(a.context).nodes == 1
            for ref in (first, *others):
                a.context.layout.block(ref.digest).unlink()

        fs = Hooked(call="open_fd", part=first.digest.hex(), hook=meanwhile)
        with open_store(a.path, None, fs) as source:
            report = merge(source.context, b.context)
        assert fs.done
        assert (report.nodes, report.damaged, report.skipped) == (1, 0, 0)
        assert counts(b.path) == {16: [16]}
        assert_restores(b.path, [(INFO, ONE[:16])])


def test_what_the_sources_collector_removes_meanwhile_is_skipped(pair):
    a, b = pair
    (ref,) = decode(by_end(a.path)[40].read_bytes()).blocks
    leaf = by_end(a.path)[40]

    def meanwhile() -> None:
        leaf.unlink()
        a.context.layout.block(ref.digest).unlink()

    fs = Hooked(call="open_fd", part=ref.digest.hex(), hook=meanwhile)
    with open_store(a.path, None, fs) as source:
        report = merge(source.context, b.context)
    assert (report.nodes, report.skipped, report.damaged) == (3, 1, 0)


def test_a_parent_that_the_targets_collector_removes_meanwhile_is_noticed_under_the_lock(pair):
    a, b = pair
    parent = b.path / by_end(a.path)[32].relative_to(a.path)
    tail = by_end(a.path)[40].name

    fs = Hooked(call="touch", part=str(parent), hook=parent.unlink)
    with open_store(b.path, None, fs) as target:
        report = merge(a.context, target.context)
    assert fs.done
    assert report.skipped >= 1
    assert report.error == ""
    assert tail not in {path.name for path in manifests(b.path)}
    check_valid(b.path)
    # Another run brings both.
    merge(a.context, b.context)
    assert_restores(b.path, [(INFO, ONE)])


def test_a_collector_that_chose_the_parent_before_leaves_it(pair):
    """It marked the target before the merge, and sweeps after a child was put upon a node that nothing else keeps."""
    a, b = pair
    old = time.time_ns() - 40 * DAY
    for root in (a.path, b.path):
        for path in manifests(root):
            os.utime(path, ns=(old, old))
    b.context.recent.clear()

    def meanwhile(point: str) -> None:
        if point == "planned":
            assert merge(a.context, b.context).nodes == 4

    with open_store(b.path, None, clock=lambda: time.time_ns() + HOUR) as later:
        report = collect(later.context, Policy(size=0), pause=meanwhile)
    assert report.skipped
    check_valid(b.path)
    assert_restores(b.path, [(INFO, ONE), (TENANT, THREE)])


def test_a_full_disk_ends_it_with_a_sentence_and_another_run_goes_on(pair):
    a, b = pair

    @dataclass(frozen=True)
    class Full(FileSystem):
        durability: object = FAST.durability
        left: list[int] = field(default_factory=lambda: [4])

        def allocate(self, fd, size):
            self.left[0] -= 1
            if self.left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

    with open_store(b.path, None, Full()) as target:
        report = merge(a.context, target.context)
    assert "the disk is full" in report.error
    assert str(b.path) in report.error
    assert 0 < report.nodes < 4
    check_valid(b.path)
    done = report.nodes
    report = merge(a.context, b.context)
    assert (report.nodes, report.error) == (4 - done, "")
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO), (TENANT, THREE)])


def test_a_source_that_cannot_be_listed_is_named(pair, monkeypatch):
    a, b = pair
    real = os.open

    def refusing(path, *arguments, **options):
        if str(path).startswith(str(a.path / "objects" / "nodes")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    report = merge(a.context, b.context)
    assert str(a.path) in report.error
    assert "permission denied" in report.error


def test_two_merges_and_a_publisher_at_once(pair, tmp_path):
    a, b = pair
    with open_store(tmp_path / "c") as c:
        publish(c.namespace(INFO), [*ONE[:32], *prompt(30, 5)])
        start = threading.Barrier(3)
        errors = []

        def bring(source: Path) -> None:
            with open_store(source, None) as one, open_store(b.path, None) as other:
                start.wait()
                report = merge(one.context, other.context)
                errors.append((report.error, report.skipped, report.without_parent, report.problems))

        def write() -> None:
            with open_store(b.path, None) as store:
                start.wait()
                for seed in range(10, 16):
                    publish(store.namespace(INFO), [*ONE[:16], *prompt(16, seed)])

        threads = [threading.Thread(target=bring, args=(path,)) for path in (a.path, c.path)]
        threads.append(threading.Thread(target=write))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [("", 0, 0, []), ("", 0, 0, [])]
        check_valid(b.path)
        longer = [*ONE[:32], *prompt(30, 5)]
        written = [[*ONE[:16], *prompt(16, seed)] for seed in range(10, 16)]
        assert_restores(b.path, [(INFO, each) for each in (ONE, TWO, longer, *written)] + [(TENANT, THREE)])


def test_the_publish_lock_is_free_while_blocks_are_copied(pair):
    a, b = pair
    free = []

    @dataclass(frozen=True)
    class Watching(FileSystem):
        durability: object = FAST.durability

        def write(self, fd, parts):
            with publish_lock(b.context.layout, 0.05):
                free.append(True)
            return super().write(fd, parts)

    with open_store(b.path, None, Watching()) as target:
        assert merge(a.context, target.context).error == ""
    assert len(free) >= 10


def test_memory_does_not_grow_with_the_blocks(tmp_path):
    specs = tuple(TensorSpec(f"{layer}.keys", "F32", 4, (1 << 15,)) for layer in range(6))
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        data = [bytes(spec.span_bytes(16)) for spec in specs]
        a.namespace(INFO).publish(ONE[:16], [Span(0, 16, specs, data)])
        del data
        tracemalloc.start()
        try:
            report = merge(a.context, b.context)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert report.copied_bytes > 48 << 20
        assert peak < 8 << 20
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")


@st.composite
def stores(draw):
    """For each of two directories: conversations of a few beginnings, how each was cut, and what it lost."""
    return [
        [
            (
                draw(st.sampled_from([0, 5, 16, 21])),
                draw(st.integers(0, 1)),
                draw(st.integers(22, 40)),
                draw(st.sampled_from([INFO, TENANT])),
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        for _ in range(2)
    ]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stores(), st.booleans(), st.data())
def test_every_prefix_of_either_is_in_the_union(tmp_path, found, squeeze, data):
    for name in "ab":
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    known: list[tuple[NamespaceInfo, list[int]]] = []
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        for store, conversations in zip((a, b), found, strict=True):
            for branch, seed, length, info in conversations:
                tokens = [*prompt(branch), *prompt(length - branch, seed)]
                publish(store.namespace(info), tokens)
                known.append((info, tokens))
        if squeeze and manifests(a.path):
            # Some leaf goes, as under a budget.
            chosen = data.draw(st.sampled_from(manifests(a.path)))
            manifest = decode(chosen.read_bytes())
            if not any(decode(path.read_bytes()).parent == manifest.key for path in manifests(a.path)):
                chosen.unlink()
        before = [max(restore(store.namespace(info), tokens).tokens for store in (a, b)) for info, tokens in known]
        report = merge(a.context, b.context)
        assert (report.damaged, report.without_parent, report.skipped, report.error) == (0, 0, 0, "")
        after = [restore(b.namespace(info), tokens).tokens for info, tokens in known]
        assert all(new >= old for new, old in zip(after, before, strict=True))
        check_valid(b.path)
        assert {path.name for path in manifests(b.path)} >= {path.name for path in manifests(a.path)}


# The command.


def test_the_command_merges_and_says_so(pair):
    a, b = pair
    code, out, err = invoke("merge", a.path, b.path)
    assert code == 0
    assert [line for line in err.splitlines() if "temporary folder" not in line] == []
    assert out.startswith("Copied 4 nodes, 1 boundary state, 1 tokenization, 1 namespace description, 5 blocks of ")
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO), (TENANT, THREE)])
    assert f"Copied nothing into {b.path}." in invoke("merge", a.path, b.path)[1]


def test_the_command_in_json_and_dry(pair):
    a, b = pair
    before = snapshot(b.path)
    document = invoke_json("merge", a.path, b.path, "--dry-run")
    assert (document["source"], document["target"], document["nodes"]) == (str(a.path), str(b.path), 4)
    assert snapshot(b.path) == before


def test_damage_is_warned_of_on_stderr_and_no_failure(pair):
    a, b = pair
    flip(a.context.layout.block(decode(by_end(a.path)[40].read_bytes()).blocks[0].digest))
    code, out, err = invoke("merge", a.path, b.path)
    assert code == 0
    assert "2 damaged files left out." in out
    assert "digest does not match its bytes" in " ".join(err.split())


def test_what_cannot_be_merged_is_one_sentence(pair, tmp_path):
    a, b = pair
    with open_store(tmp_path / "wide", 32) as wide:
        other = wide.path
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "newer" / "kvstore.json").write_text('{"format": 2, "interval": 16}')
    before = [snapshot(store.path) for store in pair]
    for source, target, sentence in (
        (a.path, a.path, "are the same directory"),
        (a.path, other, "only directories of one interval can be merged"),
        (tmp_path / "empty", b.path, "is not a cache directory"),
        (a.path, tmp_path / "full", "holds other files (x) and is not a cache directory"),
        (a.path, tmp_path / "full" / "x", "is a file; name a directory"),
        (a.path, a.path / "inside", "lies inside"),
        (a.path, tmp_path / "newer", "has format 2"),
        (tmp_path / "missing", b.path, f"there is no {tmp_path / 'missing'} "),
    ):
        for options in ([], ["--dry-run"]):
            code, out, err = invoke("merge", source, target, *options)
            assert (code, out) == (1, ""), sentence
            assert sentence in " ".join(err.split())
            assert err.count("kvstore: ") == 1
    assert [snapshot(store.path) for store in pair] == before
    assert list((tmp_path / "empty").iterdir()) == []
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["missing", "empty", "deep/missing"])
def test_a_target_that_is_not_there_is_made_like_the_source(tmp_path, name, shared):
    (tmp_path / "empty").mkdir()
    target = tmp_path / name
    with Store.open(tmp_path / "a", interval=32, shared=shared) as a:
        a.namespace(INFO).publish(ONE, [span(ONE, 0, 32), span(ONE, 32, 40)])
        document = invoke_json("merge", a.path, target, "--dry-run")
        assert (document["made"], document["nodes"]) == (True, 2)
        assert "Would make the cache directory" in invoke("merge", a.path, target, "--dry-run")[1]
        assert not target.exists() or not list(target.iterdir())
        code, out, _ = invoke("merge", a.path, target)
    assert code == 0
    assert out.startswith(f"Made the cache directory {target} with chunks of 32 tokens")
    assert ("shared by several users" in out) is shared
    with Store.open(target, create=False) as made:
        assert (made.interval, made.context.fs.private) == (32, not shared)
        assert restore(made.namespace(INFO), ONE).tokens == 40
    assert invoke_json("merge", tmp_path / "a", target)["made"] is False


def test_the_default_target_is_said_with_its_reason(pair, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "full"))
    assert "because KVSTORE_DIR names it" in " ".join(invoke("merge", pair[0].path)[2].split())


def test_a_used_node_keeps_its_place_in_the_queue(pair):
    """What was used long ago in the source goes first in the target too."""
    a, b = pair
    set_used(a, a.namespace(TENANT), THREE, 50 * 86400)
    b.context.recent.clear()
    merge(a.context, b.context)
    with open_store(b.path, None, clock=lambda: time.time_ns() + HOUR) as later:
        report = collect(later.context, Policy(older_than_ns=20 * DAY))
    assert report.nodes == 2
    with open_store(b.path, None) as store:
        assert restore(store.namespace(TENANT), THREE).tokens == 0
        assert restore(store.namespace(INFO), ONE).tokens == 40
