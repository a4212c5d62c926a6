"""A collection where something fails: nothing is lost, and it says why it ended."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
from core_support import FAST, files, open_store
from gc_support import (
    INTERVAL,
    SECOND,
    ahead,
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import FileSystem, LockTimeoutError
from kvstore.gc import Policy, collect, usage


@pytest.mark.parametrize("code", ["EACCES", "EPERM", "EBUSY", "EISDIR", "ENOTDIR", "ENOTEMPTY"])
def test_a_file_that_cannot_be_removed_keeps_what_it_stands_on(writer, code):
    number = getattr(errno, code)
    space = fill(writer, 2, 60)
    doomed = space.lookup(prompt(60, 0)).steps[2].path

    class Refusing(FileSystem):
        def unlink(self, path):
            if path == doomed:
                raise OSError(number, os.strerror(number), str(path))
            super().unlink(path)

    report = gc(writer.path, fs=Refusing(durability=FAST.durability), size=0)
    check_valid(writer.path)
    assert (report.failed, report.error) == (1, "")
    assert report.nodes == 5
    assert restore(space, prompt(60, 0)).tokens == 48
    assert restore(space, prompt(60, 1)).tokens == 0


def test_a_state_that_cannot_be_removed_keeps_its_kv(writer):
    space = fill(writer, 2)
    space.publish_state(prompt(40, 0), state())

    class Refusing(FileSystem):
        def unlink(self, path):
            if Path(path).suffix == ".state":
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
            super().unlink(path)

    report = gc(writer.path, fs=Refusing(durability=FAST.durability), size=0)
    check_valid(writer.path)
    assert (report.failed, report.nodes, report.error) == (1, 3, "")
    assert space.lookup(prompt(40, 0), trimmable=False).count == 40


def test_a_read_only_directory_ends_the_collection_with_a_sentence(writer):
    fill(writer)

    class ReadOnly(FileSystem):
        def unlink(self, path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    before = files(writer.path)
    report = gc(writer.path, fs=ReadOnly(durability=FAST.durability), size=0)
    assert report.error.endswith(": it is on a read-only file system; choose another directory")
    assert files(writer.path) == before
    assert report.freed_bytes == report.nodes == 0


def test_a_folder_that_cannot_be_synced_keeps_the_blocks(writer):
    fill(writer, 1)

    class Failing(FileSystem):
        def sync_dir(self, path):
            raise OSError(errno.EIO, "Input/output error", str(path))

    everything = blocks(writer.path)
    report = gc(writer.path, fs=Failing(), size=0)
    assert report.error.endswith("Input/output error; check the disk")
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
