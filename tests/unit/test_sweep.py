"""How files go: short holds of the publish lock whatever a removal takes, and an order that nothing can upset."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt
from gc_support import HOUR, TENANT, ahead, blocks, check_valid, manifests, publish, space_of
from hypothesis import given
from hypothesis import strategies as st
from upkeep_support import later

import kvstore.sweep
from kvstore import FileSystem
from kvstore.clear import clear
from kvstore.gc import Policy, collect
from kvstore.holds import ShortHolds
from kvstore.locks import POLL_S
from kvstore.marking import Marked, Marks
from kvstore.scan import NodeFile
from kvstore.sweep import Sweeper, in_disk_order

FILES = 24
SLOW = 0.01
"""Seconds that a removal takes; all of them under one hold would be a quarter of a second."""


@pytest.fixture
def full(tmp_path) -> Path:
    with open_store(tmp_path / "s") as store:
        for seed in range(FILES):
            publish(space_of(store), prompt(9, seed))
    return tmp_path / "s"


class Holds:
    """When the publish lock was taken and let go, and how many slow calls there were meanwhile: with other programs on
    the processors a time says little about a hold, and what happens under it says all.
    """

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.slow: list[int] = []
        self.held = False

    def slow_call(self) -> None:
        if self.held:
            self.slow[-1] += 1
        time.sleep(SLOW)

    @property
    def longest(self) -> float:
        """Seconds of slow calls under one hold."""
        return max(self.slow) * SLOW

    @property
    def shortest_gap(self) -> float:
        """Between two holds of one sweep; the first is the fence."""
        return min(start - end for (_, end), (start, _) in zip(self.times[1:], self.times[2:], strict=False))


@pytest.fixture
def holds(monkeypatch) -> Holds:
    real, found = kvstore.sweep.publish_lock, Holds()

    @contextmanager
    def timed(layout):
        with real(layout):
            start = time.perf_counter()
            found.slow.append(0)
            found.held = True
            try:
                yield
            finally:
                found.held = False
            end = time.perf_counter()
        found.times.append((start, end))

    monkeypatch.setattr(kvstore.sweep, "publish_lock", timed)
    return found


@dataclass(frozen=True)
class SlowClose(FileSystem):
    """As with large files: a name goes at once, and the space is given back when the last descriptor is closed."""

    holds: Holds = field(default_factory=Holds)

    def close(self, fd):
        if os.fstat(fd).st_nlink == 0:
            self.holds.slow_call()
        super().close(fd)


@dataclass(frozen=True)
class SlowUnlink(FileSystem):
    """As where a file cannot be opened first: all of its removal is under the lock."""

    holds: Holds = field(default_factory=Holds)

    def open_fd(self, path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def read_file(self, path, limit):
        return FAST.read_file(path, limit)

    def unlink(self, path):
        self.holds.slow_call()
        super().unlink(path)


def gc(root: Path, fs: FileSystem) -> None:
    with ahead(root, HOUR, fs) as store:
        report = collect(store.context, Policy(size=0))
    assert (report.nodes, report.blocks, report.error) == (FILES, FILES, "")


def clear_all(root: Path, fs: FileSystem) -> None:
    with open_store(root, None, fs) as store:
        report = clear(store.context)
    assert (report.nodes, report.blocks, report.error) == (FILES, FILES, "")


@pytest.mark.parametrize("remove", [gc, clear_all])
def test_space_is_given_back_when_the_lock_is_free(full, holds, remove):
    remove(full, SlowClose(FAST.durability, holds=holds))
    assert holds.longest == 0
    assert holds.shortest_gap > POLL_S


@pytest.mark.parametrize("remove", [gc, clear_all])
def test_slow_removals_are_one_to_a_hold_and_others_have_as_long(full, holds, remove):
    remove(full, SlowUnlink(FAST.durability, holds=holds))
    assert holds.longest == SLOW
    assert sum(holds.slow) - 2 * FILES in {0, 1}  # clear removes the description, too
    assert holds.shortest_gap >= SLOW


def test_a_publisher_gets_the_lock_in_between(full, holds):
    """Not by luck: it asks every 5 ms, and every gap is longer."""
    waits = []
    stop = threading.Event()

    def work():
        with open_store(full, None) as other:
            while not stop.is_set():
                began = time.perf_counter()
                publish(space_of(other, TENANT), prompt(9, len(waits)))
                waits.append(time.perf_counter() - began)

    publisher = threading.Thread(target=work)
    with ahead(full, HOUR, SlowUnlink(FAST.durability, holds=holds)) as store:
        publisher.start()
        report = collect(store.context, Policy(size=0, namespace=INFO.id))
        stop.set()
        publisher.join()
    assert report.nodes == FILES
    assert holds.longest == SLOW
    assert len(waits) > 5
    assert max(waits) < 5


def test_without_descriptors_batches_are_smaller(full, monkeypatch):
    opened: list[int] = []
    most = 0

    class Few(FileSystem):
        def open_fd(self, path):
            nonlocal most
            if len(opened) >= 5:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            found = super().open_fd(path)
            opened.append(found[0])
            most = max(most, len(opened))
            return found

        def close(self, fd):
            opened.remove(fd)
            super().close(fd)

        def read_file(self, path, limit):  # marking is not what runs out here
            return FAST.read_file(path, limit)

    gc(full, Few(FAST.durability))
    assert opened == []
    assert most == 5, "tried once, and from then on others have theirs"
    assert manifests(full) == blocks(full) == []


def test_a_process_that_has_no_descriptor_left_removes_all_the_same(full):
    class NoneLeft(FileSystem):
        def open_fd(self, path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

        def read_file(self, path, limit):
            return FAST.read_file(path, limit)

    gc(full, NoneLeft(FAST.durability))


@pytest.mark.parametrize(("limit", "expected"), [(256, 32), (1024, 128), (8, 1), (resource.RLIM_INFINITY, 128)])
def test_how_many_are_opened_follows_the_limit_of_the_process(full, monkeypatch, limit, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with open_store(full, None) as store:
        assert ShortHolds(store.context.fs, nullcontext).at_once == expected


def test_no_descriptor_is_left_open_whatever_happens(full):
    class Failing(FileSystem):
        def unlink(self, path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    before = len(os.listdir("/dev/fd"))
    with ahead(full, HOUR, Failing(FAST.durability)) as store:
        assert "Input/output error" in collect(store.context, Policy(size=0)).error
        sweeper = Sweeper(store.context, lambda _: None, dry_run=False)
        with sweeper.in_short_holds(blocks(full), lambda path: (path,)) as held:
            for _ in held:
                break
        raising = sweeper.in_short_holds(blocks(full), lambda path: (path,))
        with pytest.raises(KeyError), raising as held:
            raise KeyError(next(held))
    assert len(os.listdir("/dev/fd")) == before
    # And the lock is free.
    with kvstore.sweep.publish_lock(store.context.layout, timeout=0):
        pass


def test_a_close_that_fails_costs_nothing(full):
    """It is closed all the same, and there was nothing to write: NFS answers with errors of others' writes."""

    class Failing(FileSystem):
        def close(self, fd):
            super().close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    gc(full, Failing(FAST.durability))


