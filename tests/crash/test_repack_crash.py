"""A process killed, or a machine without power, after every single call of a repack.

At the next start every prefix restores whole and byte for byte, because each node has its old manifest or its new one,
with all the blocks that it names; repacking again ends it; and a collection past grace leaves nothing of the old.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt
from crash_support import SURVIVALS, CrashingFileSystem, Disk, KilledError, copy, disks_after
from gc_support import DAY, blocks, check_valid, manifests, named, state
from upkeep_support import assert_restores, counts, forget_tails, grow, later, memory_folder, named_bytes, read_state

from kvstore import Durability
from kvstore.fsck import check as fsck
from kvstore.gc import collect
from kvstore.manifest import decode
from kvstore.repack import repack

TOKENS = prompt(36)
BRANCH = [*TOKENS[:20], *prompt(12, 1)]
JOINED = {12: [12], 16: [12, 4], 32: [4, 12], 36: [4]}
"""What is left to have: [12] is shared by the tail and the chunk, [4] by both branches (and of 32 there are two)."""


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with memory_folder(tmp_path) as found:
        yield found


def prepare(root: Path) -> Path:
    """A tail inside a chunk that share several blocks, two branches that share one, and a state."""
    with open_store(root) as store:
        space = store.namespace(INFO)
        grow(space, TOKENS, 3, 8, 12, 16, 20, 26, 32, 34, 36)
        grow(space, BRANCH, 16, 20, 23, 32)
        forget_tails(root, 12)
        space.publish_state(TOKENS[:16], state(5))
    assert len(manifests(root)) == 6
    return root


def run(root: Path, durability: Durability, limit: int) -> CrashingFileSystem:
    """Repack in root with a file system that is killed after limit calls."""
    fs = CrashingFileSystem(durability, disk=Disk.settled(root), limit=limit)
    store = open_store(root, None, fs)
    try:
        report = repack(store.context, older_than_ns=0)
    except KilledError:
        return fs
    assert (report.nodes, report.replaced, report.written) == (5, 9, 4)
    return fs


def check(root: Path, size: int) -> None:
    check_valid(root)
    assert_restores(root, [(INFO, TOKENS), (INFO, BRANCH), (INFO, TOKENS[:12])])
    with open_store(root, None) as store:
        assert read_state(store.namespace(INFO), TOKENS[:16]) == ({"n": 5}, {"s": bytes([5, 1, 2])})
    with open_store(root, None, FAST) as store:
        report = repack(store.context, older_than_ns=0)
        assert (report.damaged, report.skipped, report.error) == (0, 0, "")
        assert repack(store.context, older_than_ns=0).nodes == 0
        assert fsck(store.context, read_data=True).errors == 0
    assert counts(root) == JOINED
    assert named_bytes(root) <= size
    with later(root, 2 * DAY) as store:
        assert collect(store.context).error == ""
    assert {path.name for path in blocks(root)} == named(root)
    assert_restores(root, [(INFO, TOKENS), (INFO, BRANCH)])


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.NONE])
def test_a_repack_can_end_anywhere(folder, durability, record_property):
    record_property("what", "Repack: stopped after each call, and what each kind of disk keeps")
    source = prepare(folder / "source")
    size = named_bytes(source)
    root = copy(source, folder / "run")
    calls = run(root, durability, 1 << 30).calls
    assert counts(root) == JOINED
    assert calls.count("rename nodes") == 5
    assert calls.count("rename blocks") == 4
    states: set[tuple[int, ...]] = set()
    # Without syncing, a power cut may lose anything; a killed process still must not.
    survivals = SURVIVALS[1:] if durability is Durability.BARRIER else SURVIVALS[:1]
    checked = 0
    for after in disks_after(
        lambda root, limit: run(root, durability, limit), source, folder / "run", survivals, record_property
    ):
        checked += 1
        states.add(tuple(len(decode(path.read_bytes()).blocks) for path in manifests(after)))
        check(after, size)
    assert checked >= 10
    # Killed between the renames of nodes that share blocks, too: each of the five changes alone.
    assert len(states) == 6


def test_the_old_blocks_are_young_before_a_manifest_stops_naming_them(tmp_path):
    root = copy(prepare(tmp_path / "source"), tmp_path / "run")
    calls = run(root, Durability.BARRIER, 1 << 30).calls
    first = calls.index("rename nodes")
    touches = 0
    while calls[first - 1 - touches] == "touch":
        touches += 1
    # The joined block, and the two or three that it replaces.
    assert touches >= 3


GROWN = prompt(300)
GROWN_ENDS = (70, 100, 128, 200, 256, 300)
GROWN_JOINED = {128: [128], 256: [128], 300: [44]}


def grown(root: Path) -> Path:
    """A conversation with a tail a turn, all of them inside longer nodes."""
    with open_store(root, 128) as store:
        grow(store.namespace(INFO), GROWN, *GROWN_ENDS)
    return root


def run_later(root: Path, durability: Durability, limit: int) -> CrashingFileSystem:
    """As run, two days after everything was written: tails go, and then blocks are joined."""
    fs = CrashingFileSystem(durability, disk=Disk.settled(root), limit=limit)
    store = later(root, 2 * DAY, fs)
    try:
        report = repack(store.context)
    except KilledError:
        return fs
    assert (report.dropped, report.nodes, report.written) == (3, 2, 2)
    return fs


def check_grown(root: Path) -> None:
    check_valid(root)
    assert_restores(root, [(INFO, GROWN[:end]) for end in GROWN_ENDS])
    with later(root, 2 * DAY) as store:
        report = repack(store.context)
        assert (report.damaged, report.skipped, report.error) == (0, 0, "")
        assert fsck(store.context, read_data=True).errors == 0
    assert counts(root) == GROWN_JOINED
    with later(root, 4 * DAY) as store:
        assert collect(store.context).error == ""
    assert {path.name for path in blocks(root)} == named(root)
    assert_restores(root, [(INFO, GROWN[:end]) for end in GROWN_ENDS])


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.NONE])
def test_dropping_tails_can_end_anywhere(folder, durability, record_property):
    record_property("what", "Repack: stopped after each call, and what each kind of disk keeps")
    source = grown(folder / "source")
    root = copy(source, folder / "run")
    calls = run_later(root, durability, 1 << 30).calls
    assert counts(root) == GROWN_JOINED
    assert calls.count("unlink") == 3
    survivals = SURVIVALS if durability is Durability.BARRIER else SURVIVALS[:1]
    checked = 0
    for after in disks_after(
        lambda root, limit: run_later(root, durability, limit), source, folder / "run", survivals, record_property
    ):
        checked += 1
        check_grown(after)
    assert checked >= 7
