"""Repacking beside readers, publishes, collections and another repack."""

from __future__ import annotations

import os
import shutil
import threading
import tracemalloc
from dataclasses import dataclass, field

import pytest
from core_support import FAST, INFO, SPECS, kv, open_store, prompt, restore
from gc_support import DAY, check_valid, manifests, named
from upkeep_support import assert_restores, counts, forget_tails, later, refs, rest, snapshot

import kvstore.repack
from kvstore import FileSystem, Span, TensorSpec
from kvstore.gc import Policy, collect
from kvstore.joining import join
from kvstore.locks import publish_lock
from kvstore.manifest import decode
from kvstore.repack import repack

TOKENS = prompt(40)


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


@pytest.mark.parametrize(("act", "left"), [(os.utime, [5, 6, 5]), (os.unlink, None)], ids=["used", "removed"])
def test_a_node_that_changes_before_its_manifest_is_read_again_is_left(cold, monkeypatch, act, left):
    path = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 16)
    real = kvstore.repack.drop_contained

    def drop_and_act(*arguments, **options):
        found = real(*arguments, **options)
        act(path)
        return found

    monkeypatch.setattr(kvstore.repack, "drop_contained", drop_and_act)
    report = repack(cold.context)
    assert (report.nodes, report.skipped, report.bound, report.error) == (2, 1, 0, "")
    assert counts(cold.path).get(16) == left


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
