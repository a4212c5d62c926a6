"""What happens between the mark and the sweep, forced at the named points of a collection."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from core_support import open_store, spans
from gc_support import (
    HOUR,
    SECOND,
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

import kvstore.gc
from kvstore import MissingParentError, UnavailableError
from kvstore.gc import Policy, collect
from kvstore.locks import publish_lock
from kvstore.manifest import decode

POINTS = ["scanned", "marked", "planned", "batch", "unnamed"]


@pytest.fixture
def writer(tmp_path):
    with open_store(tmp_path / "s") as store:
        yield store


def collect_with(path, act, point, policy=None):
    """Collect everything from a clock an hour ahead, and let act happen the first time point is reached."""
    done = []

    def pause(name):
        if name == point and not done:
            done.append(name)
            act()

    with ahead(path) as later:
        report = collect(later.context, policy or Policy(size=0), pause=pause)
    assert done, f"{point} was never reached"
    assert report.error == ""
    check_valid(path)
    return report


@pytest.mark.parametrize("point", POINTS[:3])
def test_a_block_that_gains_a_reference_stays(writer, point):
    # The tail's block is the first of the grown tail's; it was marked as named by the doomed tail alone.
    space, tokens = space_of(writer), prompt(14)
    publish(space, tokens, 0, 5)
    report = collect_with(writer.path, lambda: publish(space, tokens, 5, 14), point)
    # The tail itself goes; its block was freshened.
    assert (report.nodes, report.blocks) == (1, 0)
    assert restore(space, tokens).tokens == 14


@pytest.mark.parametrize("point", POINTS)
def test_a_node_that_is_published_again_is_whole_afterwards(writer, point):
    # At "unnamed" its manifest is gone already and its block is about to go.
    space, tokens = space_of(writer), prompt(14)
    publish(space, tokens)
    collect_with(writer.path, lambda: publish(space, tokens), point)
    assert restore(space, tokens).tokens == 14
    assert len(blocks(writer.path)) == 1


@pytest.mark.parametrize("point", POINTS[:3])
def test_a_victim_that_gains_a_child_stays_with_its_ancestors(writer, point):
    space, tokens = space_of(writer), prompt(48)
    publish(space, tokens[:32])
    publish(space, prompt(32, 1))
    report = collect_with(writer.path, lambda: publish(space, tokens, 32, 48), point)
    assert restore(space, tokens).tokens == 48
    assert restore(space, prompt(32, 1)).tokens == 0
    # Published before the fence, it is marked as in use; after it, the sweep sees its touch.
    assert report.skipped == (point != "scanned")


@pytest.mark.parametrize("point", POINTS[:3])
def test_a_victim_that_gains_a_state_stays(writer, point):
    space, tokens = space_of(writer), prompt(20)
    publish(space, tokens)
    collect_with(writer.path, lambda: space.publish_state(tokens, state()), point)
    assert space.lookup(tokens, trimmable=False).count == 20
    assert restore(space, tokens).tokens == 20


@pytest.mark.parametrize("point", POINTS[:3])
def test_a_victim_that_is_restored_stays(writer, point):
    space, tokens = space_of(writer), prompt(40)
    publish(space, tokens)
    space.publish_state(tokens, state())
    publish(space, prompt(40, 1))
    # Long enough ago that the restore refreshes its time.
    set_used(writer, space, tokens, 2 * HOUR / SECOND)
    report = collect_with(writer.path, lambda: restore(space, tokens), point)
    assert restore(space, tokens).tokens == 40
    assert space.lookup(tokens, trimmable=False).count == 40, "the state beside it was used as much"
    assert restore(space, prompt(40, 1)).tokens == 0
    assert report.nodes == 3


def test_a_victim_of_this_process_stays_although_its_time_was_not_refreshed(writer):
    space, tokens = space_of(writer), prompt(40)
    publish(space, tokens)
    space.publish_state(tokens, state())
    with ahead(writer.path) as later:
        own = space_of(later)

        def use(name):
            if name == "planned":
                own.lookup(tokens)

        report = collect(later.context, Policy(size=0), pause=use)
    assert (report.nodes, report.states, report.skipped) == (0, 0, 1)
    assert restore(space, tokens).tokens == 40


def test_a_victim_that_becomes_protected_during_the_collection_stays(writer):
    space, tokens = space_of(writer), prompt(40)
    publish(space, tokens)
    protected = set()
    path = space.lookup(tokens).steps[1].path
    report = collect_with(writer.path, lambda: protected.add(path), "planned", Policy(size=0, protect=protected))
    assert report.nodes == 1
    assert restore(space, tokens).tokens == 32


@pytest.mark.parametrize("point", POINTS[:3])
def test_a_conversation_published_meanwhile_is_untouched(writer, point):
    space = space_of(writer)
    publish(space, prompt(40))
    report = collect_with(writer.path, lambda: publish(space, prompt(40, 1)), point)
    assert report.nodes == 3
    assert restore(space, prompt(40, 1)).tokens == 40


def test_an_orphan_that_is_named_meanwhile_stays(writer):
    space, tokens = space_of(writer), prompt(14)
    publish(space, tokens)
    manifests(writer.path)[0].unlink()
    two_days = 48 * HOUR

    def pause(name):
        if name == "marked":
            publish(space, tokens)

    with ahead(writer.path, two_days) as later:
        report = collect(later.context, pause=pause)
    assert report.orphans == 0
    assert restore(space, tokens).tokens == 14


def test_a_manifest_that_was_set_aside_and_replaced_meanwhile_stays(writer):
    space, tokens = space_of(writer), prompt(14)
    publish(space, tokens)
    path = manifests(writer.path)[0]
    data = bytearray(path.read_bytes())

    def replace():
        writer.context.damaged.add(path)
        path.write_bytes(data[:-1])
        publish(space, tokens)

    report = collect_with(writer.path, replace, "planned")
    assert report.nodes == 0
    assert restore(space, tokens).tokens == 14


def test_a_manifest_removed_by_somebody_else_is_not_an_error(writer):
    space = space_of(writer)
    publish(space, prompt(40))

    def remove():
        for path in [*manifests(writer.path), *blocks(writer.path)[1:]]:
            path.unlink()

    collect_with(writer.path, remove, "planned")
    assert blocks(writer.path) == []


@pytest.mark.parametrize("point", POINTS)
def test_a_second_collection_leaves_the_first_one_alone(writer, point):
    space = space_of(writer)
    for seed in range(3):
        publish(space, prompt(40, seed))
    reports = []

    def second():
        with ahead(writer.path) as other:
            reports.append(collect(other.context, Policy(size=0)))

    first = collect_with(writer.path, second, point)
    assert [report.busy for report in reports] == [True]
    assert first.nodes == 9


def test_a_second_collection_in_another_process_leaves_the_first_one_alone(writer):
    publish(space_of(writer), prompt(40))
    code = (
        "import sys; from kvstore import Store; from kvstore.gc import Policy, collect\n"
        "print(collect(Store.open(sys.argv[1]).context, Policy(size=0)).busy)"
    )
    said = []

    def second():
        command = [sys.executable, "-c", code, str(writer.path)]
        said.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())

    collect_with(writer.path, second, "planned")
    assert said == ["True"]


def test_a_publisher_that_lost_its_parent_says_so_and_writes_nothing_visible(writer):
    space, tokens = space_of(writer), prompt(48)
    publish(space, tokens[:32])
    failed = []

    def late():
        # The manifests are gone: this publisher had looked its prefix up before.
        with pytest.raises((MissingParentError, UnavailableError)):
            publish(space, tokens, 32, 48)
        failed.append(True)

    collect_with(writer.path, late, "unnamed")
    assert failed
    assert manifests(writer.path) == []


def test_the_publish_lock_is_free_at_every_point(writer):
    space = space_of(writer)
    for seed in range(3):
        publish(space, prompt(40, seed))
    seen = []

    def pause(name):
        with publish_lock(writer.context.layout, timeout=0):
            seen.append(name)

    with ahead(writer.path) as later:
        collect(later.context, Policy(size=0), pause=pause)
    assert set(seen) == set(POINTS)


def test_an_open_reader_keeps_its_bytes(writer):
    space, tokens = space_of(writer), prompt(40)
    publish(space, tokens)
    opened = [(path, os.open(path, os.O_RDONLY), path.read_bytes()) for path in blocks(writer.path)]
    collect_with(writer.path, lambda: None, "planned")
    assert blocks(writer.path) == []
    for _, fd, data in opened:
        assert os.pread(fd, len(data) + 1, 0) == data
        os.close(fd)


def test_publishers_readers_and_collections_at_once(writer):
    """A short run with threads; the long one with processes and kills is the soak's."""
    path = writer.path
    stop = threading.Event()
    wrong = []

    def work(seed):
        try:
            with open_store(path) as store:
                space = space_of(store)
                for turn in range(12):
                    tokens = prompt(16, seed % 2) + prompt(30, 10 + (seed + turn) % 4)
                    try:
                        match = space.lookup(tokens)
                        borders = sorted({match.border, 16, 20, 32, 46} - set(range(match.border)))
                        publish(space, tokens, *borders) if len(borders) > 1 else None
                    except (MissingParentError, UnavailableError):
                        pass
                    restore(space, tokens)
        except BaseException as error:
            wrong.append(error)
            raise

    def sweep():
        try:
            while not stop.is_set():
                # Two hours ahead, so that even what is being published is fair game: the worst case for the protocol.
                with ahead(path, 2 * HOUR) as later:
                    report = collect(later.context, Policy(size=0))
                    assert report.error == ""
        except BaseException as error:
            wrong.append(error)
            raise

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    sweeper = threading.Thread(target=sweep)
    for thread in [*workers, sweeper]:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    sweeper.join()
    assert wrong == []
    check_valid(path)
    assert named(path) <= {block.name for block in blocks(path)}


