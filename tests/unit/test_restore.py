"""Reading a match: every byte right, or a shorter prefix with one line in the log."""

from __future__ import annotations

import errno
import logging
import os
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from core_support import (
    FAST,
    INFO,
    SPECS,
    Memory,
    block_files,
    kv,
    node_files,
    open_store,
    prompt,
    read_checked,
    restore,
    span,
    spans,
)

import kvstore.restore
from kvstore import FileSystem, Span, TensorSpec
from kvstore.blocks import block_head
from kvstore.fsck import check
from kvstore.manifest import decode, encode
from kvstore.merge import merge

TOKENS = prompt(100)
NOW = 1_700_000_000_000_000_000
HOUR = 3600 * 10**9


def block_of(space, tokens, index: int, nth: int = 0) -> Path:
    """The file of the nth block of one node on a prompt's way."""
    step = space.lookup(tokens).steps[index]
    digest = decode(step.path.read_bytes()).blocks[nth].digest.hex()
    return step.path.parents[3] / "blocks" / digest[:2] / digest


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_byte_of_every_tensor_is_restored(space, threads):
    space.publish(TOKENS, spans(TOKENS, 0, 7, 16, 32, 33, 40))
    restored = restore(space, TOKENS, threads=threads)
    assert (restored.tokens, restored.border) == (40, 40)


