"""A process killed, or a machine without power, after every single call of a merge.

At the next start the target holds whatever it held before, whole and byte for byte, and nothing without its parent or
its blocks; the source is untouched; and merging again brings the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt, restore
from crash_support import SURVIVALS, CrashingFileSystem, Disk, KilledError, copy, disks_after
from gc_support import DAY, TENANT, blocks, check_valid, manifests, named, publish, state
from upkeep_support import assert_restores, later, memory_folder, read_state, snapshot

from kvstore import Durability
from kvstore.fsck import check as fsck
from kvstore.gc import collect
from kvstore.layout import Layout
from kvstore.manifest import decode
from kvstore.merge import merge

BOTH = prompt(16)
ONE = [*BOTH, *prompt(24, 1)]
TWO = [*BOTH, *prompt(12, 2)]
THREE = prompt(20, 3)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with memory_folder(tmp_path) as found:
        yield found


def prepare(root: Path) -> tuple[Path, Path]:
    """Two directories that share a first chunk. Of the source's second one, the target has a block cut short."""
    with open_store(root / "source") as store:
        publish(store.namespace(INFO), ONE)
        store.namespace(INFO).publish_state(ONE, state(3))
        publish(store.namespace(TENANT), THREE)
        store.tokenizations(b"scope").put(b"request", bytes(8))
    with open_store(root / "target") as store:
        publish(store.namespace(INFO), TWO)
    source, target = Layout(root / "source"), Layout(root / "target")
    (second,) = [path for path in manifests(source.root) if decode(path.read_bytes()).end == 32]
    (ref,) = decode(second.read_bytes()).blocks
    for path, size in ((second, second.stat().st_size), (source.block(ref.digest), ref.size - 7)):
        copied = target.root / path.relative_to(source.root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes()[:size])
    return source.root, target.root


def run(source: Path, root: Path, durability: Durability, limit: int) -> CrashingFileSystem:
    """Merge into root with a file system that is killed after limit calls."""
    fs = CrashingFileSystem(durability, disk=Disk.settled(root), limit=limit)
    one, other = open_store(source, None), open_store(root, None, fs)
    try:
        report = merge(one.context, other.context)
    except KilledError:
        return fs
    assert (report.nodes, report.states, report.there, report.blocks) == (3, 1, 2, 5)
    assert (report.tokenizations, report.namespaces, report.damaged, report.error) == (1, 1, 0, "")
    return fs


def check(source: Path, root: Path) -> None:
    with open_store(root, None) as store:
        assert restore(store.namespace(INFO), TWO).tokens == len(TWO)
        for tokens in (ONE, BOTH):
            assert restore(store.namespace(INFO), tokens).tokens >= 16
        restore(store.namespace(TENANT), THREE)
    with open_store(source, None) as one, open_store(root, None, FAST) as other:
        report = merge(one.context, other.context)
        assert (report.damaged, report.without_parent, report.skipped, report.error) == (0, 0, 0, "")
        again = merge(one.context, other.context)
        assert (again.nodes, again.states, again.blocks, again.tokenizations, again.namespaces) == (0, 0, 0, 0, 0)
        assert read_state(other.namespace(INFO), ONE) == ({"n": 3}, {"s": bytes([3, 1, 2])})
        assert other.tokenizations(b"scope").get(b"request") == bytes(8)
    check_valid(root)
    assert_restores(root, [(INFO, ONE), (INFO, TWO), (TENANT, THREE)])
    with open_store(root, None) as store:
        assert fsck(store.context, read_data=True).errors == 0
    with later(root, 2 * DAY) as store:
        assert collect(store.context).error == ""
    assert {path.name for path in blocks(root)} == named(root)


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.NONE])
def test_a_merge_can_end_anywhere(folder, durability, record_property):
    record_property("what", "Merge: stopped after each call, and what each kind of disk keeps")
    source, target = prepare(folder)
    before = snapshot(source)
    root = copy(target, folder / "run")
    calls = run(source, root, durability, 1 << 30).calls
    assert calls.count("rename quarantine") == 1, "the short block is set aside, not overwritten"
    assert calls.count("rename nodes") == 4
    check(source, root)
    # Without syncing, a power cut may lose anything; a killed process still must not.
    survivals = SURVIVALS[1:] if durability is Durability.BARRIER else SURVIVALS[:1]
    checked = 0
    counted: set[int] = set()
    for after in disks_after(
        lambda root, limit: run(source, root, durability, limit), target, folder / "run", survivals, record_property
    ):
        checked += 1
        counted.add(len(manifests(after)))
        check(source, after)
    assert checked >= 10
    assert counted == {3, 4, 5, 6, 7}
    assert snapshot(source) == before