def test_blocks_that_a_copy_brings_during_the_scan_stay(writer, tmp_path, monkeypatch):
    # rsync brings a block with an old mtime and, after the collection began, a new ctime; its manifest comes later.
    source = space_of(open_store(tmp_path / "other"))
    publish(source, prompt(14))
    (block,) = blocks(tmp_path / "other")
    target = writer.context.layout.block(bytes.fromhex(block.name))
    real = kvstore.gc.scan

    def scan(*args):
        target.parent.mkdir()
        target.write_bytes(block.read_bytes())
        os.utime(target, ns=(1, 1))
        return real(*args)

    monkeypatch.setattr("kvstore.gc.scan", scan)
    report = collect(writer.context, Policy(size=0))
    assert (report.orphans, report.waiting) == (0, 1)
    assert target.exists()


def test_a_publisher_who_owns_nothing_still_keeps_what_it_builds_on(writer, monkeypatch):
    # Another user of a shared directory may set a file's times to now only.
    space, tokens = space_of(writer), prompt(48)
    publish(space, tokens[:20], 0, 16, 20)
    real = os.utime

    def utime(path, times=None, *, ns=None, follow_symlinks=True):
        if ns is not None:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, follow_symlinks=follow_symlinks)

    def other_user():
        monkeypatch.setattr(os, "utime", utime)
        publish(space, tokens, 20, 32, 48)

    collect_with(writer.path, other_user, "planned")
    assert restore(space, tokens).tokens == 48


