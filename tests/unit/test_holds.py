"""The publish lock is held for milliseconds where files are renamed over others, too: a block or a manifest of another
user, and the manifests of a repack, of which a chunk may have ten thousand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt, span, spans
from gc_support import DAY, SECOND, blocks, check_valid, manifests, named
from upkeep_support import assert_restores, counts, later, named_bytes, rest

import kvstore.holds
import kvstore.replacing
from kvstore import FileSystem, LockTimeoutError
from kvstore.gc import collect
from kvstore.layout import Layout
from kvstore.locks import publish_lock
from kvstore.manifest import decode
from kvstore.repack import RepackReport, repack

TOKENS = prompt(20)


@dataclass(frozen=True)
class OfOthers(FileSystem):
    """Some files are another user's: readable, and nobody else can touch them.

    over: for each rename over a file, whether that was open. free: for each close of a file that had lost its name, by
    which its space is given back, whether the lock was free.
    """

    root: Path = Path()
    theirs: set[int] = field(default_factory=set)
    opened: dict[int, int] = field(default_factory=dict)
    over: list[bool] = field(default_factory=list)
    free: list[bool] = field(default_factory=list)

    def touch(self, path, time_ns):
        return path.stat().st_ino not in self.theirs and super().touch(path, time_ns)

    def open_fd(self, path):
        fd, status = super().open_fd(path)
        self.opened[fd] = status.st_ino
        return fd, status

    def close(self, fd):
        if os.fstat(fd).st_nlink == 0:
            self.free.append(is_free(self.root))
        self.opened.pop(fd)
        super().close(fd)

    def rename(self, source, target):
        if target.exists():
            self.over.append(target.stat().st_ino in self.opened.values())
            self.theirs.discard(target.stat().st_ino)  # a new file may get the number
        super().rename(source, target)


def is_free(root: Path) -> bool:
    try:
        with publish_lock(Layout(root), timeout=0):
            return True
    except LockTimeoutError:
        return False


@pytest.mark.parametrize("theirs", [blocks, manifests])
def test_what_another_user_published_gives_its_space_back_when_the_lock_is_free(tmp_path, theirs):
    root = tmp_path / "cache"
    with open_store(root) as store:
        store.namespace(INFO).publish(TOKENS[:16], spans(TOKENS, 0, 16))
    fs = OfOthers(FAST.durability, root=root, theirs={path.stat().st_ino for path in theirs(root)})
    if theirs is blocks:
        manifests(root)[0].unlink()
    with open_store(root, None, fs) as store:
        # A block that cannot be made young is written again, and a manifest copied before something stands on it.
        store.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16, 20))
    assert fs.over == fs.free == [True]
    assert_restores(root, [(INFO, TOKENS)])


def test_what_cannot_be_opened_is_replaced_all_the_same(tmp_path):
    class Closed(OfOthers):
        def open_fd(self, path):
            if "blocks" in Path(path).parts:
                raise PermissionError(path)
            return super().open_fd(path)

    root = tmp_path / "cache"
    with open_store(root) as store:
        store.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16))
    old = {path.stat().st_ino for path in blocks(root)}
    manifests(root)[0].unlink()
    with open_store(root, None, Closed(FAST.durability, root=root, theirs=old)) as store:
        store.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16))
    assert old.isdisjoint(path.stat().st_ino for path in blocks(root))
    assert_restores(root, [(INFO, TOKENS[:16])])


# Repacking a large family.

SIBLINGS = 40
STEM = prompt(9)


def sibling(number: int) -> list[int]:
    return [*STEM, 1000 + number, 7]


@pytest.fixture
def family(tmp_path, monkeypatch) -> Path:
    """Many tails of one chunk, which all begin with the same three blocks; holds of eight."""
    monkeypatch.setattr(kvstore.holds, "_AT_ONCE", 8)
    root = tmp_path / "family"
    with open_store(root, 64) as store:
        space = store.namespace(INFO)
        for first in (0, 3, 6):
            space.publish(STEM[: first + 3], [span(STEM, first, first + 3)])
        for number in range(SIBLINGS):
            space.publish(sibling(number), [span(sibling(number), 9, 11)])
        for path in manifests(root):
            if decode(path.read_bytes()).count <= 9:
                path.unlink()
        rest(store)
    assert len(manifests(root)) == SIBLINGS
    return root


def run(root: Path, fs: FileSystem = FAST) -> RepackReport:
    with open_store(root, None, fs) as store:
        report = repack(store.context)
    assert report.error == ""
    return report


def after_the_first_hold(monkeypatch, act: Callable[[], object]) -> list[int]:
    """Let something happen when the lock was let go for the first time; the holds that there were."""
    real, holds = kvstore.replacing.publish_lock, []

    @contextmanager
    def counted(layout):
        if len(holds) == 1:
            act()
        holds.append(1)
        with real(layout):
            yield

    monkeypatch.setattr(kvstore.replacing, "publish_lock", counted)
    return holds


def test_a_large_family_is_replaced_in_short_holds(family, monkeypatch):
    free = []
    holds = after_the_first_hold(monkeypatch, lambda: free.append(is_free(family)))
    fs = OfOthers(FAST.durability, root=family)
    report = run(family, fs)
    assert (report.nodes, report.skipped, report.replaced, report.written) == (SIBLINGS, 0, 3, 1)
    assert len(holds) >= SIBLINGS / 8
    assert free == [True]
    assert fs.over == fs.free == [True] * SIBLINGS
    assert counts(family) == {11: [9, 2]}
    check_valid(family)


@pytest.mark.parametrize("what", [os.utime, Path.unlink])
def test_one_that_changes_in_between_keeps_its_blocks_until_the_next_time(family, monkeypatch, what):
    """As after a kill half way: what is left alone joins what it has to the same block, and nothing is stored twice."""
    before = named_bytes(family)

    def change() -> None:
        what(next(path for path in manifests(family) if len(decode(path.read_bytes()).blocks) == 4))

    after_the_first_hold(monkeypatch, change)
    report = run(family)
    assert (report.nodes, report.skipped, report.replaced) == (SIBLINGS - 1, 1, 0)
    check_valid(family)
    left = len(manifests(family)) - (SIBLINGS - 1)
    with open_store(family, None) as store:
        rest(store)
    assert run(family).nodes == left
    assert {len(decode(path.read_bytes()).blocks) for path in manifests(family)} == {2}
    assert named_bytes(family) <= before


def test_nothing_is_done_when_one_changed_before(family):
    class Used(FileSystem):
        def sync_file(self, fd):
            os.utime(manifests(family)[0])

    before = {path: path.read_bytes() for path in manifests(family)}
    report = run(family, Used(FAST.durability))
    assert (report.nodes, report.written, report.skipped) == (0, 0, SIBLINGS)
    assert {path: path.read_bytes() for path in manifests(family)} == before


@pytest.mark.parametrize("by", [0, 2 * DAY])
def test_a_collection_in_between_takes_nothing_that_is_needed(family, monkeypatch, by):
    def gc() -> None:
        with later(family, by) as store:
            assert collect(store.context).error == ""

    after_the_first_hold(monkeypatch, gc)
    assert run(family).nodes == SIBLINGS
    check_valid(family)
    with later(family, 2 * DAY) as store:
        assert collect(store.context).blocks == 3
    assert {path.name for path in blocks(family)} == named(family)
    assert_restores(family, [(INFO, sibling(number)) for number in range(SIBLINGS)])


def test_old_blocks_are_young_before_any_manifest_stops_naming_them(family, monkeypatch):
    old = named(family)
    for path in blocks(family):
        os.utime(path, ns=(SECOND, SECOND))
    young = []

    def look() -> None:
        young.extend(path.name for path in blocks(family) if path.stat().st_mtime_ns > SECOND)

    after_the_first_hold(monkeypatch, look)
    run(family)
    assert len(old & set(young)) == 3