def test_the_engine_is_asked_once_for_memory_of_its_own_tensors(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    memory = Memory()
    space.read(space.lookup(TOKENS), memory)
    assert (memory.calls, memory.specs, memory.capacity - memory.spare) == (1, SPECS, 20)


def test_a_miss_asks_for_no_memory(space):
    memory = Memory()
    restored = space.read(space.lookup(TOKENS), memory)
    assert (restored.tokens, restored.size, restored.border, memory.calls) == (0, 0, 0, 0)


def test_an_overlap_restores_exactly_the_shared_tokens(tmp_path):
    space = open_store(tmp_path / "cache", interval=128).namespace(INFO)
    tokens = prompt(256)
    space.publish(tokens, spans(tokens, 0, 70, 128, 200, 256))
    branch = [*tokens[: 128 + 90], *prompt(38, 9)]
    restored = restore(space, branch)
    assert (restored.tokens, restored.border) == (218, 200)


def test_blocks_after_an_overlap_are_not_read(tmp_path, caplog):
    space = open_store(tmp_path / "cache", interval=128).namespace(INFO)
    tokens = prompt(128)
    space.publish(tokens, spans(tokens, 0, 70, 100, 128))
    block_of(space, tokens, -1, 2).unlink()
    assert restore(space, [*tokens[:90], *prompt(38, 9)]).tokens == 90
    assert caplog.records == []


@pytest.mark.parametrize(("shared", "beyond"), [(69, 1), (70, 0), (71, 57), (128, 0), (128 + 64, 8), (128 + 90, 38)])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_a_lookup_says_how_much_more_than_the_overlap_is_read(tmp_path, shared, beyond, prefill_only):
    space = open_store(tmp_path / "cache", interval=128).namespace(INFO)
    tokens = prompt(256)
    space.publish(tokens, spans(tokens, 0, 70, 128, 200, 256))
    match = space.lookup([*tokens[:shared], *prompt(256 - shared, 9)], prefill_only=prefill_only)
    assert (match.count, match.beyond) == (shared, beyond)
    kept = [ref for step in match.steps for ref in decode(step.path.read_bytes()).blocks if ref.first < shared]
    assert sum(ref.count for ref in kept) == match.count + match.beyond
    assert space.read(match, Memory()).size == sum(ref.size for ref in kept)


def test_what_was_read_is_counted(store, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    restored = restore(space, TOKENS)
    size = sum(path.stat().st_size for path in block_files(store.path))
    counted = store.counters.snapshot()
    assert (counted["restored_tokens"], counted["restored_bytes"], restored.size) == (20, size, size)


@pytest.mark.parametrize("count", [64, 65, 129])
def test_more_blocks_than_are_open_at_once_are_restored(tmp_path, count):
    space = open_store(tmp_path / "cache", interval=16).namespace(INFO)
    tokens = prompt(4 * count)
    space.publish(tokens, spans(tokens, *range(0, 4 * count + 1, 4)))
    assert len(block_files(tmp_path / "cache")) == count
    assert restore(space, tokens).tokens == 4 * count


@pytest.fixture
def few_files():
    """Room for no more than about ten more open files in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda room: resource.setrlimit(resource.RLIMIT_NOFILE, (highest_free() + room, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def highest_free() -> int:
    return max(int(name) for name in os.listdir("/dev/fd")) + 1


def test_a_process_with_few_descriptors_left_restores_everything(space, few_files, caplog):
    space.publish(TOKENS, spans(TOKENS, *range(0, 97, 4)))
    few_files(10)
    assert restore(space, TOKENS).tokens == 96
    assert caplog.records == []


def test_a_process_without_descriptors_has_a_miss_and_no_damage(store, space, few_files, caplog):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    match = space.lookup(TOKENS)
    few_files(0)
    with open_all():
        assert read_checked(space, match, TOKENS).tokens == 0
    assert store.context.damaged == set()
    assert restore(space, TOKENS).tokens == 20
    assert len(caplog.records) == 1


@dataclass(frozen=True)
class Crowded(FileSystem):
    """Other threads have taken every descriptor when the blocks are to be opened."""

    def open_fd(self, path):
        if "blocks" in Path(path).parts:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return super().open_fd(path)


def test_blocks_that_cannot_be_opened_just_now_are_no_damage(tmp_path, space, caplog):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    crowded = open_store(tmp_path / "cache", fs=Crowded())
    assert restore(crowded.namespace(INFO), TOKENS).tokens == 0
    assert (crowded.context.damaged, crowded.counters.damaged, crowded.counters.missing) == (set(), 0, 0)
    assert "Too many open files" in caplog.text


class open_all:  # noqa: N801 - reads as a function
    """Take every descriptor that is left."""

    def __enter__(self):
        self.taken = []
        try:
            while True:
                self.taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return self

    def __exit__(self, *_):
        for fd in self.taken:
            os.close(fd)


def test_a_block_removed_while_it_is_open_is_still_read(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    memory = Memory()

    def allocate(specs, count):
        for block in block_files(tmp_path / "cache"):
            block.unlink()
        return memory(specs, count)

    restored = space.read(space.lookup(TOKENS), allocate)
    assert restored.tokens == 40
    for spec, expected in zip(SPECS, kv(TOKENS, 0, 40), strict=True):
        assert memory.rows(spec, 0, 40) == expected


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_flipped_bit_ends_the_restore_before_it_with_one_line(store, space, caplog, node):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    block = block_of(space, TOKENS, node)
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(data)
    assert restore(space, TOKENS).tokens == 16 * node
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "kvstore")
    assert record.getMessage().startswith(f"kvstore: block {block} is damaged")
    assert record.getMessage().endswith(f"; computing from token {16 * node}")
    assert store.counters.damaged == 1


def test_damage_is_read_into_once(store, space, caplog):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    block = block_of(space, TOKENS, 1)
    block.write_bytes(block.read_bytes()[:-1])
    assert [restore(space, TOKENS).tokens for _ in range(3)] == [16, 16, 16]
    assert (store.counters.damaged, len(caplog.records)) == (1, 1)


def test_a_damaged_block_that_somebody_removed_heals_too(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    block = block_of(space, TOKENS, 0)
    block.write_bytes(block.read_bytes()[:-1] + b"?")
    assert restore(space, TOKENS).tokens == 0
    block.unlink()
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert restore(space, TOKENS).tokens == 16


def test_two_damaged_blocks_are_one_line(store, space, caplog):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    for node in (1, 2):
        block = block_of(space, TOKENS, node)
        block.write_bytes(block.read_bytes()[:-1] + b"?")
    assert restore(space, TOKENS).tokens == 16
    assert (store.counters.damaged, len(caplog.records)) == (2, 1)


def test_a_damaged_block_in_the_middle_of_a_chunk_keeps_those_before_it(space):
    space.publish(TOKENS, spans(TOKENS, 0, 5, 9, 16))
    block = block_of(space, TOKENS, 0, 1)
    block.write_bytes(b"\0" * block.stat().st_size)
    restored = restore(space, TOKENS)
    assert (restored.tokens, restored.border) == (5, 5)


def test_a_missing_block_is_a_shorter_restore(store, space, caplog):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    block_of(space, TOKENS, 1).unlink()
    assert restore(space, TOKENS).tokens == 16
    assert (store.counters.missing, store.counters.damaged) == (1, 0)
    assert "is missing" in caplog.text


def test_a_manifest_removed_after_the_lookup_is_a_shorter_restore(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    match = space.lookup(TOKENS)
    match.steps[1].path.unlink()
    assert read_checked(space, match, TOKENS).tokens == 16


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "dangling", "empty", "huge"])
@pytest.mark.parametrize("what", ["block", "manifest"])
def test_whatever_lies_in_place_of_a_file_is_a_miss(tmp_path, space, what, kind):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    path = block_of(space, TOKENS, 1) if what == "block" else space.lookup(TOKENS).steps[1].path
    path.rename(tmp_path / "real")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("link", "dangling"):
        path.symlink_to(tmp_path / ("real" if kind == "link" else "nothing"))
    else:
        path.touch()
        os.truncate(path, 0 if kind == "empty" else 1 << 40)
    assert restore(space, TOKENS).tokens == 16
    space.publish(TOKENS, [span(TOKENS, 16, 32)])
    assert restore(space, TOKENS).tokens == 32


def test_descriptors_are_closed_whatever_happens(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    before = highest_free(), len(os.listdir("/dev/fd"))

    def allocate(*_):
        raise KeyError("the engine is out of memory")

    with pytest.raises(KeyError):
        space.read(space.lookup(TOKENS), allocate)
    block_of(space, TOKENS, 1).write_bytes(b"")
    restore(space, TOKENS)
    assert (highest_free(), len(os.listdir("/dev/fd"))) == before


def test_descriptors_of_blocks_with_other_tensors_are_closed(space):
    """Looked at beside those before it, and once more when they were read."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    first = block_of(space, TOKENS, 0)
    data = first.read_bytes()
    first.write_bytes(bytes(len(data)))  # A publish that cannot see what is before it does not refuse it.
    space.publish(TOKENS, [Span(16, 16, SPECS[:1], kv(TOKENS, 16, 32, SPECS[:1]))])
    first.write_bytes(data)
    before = highest_free(), len(os.listdir("/dev/fd"))
    assert restore(space, TOKENS).tokens == 16
    assert (highest_free(), len(os.listdir("/dev/fd"))) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_descriptors_are_closed_when_opening_is_interrupted(space, monkeypatch, error):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    before = highest_free(), len(os.listdir("/dev/fd"))
    calls, real = [], kvstore.restore.read_specs

    def interrupted(head, ref):
        calls.append(ref)
        if len(calls) == 3:
            raise error
        return real(head, ref)

    with monkeypatch.context() as patch:
        patch.setattr(kvstore.restore, "read_specs", interrupted)
        with pytest.raises(error):
            space.read(space.lookup(TOKENS), Memory())
    assert (highest_free(), len(os.listdir("/dev/fd"))) == before
    assert restore(space, TOKENS).tokens == 40


def test_a_close_that_fails_takes_nothing_from_a_restore(space, monkeypatch):
    """Linux answers EIO and has closed it all the same."""
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    before, close, memory = highest_free(), os.close, Memory()

    def failing(fd):
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    def allocate(*wanted):
        patch.setattr(os, "close", failing)  # from here on blocks are closed, and nothing else
        return memory(*wanted)

    with monkeypatch.context() as patch:
        restored = space.read(space.lookup(TOKENS), allocate)
    assert restored.tokens == 40
    assert [memory.rows(spec, 0, 40) for spec in SPECS] == kv(TOKENS, 0, 40)
    assert highest_free() == before


class Clock:
    now = NOW

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def timed(tmp_path):
    """A namespace with three nodes published at NOW, their manifests in order, and its clock."""
    clock = Clock()
    space = open_store(tmp_path / "cache", clock=clock).namespace(INFO)
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    paths = [step.path for step in space.lookup(TOKENS).steps]
    for path in paths:
        FAST.touch(path, NOW)
    return space, paths, clock


def ages(paths, now: int) -> list[int]:
    return [round((now - path.stat().st_mtime_ns) / 60e9) for path in paths]


def test_a_restore_within_the_hour_touches_nothing(timed):
    space, paths, clock = timed
    clock.now = NOW + HOUR - 10**9
    restore(space, TOKENS)
    assert ages(paths, NOW) == [0, 0, 0]


def test_a_restore_after_an_hour_makes_the_whole_path_young(timed):
    space, paths, clock = timed
    clock.now = NOW + HOUR + 10**9
    restore(space, TOKENS)
    assert ages(paths, clock.now) == [0, 0, 0]


def test_a_parent_is_never_older_than_its_child(timed):
    """The parent was used through another branch half an hour ago; its child is due now."""
    space, paths, clock = timed
    clock.now = NOW + 2 * HOUR
    for path in paths[:2]:
        FAST.touch(path, clock.now - HOUR // 2)
    restore(space, TOKENS)
    assert ages(paths, clock.now) == [0, 0, 0]


def test_only_what_was_restored_is_made_young(timed):
    space, paths, clock = timed
    clock.now = NOW + 2 * HOUR
    restore(space, TOKENS[:32])
    assert ages(paths, clock.now) == [0, 0, 120]


def test_a_node_that_could_not_be_read_is_not_made_young(timed):
    space, paths, clock = timed
    block_of(space, TOKENS, 1).unlink()
    clock.now = NOW + 2 * HOUR
    restore(space, TOKENS)
    assert ages(paths, clock.now) == [0, 120, 120]


def test_a_file_time_in_the_future_is_left(timed):
    space, paths, clock = timed
    FAST.touch(paths[0], NOW + 5 * HOUR)
    clock.now = NOW + 2 * HOUR
    restore(space, TOKENS)
    assert ages(paths, clock.now) == [-180, 0, 0]


def test_blocks_of_a_longer_prompt_restore_a_shorter_one_only_to_its_nodes(space):
    space.publish(TOKENS, [Span(0, 16, SPECS, kv(TOKENS, 0, 16)), span(TOKENS, 16, 30)])
    assert restore(space, TOKENS[:29]).tokens == 16
    assert len(node_files(space._space.context.layout.root)) == 2


def test_what_was_used_is_remembered_within_bounds(tmp_path):
    store = open_store(tmp_path / "cache")
    paths = [str(tmp_path / str(number)) for number in range(40_000)]
    for path in paths:
        store.context.note_use([path])
    assert len(store.context.recent) <= 16_384
    assert paths[-1] in store.context.recent
    assert paths[0] not in store.context.recent


@pytest.mark.parametrize("size", [1 << 30, 1 << 39])
def test_a_header_alone_asks_for_no_memory(tmp_path, space, size):
    """A sparse file costs its maker nothing: its header may be honest, and its tensors of any size."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    path = space.lookup(TOKENS).steps[0].path
    head = block_head((TensorSpec("0.keys", "U8", 1, (size,)),), 0, 16, 0)
    ref = replace(decode(path.read_bytes()).blocks[0], size=len(head) + 16 * size, payload=len(head))
    block = block_files(tmp_path / "cache")[0]
    block.write_bytes(head)
    try:
        os.truncate(block, ref.size)
    except OSError as error:
        pytest.skip(f"no file of {ref.size} bytes here: {error.strerror}")
    path.write_bytes(encode(replace(decode(path.read_bytes()), blocks=(ref,))))

    def allocate(specs, _tokens):
        raise AssertionError(f"asked for {specs}")

    assert space.read(space.lookup(TOKENS), allocate).tokens == 0
    with open_store(tmp_path / "cache", None) as store, open_store(tmp_path / "other") as other:
        assert "mostly holes" in merge(store.context, other.context).problems[0]
        report = check(store.context, read_data=True)
        assert {finding.code for finding in report.findings} >= {"block-damaged", "manifest-unusable"}
        assert report.seconds < 5