def of_another_user(monkeypatch, root, *, copies: bool = True) -> None:
    """Let nobody set the times of the files that are there; copies: those of new files can be set."""
    theirs = {path.stat().st_ino for path in root.rglob("*") if path.is_file()}
    real = os.utime

    def utime(path, *, ns=None, follow_symlinks=True):
        if not copies or os.lstat(path).st_ino in theirs:
            raise PermissionError(1, "Operation not permitted", str(path))
        real(path, **({} if ns is None else {"ns": ns}), follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "utime", utime)


def everything(root) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (*manifests(root), *blocks(root))}


@pytest.mark.parametrize("copies", [True, False], ids=["own files can be touched", "no file can be touched"])
@pytest.mark.parametrize("point", POINTS[:3])
@pytest.mark.parametrize(
    "what", ["a tail that grows", "a child", "a state", "the same again", "a block without its manifest"]
)
def test_a_publisher_keeps_what_it_can_read_and_not_touch(writer, monkeypatch, what, point, copies):
    """It puts copies in the place of another user's files, which the collector chose and then finds changed."""
    space, tokens = space_of(writer), prompt(48)
    publish(space, tokens[:20], 0, 16, 20)
    if what == "a block without its manifest":
        space.lookup(tokens[:20]).steps[1].path.unlink()
    before = everything(writer.path)

    def other_user():
        of_another_user(monkeypatch, writer.path, copies=copies)
        with open_store(writer.path, None) as store:
            theirs = space_of(store)
            if what == "a tail that grows":
                publish(theirs, tokens, 20, 32, 48)
            elif what == "a child":
                publish(theirs, tokens, 16, 32, 48)
            elif what == "a state":
                theirs.publish_state(tokens[:20], state())
            else:
                publish(theirs, tokens[:20], 0, 16, 20)
            assert theirs.lookup(tokens).steps

    collect_with(writer.path, other_user, point)
    kept = {"a state": 20, "the same again": 20, "a block without its manifest": 20}.get(what, 48)
    with open_store(writer.path, None) as store:
        assert restore(space_of(store), tokens).tokens == kept
    after = everything(writer.path)
    assert {name: data for name, data in after.items() if name in before}.items() <= before.items()


