"""A process killed, or a machine without power, after every single call of a publish.

At the next start every prefix that was there before must restore byte for byte, nothing wrong may be served, and
publishing again must make everything whole. With the default durability, what a publish had committed must be there.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from core_support import INFO, block_files, open_store, prompt, restore, spans
from crash_support import SURVIVALS, CrashingFileSystem, Disk, FaultyFileSystem, KilledError, copy, disks_after
from gc_support import state
from upkeep_support import read_state

from kvstore import Durability, KVStoreError, Namespace, Store
from kvstore.fsck import check as fsck

TOKENS = prompt(60)
OTHER = prompt(40, seed=5)


class Fresh:
    """A directory that is created and gets its first three nodes."""

    before: tuple[int, ...] = ()
    cut = (0, 16, 32, 40)

    def prepare(self, root: Path) -> None:
        pass

    def run(self, space: Namespace) -> None:
        space.publish(TOKENS, spans(TOKENS, *self.cut))


class Growing(Fresh):
    """A tail grows to a full chunk and beyond; another conversation is in the same directory."""

    before = (16, 20)
    cut = (20, 25, 32, 36)

    def prepare(self, root: Path) -> None:
        with open_store(root) as store:
            space = store.namespace(INFO)
            space.publish(TOKENS, spans(TOKENS, 0, *self.before))
            space.publish(OTHER, spans(OTHER, 0, 16, 32, 40))


class Healing(Growing):
    """The tail's block is damaged; the publish sets it aside and writes it again."""

    before = (16,)
    cut = (16, 20, 25)

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        with open_store(root) as store:
            store.namespace(INFO).publish(TOKENS, spans(TOKENS, 16, 20))
            paths = block_files(root)
            store.namespace(INFO).lookup(TOKENS)
        for path in paths:
            data = path.read_bytes()
            if b'"first":"16","count":"4"' in data:
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def run(self, space: Namespace) -> None:
        assert restore(space, TOKENS, threads=1).tokens == 16
        super().run(space)


FAULTS = "Publish, each call of it failing in turn"
PUBLISHES = "Publish: stopped after each call, and what each kind of disk keeps"
SCENARIOS = {"fresh": Fresh(), "growing tail": Growing(), "healing": Healing()}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Hundreds of small trees are made and removed: in memory, where that is possible."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvstore-crash-", dir=memory) as name:
        yield Path(name)


@pytest.fixture(params=SCENARIOS)
def scenario(request) -> Fresh:
    return SCENARIOS[request.param]


def attempt(scenario: Fresh, folder: Path, durability: Durability, limit: int) -> CrashingFileSystem:
    """Run a scenario in folder / "live" until it is killed after limit calls."""
    live = folder / "live"
    live.mkdir(parents=True)
    scenario.prepare(live / "cache")
    fs = CrashingFileSystem(durability, disk=Disk.settled(live), limit=limit)
    with suppress(KilledError):
        scenario.run(Store.open(live / "cache", interval=16, fs=fs).namespace(INFO))
    return fs


def committed(fs: CrashingFileSystem, scenario: Fresh, *, synced: bool) -> int:
    """Tokens of the longest prefix that was committed by the calls that were made."""
    done = fs.calls[: fs.limit]
    nodes = [i for i, call in enumerate(done) if call == "rename nodes"]
    if synced:
        nodes = [i for i in nodes if "sync_dir nodes" in done[i:]]
    return max([*scenario.before, *scenario.cut[1 : len(nodes) + 1]], default=0)


def content(root: Path) -> tuple:
    """What the next process can see: folders, files and their bytes. (It does not look into tmp.)"""
    paths = (path for path in root.rglob("*") if path.relative_to(root).parts[0] not in ("tmp", "locks"))
    return tuple(sorted((str(path.relative_to(root)), path.read_bytes() if path.is_file() else b"") for path in paths))


def check(scenario: Fresh, root: Path) -> int:
    """What the next process finds, and what it makes of it. Returns the number of tokens that it found."""
    ends = {0, *scenario.before, *scenario.cut}
    base = max(scenario.before, default=0)
    if (root / "kvstore.json").exists():
        assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: ")
    with open_store(root) as store:
        space = store.namespace(INFO)
        assert restore(space, TOKENS[:base], threads=1).tokens == base
        found = restore(space, TOKENS, threads=1).tokens
        assert found in ends
        if isinstance(scenario, Growing):
            assert restore(space, OTHER, threads=1).tokens == 40
        # One round for each node at most: what lies behind a damaged node is only seen once that one is whole.
        for _ in scenario.cut:
            space.publish(TOKENS, spans(TOKENS, *sorted({0, 16, *scenario.before, *scenario.cut})))
            if (healed := restore(space, TOKENS, threads=1).tokens) == scenario.cut[-1]:
                break
        assert healed == scenario.cut[-1]
        return found


