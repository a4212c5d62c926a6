"""A collection: what it removes, what it must leave, and what it says about it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from core_support import FAST, files, open_store
from gc_support import (
    DAY,
    HOUR,
    INTERVAL,
    SECOND,
    TENANT,
    ahead,
    as_newer,
    blocks,
    check_valid,
    manifests,
    named,
    prompt,
    publish,
    restore,
    set_used,
    space_of,
    spans,
    state,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import FileSystem, LockTimeoutError
from kvstore.context import this_process
from kvstore.eviction import GRACE_NS
from kvstore.fsck import check
from kvstore.gc import FOREIGN_STAGING_NS, QUARANTINE_NS, GcReport, Policy, collect, usage
from kvstore.keys import request_key
from kvstore.locks import gc_lock
from kvstore.manifest import decode


@pytest.fixture
def writer(tmp_path):
    with open_store(tmp_path / "s") as store:
        yield store


def gc(path: Path, by: int = HOUR, fs: FileSystem = FAST, **policy) -> GcReport:
    """Collect with a clock that runs ahead."""
    with ahead(path, by, fs) as later:
        return collect(later.context, Policy(**policy))


def fill(store, conversations=4, tokens=40):
    space = space_of(store)
    for seed in range(conversations):
        publish(space, prompt(tokens, seed))
        set_used(store, space, prompt(tokens, seed), 1000 - seed)
    return space


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


@pytest.mark.parametrize("by", [365 * DAY, 5 * HOUR])
def test_what_was_written_while_the_clock_was_ahead_is_counted_and_repaired(writer, by):
    """A machine that starts with the wrong year or the wrong zone and learns the right one later."""
    fill(writer, 2)
    report = gc(writer.path, -by, size=0)
    assert (report.nodes, report.future) == (0, 12)
    assert report.unmet_bytes == report.before_bytes
    assert gc(writer.path, -by, size=1 << 40).future == 0, "nobody misses their room"
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
    before = files(writer.path)
    report = gc(writer.path, 400 * DAY, size=0, older_than_ns=0)
    assert files(writer.path) == before
    assert (report.damaged, report.nodes, report.blocks) == (1, 0, 0)


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
    assert os.strerror(code) in report.error
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
    report = gc(writer.path)
    assert report.staging == 2
    assert report.freed_bytes == 2 * 12288
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
    budget = {"size": usage(writer.context) - 1}
    assert gc(writer.path, QUARANTINE_NS - HOUR, dry_run=True, **budget).quarantined == 0
    report = gc(writer.path, QUARANTINE_NS + HOUR, **budget)
    assert report.quarantined == 3
    assert os.listdir(layout.quarantine) == ["note.txt"]


def test_tokenizations_go_with_what_was_used_as_long_ago(writer):
    fill(writer, 4)
    saved = writer.tokenizations(b"scope")
    for number, age in enumerate((2000, 999.5, 500)):
        saved.put(b"%d" % number, bytes(40))
        path = saved._path(request_key(b"scope", b"%d" % number))
        stamp = time.time_ns() - int(age * SECOND)
        os.utime(path, ns=(stamp, stamp))
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


def test_a_file_that_cannot_be_removed_keeps_what_it_stands_on(writer):
    space = fill(writer, 2, 60)
    doomed = space.lookup(prompt(60, 0)).steps[2].path

    class Refusing(FileSystem):
        def unlink(self, path):
            if path == doomed:
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
            super().unlink(path)

    report = gc(writer.path, fs=Refusing(durability=FAST.durability), size=0)
    check_valid(writer.path)
    assert (report.failed, report.error) == (1, "")
    assert report.nodes == 5
    assert restore(space, prompt(60, 0)).tokens == 48
    assert restore(space, prompt(60, 1)).tokens == 0


def test_a_read_only_directory_ends_the_collection_with_a_sentence(writer):
    fill(writer)

    class ReadOnly(FileSystem):
        def unlink(self, path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    before = files(writer.path)
    report = gc(writer.path, fs=ReadOnly(durability=FAST.durability), size=0)
    assert "Read-only file system" in report.error
    assert files(writer.path) == before
    assert report.freed_bytes == report.nodes == 0


def test_a_folder_that_cannot_be_synced_keeps_the_blocks(writer):
    fill(writer, 1)

    class Failing(FileSystem):
        def sync_dir(self, path):
            raise OSError(errno.EIO, "Input/output error", str(path))

    everything = blocks(writer.path)
    report = gc(writer.path, fs=Failing(), size=0)
    assert "Input/output error" in report.error
    assert blocks(writer.path) == everything
    assert report.nodes == 3


def test_a_publish_lock_that_is_never_free_is_an_error_not_an_exception(writer, monkeypatch):
    fill(writer)

    def never(layout):
        raise LockTimeoutError("it is held")

    monkeypatch.setattr("kvstore.sweep.publish_lock", never)
    before = files(writer.path)
    report = gc(writer.path, size=0)
    assert report.error == "stopped, because it is held"
    assert files(writer.path) == before


def test_a_vanished_directory_is_an_error_not_an_exception(writer):
    fill(writer)
    with ahead(writer.path) as later:
        shutil.rmtree(writer.path)
        assert collect(later.context, Policy(size=0)).error
        assert collect(later.context, Policy(size=0, dry_run=True)).before_bytes == 0


def test_what_was_removed_is_counted(writer):
    fill(writer, 2)
    with ahead(writer.path) as later:
        report = collect(later.context, Policy(size=0))
        counters = later.counters.snapshot()
        assert (
            (counters["collected_nodes"], counters["collected_bytes"])
            == (report.nodes, report.freed_bytes)
            == (6, 49152)
        )
        collect(later.context, Policy(size=0, dry_run=True))
        assert later.counters.snapshot() == counters


def test_a_removed_file_is_no_longer_known_as_damaged(writer):
    # Otherwise a publish that writes the same bytes again would still take them for damaged.
    fill(writer, 1)
    with ahead(writer.path) as later:
        later.context.damaged.update([*manifests(writer.path), *blocks(writer.path)])
        collect(later.context, Policy(size=0))
        assert later.context.damaged == set()


def test_many_victims_go_in_batches_with_the_lock_free_in_between(writer):
    space = space_of(writer)
    for seed in range(70):
        publish(space, prompt(30, seed))
    points = []
    with ahead(writer.path) as later:
        report = collect(later.context, Policy(size=0), pause=points.append)
    assert report.nodes == report.blocks == 140
    # Two at least, and more where the disk is slow (tests/unit/test_sweep.py has their times).
    stages = "".join("b" if point == "batch" else "|" for point in points).split("|")
    assert [point for point in points if point != "batch"] == ["scanned", "marked", "planned", "unnamed"]
    assert [len(batches) >= 2 for batches in stages] == [False, False, False, True, True]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_collection_leaves_a_valid_directory(tmp_path_factory, data):
    """Random conversations that branch and grow, random times, random budget: what is left is whole and restores."""
    path = tmp_path_factory.mktemp("gc") / "s"
    with open_store(path) as store:
        space = space_of(store)
        prompts = []
        for _ in range(data.draw(st.integers(1, 6), "prompts")):
            base = data.draw(st.sampled_from([[], *prompts]), "continues")
            base = base[: data.draw(st.integers(0, len(base)), "from")]
            tokens = base + prompt(data.draw(st.integers(1, 40), "more"), data.draw(st.integers(0, 3), "seed"))
            end = 0
            for stop in sorted({*data.draw(st.sets(st.integers(1, len(tokens)), max_size=3), "turns"), len(tokens)}):
                publish_turn(space, tokens, end, stop)
                end = stop
            if data.draw(st.booleans(), "state"):
                space.publish_state(tokens, state())
            prompts.append(tokens)
        now = time.time_ns()
        for file in manifests(path):
            used = now - data.draw(st.integers(0, 100), "age") * SECOND
            os.utime(file, ns=(used, used))
        before = [space.lookup(tokens).count for tokens in prompts]
        total = usage(store.context)
        budget = total * data.draw(st.integers(0, 100), "percent") // 100
        report = gc(path, size=budget)
        assert report.error == ""
        assert report.skipped == report.failed == report.waiting == 0
        check_valid(path)
        assert {file.name for file in blocks(path)} == named(path), "unnamed blocks were left"
        assert report.after_bytes == usage(store.context)
        assert report.after_bytes <= max(budget, total * (total <= budget)) or not manifests(path)
        for tokens, count in zip(prompts, before, strict=True):
            assert restore(space, tokens).tokens <= count


def publish_turn(space, tokens, first, end):
    """Publish what is new of a prompt, as an engine does after each turn."""
    match = space.lookup(tokens[:end])
    first = match.border
    if first < end:
        borders = sorted({first, end, *range(first - first % INTERVAL + INTERVAL, end, INTERVAL)})
        publish(space, tokens[:end], *borders)
