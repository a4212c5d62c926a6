"""What cannot be read just now is no damage: it is neither hidden nor replaced, whoever asks. But a block that the disk
says it cannot give (EIO) gets a new file from whoever publishes its bytes.

Found by review: one publish without descriptors, or one stale handle, and healthy files went to quarantine, or a newer
kvstore's manifest was replaced.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass, field

import pytest
from core_support import INFO, block_files, files, node_files, open_store, prompt, restore, span, spans
from gc_support import as_newer, state

import kvstore.fs
from kvstore import (
    Durability,
    FileSystem,
    FormatVersionError,
    MissingParentError,
    Span,
    State,
    StateTensor,
    UnavailableError,
)
from kvstore.manifest import decode
from kvstore.merge import merge
from kvstore.takeover import take_over

TOKENS = prompt(48)
PASSING = [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM, errno.EINTR]
NAMES = [errno.errorcode[code] for code in PASSING]


@dataclass(frozen=True)
class Failing(FileSystem):
    """Answers an error (0: none) the next times that a file whose name ends so is opened, the last of them first."""

    durability: Durability = Durability.NONE
    errors: list[int] = field(default_factory=list)
    suffix: list[str] = field(default_factory=lambda: [".kv"])

    def open_fd(self, path):
        if str(path).endswith(self.suffix[0]) and self.errors and (code := self.errors.pop()):
            raise OSError(code, os.strerror(code), str(path))
        return super().open_fd(path)


@pytest.fixture
def fs() -> Failing:
    return Failing()


@pytest.fixture
def store(tmp_path, fs):
    return open_store(tmp_path / "cache", fs=fs)


def set_aside(store) -> list[str]:
    return os.listdir(store.context.layout.quarantine)


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_manifest_that_cannot_be_read_is_not_written_again(store, space, fs, code, times):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    before = files(store.path)
    for _ in range(2):
        fs.errors[:] = [code] * times
        with pytest.raises(UnavailableError):
            space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
        fs.errors.clear()
        assert space.lookup(TOKENS).count == 48
        assert space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48)).nodes == 0
    assert files(store.path) == before
    assert store.counters.damaged == 0
    assert store.counters.failed_publishes == 2


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
def test_a_block_that_cannot_be_looked_at_is_not_written_again(store, space, monkeypatch, code):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (block,) = block_files(store.path)
    before = files(store.path)
    real = os.stat

    def failing(path, **named):
        if str(path) == str(block):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        with pytest.raises(UnavailableError):
            space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert store.context.damaged == set()
    assert space.publish(TOKENS, spans(TOKENS, 0, 16)).nodes == 0
    assert files(store.path) == before


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_block_that_cannot_be_read_ends_a_restore_and_nothing_else(store, space, monkeypatch, call, code, caplog):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    real, calls = getattr(os, call), []

    def failing(fd, *arguments):
        if os.fstat(fd).st_ino == inode:
            calls.append(fd)
            raise OSError(code, os.strerror(code))
        return real(fd, *arguments)

    third = store.context.layout.block(refs_of(space)[2])
    inode = third.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert restore(space, TOKENS).tokens == 32
    assert calls
    assert store.context.damaged == ({third} if code == errno.EIO else set())
    assert store.counters.damaged == 0
    assert store.counters.missing == (code not in (errno.EMFILE, errno.ENFILE))
    assert [record.message for record in caplog.records] == [
        f"kvstore: block {third} cannot be read now ({os.strerror(code)}); computing from token 32"
    ]
    assert restore(space, TOKENS).tokens == 48
    assert store.context.damaged == set()


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_blocks_that_the_disk_does_not_read_are_set_aside_by_a_publish_of_their_bytes(store, space, monkeypatch, call):
    """A bad sector: each request read into it, computed the rest, and could not save it."""
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    space.publish_state(TOKENS, state())
    manifest = decode(space.lookup(TOKENS).steps[-1].path.with_suffix(".state").read_bytes())
    lost = [*refs_of(space)[1:], manifest.blocks[0].digest]
    real, bad = getattr(os, call), {store.context.layout.block(digest).stat().st_ino for digest in lost}

    def failing(fd, *arguments):
        if os.fstat(fd).st_ino in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *arguments)

    monkeypatch.setattr(os, call, failing)
    for _ in range(3):
        if (border := restore(space, TOKENS).border) < 48:
            space.publish(TOKENS, spans(TOKENS, border, *range(border + 16, 49, 16)))
        if read_state(space, TOKENS) is None:
            space.publish_state(TOKENS, state())
    assert restore(space, TOKENS).tokens == 48
    assert read_state(space, TOKENS) == {"n": 0}
    assert store.context.damaged == set()
    assert len([name for name in set_aside(store) if "-" not in name]) == len(lost)


def test_a_block_not_read_once_does_not_hide_its_node_when_the_publish_fails_too(store, space, monkeypatch):
    """The disk is full, or may only be read since its error."""
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    space.publish_state(TOKENS, state())

    def failed(code):
        def call(*_arguments):
            raise OSError(code, os.strerror(code))

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failed(errno.EIO))
        assert restore(space, TOKENS).tokens == 0
        assert read_state(space, TOKENS) is None
        patch.setattr(store.context.staging, "create", failed(errno.EROFS))
        for start in (0, 16, 32):
            with pytest.raises(UnavailableError):
                space.publish(TOKENS, spans(TOKENS, start, start + 16))
        with pytest.raises(UnavailableError):
            space.publish_state(TOKENS, state())
    assert restore(space, TOKENS).tokens == 48
    assert read_state(space, TOKENS) == {"n": 0}
    assert store.context.damaged == set()


def read_state(space, tokens):
    match = space.lookup(tokens, trimmable=False)
    return space.read_state(match, lambda tensors: {each.name: memoryview(bytearray(3)) for each in tensors})


def refs_of(space) -> list[bytes]:
    return [ref.digest for step in space.lookup(TOKENS).steps for ref in decode(step.path.read_bytes()).blocks]


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
@pytest.mark.parametrize("what", ["manifest", "block"])
def test_a_state_that_cannot_be_read_is_a_miss_once(store, space, fs, what, code):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    before = set(block_files(store.path))
    space.publish_state(TOKENS[:16], state())
    (block,) = set(block_files(store.path)) - before
    fs.suffix[0] = ".state" if what == "manifest" else block.name
    fs.errors.append(code)
    assert read_state(space, TOKENS[:16]) is None
    assert store.counters.missing == (code not in (errno.EMFILE, errno.ENFILE))
    assert store.counters.damaged == 0
    assert store.context.damaged == ({block} if (what, code) == ("block", errno.EIO) else set())
    assert space.lookup(TOKENS[:16], trimmable=False).count == 16
    assert read_state(space, TOKENS[:16]) == {"n": 0}
    assert store.context.damaged == set()


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
@pytest.mark.parametrize("times", range(1, 5))
@pytest.mark.parametrize("known", [False, True], ids=["not looked at yet", "known as unusable"])
def test_a_newer_manifest_is_never_replaced(store, space, fs, code, times, known):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (path,) = node_files(store.path)
    as_newer(path)
    before = files(store.path)
    if known:
        with pytest.raises(FormatVersionError):
            space.publish(TOKENS, spans(TOKENS, 0, 16))
    fs.errors[:] = [code] * times
    with pytest.raises((UnavailableError, FormatVersionError)):
        space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert files(store.path) == before


def test_a_newer_manifest_is_not_replaced_when_only_the_commit_cannot_read_it(store, space, fs, monkeypatch):
    """It was damage when the publish began; the newer kvstore came in between."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (path,) = node_files(store.path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    real = kvstore.commit.stage

    def meanwhile(*args):
        path.write_bytes(whole)
        as_newer(path)
        fs.errors[:] = [errno.EACCES]
        return real(*args)

    monkeypatch.setattr(kvstore.commit, "stage", meanwhile)
    with pytest.raises(UnavailableError):
        space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert path.read_bytes() != whole
    assert set_aside(store) == []
    assert not [each for each in (store.path / "tmp").rglob("*") if each.is_file()]