def every_limit(scenario: Fresh, folder: Path, durability: Durability) -> list[str]:
    fs = attempt(scenario, folder / "count", durability, 1 << 30)
    assert not fs.dead
    assert fs.calls.count("rename nodes") >= len(scenario.cut) - 1
    return fs.calls


@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.NONE])
def test_a_crash_after_any_call_loses_nothing_that_was_there(folder, scenario, durability, record_property):
    record_property("what", PUBLISHES)
    calls = every_limit(scenario, folder, durability)
    checked: dict[tuple, int] = {}
    record_property("points", len(calls) + 1)
    record_property("disks", (len(calls) + 1) * len(SURVIVALS))
    for limit in range(len(calls) + 1):
        here = folder / str(limit)
        fs = attempt(scenario, here, durability, limit)
        for how in SURVIVALS:
            root = fs.disk.survive(how, here / how) / "cache"
            promised = durability is Durability.BARRIER or how == "all"
            at_least = committed(fs, scenario, synced=how != "all") if promised else 0
            try:
                if (seen := content(root)) not in checked:
                    checked[seen] = check(scenario, root)
                assert checked[seen] >= at_least
            except BaseException as error:
                error.add_note(f"killed after call {limit} of {calls[max(0, limit - 3) : limit + 1]}, disk keeps {how}")
                raise
        shutil.rmtree(here)
    assert len(checked) > len(scenario.cut)


def begin(root: Path) -> Path:
    """Another prompt with a state, a conversation that ends in a tail, a tokenization."""
    with open_store(root) as store:
        space = store.namespace(INFO)
        space.publish(OTHER, spans(OTHER, 0, 16, 32, 40))
        space.publish_state(OTHER[:16], state(9))
        space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
        store.tokenizations(b"scope").put(b"an old request", bytes(8))
    return root


def work(root: Path, durability: Durability, limit: int) -> CrashingFileSystem:
    """All that an engine saves of a request, by a file system that is killed after limit calls."""
    fs = CrashingFileSystem(durability, disk=Disk.settled(root), limit=limit)
    with suppress(KilledError):
        store = open_store(root, None, fs)
        space = store.namespace(INFO)
        space.publish(TOKENS[:44], spans(TOKENS, 20, 32, 44))
        space.publish_state(TOKENS[:44], state(3))
        space.publish_state(TOKENS[:32], state(4))
        store.tokenizations(b"scope").put(b"a request", bytes(12))
    return fs


def check_all(root: Path, *, lost: bool) -> None:
    """What was there is there, fsck finds nothing (lost: or what it can repair), and all can be saved again."""
    with open_store(root, None) as store:
        space = store.namespace(INFO)
        assert restore(space, OTHER, threads=1).tokens == 40
        assert read_state(space, OTHER[:16])[0] == {"n": 9}
        assert restore(space, TOKENS[:20], threads=1).tokens == 20
        # A chunk that lost its data hides the tail that it contains until it is known to be damaged.
        assert restore(space, TOKENS, threads=1).tokens in {20, 32, 44, 16 if lost else 20}
        values, tensors = read_state(space, TOKENS[:44])
        assert values is None or tensors == {"s": bytes([values["n"], 1, 2])}
        cache = store.tokenizations(b"scope")
        assert cache.get(b"an old request") == bytes(8)
        assert cache.get(b"a request") in {None, bytes(12)}
        found = fsck(store.context, read_data=True)
        assert not found.error
        assert lost or found.exit_code == 0, found.findings
        if lost:
            assert not fsck(store.context, read_data=True, repair=True, settle_s=0).error
            assert fsck(store.context, read_data=True).exit_code == 0
            assert restore(space, OTHER, threads=1).tokens == 40
    # The next process does the same work again.
    with open_store(root, None) as store:
        space = store.namespace(INFO)
        border = restore(space, TOKENS[:44], threads=1).border
        ends = sorted({border, *(end for end in (16, 20, 32, 44) if end > border)})
        space.publish(TOKENS[:44], spans(TOKENS, *ends)) if len(ends) > 1 else None
        space.publish_state(TOKENS[:44], state(3))
        store.tokenizations(b"scope").put(b"a request", bytes(12))
        assert restore(space, TOKENS, threads=1).tokens == 44
        assert read_state(space, TOKENS[:44]) == ({"n": 3}, {"s": bytes([3, 1, 2])})
        assert store.tokenizations(b"scope").get(b"a request") == bytes(12)
        assert fsck(store.context, read_data=True).exit_code == 0


