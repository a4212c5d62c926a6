"""Every call of an operation fails once, and then all from there on: with each error, and with the directory gone.

Whatever fails, only the documented error comes out; what was published before is still restored byte for byte; the
operation succeeds when it is tried again; and nothing is left in staging after close().
(Publishing alone, call by call, is in tests/crash/test_publish_crash.py; here is everything that one can call.)
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fault_support import ERRORS, Emptied, Fault, Vanish, faulty, system_faults
from stress_support import examine, quick_place, staged

from kvstore import KVStoreError, NamespaceInfo, Store, UnavailableError
from kvstore.context import Context, this_process
from kvstore.eviction import GRACE_NS
from kvstore.fsck import check
from kvstore.gc import Policy, collect
from kvstore.testing.oracle import Memory, Oracle, StateMemory, random_tokens

INTERVAL = 32
INFO, OTHER = NamespaceInfo({"model": "faults"}), NamespaceInfo({"model": "other"})
ORACLE = Oracle()
TOKENS = random_tokens(1, 100)
OLD = 40 * 4
"""Bytes of the tokens that were published before anything fails."""

SCOPE, REQUEST, NEW_REQUEST = b"tokenizer", b"an old request", b"a new request"


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def place():
    with quick_place() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def base(place):
    """A store with a prefix of two nodes, a state and a tokenization."""
    root = place / "base"
    with Store.open(root, interval=INTERVAL) as store:
        space = store.namespace(INFO)
        space.publish(TOKENS, [ORACLE.span(TOKENS, 0, 20), ORACLE.span(TOKENS, 20, 32), ORACLE.span(TOKENS, 32, 40)])
        space.publish_state(TOKENS[: 4 * 32], ORACLE.state(TOKENS[: 4 * 32]))
        store.tokenizations(SCOPE).put(REQUEST, TOKENS)
    return root


def restore(store: Store, tokens: bytes = TOKENS, info: NamespaceInfo = INFO) -> int:
    """Tokens that are restored; each byte is checked."""
    space, memory = store.namespace(info), Memory()
    restored = space.read(space.lookup(tokens), memory, 1)
    ORACLE.check(memory, tokens, restored.tokens)
    return restored.tokens


def restore_state(store: Store) -> int:
    space, memory = store.namespace(INFO), StateMemory()
    match = space.lookup(TOKENS, trimmable=False)
    values = space.read_state(match, memory)
    if values is None:
        return 0
    ORACLE.check_state(memory, values, TOKENS[: 4 * match.count])
    return match.count


@dataclass(frozen=True)
class Operation:
    """Something one can call. ends: what a restore gives once it succeeded. raises: what it may raise."""

    name: str
    call: Callable[[Store], object]
    check: Callable[[Store], object]
    raises: type[Exception] | tuple[type[Exception], ...] = KVStoreError


def publish_tail(store: Store) -> None:
    store.namespace(INFO).publish(TOKENS, [ORACLE.span(TOKENS, 40, 64), ORACLE.span(TOKENS, 64, 90)])


def publish_elsewhere(store: Store) -> None:
    store.namespace(OTHER).publish(TOKENS, [ORACLE.span(TOKENS, 0, 32), ORACLE.span(TOKENS, 32, 50)])


def publish_state(store: Store) -> None:
    store.namespace(INFO).publish_state(TOKENS[:OLD], ORACLE.state(TOKENS[:OLD]))


def put_tokens(store: Store) -> None:
    store.tokenizations(SCOPE).put(NEW_REQUEST, TOKENS)


def look(store: Store) -> None:
    restore(store)
    restore_state(store)
    restore(store, info=OTHER)
    assert store.tokenizations(SCOPE).get(REQUEST) in {None, TOKENS}


def check_look(store: Store) -> None:
    assert store.tokenizations(SCOPE).get(REQUEST) == TOKENS


def check_tokens(store: Store) -> None:
    assert store.tokenizations(SCOPE).get(NEW_REQUEST) == TOKENS


def check_tail(store: Store) -> None:
    assert restore(store) == 90


def check_elsewhere(store: Store) -> None:
    assert restore(store, info=OTHER) == 50


def check_state(store: Store) -> None:
    assert restore_state(store) == 40


OPERATIONS = [
    Operation("publish a tail", publish_tail, check_tail),
    Operation("publish into a new namespace", publish_elsewhere, check_elsewhere),
    Operation("publish a state", publish_state, check_state),
    Operation("save a tokenization", put_tokens, check_tokens, (KVStoreError, OSError)),
    Operation("check that it is writable", Store.check_writable, lambda _: None, UnavailableError),
    Operation("look up and read", look, check_look, ()),
]


def open_base(base: Path, place: Path, fault: Fault) -> Store:
    root = place / "store"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(base, root)
    return Store.open(root, fs=faulty(fault))


def attempt(operation: Operation, store: Store) -> bool:
    """Whether it succeeded; anything but what it may raise is a finding."""
    try:
        operation.call(store)
    except operation.raises:
        return False
    return True


def afterwards(operation: Operation, store: Store, fault: Fault) -> None:
    """The fault is gone: everything that was there is there, it works, and it leaves nothing behind."""
    fault.at = None
    root = store.path
    with Store.open(root) as fresh:
        assert restore(fresh) >= 40
        assert restore_state(fresh) >= 32
        assert fresh.tokenizations(SCOPE).get(REQUEST) == TOKENS
    heal(store)
    operation.call(store)
    operation.check(store)
    store.close()
    assert staged(root) == []
    examine(root)
    with Store.open(root) as fresh:
        operation.check(fresh)


def heal(store: Store) -> None:
    """What an engine does next: publish what it did not get. A process remembers a file that it could not read as
    damaged, so it may have to write what is there once more.
    """
    space, memory = store.namespace(INFO), Memory()
    for _ in range(4):
        border = space.read(space.lookup(TOKENS[:OLD]), memory, 1).border
        if border == 40:
            return
        ends = [32, 40] if border < 32 else [40]
        spans = [ORACLE.span(TOKENS, *pair) for pair in zip([border, *ends], ends, strict=False)]
        space.publish(TOKENS, spans)
    raise AssertionError("what was there before is not restored, however often it is published again")


def descriptors() -> set[str]:
    """The descriptors that this process has, and the one that this is found with, which is always the same then."""
    return set(os.listdir("/dev/fd"))


def count_calls(operation: Operation, base: Path, place: Path) -> int:
    fault = Fault()
    with open_base(base, place, fault) as store:
        fault.calls.clear()
        operation.call(store)
        return len(fault.calls)


WHAT = "Every operation, each of its calls failing in turn"
AWAY = "Every operation, the directory gone or emptied at each of its calls"


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_call_through_the_seam_fails(base, place, operation, lasting, record_property):
    calls = count_calls(operation, base, place)
    assert calls
    tried = 0
    for at in range(calls):
        for number, name in enumerate(ERRORS):
            if (at + number) % 2 and not lasting:
                continue  # every second pair, to be quick
            tried += 1
            fault = Fault(error=getattr(errno, name), lasting=lasting)
            with open_base(base, place, fault) as store:
                fault.calls.clear()
                fault.at = at
                with naming(f"call {at} ({name})"):
                    attempt(operation, store)
                    look(store)
                    afterwards(operation, store, fault)
    record_property("what", WHAT)
    record_property("faults", tried)


class naming:  # noqa: N801 - reads as a statement
    """Say which case it was."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind, error, _trace) -> None:
        if error is not None:
            error.add_note(f"with {self.what}")