def test_a_file_that_is_taken_over_is_never_missing_and_stays_open(writer, monkeypatch):
    space, tokens = space_of(writer), prompt(20)
    publish(space, tokens[:9])
    (block,) = blocks(writer.path)
    of_another_user(monkeypatch, writer.path)
    with block.open("rb") as reader:
        publish(space, tokens[:16], 9, 16)
        assert os.fstat(reader.fileno()).st_ino != block.stat().st_ino
        assert reader.read() == block.read_bytes()
    assert not list((writer.path / "quarantine").iterdir())
    assert not [path for path in (writer.path / "tmp").rglob("*") if path.is_file()]
    # Now it is this user's, and is not copied again.
    inode = block.stat().st_ino
    publish(space, tokens, 16, 20)
    publish(space, [*tokens[:9], *prompt(3, 9)], 9, 12)
    assert block.stat().st_ino == inode


def test_the_block_of_another_user_gives_way_to_the_same_that_was_just_written(writer, monkeypatch):
    space, tokens = space_of(writer), prompt(9)
    publish(space, tokens)
    (block,), (manifest,) = blocks(writer.path), manifests(writer.path)
    before = block.stat().st_ino
    manifest.unlink()
    of_another_user(monkeypatch, writer.path)
    assert space.publish(tokens, spans(tokens, 0, 9)).blocks == block.stat().st_size
    assert block.stat().st_ino != before


def test_a_copy_counts_as_written(writer, monkeypatch):
    """Found by review: the write limit never saw what two users copied from each other."""
    space, tokens = space_of(writer), prompt(20)
    publish(space, tokens[:9])
    (block,) = blocks(writer.path)
    of_another_user(monkeypatch, writer.path)
    before = writer.counters.written_bytes
    done = space.publish(tokens[:16], spans(tokens, 9, 16))
    (manifest,) = (step.path for step in space.lookup(tokens[:16]).steps)
    assert done.written == done.blocks + manifest.stat().st_size + block.stat().st_size
    assert writer.counters.written_bytes - before == done.written
    of_another_user(monkeypatch, writer.path)
    again = space.publish(tokens[:16], spans(tokens, 0, 16))
    assert (again.nodes, again.blocks, again.written) == (0, 0, manifest.stat().st_size)
    space.publish_state(tokens[:16], state())
    of_another_user(monkeypatch, writer.path)
    again = space.publish_state(tokens[:16], state())
    assert (again.nodes, again.written) == (0, manifest.with_suffix(".state").stat().st_size)


@pytest.mark.parametrize("what", ["blocks", "nodes"])
def test_what_can_be_neither_touched_nor_replaced_is_not_built_upon(writer, monkeypatch, what):
    space, tokens = space_of(writer), prompt(32)
    publish(space, tokens[:20], 0, 16, 20)
    before = everything(writer.path)
    of_another_user(monkeypatch, writer.path)
    real = os.rename

    def rename(source, target):
        if os.path.lexists(target) and what in str(target):
            raise PermissionError(1, "Operation not permitted", str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(UnavailableError, match="another user's and can be neither touched nor replaced"):
        publish(space, tokens, 20, 32)
    assert everything(writer.path).items() >= before.items()
    assert len(manifests(writer.path)) == 2
    assert not [path for path in (writer.path / "tmp").rglob("*") if path.is_file()]


@pytest.mark.parametrize("what", ["block", "parent"])
def test_a_damaged_file_is_not_copied(writer, monkeypatch, what):
    """A copy would make damage young; the publish says what it is without."""
    space, tokens = space_of(writer), prompt(32)
    publish(space, tokens[:20], 0, 16, 20)
    *_, parent, tail = space.lookup(tokens[:20]).steps
    (ref,) = decode(tail.path.read_bytes()).blocks
    path = writer.context.layout.block(ref.digest) if what == "block" else parent.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    of_another_user(monkeypatch, writer.path)
    with pytest.raises(MissingParentError, match="damaged"):
        publish(space, tokens, 20, 32)
    assert path.read_bytes() == data
    publish(space, tokens, 0, 16, 32)
    assert restore(space, tokens).tokens == 32
