"""Copies by other programs: cp, rsync, a sync service. The union of two directories holds every prefix of either.

Nothing of kvstore runs while they copy. What a copy leaves behind, in whatever order and wherever it was interrupted,
must be a cache directory that serves no wrong byte, and once it is complete, every prefix of either.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt, restore, spans
from gc_support import DAY, HOUR, TENANT, check_valid, manifests, publish, state
from upkeep_support import assert_restores, forget_tails, grow, later, memory_folder, read_state, rest

from kvstore import NamespaceInfo, Store
from kvstore.clear import clear
from kvstore.gc import Policy, collect
from kvstore.listing import listing
from kvstore.merge import merge
from kvstore.repack import repack
from kvstore.scan import scan

ONE = prompt(40)
TWO = [*ONE[:16], *prompt(20, 1)]
THREE = [*ONE[:32], *prompt(5, 2)]
FOUR = prompt(27, 3)
FIRST = [(INFO, ONE), (INFO, TWO), (TENANT, ONE)]
SECOND = [(INFO, TWO), (INFO, THREE), (INFO, FOUR), (TENANT, FOUR)]

Prompts = list[tuple[NamespaceInfo, list[int]]]


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with memory_folder(tmp_path) as found:
        yield found


def fill(root: Path, prompts: Prompts, *, repacked: bool = False) -> Path:
    """A directory with some prompts. repacked: the first chunk was several blocks, and is one."""
    with open_store(root) as store:
        if repacked:
            grow(store.namespace(INFO), ONE[:16], 5, 11, 16)
            forget_tails(root)
            rest(store)
            assert repack(store.context).nodes == 1
        for info, tokens in prompts:
            publish(store.namespace(info), tokens)
        if (INFO, TWO) in prompts:
            store.namespace(INFO).publish_state(TWO, state(2))
        store.tokenizations(b"scope").put(str(root).encode(), bytes(8))
    return root


def copy_tree(source: Path, target: Path) -> None:
    """As ``cp -a source/. target``: files that are there are overwritten in place."""
    shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)


def copy_missing(source: Path, target: Path) -> None:
    """As ``cp -an``: files that are there are left."""

    def one(a: str, b: str) -> None:
        if not os.path.exists(b):
            shutil.copy2(a, b)

    shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True, copy_function=one)


def cp(source: Path, target: Path) -> None:
    """``cp -a`` itself."""
    subprocess.run(["cp", "-a", f"{source}/.", target], check=True)


def rsync(source: Path, target: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    subprocess.run(["rsync", "-a", f"{source}/", f"{target}/"], check=True)


def rsync_ignoring_existing(source: Path, target: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    subprocess.run(["rsync", "-a", "--ignore-existing", f"{source}/", f"{target}/"], check=True)


COPIERS: list[Callable[[Path, Path], None]] = [copy_tree, copy_missing, cp, rsync, rsync_ignoring_existing]


def check_union(root: Path) -> None:
    assert_restores(root, [*FIRST, *SECOND])
    check_valid(root)
    with open_store(root, None) as store:
        assert read_state(store.namespace(INFO), TWO) == ({"n": 2}, {"s": bytes([2, 1, 2])})
        assert scan(store.context).tally.foreign == 0
        assert listing(store.context).damaged == 0
    # A collector finds nothing to remove in it but what nothing names, and nothing of the union goes with that.
    with later(root, 3 * DAY) as store:
        report = collect(store.context, Policy())
        assert (report.nodes, report.damaged, report.error) == (0, 0, "")
    assert_restores(root, [*FIRST, *SECOND])


@pytest.mark.parametrize("repacked", [False, True], ids=["", "repacked"])
@pytest.mark.parametrize("swapped", [False, True], ids=["first into second", "second into first"])
@pytest.mark.parametrize("copier", COPIERS)
def test_the_union_holds_every_prefix_of_either(folder, copier, swapped, repacked):
    first, second = fill(folder / "1", FIRST, repacked=repacked), fill(folder / "2", SECOND)
    if swapped:
        first, second = second, first
    copier(first, second)
    check_union(second)


@pytest.mark.parametrize("copier", COPIERS)
def test_two_directories_into_a_new_place_in_both_orders(folder, copier):
    first, second = fill(folder / "1", FIRST, repacked=True), fill(folder / "2", SECOND)
    for number, order in enumerate(((first, second), (second, first))):
        target = folder / f"new{number}"
        target.mkdir()
        for source in order:
            copier(source, target)
        check_union(target)


def all_files(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def copy_some(source: Path, target: Path, names: list[Path], cut: int | None) -> None:
    """Copy files one by one in this order; of the last one only cut bytes (in place, as a careless program does)."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if cut is not None and name == names[-1]:
            (target / name).write_bytes((source / name).read_bytes()[:cut])
        else:
            shutil.copy2(source / name, target / name)