@pytest.fixture
def at_each_call(base, place, record_property):
    """Let something happen to the directory at each call of an operation in turn, which is tried twice, and look."""

    def run(operation, make_fault, then) -> None:
        calls = count_calls(operation, base, place)
        record_property("what", AWAY)
        record_property("faults", calls)
        for at in range(calls):
            fault = make_fault()
            with open_base(base, place, fault) as store:
                fault.calls.clear()
                fault.at = at
                with naming(f"call {at}"):
                    attempt(operation, store)
                    attempt(operation, store)
                    look(store)
                    then(store, fault)

    return run


@pytest.mark.parametrize("empty", [False, True], ids=["gone", "an empty mount point"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_directory_vanishes_at_a_call(at_each_call, place, operation, empty):
    root = place / "store"

    def then(store: Store, fault: Vanish) -> None:
        # Nothing of ours is made where the volume is not.
        assert root.exists() == empty
        assert not empty or os.listdir(root) == []
        fault.back()
        afterwards(operation, store, fault)

    at_each_call(operation, lambda: Vanish(root=root, empty=empty), then)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_directory_is_emptied_at_a_call(at_each_call, place, operation):
    """Whatever was under way: what is published next finds a directory that was set up anew, and no error."""

    def then(store: Store, fault: Emptied) -> None:
        fault.at = None
        space = store.namespace(INFO)
        space.publish(TOKENS, [ORACLE.span(TOKENS, 0, 32), ORACLE.span(TOKENS, 32, 40)])
        space.publish_state(TOKENS[: 4 * 32], ORACLE.state(TOKENS[: 4 * 32]))
        assert restore(store) >= 40
        operation.call(store)
        if operation.check is not check_look:  # what it saved is gone, as it should be
            operation.check(store)
        store.close()
        assert staged(place / "store") == []
        examine(place / "store")
        with Store.open(place / "store", create=False, interval=INTERVAL) as fresh:
            assert restore(fresh) >= 40

    at_each_call(operation, lambda: Emptied(root=place / "store"), then)


SOME_ERRORS = ("EIO", "EACCES", "EMFILE", "ENOSPC", "ESTALE")


@pytest.mark.parametrize("name", SOME_ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_any_system_call_fails(base, place, operation, name, record_property):
    """Those that are not made through the seam, too: stat, listdir, close, the lock's. No descriptor is left open."""
    at = 0
    while True:
        fault = Fault(error=getattr(errno, name))
        with open_base(base, place, Fault()) as store:
            fault.at = at
            with naming(f"call {at} ({name})"):
                before = descriptors()
                with system_faults(fault):
                    attempt(operation, store)
                assert descriptors() == before
                if len(fault.calls) <= at:
                    break
                afterwards(operation, store, fault)
        at += 1
    record_property("what", WHAT)
    record_property("faults", at)


def open_new(place: Path, fault: Fault) -> Store:
    return Store.open(place / "new" / "store", interval=INTERVAL, fs=faulty(fault))


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("name", ERRORS)
def test_creating_a_directory_fails(place, name, lasting, record_property):
    at = 0
    while True:
        shutil.rmtree(place / "new", ignore_errors=True)
        fault = Fault(at=at, error=getattr(errno, name), lasting=lasting)
        with naming(f"call {at} ({name})"):
            with suppress(KVStoreError):
                open_new(place, fault).close()
            done = len(fault.calls) <= at
            fault.at = None
            with open_new(place, fault) as store:
                publish_elsewhere(store)
                check_elsewhere(store)
            # Creating has a staging folder of its own. If even removing that failed, it is the collector's.
            left = [path for path in staged(store.path) if path.is_file()]
            assert left == [] or lasting
            examine(store.path)
        if done:
            record_property("what", WHAT)
            record_property("faults", at)
            return
        at += 1


@pytest.mark.parametrize("name", ERRORS)
def test_opening_fails(base, place, name, record_property):
    at = 0
    while True:
        open_base(base, place, Fault()).close()
        fault = Fault(at=at, error=getattr(errno, name))
        with naming(f"call {at} ({name})"):
            with suppress(KVStoreError):
                Store.open(place / "store", fs=faulty(fault)).close()
            done = len(fault.calls) <= at
            with Store.open(place / "store") as store:
                assert restore(store) == 40
        if done:
            record_property("what", WHAT)
            record_property("faults", at)
            return
        at += 1


@pytest.mark.parametrize("new", [False, True], ids=["opening", "creating"])
@pytest.mark.parametrize("name", SOME_ERRORS)
def test_any_system_call_fails_while_a_store_is_opened_and_closed(base, place, new, name, record_property):
    at = 0
    while True:
        root = place / "new" / "store" if new else place / "store"
        shutil.rmtree(root.parent if new else root, ignore_errors=True)
        if not new:
            shutil.copytree(base, root)
        fault = Fault(at=at, error=getattr(errno, name))
        with naming(f"call {at} ({name})"):
            before = descriptors()
            with system_faults(fault), suppress(KVStoreError):
                Store.open(root, interval=INTERVAL).close()
            assert descriptors() == before
            with Store.open(root, interval=INTERVAL) as store:
                if not new:
                    assert restore(store) == 40
                publish_elsewhere(store)
                check_elsewhere(store)
            examine(root)
        if len(fault.calls) <= at:
            break
        at += 1
    record_property("what", WHAT)
    record_property("faults", at)


UPKEEP: dict[str, Callable[[Context], str]] = {
    "collect": lambda context: collect(context, Policy()).error,
    "check": lambda context: check(context, read_data=True).error,
    "repair": lambda context: check(context, read_data=True, repair=True, settle_s=0).error,
}


@pytest.mark.parametrize("name", ["EIO", "EACCES", "ESTALE"])
@pytest.mark.parametrize("kind", UPKEEP)
def test_any_system_call_fails_in_upkeep(base, place, kind, name, record_property):
    """Nothing is raised, and nothing goes that was saved: what cannot be seen may be whole."""
    at, run = 0, UPKEEP[kind]
    while True:
        fault = Fault(at=at, error=getattr(errno, name))
        with open_base(base, place, Fault()) as store, naming(f"call {at} ({name})"):
            orphan = store.path / "objects" / "blocks" / "ab" / ("ab" * 16)
            orphan.parent.mkdir(exist_ok=True)
            orphan.write_bytes(b"of no manifest")
            stale = store.path / "tmp" / f"{this_process().host}.0.1.00000000"
            stale.mkdir()
            (stale / "1").write_bytes(b"of a process that is gone")
            later = replace(store.context, clock=lambda: time.time_ns() + 3 * GRACE_NS)
            before = descriptors()
            with system_faults(fault):
                run(later)
            assert descriptors() == before
            with Store.open(store.path) as fresh:
                assert restore(fresh) == 40
                assert restore_state(fresh) == 32
                assert fresh.tokenizations(SCOPE).get(REQUEST) == TOKENS
            assert run(later) == ""
            assert kind != "collect" or (not orphan.exists() and staged(store.path) == [])
            examine(store.path)
        if len(fault.calls) <= at:
            break
        at += 1
    record_property("what", WHAT)
    record_property("faults", at)


def test_closing_never_raises(base, place):
    for name in ERRORS:
        fault = Fault(error=getattr(errno, name), lasting=True)
        store = open_base(base, place, fault)
        publish_tail(store)
        fault.calls.clear()
        fault.at = 0
        store.close()
        assert fault.calls
