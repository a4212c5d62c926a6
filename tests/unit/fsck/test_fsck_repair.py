"""What a repair keeps: everything that is whole, that may be on its way, or that cannot be read now."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import dataclass

import pytest
from core_support import FAST, open_store
from fsck_damage import (
    gone_pid,
    missing_block,
    newer,
    replaced_folder,
    staging,
    tokens_entry,
    without_kv,
    without_parent,
)
from fsck_support import GROWN, LATER, LONG, OTHER, PROMPTS, block, codes, errors, flip, node, restored, run, snapshot
from gc_support import DAY, TENANT, publish, space_of

from kvstore import FileSystem, Store
from kvstore.context import Owner
from kvstore.fsck import ExitCode, repair
from kvstore.layout import Layout

# What a repair keeps.


def test_damage_in_a_shared_chunk_costs_that_chunk_only(root):
    """Everything that continues a damaged node is in use again as soon as that node was computed again."""
    flip(block(root, node(root, LONG[:16])))
    report = run(root, read_data=True, repair=True)
    # The namespaces of one prompt have equal blocks, so both lose their first node.
    assert sorted(errors(report.findings).values()) == ["block-damaged", "manifest-unusable", "manifest-unusable"]
    assert report.counts.unreachable == 8
    assert report.exit_code == ExitCode.CORRECTED
    with open_store(root, None) as store:
        space = space_of(store)
        assert restored(space, LONG) == restored(space, GROWN) == 0
        assert restored(space, OTHER) == len(OTHER)
        publish(space, LONG[:16])
        assert [restored(space, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        assert space.lookup(LONG, trimmable=False).count == len(LONG)
    again = run(root, read_data=True)
    assert again.exit_code == ExitCode.CLEAN
    assert again.counts.unreachable == 2, "those of the other namespace still wait"


def test_what_continues_a_node_in_quarantine_waits_until_that_is_gone(root):
    flip(node(root, LONG[:16]))
    assert run(root, repair=True).counts.unreachable == 6
    assert run(root, repair=True, late=20 * DAY).findings[0].code == "unreachable"
    for path in (root / "quarantine").iterdir():
        path.unlink()
    report = run(root, repair=True)
    # The whole line: nobody knows any more why the parent is missing.
    assert sorted(errors(report.findings).values()) == ["kv-missing"] * 2 + ["parent-missing"] * 4
    assert report.exit_code == ExitCode.CORRECTED
    assert len(list((root / "quarantine").iterdir())) == 6
    assert run(root).exit_code == ExitCode.CLEAN


@pytest.mark.parametrize("size", [64, 2, 1])
@pytest.mark.parametrize("point", ["names", "batch"])
def test_what_continues_a_parent_that_comes_back_during_a_repair_is_put_back(root, monkeypatch, point, size):
    """A server computes the first chunks anew, before others are set aside or just after."""
    node(root, LONG[:16]).unlink()
    node(root, LONG[:16], info=TENANT).unlink()  # and stays away
    monkeypatch.setattr(repair, "_ROUND", size)
    monkeypatch.setattr(repair, "_BATCH", size)
    real = repair.names_there

    def compute(now: str) -> None:
        if now == point:
            with open_store(root, None) as store:
                publish(space_of(store), LONG[:32])

    def listing(layout: Layout) -> set[str]:
        found = real(layout)
        compute("names")
        return found

    monkeypatch.setattr(repair, "names_there", listing)
    report = run(root, repair=True, pause=compute)
    assert report.exit_code == ExitCode.CORRECTED
    with open_store(root, None, create=False) as store:
        assert [restored(space_of(store), tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        assert space_of(store).lookup(LONG, trimmable=False).count == len(LONG)
        assert restored(space_of(store, TENANT), LONG) == 0
    aside = [finding.path for finding in report.findings if finding.repair.startswith("set aside")]
    assert sum(space_of(store, TENANT).id in path for path in aside) == 2
    assert len(list((root / "quarantine").iterdir())) == len(aside)
    assert len(aside) <= 3, "the second chunk was computed while it was set aside, so there are two"
    assert run(root).exit_code == ExitCode.CLEAN


@pytest.mark.parametrize("damage", [missing_block, without_parent, without_kv])
def test_what_may_be_on_its_way_is_left_alone(root, damage):
    path = damage(root)
    report = run(root, late=0, repair=True)
    assert {severity for severity, _ in codes(report)} == {"note"}
    assert report.exit_code == ExitCode.CLEAN
    assert path.exists()
    assert run(root, late=0, grace_ns=0).exit_code == ExitCode.LEFT


def test_a_copy_with_old_times_is_young(root):
    path = without_parent(root)
    os.utime(path, ns=(0, 0))
    assert run(root, late=0, repair=True).exit_code == ExitCode.CLEAN
    assert path.exists()


def test_quarantine_never_overwrites(root):
    path = node(root, LONG)
    with open_store(root, None, create=False, clock=lambda: 2_000_000_000_000_000_000) as store:
        for _ in range(2):
            shutil.copy(path, root / "keep")
            flip(path)
            report = check_now(store, repair=True)
            assert report.exit_code == ExitCode.CORRECTED
            shutil.move(root / "keep", path)
            path.chmod(0o600)
    assert len(list((root / "quarantine").iterdir())) == 2


def check_now(store: Store, **options):
    from kvstore.fsck import check

    return check(store.context, settle_s=0, **options)


def test_quarantined_files_are_counted_and_foreign_ones_ignored(root):
    foreign = [
        root / ".DS_Store",
        root / "objects" / "notes.txt",
        root / "objects" / "blocks" / "._ab",
        node(root, LONG).parent / f".{node(root, LONG).name}.Xy12",
        block(root, node(root, LONG)).with_suffix(".conflicted copy"),
        root / "namespaces" / "readme",
        root / "tmp" / "upload",
    ]
    for path in foreign:
        path.write_bytes(b"x")
        path.chmod(0o600)
    (root / "quarantine" / "17.something").write_bytes(b"12345")
    report = run(root, read_data=True, repair=True)
    assert report.findings == ()
    assert report.counts.foreign == len(foreign)
    assert (report.counts.quarantined, report.counts.quarantined_bytes) == (1, 5)
    assert all(path.read_bytes() == b"x" for path in foreign)


def test_blocks_that_nothing_names(root):
    node(root, LONG, "state").unlink()
    young = run(root, late=0)
    assert young.findings == ()
    assert young.counts.waiting == 1
    old = run(root, repair=True)
    assert codes(old) == [("note", "orphans")]
    assert (old.counts.orphans, old.counts.waiting) == (1, 0)
    assert old.counts.orphan_bytes == young.counts.waiting_bytes > 0
    assert old.exit_code == ExitCode.CLEAN


def test_stale_staging_is_removed(root):
    stale = [staging(root, gone_pid()), staging(root, 1, "0badb007")]
    mine = staging(root, os.getpid())
    report = run(root)
    assert codes(report) == [("note", "staging-stale")] * 2
    assert (report.exit_code, report.counts.staging) == (ExitCode.CLEAN, 3)
    assert run(root, late=0, repair=True).findings == (), "it must have rested for a minute"
    report = run(root, repair=True)
    assert [finding.repair for finding in report.findings] == ["removed"] * 2
    assert not any(folder.exists() for folder in stale)
    assert (mine / "1f").exists()


def test_staging_whose_process_is_there_again_stays(root, monkeypatch):
    """Process numbers come back; what was free when it was looked at may be a server by now."""
    folder = staging(root, gone_pid())

    def come_back(point: str) -> None:
        if point == "repairing":
            monkeypatch.setattr(Owner, "surely_gone", lambda self: False)

    (finding,) = run(root, repair=True, pause=come_back).findings
    assert finding.repair == "left, because its process runs"
    assert (folder / "1f").exists()


def test_staging_that_is_written_to_again_before_its_repair_stays(root):
    """In a container the number of a process that is gone may be another's, on a machine of the same name."""
    folder = staging(root, gone_pid())
    assert codes(run(root)) == [("note", "staging-stale")]

    def pause(point: str) -> None:
        if point == "repairing":
            later = time.time_ns() + LATER
            (folder / "2").write_bytes(b"being written")
            os.utime(folder / "2", ns=(later, later))

    (finding,) = run(root, repair=True, pause=pause).findings
    assert (finding.corrected, finding.repair) == (False, "left, because something was written there just now")
    assert folder.exists()