@pytest.mark.parametrize(
    ("durability", "survivals", "lost"),
    [
        (Durability.BARRIER, SURVIVALS, False),
        (Durability.NONE, SURVIVALS[:1], False),
        (Durability.NONE, SURVIVALS[1:], True),
    ],
    ids=["barrier", "none, killed", "none, power cut"],
)
def test_states_and_tokenizations_too_and_fsck_is_content(folder, durability, survivals, lost, record_property):
    record_property("what", PUBLISHES)
    source = begin(folder / "source")
    calls = work(copy(source, folder / "run"), durability, 1 << 30).calls
    assert calls.count("rename nodes") == 4
    assert calls.count("rename tokens") == 1
    checked = 0
    for after in disks_after(
        lambda root, limit: work(root, durability, limit), source, folder / "run", survivals, record_property
    ):
        checked += 1
        check_all(after, lost=lost)
    assert checked > 10


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.EIO, False), (errno.EACCES, False), (errno.EMFILE, False), (errno.ENOSPC, True), (errno.EROFS, True)],
    ids=["EIO once", "EACCES once", "EMFILE once", "ENOSPC from then on", "EROFS from then on"],
)
def test_an_error_of_any_call_is_one_of_ours_and_loses_nothing(folder, scenario, code, lasting, record_property):
    record_property("what", FAULTS)
    calls = every_limit(scenario, folder, Durability.NONE)
    failed = 0
    checked: set[tuple] = set()
    for limit in range(1, len(calls) + 1):
        root = folder / str(limit) / "cache"
        root.parent.mkdir()
        scenario.prepare(root)
        disk = Disk.settled(root.parent, folder / f"{limit} shadow")
        fs = FaultyFileSystem(Durability.NONE, disk=disk, limit=limit, code=code, lasting=lasting)
        try:
            failed += fails(scenario, root, fs)
            if (seen := content(root)) not in checked:
                check(scenario, root)
                checked.add(seen)
        except BaseException as error:
            error.add_note(f"call {limit}, {calls[limit - 1]}, answered {errno.errorcode[code]}")
            raise
        shutil.rmtree(root.parent)
        shutil.rmtree(disk.shadow)
    record_property("faults", len(calls))
    assert failed > len(calls) // 2


def fails(scenario: Fresh, root: Path, fs: FaultyFileSystem) -> bool:
    """Run a scenario; whether it failed, as it must: with an error of ours, counted, without leaving staged files."""
    store = None
    try:
        store = Store.open(root, interval=16, fs=fs)
        scenario.run(store.namespace(INFO))
    except KVStoreError:
        if store is not None:
            assert store.counters.failed_publishes == 1
        return True
    finally:
        if store is not None:
            store.close()
        assert [path for path in (root / "tmp").rglob("*") if path.is_file()] == []
    return False


def test_the_same_store_publishes_again_once_there_is_room(folder, scenario):
    calls = every_limit(scenario, folder, Durability.NONE)
    for limit in range(1, len(calls) + 1):
        root = folder / str(limit) / "cache"
        root.parent.mkdir()
        scenario.prepare(root)
        disk = Disk.settled(root.parent, folder / f"{limit} shadow")
        fs = FaultyFileSystem(Durability.NONE, disk=disk, limit=limit, code=errno.ENOSPC)
        with suppress(KVStoreError), Store.open(root, interval=16, fs=fs) as store:
            space = store.namespace(INFO)
            with suppress(KVStoreError):
                scenario.run(space)
            assert restore(space, TOKENS, threads=1).tokens in {0, *scenario.before, *scenario.cut}
            space.publish(TOKENS, spans(TOKENS, *sorted({0, 16, *scenario.before, *scenario.cut})))
            assert restore(space, TOKENS, threads=1).tokens == scenario.cut[-1], calls[limit - 1]
