"""Blocks, states, tokenizations and what lies around: what goes with what, and what nobody may remove."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from core_support import files
from gc_support import (
    DAY,
    HOUR,
    SECOND,
    ahead,
    as_newer,
    blocks,
    check_valid,
    fill,
    gc,
    manifests,
    named,
    prompt,
    publish,
    restore,
    space_of,
    state,
)

from kvstore import FileSystem
from kvstore.context import this_process
from kvstore.eviction import GRACE_NS
from kvstore.gc import FOREIGN_STAGING_NS, QUARANTINE_NS, GcReport, Policy, collect, usage
from kvstore.keys import request_key
from kvstore.locks import gc_lock
from kvstore.manifest import decode


def test_a_block_goes_only_with_its_last_manifest(writer):
    space = space_of(writer)
    tokens = prompt(14)
    publish(space, tokens, 0, 5, 14)
    publish(space, tokens[:5] + prompt(6, 1), 0, 5, 11)
    longest = space.lookup(tokens).steps[-1].path
    with ahead(writer.path) as later:
        report = collect(later.context, Policy(size=0, protect={longest}))
    assert (report.nodes, report.blocks) == (2, 1)
    assert restore(space, tokens).tokens == 14
    assert {path.name for path in blocks(writer.path)} == named(writer.path)


def test_states_go_with_their_blocks(writer):
    space = space_of(writer)
    publish(space, prompt(20))
    space.publish_state(prompt(20), state())
    report = gc(writer.path, size=0)
    assert (report.nodes, report.states, report.blocks) == (2, 1, 3)
    assert blocks(writer.path) == []


def test_orphans_go_after_a_day_by_their_later_time(writer):
    fill(writer, 1)
    for path in manifests(writer.path):
        path.unlink()
    orphans = blocks(writer.path)
    os.utime(orphans[0], ns=(0, 0))  # as rsync leaves it
    report = gc(writer.path, GRACE_NS - HOUR, size=0)
    assert (report.orphans, report.waiting) == (0, 3)
    assert blocks(writer.path) == orphans
    report = gc(writer.path, GRACE_NS + HOUR)
    assert (report.orphans, report.blocks, report.waiting, report.freed_bytes) == (3, 3, 0, 3 * 4096)
    assert blocks(writer.path) == []


def test_a_block_that_was_just_used_outlives_its_last_manifest(writer):
    """Somebody may be about to name it: a publish that found it there made it young, and commits in a moment."""
    fill(writer, 1)
    touched = blocks(writer.path)[0]
    with ahead(writer.path) as later:
        now = later.context.clock()
        os.utime(touched, ns=(now, now))
        report = collect(later.context, Policy(size=0))
    assert (report.nodes, report.blocks) == (3, 2)
    assert blocks(writer.path) == [touched]


def test_a_node_that_has_lost_its_block_is_collected_like_any_other(writer):
    space = fill(writer, 2)
    (ref,) = decode(space.lookup(prompt(40, 0)).steps[-1].path.read_bytes()).blocks
    writer.context.layout.block(ref.digest).unlink()
    report = gc(writer.path, quotas={space.id: 0})
    assert (report.nodes, report.blocks, report.over_quota_bytes, report.error) == (6, 5, 0, "")
    assert manifests(writer.path) == blocks(writer.path) == []


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def orphan(space, seed: int) -> None:
    """Leave a block that no manifest names."""
    publish(space, prompt(9, seed))
    space.lookup(prompt(9, seed)).steps[0].path.unlink()


def test_a_damaged_manifest_keeps_every_block_it_may_name(writer):
    space = fill(writer, 2)
    victim = space.lookup(prompt(40, 0)).steps[0].path
    bad = space.lookup(prompt(40, 1)).steps[1].path
    damage(bad)
    orphan(space, 7)  # unless the damaged one names it
    # Changed within the day: a copy may still be at it.
    lately = time.time_ns() + 2 * DAY - HOUR
    os.utime(bad, ns=(lately, lately))
    everything = set(blocks(writer.path))
    report = gc(writer.path, 2 * DAY)
    assert (report.damaged, report.orphans, report.waiting) == (1, 0, 2)
    assert set(blocks(writer.path)) == everything
    # Under pressure the other conversation goes, and a day later the damaged manifest too.
    report = gc(writer.path, size=0)
    assert not victim.exists()
    assert bad.exists()
    assert report.nodes == 4
    report = gc(writer.path, 4 * DAY, size=0)
    assert not bad.exists()
    report = gc(writer.path, 4 * DAY, size=0)
    assert manifests(writer.path) == blocks(writer.path) == []


def test_a_manifest_that_is_damaged_for_a_day_keeps_no_garbage(writer):
    space = fill(writer, 2)
    steps = space.lookup(prompt(40, 1)).steps
    (mine,) = decode(steps[1].path.read_bytes()).blocks
    damage(steps[1].path)
    orphan(space, 7)
    report = gc(writer.path, GRACE_NS - HOUR)
    assert (report.damaged, report.orphans, report.waiting) == (1, 0, 2)
    report = gc(writer.path, GRACE_NS + HOUR)
    assert (report.damaged, report.orphans, report.waiting) == (1, 2, 0)
    assert not writer.context.layout.block(mine.digest).exists()
    # All that can be read is as it was, and what is published again brings its own blocks.
    assert restore(space, prompt(40, 0)).tokens == 40
    assert restore(space, prompt(40, 1)).tokens == 16
    publish(space, prompt(40, 1))
    assert restore(space, prompt(40, 1)).tokens == 40
    check_valid(writer.path)


def test_a_manifest_of_a_newer_version_is_left_with_its_blocks(writer):
    fill(writer, 1)
    last = space_of(writer).lookup(prompt(40, 0)).steps[-1].path
    as_newer(last)
    orphan(space_of(writer), 7)  # unless that one names it
    before = files(writer.path)
    report = gc(writer.path, 400 * DAY, size=0, older_than_ns=0)
    assert files(writer.path) == before
    assert (report.damaged, report.nodes, report.blocks, report.waiting) == (1, 0, 0, 2)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_an_error_while_marking_removes_nothing(writer, code):
    fill(writer)
    doomed = manifests(writer.path)[-1]

    class Failing(FileSystem):
        def read_file(self, path, limit):
            if Path(path) == doomed:
                raise OSError(code, os.strerror(code), str(path))
            return super().read_file(path, limit)

    stale = writer.context.layout.tmp / f"{this_process().host}.dead.1.00000000"
    stale.mkdir()
    before = files(writer.path)
    report = gc(writer.path, 2 * DAY, Failing(), size=0)
    assert files(writer.path) == before
    assert stale.exists()
    assert os.strerror(code).lower() in report.error.lower()
    assert doomed.name in report.error
    assert report.freed_bytes == 0


def test_another_collection_is_left_alone(writer):
    fill(writer)
    before = files(writer.path)
    with gc_lock(writer.context.layout) as mine:
        assert mine
        report = gc(writer.path, size=0)
        assert report == GcReport(busy=True)
        assert files(writer.path) == before
        assert gc(writer.path, size=0, dry_run=True).nodes == 12, "a dry run needs no lock"
    assert gc(writer.path, size=0).nodes == 12


def test_a_dry_run_says_what_a_run_does_and_does_nothing(writer):
    space = fill(writer)
    space.publish_state(prompt(40, 0), state())
    publish(space, prompt(14, 8), 0, 5, 14)
    publish(space, prompt(9, 7))
    space.lookup(prompt(9, 7)).steps[0].path.unlink()
    writer.tokenizations(b"x").put(b"request", bytes(40))
    stale = writer.context.layout.tmp / f"{this_process().host}.dead.1.00000000"
    stale.mkdir()
    before = files(writer.path)
    policy = {"size": usage(writer.context) - 30_000, "older_than_ns": 2 * DAY}
    dry = gc(writer.path, 2 * DAY, dry_run=True, **policy)
    assert files(writer.path) == before
    assert stale.exists()
    real = gc(writer.path, 2 * DAY, **policy)
    timing = {"dry_run": True, "mark_seconds": 0.0, "sweep_seconds": 0.0}
    assert asdict(dry) | timing == asdict(real) | timing
    assert real.nodes
    assert real.orphans
    assert real.staging
    check_valid(writer.path)


def test_staging_of_the_dead_goes_and_of_the_living_stays(writer):
    tmp = writer.context.layout.tmp
    me = this_process()
    kept = [
        writer.context.staging,  # made by the fill below
        tmp / f"{me.host}.{me.boot}.{os.getppid()}.00000001",
        tmp / f"elsewhere.{me.boot}.1.00000002",
        tmp / "not-ours",
    ]
    gone = [
        tmp / f"{me.host}.0badb007.{os.getpid()}.00000003",
        tmp / f"{me.host}.{me.boot}.4194303.00000004",
    ]
    fill(writer, 1)
    for folder in [*kept[1:], *gone]:
        folder.mkdir()
        (folder / "1").write_bytes(bytes(5000))
    assert gc(writer.path, 0).staging == 0, "they have not rested yet"
    before = usage(writer.context)
    report = gc(writer.path)
    assert report.staging == 2
    assert report.freed_bytes == before - usage(writer.context) >= 2 * 5000
    assert not any(folder.exists() for folder in gone)
    assert all(folder.exists() for folder in kept[1:])
    assert kept[0]._folder.exists()
    report = gc(writer.path, FOREIGN_STAGING_NS + HOUR)
    assert report.staging == 1
    assert not kept[2].exists()
    assert kept[1].exists()
    assert kept[3].exists(), "not a name of ours"


def test_a_staging_folder_with_something_strange_in_it_is_passed_over(writer):
    """A file server puts a folder into every folder. What lies beside it may be gigabytes of a killed publish."""
    folder = writer.context.layout.tmp / f"{this_process().host}.0badb007.1.00000003"
    for name in ("0", "7", "f"):  # none, one or two of these come before the files, in whatever order they are listed
        (folder / name).mkdir(parents=True)
    for name in range(1, 7):
        (folder / str(name)).write_bytes(bytes(1 << 20))
    before = usage(writer.context)
    report = gc(writer.path)
    assert (report.staging, report.failed, report.error) == (0, 1, "")
    assert sorted(os.listdir(folder)) == ["0", "7", "f"]
    assert report.freed_bytes == before - usage(writer.context) >= 6 << 20


def test_quarantine_is_emptied_when_old_and_only_for_room(writer):
    fill(writer, 1)
    layout = writer.context.layout
    for number, path in enumerate(blocks(writer.path)):
        shutil.copy(path, layout.quarantine / f"{number:x}.{path.name}")
    (layout.quarantine / "note.txt").write_text("why")
    room = {"size": 1 << 40}
    assert gc(writer.path, QUARANTINE_NS + HOUR, **room).quarantined == 0
    room = {"size": usage(writer.context) - 1, "spare": 0}
    assert gc(writer.path, QUARANTINE_NS - HOUR, dry_run=True, **room).quarantined == 0
    report = gc(writer.path, QUARANTINE_NS + HOUR, **room)
    assert (report.quarantined, report.nodes) == (1, 0)
    assert gc(writer.path, QUARANTINE_NS + HOUR, size=0).quarantined == 2
    assert os.listdir(layout.quarantine) == ["note.txt"]


def test_garbage_makes_room_before_anything_that_is_of_use(writer, monkeypatch):
    """First what nothing names, then what was set aside long ago; nodes only for what is needed beyond both."""
    space, layout = fill(writer, 2), writer.context.layout
    for seed in (7, 8, 9):
        orphan(space, seed)
    for number, path in enumerate(blocks(writer.path)[:2]):
        shutil.copy(path, layout.quarantine / f"{number:x}.{path.name}")
    used = usage(writer.context)
    monkeypatch.setattr("kvstore.gc.free_bytes", lambda context: 0)
    limits = [{"size": used - units * 4096, "spare": 0} for units in (3, 4, 5)]
    limits += [{"min_free": free} for free in (12_000, 14_000, 18_000)]  # and a tenth, where it is not met
    for limit, quarantined in zip(limits, (0, 1, 2) * 2, strict=True):
        report = gc(writer.path, QUARANTINE_NS + HOUR, dry_run=True, **limit)
        assert (report.orphans, report.quarantined, report.nodes) == (3, quarantined, 0), limit
    assert gc(writer.path, QUARANTINE_NS + HOUR, size=used - 6 * 4096, spare=0).nodes == 1


def test_the_name_tells_when_a_file_was_set_aside_where_its_times_do_not(writer):
    """A rename leaves the times of a file on exFAT: what fsck had just set aside was the first to go."""
    fill(writer, 1)
    layout = writer.context.layout
    now = time.time_ns() + QUARANTINE_NS + DAY
    moved = [now - QUARANTINE_NS - HOUR, now - QUARANTINE_NS + HOUR, now, now + 2 * HOUR]
    for stamp, path in zip(moved, (*blocks(writer.path), layout.tag), strict=True):
        shutil.copyfile(path, layout.quarantine / f"{stamp:x}.{path.name}")
    assert gc(writer.path, QUARANTINE_NS + DAY, size=0, dry_run=True).quarantined == 2
    gc(writer.path, QUARANTINE_NS + DAY, size=0)
    left = sorted(int(name.partition(".")[0], 16) for name in os.listdir(layout.quarantine))
    assert left == moved[1:3]


def test_tokenizations_go_with_what_was_used_as_long_ago(writer):
    fill(writer, 4)
    saved = writer.tokenizations(b"scope")
    for number, age in enumerate((2000, 999.5, 500)):
        saved.put(b"%d" % number, bytes(40))
        path = saved._path(request_key(b"scope", b"%d" % number))
        stamp = time.time_ns() - int(age * SECOND)
        os.utime(path, ns=(stamp, stamp))
    alone = gc(writer.path, dry_run=True, older_than_ns=1, namespace=space_of(writer).id)
    assert (alone.nodes, alone.tokenizations) == (12, 0), "they are of no namespace"
    with ahead(writer.path) as later:
        need_one = Policy(size=usage(later.context) - 1)
        report = collect(later.context, need_one)
    assert report.nodes
    assert report.tokenizations >= 1
    assert saved.get(b"0") is None
    assert saved.get(b"2") is not None
    report = gc(writer.path, size=0)
    assert saved.get(b"2") is None
    assert report.tokenizations


def test_tokenizations_go_alone_when_nothing_else_can(writer):
    saved = writer.tokenizations(b"scope")
    for number in range(5):
        saved.put(b"%d" % number, bytes(40))
    before = usage(writer.context)
    report = gc(writer.path, size=before - 1)
    assert report.tokenizations == 1
    assert report.unmet_bytes == 0
    assert gc(writer.path, 0, size=0).tokenizations == 0, "young ones stay"
    assert gc(writer.path, older_than_ns=1).tokenizations == 4


def test_foreign_files_are_never_touched(writer):
    fill(writer)
    folders = {path.parent for path in [*manifests(writer.path), *blocks(writer.path)]}
    strange = [folder / ".DS_Store" for folder in folders] + [writer.path / "notes", writer.context.layout.tmp / "x"]
    for path in strange:
        path.write_bytes(b"x")
    report = gc(writer.path, 400 * DAY, size=0, older_than_ns=0)
    assert manifests(writer.path) == []
    assert report.foreign == len(strange)
    assert all(path.exists() for path in strange)