def test_stale_staging_with_something_else_in_it_stays(root):
    folder = staging(root, gone_pid())
    (folder / "my notes").write_text("x")
    for name in "09af":
        (folder / name).mkdir()
    (finding,) = run(root, repair=True).findings
    assert not finding.corrected
    assert sorted(os.listdir(folder)) == ["0", "9", "a", "f", "my notes"]


def test_a_link_for_quarantine_is_not_followed(root):
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "quarantine").rmdir()
    (root / "quarantine").symlink_to(outside)
    flip(node(root, LONG))
    report = run(root, repair=True)
    assert report.exit_code == ExitCode.LEFT
    assert os.listdir(outside) == []


# What cannot be read.


@dataclass(frozen=True)
class Failing(FileSystem):
    """Answers an error for files whose path contains something."""

    part: str = ""
    code: int = errno.EIO

    def open_fd(self, path):
        if self.part in str(path):
            raise OSError(self.code, os.strerror(self.code), str(path))
        return super().open_fd(path)


@pytest.mark.parametrize("kind", ["manifest", "block", "tokens"])
def test_what_cannot_be_read_is_neither_damaged_nor_repaired(root, kind):
    path = {
        "manifest": lambda: node(root, LONG[:16]),
        "block": lambda: block(root, node(root, LONG)),
        "tokens": lambda: tokens_entry(root),
    }[kind]()
    before = snapshot(root)
    report = run(root, fs=Failing(FAST.durability, part=path.name), read_data=True, repair=True)
    assert codes(report) == [("error", "unreadable")]
    assert report.findings[0].path == str(path.relative_to(root))
    assert report.exit_code == ExitCode.FAILED
    assert snapshot(root) == before, "its children were taken for orphans"


