"""A check and a repair beside processes that publish, remove and repair."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from core_support import FAST, open_store
from fsck_damage import tokens_entry, without_parent
from fsck_support import LATER, LONG, OTHER, block, errors, flip, match_of, node, refs, restored, run
from gc_support import ahead, prompt, publish, space_of

from kvstore import FileSystem
from kvstore.fsck import ExitCode, repair
from kvstore.gc import Policy, collect
from kvstore.layout import Layout

# Other processes at work.


def test_what_vanishes_during_a_check_is_no_finding(root):
    """gc removes manifests first, so a block that is missing has no manifest any more."""

    def collect(point: str) -> None:
        if point == "listed":
            match = match_of(root, OTHER)
            for step in reversed(match.steps):
                named = refs(step.path)
                step.path.unlink()
                for ref in named:
                    Layout(root).block(ref.digest).unlink()
            tokens_entry(root).unlink()

    assert run(root, read_data=True, repair=True, pause=collect).findings == ()


def test_a_block_that_goes_with_its_manifest_is_no_finding(root):
    """gc removes both between the moment the manifest is read and the moment the block is opened."""
    path = node(root, OTHER)
    lost = block(root, path)

    @dataclass(frozen=True)
    class Collecting(FileSystem):
        def open_fd(self, path_):
            if str(path_) == str(lost):
                opened.append(path_)
                if len(opened) == 2:
                    path.unlink()
                raise FileNotFoundError(errno.ENOENT, "removed", str(path_))
            return super().open_fd(path_)

    opened: list[str] = []
    report = run(root, fs=Collecting(FAST.durability), repair=True)
    assert len(opened) == 2
    assert report.findings == ()


def test_what_is_published_during_a_check_is_whole(root, monkeypatch):
    """Blocks are listed before manifests: those of a manifest that appears in between are not known yet."""
    from kvstore.fsck import inspection

    new = prompt(64, 9)
    listed = inspection.folders

    def publishing(layout, kind, misfits):
        if kind == "nodes":
            with open_store(root, None) as store:
                publish(space_of(store), new)
        return listed(layout, kind, misfits)

    monkeypatch.setattr(inspection, "folders", publishing)
    report = run(root, repair=True)
    assert report.findings == ()
    assert (report.counts.manifests, report.counts.blocks) == (14, 9)
    with open_store(root, None) as store:
        assert restored(space_of(store), new) == 64


def test_a_parent_published_after_its_folder_was_listed_is_found(root, monkeypatch):
    """The listing that misses it is made by hand: what a walk returned before the parent was there."""
    from kvstore.fsck import inspection

    hidden = node(root, LONG[:16]).name
    listed = inspection.folders

    def stale(layout, kind, misfits):
        for folder in listed(layout, kind, misfits):
            yield folder._replace(names=[name for name in folder.names if name != hidden])

    monkeypatch.setattr(inspection, "folders", stale)
    report = run(root, repair=True)
    assert report.findings == ()


def test_a_block_written_again_before_the_repair_keeps_its_manifest(root):
    path = node(root, LONG)
    lost = block(root, path)
    data = lost.read_bytes()
    lost.unlink()

    def write(point: str) -> None:
        if point == "repairing":
            lost.write_bytes(data)

    report = run(root, repair=True, pause=write)
    assert report.exit_code == ExitCode.CORRECTED
    assert path.exists()
    assert errors(run(root, read_data=True).findings) == {}


def test_a_parent_published_before_the_repair_keeps_its_children(root):
    path = without_parent(root)

    def write(point: str) -> None:
        if point == "repairing":
            with open_store(root, None) as store:
                publish(space_of(store), OTHER[:16])

    report = run(root, repair=True, pause=write)
    assert report.exit_code == ExitCode.CORRECTED
    assert path.exists()
    with open_store(root, None) as store:
        assert restored(space_of(store), OTHER) == len(OTHER)


@pytest.mark.parametrize("swept", ["before", "after"])
def test_what_is_put_back_has_its_blocks_whatever_a_collection_took_for_nobodys(root, swept):
    """One that marks while the manifest is set aside sees blocks that no manifest names, and sweeps when it is back."""
    path = without_parent(root)
    marked, go_on = threading.Event(), threading.Event()

    def at(point: str) -> None:
        if point == "marked":
            marked.set()
            assert go_on.wait(20)

    def collecting() -> None:
        with ahead(root, LATER) as store:
            assert collect(store.context, Policy(), pause=at).error == ""

    collector = threading.Thread(target=collecting)

    def meanwhile(point: str) -> None:
        if point == "batch" and not collector.ident:
            with open_store(root, None) as store:
                publish(space_of(store), OTHER[:16])
            collector.start()
            assert marked.wait(20)
            if swept == "before":
                go_on.set()
                collector.join()

    run(root, repair=True, pause=meanwhile)
    go_on.set()
    collector.join()
    with open_store(root, None) as store:
        assert restored(space_of(store), OTHER) == (len(OTHER) if swept == "after" else 16)
    assert path.exists() == (swept == "after")
    assert errors(run(root, read_data=True).findings) == {}


def test_what_continues_a_manifest_that_cannot_be_put_back_is_not_put_back_either(root):
    """Its block went with a collection while it was set aside."""
    lost, tail = node(root, LONG[:32]), node(root, LONG)
    gone = block(root, lost)
    node(root, LONG[:16]).unlink()

    def meanwhile(point: str) -> None:
        if point == "batch" and gone.exists():
            gone.unlink()
            with open_store(root, None) as store:
                publish(space_of(store), LONG[:16])

    run(root, repair=True, pause=meanwhile)
    assert not any(path.with_suffix(kind).exists() for path in (lost, tail) for kind in (".kv", ".state"))


def test_a_file_replaced_before_the_repair_is_left(root):
    path = node(root, LONG)
    data = path.read_bytes()
    flip(path)

    def replace_it(point: str) -> None:
        if point == "repairing":
            fresh = path.with_name("fresh")
            fresh.write_bytes(data)
            fresh.rename(path)

    report = run(root, repair=True, pause=replace_it)
    assert report.findings[0].repair == "left, because it was replaced meanwhile"
    assert path.read_bytes() == data


def test_a_file_still_being_written_is_left(root):
    """cp writes in place: what looks short is whole a moment later, under the same inode."""
    path = block(root, node(root, LONG))
    data = path.read_bytes()
    os.truncate(path, 100)

    def go_on(point: str) -> None:
        if point == "repairing":
            path.write_bytes(data)

    report = run(root, repair=True, pause=go_on)
    assert report.exit_code & ExitCode.LEFT
    assert path.read_bytes() == data
    assert node(root, LONG).exists()
    assert run(root, read_data=True).exit_code == ExitCode.CLEAN


def test_a_repair_waits_for_what_was_changed_just_now(root, monkeypatch):

    slept = []
    monkeypatch.setattr(repair.time, "sleep", slept.append)
    flip(node(root, LONG))
    with open_store(root, None, create=False) as store:
        from kvstore.fsck import check

        check(store.context)
        assert slept == []
        check(store.context, repair=True)
    assert repair.SETTLE_S in slept


def test_a_lock_that_is_held_ends_a_repair_with_a_sentence(root, monkeypatch):
    from kvstore import locks

    flip(node(root, LONG))
    monkeypatch.setattr(locks.publish_lock.__wrapped__, "__defaults__", (0.05,))
    with locks.publish_lock(Layout(root)):
        report = run_elsewhere(root)
    assert "is held by another process" in report["error"]
    assert report["exit_code"] == ExitCode.FAILED | ExitCode.LEFT
    assert node(root, LONG[:32]).exists()


def run_elsewhere(root: Path) -> dict:
    """flock knows processes, and threads of one share it: the other holder has to be another process."""
    code = (
        "import json, sys; from pathlib import Path; from kvstore import locks;"
        "locks.publish_lock.__wrapped__.__defaults__ = (0.05,);"
        "from kvstore import Store; from kvstore.fsck import check;"
        "store = Store.open(sys.argv[1], create=False);"
        "print(json.dumps(check(store.context, repair=True, settle_s=0).document()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
