"""A process killed, or a machine without power, after every single call of a collection.

At the next start everything that a whole collection keeps must be there, every manifest must find its blocks (and after
a kill its parent and, for a state, its KV), every prompt must restore byte for byte as far as it goes, and collecting
again must leave nothing behind. fsck, which reads all data, finds no error: a child without its parent, which only a
power cut can leave, is counted as unreachable.

A collection writes no data, so a disk that drops or zeroes what was not synced keeps what any disk keeps. The test has
them all the same, and looks at each different content once.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_support import files, open_store
from crash_support import SURVIVALS, CrashingFileSystem, Disk, KilledError, copy
from gc_support import (
    DAY,
    TENANT,
    ahead,
    blocks,
    check_valid,
    manifests,
    named,
    prompt,
    publish,
    restore,
    set_used,
    space_of,
    state,
)
from upkeep_support import memory_folder

from kvstore import Durability
from kvstore.context import this_process
from kvstore.fsck import check as fsck
from kvstore.gc import Policy, collect
from kvstore.layout import Layout

LATER = 40 * DAY
PROMPTS = [prompt(40, seed) for seed in range(3)]
GROWN = prompt(30, 7)
COME_BACK = "manifests come back"


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with memory_folder(tmp_path) as found:
        yield found


def prepare(root: Path) -> Path:
    """Conversations of several ages, a grown tail, states, another tenant, and one of every kind of garbage."""
    with open_store(root) as store:
        space = space_of(store)
        for number, tokens in enumerate(PROMPTS):
            publish(space, tokens)
            set_used(store, space, tokens, 1000 - number)
        space.publish_state(PROMPTS[0], state(1))
        space.publish_state(PROMPTS[0][:16], state(2))
        publish(space, GROWN, 0, 16, 20, 25, 30)
        publish(space_of(store, TENANT), PROMPTS[0])
        publish(space, prompt(9, 8))
        space.lookup(prompt(9, 8)).steps[0].path.unlink()
        store.tokenizations(b"scope").put(b"request", bytes(8))
        layout = store.context.layout
        shutil.copy(blocks(root)[0], layout.quarantine / f"1.{blocks(root)[0].name}")
    stale = layout.tmp / f"{this_process().host}.0badb007.1.00000001"
    stale.mkdir()
    for name in "12":
        (stale / name).write_bytes(b"half a block")
    return root


def run(root: Path, durability: Durability, limit: int, budget: int) -> CrashingFileSystem:
    """Collect in root with a file system that is killed after limit calls."""
    fs = CrashingFileSystem(durability, disk=Disk.settled(root), limit=limit)
    with ahead(root, LATER) as store:
        context = type(store.context)(
            store.context.layout, fs, store.context.interval, store.context.clock, store.context.writer
        )
        try:
            report = collect(context, Policy(size=budget))
        except KilledError:
            return fs
        assert report.error == ""
        assert report.nodes
        assert report.states
        assert report.orphans
        assert report.staging
        assert report.quarantined
    return fs


def resurrect_manifests(disk: Disk, target: Path) -> None:
    """The worst that a disk may do to a collection: of what was not synced, it remembers blocks' removals only."""
    nodes = Layout(disk.root).nodes
    for folder, entries in disk.entries.items():
        if folder.is_relative_to(nodes):
            for name, inode in entries.items():
                source = disk.shadow / str(inode)
                back = target / folder.relative_to(disk.root) / name
                if source.exists() and not back.exists():
                    shutil.copy(source, back)


def check(root: Path, kept: set[str], *, parents: bool) -> None:
    check_valid(root, parents=parents)
    assert kept <= {path.name for path in manifests(root)}
    with open_store(root, None) as store:
        for tokens in [*PROMPTS, GROWN]:
            restore(space_of(store), tokens)
        restore(space_of(store, TENANT), PROMPTS[0])
        found = fsck(store.context, read_data=True)
        assert not found.error
        assert {each.code for each in found.findings if each.severity == "error"} == set()
    with ahead(root, LATER) as store:
        report = collect(store.context, Policy())
        assert report.error == ""
        assert report.waiting == 0
    check_valid(root, parents=parents)
    assert {path.name for path in blocks(root)} == named(root)


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.NONE])
def test_a_collection_can_end_anywhere(folder, durability, record_property):
    record_property("what", "Collection: stopped after each call, and what each kind of disk keeps")
    source = prepare(folder / "source")
    root = copy(source, folder / "run")
    with ahead(root, LATER) as store:
        dry = collect(store.context, Policy(size=0, dry_run=True))
    budget = (dry.before_bytes - dry.freed_bytes // 2) * 10 // 9
    fs = run(root, durability, 1 << 30, budget)
    total = len(fs.calls)
    kept = {path.name for path in manifests(root)}
    assert kept
    assert total > 20
    # Without syncing, a power cut may lose anything; a killed process still must not.
    power_cuts = [*SURVIVALS[1:], COME_BACK] if durability is Durability.BARRIER else []
    record_property("points", total)
    record_property("disks", total * (1 + len(power_cuts)))
    seen: set[int] = set()
    for limit in range(total):
        root = copy(source, folder / "run")
        fs = run(root, durability, limit, budget)
        assert fs.dead
        for how in [SURVIVALS[0], *power_cuts]:
            target = folder / "after"
            shutil.rmtree(target, ignore_errors=True)
            fs.disk.survive(how if how in SURVIVALS else "all", target)
            if how == COME_BACK:
                resurrect_manifests(fs.disk, target)
            whole = how not in {COME_BACK, SURVIVALS[-1]}
            content = hash((whole, *files(target).items(), *sorted(map(str, target.rglob("*")))))
            if content not in seen:
                seen.add(content)
                check(target, kept, parents=whole)
    assert len(seen) > total // 2


def test_the_worst_disk_is_worse_than_the_order_of_a_careless_collector(tmp_path):
    """A control: without the sync between manifests and blocks the test above would fail."""
    root = copy(prepare(tmp_path / "source"), tmp_path / "run")
    disk = Disk.settled(root)
    for path in [*manifests(root), *blocks(root)]:
        path.unlink()
    target = disk.survive("all", tmp_path / "after")
    resurrect_manifests(disk, target)
    with pytest.raises(FileNotFoundError):
        check_valid(target)