def blocks_first(name: Path) -> tuple[int, str]:
    """As rsync goes, by name: objects/blocks before objects/nodes before objects/tokens."""
    return ("blocks" not in name.parts, str(name))


@pytest.mark.parametrize("seed", range(12))
def test_a_copy_that_is_interrupted_anywhere(folder, seed):
    """In any order at all into a directory without nodes of the same name: what is whole is served, nothing else."""
    chance = random.Random(seed)
    prompts = [(INFO, ONE), (TENANT, ONE)]
    source, target = fill(folder / "1", prompts), folder / "2"
    with open_store(target) as store:
        publish(store.namespace(INFO), FOUR)
    names = all_files(source)
    if chance.random() < 0.5:
        names.sort(key=blocks_first)
    else:
        chance.shuffle(names)
    for _ in range(4):
        end = chance.randrange(1, len(names))
        copy_some(source, target, names[:end], chance.choice([None, 0, 1, 100]))
        with open_store(target, None) as store:
            assert restore(store.namespace(INFO), FOUR).tokens == 27
            for info, tokens in prompts:
                restore(store.namespace(info), tokens)  # fails at a wrong byte
            # What was cut short is healed by a publish of the same, or by copying on.
            if chance.random() < 0.3:
                publish(store.namespace(INFO), ONE)
                assert restore(store.namespace(INFO), ONE).tokens == 40
    copy_some(source, target, names, None)
    assert_restores(target, [*prompts, (INFO, FOUR)])


@pytest.mark.parametrize("seed", range(8))
def test_a_copy_over_nodes_of_the_same_name_that_brings_blocks_first(folder, seed):
    """Interrupted anywhere between two files, the target still has whatever it had: also when one was repacked."""
    chance = random.Random(seed)
    source, target = fill(folder / "1", FIRST, repacked=True), fill(folder / "2", SECOND)
    if seed % 2:
        source, target = target, source
    had = SECOND if seed % 2 == 0 else FIRST
    names = sorted(all_files(source), key=blocks_first)
    for end in sorted(chance.sample(range(len(names)), 6)):
        copy_some(source, target, names[:end], None)
        with open_store(target, None) as store:
            for info, tokens in had:
                assert restore(store.namespace(info), tokens).tokens == len(tokens)
    copy_some(source, target, names, None)
    check_union(target)


@pytest.mark.parametrize("healed", ["copied again", "computed again", "merged"])
def test_what_a_collection_takes_of_the_target_during_a_copy_comes_with_the_next_one(folder, healed):
    """docs/format.md, section 7: an evicted node's blocks go at once, and the copy has left them out by then."""
    source, target = folder / "1", folder / "2"
    for root, borders in ((source, (5, 9, 16, 20, 25)), (target, (5, 9))):
        with open_store(root) as store:
            grow(store.namespace(INFO), ONE, *borders)
    blocks = [name for name in all_files(source) if "blocks" in name.parts]
    missing = [name for name in blocks if not (target / name).exists()]
    assert len(missing) == 3
    copy_some(source, target, missing, None)
    with later(target, HOUR) as store:
        report = collect(store.context, Policy(size=0))
    assert (report.nodes, report.blocks, report.waiting) == (2, 2, 3), "those that were brought wait for a day"
    rest_of_it = [name for name in all_files(source) if name not in blocks and not (target / name).exists()]
    copy_some(source, target, rest_of_it, None)
    with open_store(target, None) as store:
        assert restore(store.namespace(INFO), ONE).tokens == 0
        if healed == "merged":
            with open_store(source, None) as other:
                assert merge(other.context, store.context).error == ""
        elif healed == "computed again":
            publish(store.namespace(INFO), ONE[:25], 0, 16, 25)
        else:
            copy_missing(source, target)
    assert_restores(target, [(INFO, ONE[:25])])
    if healed != "computed again":  # which heals what was asked for
        check_valid(target)


