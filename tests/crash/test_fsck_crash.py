"""A process killed, or a machine without power, after every single call of a repair.

At the next start nothing that was whole may be lost, whatever was in the middle of being set aside; repairing again
ends it; and once the damaged chunks are computed again, every prompt restores whole, byte for byte.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from core_support import open_store
from crash_support import SURVIVALS, CrashingFileSystem, Disk, KilledError, copy
from fsck_support import GROWN, LATER, LONG, OTHER, PROMPTS, block, errors, flip, make, node, refs, restored, run
from gc_support import DAY, prompt, publish, space_of

from kvstore import Durability
from kvstore.context import this_process
from kvstore.fsck import ExitCode
from kvstore.layout import Layout

ORPHANED = prompt(44, 5)
"""Its first chunk is removed: a whole line of manifests that continues nothing."""


def prepare(root: Path) -> Path:
    """Every kind of trouble that a repair does something about."""
    make(root)
    with open_store(root, None) as store:
        publish(space_of(store), ORPHANED)
    flip(block(root, node(root, LONG[:32])))
    block(root, node(root, GROWN), 1).unlink()
    last = node(root, OTHER)
    flip(last, 150)
    first = node(root, ORPHANED[:16])
    children = [node(root, ORPHANED[:32]), node(root, ORPHANED)]
    first.unlink()
    assert all(child.exists() for child in children)
    stray = root / "objects" / "blocks" / "00" / ("e" * 32)
    stray.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copy2(block(root, node(root, OTHER[:16])), stray)
    later = node(root, OTHER[:16])
    os.utime(later, ns=(later.stat().st_mtime_ns + LATER + 2 * DAY,) * 2)
    (root / "CACHEDIR.TAG").unlink()
    (root / "objects" / "tokens").rename(root / "objects" / "gone")
    shutil.rmtree(root / "objects" / "gone")
    stale = root / "tmp" / f"{this_process().host}.0badb007.1.00000001"
    stale.mkdir(mode=0o700)
    for name in "12":
        (stale / name).write_bytes(b"half a block")
    return root


def repair(root: Path, durability: Durability, limit: int) -> CrashingFileSystem:
    fs = CrashingFileSystem(durability, disk=Disk.settled(root), limit=limit)
    try:
        report = run(root, fs=fs, read_data=True, repair=True)
    except KilledError:
        return fs
    assert report.exit_code == ExitCode.CORRECTED
    assert {
        "block-damaged",
        "manifest-unusable",
        "block-missing",
        "manifest-damaged",
        "parent-missing",
        "mtime-future",
    } <= {*errors(report.findings).values()}
    assert {finding.code for finding in report.findings if finding.corrected} >= {
        "folder-missing",
        "tag-missing",
        "stray",
        "staging-stale",
    }
    return fs


def whole(root: Path) -> set[str]:
    """Manifests and blocks that a repair must leave: those of what still restores, and what only waits."""
    kept = [node(root, LONG[:16]), node(root, OTHER[:16]), node(root, GROWN[:25])]
    names = {path.name for path in kept}
    return names | {ref.digest.hex() for path in kept for ref in refs(path)}


def check(root: Path, kept: set[str]) -> None:
    there = {path.name for path in Layout(root).nodes.parent.rglob("*")}
    assert kept <= there
    report = run(root, read_data=True, repair=True)
    assert report.error == ""
    assert report.exit_code in (ExitCode.CLEAN, ExitCode.CORRECTED)
    assert run(root, read_data=True).exit_code == ExitCode.CLEAN
    with open_store(root, None) as store:
        space = space_of(store)
        assert restored(space, LONG) == 16
        assert restored(space, GROWN) == 25
        assert restored(space, OTHER) == 16
        publish(space, LONG[:32])
        # The tail of LONG and its state were whole all the time, and only waited for the chunk before them.
        assert restored(space, LONG) == len(LONG)
        assert space.lookup(LONG, trimmable=False).count == len(LONG)
        publish(space, GROWN, 0, 16, 25, 30)
        publish(space, OTHER)
        assert [restored(space, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
    assert run(root, read_data=True).exit_code == ExitCode.CLEAN


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.NONE])
def test_a_repair_can_end_anywhere(tmp_path, durability, record_property):
    record_property("what", "Repair: stopped after each call, and what each kind of disk keeps")
    source = prepare(tmp_path / "source")
    kept = whole(source)
    root = copy(source, tmp_path / "run")
    fs = repair(root, durability, 1 << 30)
    total = len(fs.calls)
    assert total > 20
    # Without syncing, a power cut may lose anything; a killed process still must not.
    survivals = SURVIVALS if durability is Durability.BARRIER else ["all"]
    record_property("points", total)
    record_property("disks", total * len(survivals))
    for how in survivals:
        target = fs.disk.survive(how, tmp_path / how)
        assert run(target, read_data=True).exit_code == ExitCode.CLEAN, "what was reported as done is not durable"
        check(target, kept)
    for limit in range(total):
        root = copy(source, tmp_path / "run")
        fs = repair(root, durability, limit)
        assert fs.dead
        for how in survivals:
            target = tmp_path / "after"
            shutil.rmtree(target, ignore_errors=True)
            fs.disk.survive(how, target)
            check(target, kept)