def test_a_check_that_sees_nothing_of_the_nodes_calls_nothing_missing(root):
    replaced_folder(root / "objects" / "nodes")
    report = run(root, repair=True)
    assert codes(report) == [("error", "folder-blocked")]


def test_a_directory_that_vanishes_is_no_clean_one(root):
    def vanish(point: str) -> None:
        if point == "listed":
            root.rename(root.with_name("unmounted"))

    report = run(root, pause=vanish)
    assert report.exit_code & ExitCode.FAILED
    assert "does not exist" in report.error


@dataclass(frozen=True)
class ReadOnly(FileSystem):
    """A file system that lets nothing be changed."""

    def rename(self, source, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_what_cannot_be_repaired_is_left_and_said(root):
    flip(node(root, LONG))
    report = run(root, fs=ReadOnly(FAST.durability), repair=True)
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert "Read-only" in finding.repair
    assert not finding.corrected
    assert report.exit_code == ExitCode.LEFT


def test_exit_codes_add_up(root):
    flip(node(root, LONG))
    newer(node(root, OTHER))
    tokens = tokens_entry(root)
    report = run(root, fs=Failing(FAST.durability, part=tokens.name), repair=True)
    assert report.exit_code == ExitCode.CORRECTED | ExitCode.LEFT | ExitCode.FAILED
    assert (report.errors, report.corrected) == (3, 1)