@pytest.mark.parametrize("copier", [copy_tree, copy_missing, cp, rsync])
def test_a_copy_while_others_write_holds_what_was_there_before(folder, copier):
    source, target = fill(folder / "1", FIRST), folder / "2"
    stop = threading.Event()
    written: list[list[int]] = []

    def write() -> None:
        with open_store(source, None) as store:
            seed = 100
            while not stop.wait(0.002):  # without a rest it would write thousands meanwhile
                tokens = [*ONE[:16], *prompt(16, seed)]
                publish(store.namespace(INFO), tokens)
                written.append(tokens)
                seed += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(written) < 5:
            time.sleep(0.001)
        target.mkdir()
        for _ in range(3):
            try:
                copier(source, target)
            except (shutil.Error, FileNotFoundError, subprocess.CalledProcessError):
                continue  # a staged file vanished while it was copied: every program says so and goes on
    finally:
        stop.set()
        writer.join()
    with open_store(target, None) as store:
        for info, tokens in FIRST:
            assert restore(store.namespace(info), tokens).tokens == len(tokens)
        for tokens in written:
            restore(store.namespace(INFO), tokens)
    copier(source, target)
    assert_restores(target, [*FIRST, *((INFO, tokens) for tokens in written)])


FOREIGN = (
    ".DS_Store",
    "._{name}",
    ".nfs00000000016c4f7e00000001",
    ".{name}.Xq3f9K",  # rsync's temporary
    "{name} (Ann's conflicted copy 2025-01-01)",
    "{name}.sync-conflict-20250101-120000-ABCDEFG",
    "{name} 2",
    "Thumbs.db",
    "desktop.ini",
)


@pytest.fixture
def littered(folder) -> Store:
    """A directory with a foreign file of every kind beside every file of ours, each with our file's content."""
    root = fill(folder / "s", FIRST)
    for name in all_files(root):
        if name.parts[0] not in {"tmp", "locks"}:
            for pattern in FOREIGN:
                foreign = root / name.parent / pattern.format(name=name.name)
                foreign.write_bytes((root / name).read_bytes())
    with open_store(root, None) as store:
        yield store


def foreign_files(root: Path) -> set[Path]:
    endings = tuple(pattern.rpartition("{name}")[2] for pattern in FOREIGN)
    return {
        name
        for name in all_files(root)
        if name.name.startswith(".") or name.name.endswith(tuple(end for end in endings if end)) or " " in name.name
    }


def test_foreign_files_are_not_read_counted_as_damage_or_removed(littered):
    before = foreign_files(littered.path)
    ours = len(all_files(littered.path)) - len(before)
    assert len(before) >= len(FOREIGN) * 15
    assert ours >= 15
    for info, tokens in FIRST:
        assert restore(littered.namespace(info), tokens).tokens == len(tokens)
    assert littered.counters.damaged == littered.counters.missing == 0
    found = scan(littered.context)
    assert (len(found.nodes), found.tally.foreign) == (len(manifests(littered.path)), len(before))
    seen = listing(littered.context)
    assert (len(seen.conversations), seen.damaged, seen.foreign) == (3, 0, found.tally.foreign - _outside(littered))
    with later(littered.path, 400 * DAY, FAST) as store:
        report = collect(store.context, Policy())
        assert (report.nodes, report.blocks, report.damaged, report.error) == (0, 0, 0, "")
    assert repack(littered.context, older_than_ns=0).error == ""
    assert foreign_files(littered.path) == before


def _outside(store: Store) -> int:
    """Foreign files that a listing, which looks at manifests only, does not come by."""
    return sum("nodes" not in name.parts for name in foreign_files(store.path))


def test_foreign_files_are_not_merged_and_not_cleared(littered, folder):
    before = foreign_files(littered.path)
    with open_store(folder / "t") as target:
        report = merge(littered.context, target.context)
        assert (report.nodes, report.damaged) == (len(manifests(littered.path)) - 1, 0)
        assert report.foreign > 0
        assert foreign_files(target.path) == set()
    report = clear(littered.context)
    assert (report.error, manifests(littered.path)) == ("", [])
    assert foreign_files(littered.path) == before


def test_a_publish_and_a_lookup_go_on_among_them(littered):
    tokens = [*ONE[:32], *prompt(8, 77)]
    littered.namespace(INFO).publish(tokens, spans(tokens, 32, 40))
    assert restore(littered.namespace(INFO), tokens).tokens == 40