@pytest.mark.parametrize("what", ["link", "folder", "fifo", "large"])
def test_what_cannot_be_a_file_of_ours_is_replaced(store, space, what):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (path,) = node_files(store.path)
    path.unlink()
    if what == "link":
        path.symlink_to("/nowhere")
    elif what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(bytes(5 << 20))
    assert space.publish(TOKENS, spans(TOKENS, 0, 16)).nodes == 1
    assert len(set_aside(store)) == 1
    assert restore(space, TOKENS).tokens == 16


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
def test_merge_leaves_a_manifest_that_it_cannot_read(tmp_path, store, space, fs, code):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    before = files(store.path)
    with open_store(tmp_path / "source") as source:
        source.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16, 32))
        fs.errors.append(code)
        report = merge(source.context, store.context)
    assert report.error == ""
    assert report.damaged == 1
    assert "cannot be read" in report.problems[0]
    assert set_aside(store) == []
    assert files(store.path).items() >= before.items()
    assert restore(space, TOKENS).tokens == 32


@pytest.mark.parametrize("code", PASSING, ids=NAMES)
def test_merge_leaves_a_damaged_manifest_that_may_be_a_newer_one(tmp_path, store, space, fs, code):
    """It was read, and cannot be read again to see of which version it is."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (target,) = node_files(store.path)
    target.write_bytes(b"damaged")
    with open_store(tmp_path / "source") as source:
        source.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16, 32))
        fs.errors.extend((code, 0))
        report = merge(source.context, store.context)
    assert fs.errors == []
    assert (report.error, report.damaged, report.nodes) == ("", 1, 1)
    assert "cannot be read" in report.problems[0]
    assert target.read_bytes() == b"damaged"


# Copies of another user's files: kvstore.takeover.


def test_a_copy_that_vanished_is_no_file_that_vanished(store, space, monkeypatch):
    """It would pass for a file that is young now."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (path,) = node_files(store.path)
    inode = path.stat().st_ino
    real = kvstore.takeover._copied

    def swept(*args):
        copy = real(*args)
        copy.unlink()
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(kvstore.takeover, "_copied", swept)
        with pytest.raises(FileNotFoundError):
            take_over(store.context, path)
    assert path.stat().st_ino == inode
    assert take_over(store.context, path) == path.stat().st_size
    path.unlink()
    assert take_over(store.context, path) == 0