@pytest.mark.timeout(30)
def test_what_lies_in_place_of_a_block_meanwhile_blocks_nothing(full):
    """A FIFO that nobody writes to, a link, a folder: seen as changed, and left."""
    odd = blocks(full)[:3]

    def replace(point):
        if point == "unnamed":
            for path in odd:
                path.unlink()
            os.mkfifo(odd[0])
            odd[1].symlink_to("nothing")
            odd[2].mkdir()

    with ahead(full) as store:
        report = collect(store.context, Policy(size=0), pause=replace)
    assert (report.blocks, report.skipped, report.error) == (FILES - 3, 3, "")
    assert all(os.path.lexists(path) for path in odd)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_goes_unopened(full):
    for path in blocks(full):
        path.chmod(0o200)
    gc(full, FAST)


def node(parent: str, key: str, tokens: int = 16, kind: str = "kv", inode: int = 0) -> Marked:
    name = f"{parent * 32}-{tokens}-{key * 32}-{'0' * 18}.{kind}"
    return Marked(NodeFile("f" * 32, name, 1, 1, 1, 1, inode), 0, ())


@given(data=st.data())
def test_children_go_before_parents_and_states_before_their_kv(data):
    keys = "0123456789abcdef"
    nodes = [node("f", "0", inode=data.draw(st.integers(0, 9)))]
    for at in range(1, data.draw(st.integers(1, 15))):
        parent = keys[data.draw(st.integers(0, at - 1))]
        nodes.append(node(parent, keys[at], inode=data.draw(st.integers(0, 9))))
    for at in data.draw(st.sets(st.integers(0, len(nodes) - 1))):
        file = nodes[at].file
        nodes.append(node(file.parent[0], file.key[0], kind="state", inode=data.draw(st.integers(0, 9))))
    victims = data.draw(st.permutations(range(len(nodes))))
    order = in_disk_order(victims, Marks(nodes))
    assert sorted(order) == sorted(victims)
    at = {index: place for place, index in enumerate(order)}
    for one, lower in enumerate(nodes):
        for other, upper in enumerate(nodes):
            if lower.file.parent == upper.file.key and one != other:
                assert at[one] < at[other]
            if lower.file.key == upper.file.key and (lower.file.kind, upper.file.kind) == ("state", "kv"):
                assert at[one] < at[other]


@pytest.mark.timeout(30)
@given(edges=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.sampled_from(["kv", "state"]))))
def test_names_that_form_circles_end_and_lose_nothing(edges):
    """Such names can only be forged, and any order of them is as good as another."""
    nodes = [node(parent, key, kind=kind, inode=at) for at, (parent, key, kind) in enumerate(edges)]
    assert sorted(in_disk_order(range(len(nodes)), Marks(nodes))) == list(range(len(nodes)))


def test_a_hold_is_for_so_many_files_at_most(full, holds):
    with open_store(full, None) as store:
        for seed in range(FILES, 140):
            publish(space_of(store), prompt(9, seed))
    with later(full, HOUR) as store:
        sweeper = Sweeper(store.context, lambda _: None, dry_run=False)
        with sweeper.in_short_holds(blocks(full), lambda path: (path,)) as held:
            seen = list(held)
    assert seen == blocks(full)
    assert len(holds.times) >= 2
    check_valid(full)
