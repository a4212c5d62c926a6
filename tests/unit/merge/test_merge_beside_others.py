"""Merging directories that other processes repack, collect and publish into."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt
from gc_support import DAY, HOUR, TENANT, check_valid, manifests, publish
from merge_support import ONE, THREE, TWO, by_end
from upkeep_support import assert_restores, counts, forget_tails, grow, refs, rest

from kvstore import FileSystem, Span, TensorSpec
from kvstore.gc import Policy, collect
from kvstore.locks import publish_lock
from kvstore.manifest import decode
from kvstore.merge import merge
from kvstore.repack import repack


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


def test_a_description_that_vanishes_meanwhile_is_skipped(pair):
    a, b = pair
    path = a.context.layout.namespace_file(a.namespace(TENANT).id)
    fs = Hooked(call="open_fd", part=path.name, hook=path.unlink)
    with open_store(a.path, None, fs) as source:
        report = merge(source.context, b.context)
    assert (report.namespaces, report.skipped, report.damaged, report.error) == (0, 1, 0, "")


def test_a_tokenization_that_vanishes_meanwhile_is_skipped(pair):
    a, b = pair
    (path,) = (path for path in a.context.layout.tokens.rglob("*") if path.is_file())
    with open_store(a.path, None, Hooked(call="open_fd", part=path.name, hook=path.unlink)) as source:
        report = merge(source.context, b.context)
    assert (report.tokenizations, report.skipped, report.damaged, report.error) == (0, 1, 0, "")


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_tokenization_that_both_have_was_used_when_it_last_was_in_either(pair, dry_run):
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    ours, theirs = (next(each.context.layout.tokens.rglob("*/*")) for each in pair)
    now = time.time_ns()
    for here, there in ((now - DAY, now - HOUR), (now - HOUR, now - DAY)):
        os.utime(ours, ns=(here, here))
        os.utime(theirs, ns=(there, there))
        merge(a.context, b.context, dry_run=dry_run)
        assert theirs.stat().st_mtime_ns == (there if dry_run else max(here, there))


def test_a_full_disk_ends_it_at_a_small_file_as_well(pair, monkeypatch):
    a, b = pair

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvstore.small_files.put_file", full)
    report = merge(a.context, b.context)
    assert (report.nodes, report.tokenizations, report.namespaces, report.damaged) == (4, 0, 0, 0)
    assert "the disk is full" in report.error


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


def test_a_node_of_both_that_the_targets_collector_removes_meanwhile_is_not_there(pair):
    a, b = pair
    path = by_end(b.path)[16]
    os.utime(path, ns=(0, 0))
    with open_store(b.path, None, Hooked(call="touch", part=path.name, hook=path.unlink)) as target:
        report = merge(a.context, target.context)
    assert (report.there, report.skipped, report.without_parent, report.error) == (0, 2, 2, "")
    assert merge(a.context, b.context).skipped == 0
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO)])


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


def test_a_target_that_cannot_be_seen_is_named(pair, monkeypatch):
    a, b = pair

    def refusing(context, ref):
        raise PermissionError(errno.EACCES, "Permission denied", str(context.layout.block(ref.digest)))

    monkeypatch.setattr("kvstore.merge.intact", refusing)
    report = merge(a.context, b.context)
    assert f"{b.path}:" in report.error
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