def test_a_file_that_is_little_more_than_a_size_is_not_copied(store, space, monkeypatch):
    """A sparse one of terabytes is quickly made: it would be read, and take room, to its end."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (path,) = block_files(store.path)
    os.truncate(path, 1 << 30)
    monkeypatch.setattr(FileSystem, "write", lambda *_: pytest.fail("copied"))
    with pytest.raises(MissingParentError, match="is damaged"):
        take_over(store.context, path)
    assert path in store.context.damaged


def test_a_copy_keeps_the_pace(store, space):
    rests = []
    store.context.pace._sleep = rests.append
    data = bytes(8 << 20)
    specs = (kvstore.TensorSpec("k", "U8", 1, (len(data) // 16,)),)
    space.publish(TOKENS, [Span(0, 16, specs, [data])])
    (path,) = block_files(store.path)
    store.context.pace.share = lambda: 0.5
    assert take_over(store.context, path) == path.stat().st_size
    assert rests


# Arrays without elements, which no memoryview can cast.


@pytest.mark.parametrize("share", [None, lambda: 1.0])
def test_a_tensor_without_elements_is_published(store, space, share):
    store.context.pace.share = share
    none = (ctypes.c_float * 4 * 0)()
    assert memoryview(none).shape == (0, 4)
    whole = span(TOKENS, 0, 16)
    space.publish(TOKENS, [Span(0, 16, whole.specs, [none, *whole.data, none])])
    assert restore(space, TOKENS).tokens == 16
    tensors = (StateTensor("z", "F32", (0, 4)), StateTensor("s", "U8", (3,)), StateTensor("e", "F32", (0, 4)))
    assert space.publish_state(TOKENS[:16], State(tensors, [none, b"abc", none], {})).nodes == 1
    memory = {"s": memoryview(bytearray(3)), "z": memoryview(none), "e": memoryview(none)}
    match = space.lookup(TOKENS[:16], trimmable=False)
    assert space.read_state(match, lambda _: memory) == {}
    assert bytes(memory["s"]) == b"abc"
