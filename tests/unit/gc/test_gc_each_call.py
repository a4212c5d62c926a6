"""A whole collection, with nothing protected by youth, between any two calls of a publish or of a read.

The named points of a collection are in test_gc_races.py; here it is the other side that is stopped, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import INFO, Memory, open_store, prompt, read_checked, restore, spans
from gc_support import DAY, ahead, check_valid, manifests, publish, space_of, state
from upkeep_support import memory_folder

from kvstore import Durability, FileSystem, KVStoreError, LockTimeoutError, Store
from kvstore.fsck import check
from kvstore.gc import Policy, collect, usage
from kvstore.locks import publish_lock

TOKENS = prompt(40)


@dataclass
class Moment:
    """Before call number at of an operation something else happens, once."""

    at: int
    act: Callable[[], None]
    calls: int = 0
    busy: bool = False

    def pass_by(self) -> None:
        if not self.busy:
            self.calls += 1
            if self.calls == self.at + 1:
                self.busy = True
                self.act()
                self.busy = False

    @property
    def came(self) -> bool:
        return self.calls > self.at


@dataclass(frozen=True)
class Watched(FileSystem):
    """Tells a moment of every call."""

    moment: Moment = field(default_factory=lambda: Moment(1 << 30, lambda: None))


def _telling(name: str) -> Callable:
    real = getattr(FileSystem, name)

    def call(self, *arguments, **named):
        self.moment.pass_by()
        return real(self, *arguments, **named)

    return call


CALLS = (
    "make_dir", "create", "allocate", "write", "sync_file", "sync_dir", "rename", "unlink", "remove_dir", "touch",
    "stat", "list_dir", "open_fd", "close", "read_file",
)  # fmt: skip
for _name in CALLS:
    setattr(Watched, _name, _telling(_name))


def test_every_call_of_the_seam_is_watched():
    """Those that act on files and are not made of others."""
    apart = {"mount_point", "exclude_from_backup", "open_read"}
    assert {name for name in vars(FileSystem) if not name.startswith("_") and callable(getattr(FileSystem, name))} == {
        *CALLS,
        *apart,
    }


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    with memory_folder(tmp_path) as found:
        yield found


def take_all(root: Path) -> None:
    """Collect everything, unless the lock is taken: then no collection could."""
    with ahead(root, 3 * DAY) as store:
        try:
            with publish_lock(store.context.layout, timeout=0):
                pass
        except LockTimeoutError:
            return
        report = collect(store.context, Policy(size=0))
    assert (report.error, report.busy, report.failed) == ("", False, 0)


def thin(root: Path) -> None:
    """Make a byte of room: that is the state of the one conversation, and nothing else."""
    with ahead(root) as store:
        report = collect(store.context, Policy(size=usage(store.context) - 1, spare=0))
    assert (report.nodes, report.error) == (0, "")


def at_each_call(folder: Path, prepare: Callable[[Store], object], operate: Callable[[Store, Moment], None]) -> int:
    """Run an operation once for each of its calls, with a collection before that call; how many there were."""
    for at in range(1000):
        root = folder / str(at)
        with open_store(root) as store:
            prepare(store)
        moment = Moment(at, lambda root=root: take_all(root))
        with open_store(root, None, Watched(Durability.NONE, moment=moment)) as store:
            moment.calls = 0
            try:
                operate(store, moment)
            except BaseException as error:
                error.add_note(f"with a collection before call {at}")
                raise
        check_valid(root)
        if not moment.came:
            return at
    raise AssertionError("it never ends")


def whole_afterwards(store: Store) -> None:
    with open_store(store.path, None) as fresh:
        restore(space_of(fresh), TOKENS)
        assert check(fresh.context, read_data=True).errors == 0
        publish(space_of(fresh), TOKENS)
        assert restore(space_of(fresh), TOKENS).tokens == 40


def test_a_publish_is_whole_or_refused_wherever_a_collection_comes(folder):
    """What it continues may go at any moment: then it says so, and leaves nothing half done."""
    done = refused = 0

    def operate(store: Store, moment: Moment) -> None:
        nonlocal done, refused
        try:
            space_of(store).publish(TOKENS, spans(TOKENS, 20, 32, 40))
            done += 1
        except KVStoreError:
            refused += 1
        moment.busy = True
        whole_afterwards(store)

    calls = at_each_call(folder, lambda store: publish(space_of(store), TOKENS, 0, 16, 20), operate)
    assert calls > 40
    assert done > 3
    assert refused > 3


def test_a_state_is_published_with_its_kv_or_refused(folder):
    def prepare(store: Store) -> None:
        publish(space_of(store), TOKENS)

    def operate(store: Store, moment: Moment) -> None:
        with suppress(KVStoreError):
            space_of(store).publish_state(TOKENS, state(3))
        moment.busy = True
        whole_afterwards(store)

    assert at_each_call(folder, prepare, operate) > 10


def test_a_restore_is_right_as_far_as_it_goes(folder):
    """Also when everything vanishes between its lookup and its last read. What it opened it has."""
    lengths = set()

    def operate(store: Store, _: Moment) -> None:
        lengths.add(restore(space_of(store), TOKENS, threads=1).tokens)

    calls = at_each_call(folder, lambda store: publish(space_of(store), TOKENS), operate)
    assert calls > 5
    assert {0, 40} <= lengths <= {0, 16, 32, 40}


def give_state(store: Store) -> None:
    publish(space_of(store), TOKENS)
    space_of(store).publish_state(TOKENS, state(7))


def read_state(store: Store, match, before: Callable[[], None] = lambda: None) -> bool:
    """Whether the state was read, which must then be the right one."""
    memory: dict[str, memoryview] = {}

    def allocate(tensors):
        before()
        memory.update({tensor.name: memoryview(bytearray(tensor.nbytes)) for tensor in tensors})
        return memory

    values = space_of(store).read_state(match, allocate)
    assert values in (None, {"n": 7})
    if values is not None:
        assert bytes(memory["s"]) == bytes([7, 1, 2])
    return values is not None


def test_a_state_is_read_whole_or_not_at_all(folder):
    found = set()

    def operate(store: Store, _: Moment) -> None:
        found.add(read_state(store, space_of(store).lookup(TOKENS, trimmable=False)))

    assert at_each_call(folder, give_state, operate) > 4
    assert found == {True, False}


@pytest.mark.parametrize("point", ["lookup", "manifest", "block", "allocated"])
def test_a_state_that_is_thinned_while_it_is_read(folder, point):
    """The state goes and its KV stays: after the lookup, its manifest's or its block's opening, or the allocation."""
    root = folder / "s"
    waiting = [root]
    with open_store(root) as store:
        give_state(store)

    class Thinning(FileSystem):
        def open_fd(self, path):
            found = super().open_fd(path)
            if waiting and (point, Path(path).suffix) in {("manifest", ".state"), ("block", "")}:
                thin(waiting.pop())
            return found

    with open_store(root, None, Thinning(Durability.NONE)) as store:
        match = space_of(store).lookup(TOKENS, trimmable=False)
        assert match.count == 40
        if point == "lookup":
            thin(root)
        there = read_state(store, match, lambda: thin(root) if point == "allocated" else None)
        assert bool(waiting) == (point in {"lookup", "allocated"})
        # What was open stays readable; a block that was not yet open when it went is a miss.
        assert there == (point in {"block", "allocated"})
        assert [path.suffix for path in manifests(root)] == [".kv"] * 3
        # The prefix itself is as good as before, and a lookup for a resume point has none any more.
        assert read_checked(space_of(store), space_of(store).lookup(TOKENS), TOKENS).tokens == 40
        assert space_of(store).lookup(TOKENS, trimmable=False).count == 0
        space_of(store).publish_state(TOKENS, state(7))
    with open_store(root, None) as store:
        assert read_state(store, space_of(store).lookup(TOKENS, trimmable=False))
    check_valid(root)


def test_memory_that_was_filled_stays_filled(folder):
    """Rows that were restored are the engine's; nothing that happens to the files reaches them."""
    root = folder / "s"
    with open_store(root) as store:
        publish(space_of(store), TOKENS)
        memory = Memory()
        restored = space_of(store).read(space_of(store).lookup(TOKENS), memory)
        before = {name: bytes(data) for name, data in memory.data.items()}
        take_all(root)
        assert restored.tokens == 40
        assert {name: bytes(data) for name, data in memory.data.items()} == before
        assert space_of(store, INFO).lookup(TOKENS).count == 0
