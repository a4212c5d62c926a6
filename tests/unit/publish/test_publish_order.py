"""In which order a publish writes, and what another process may do meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import FAST, INFO, SPECS, node_files, open_store, prompt, restore, span, spans
from crash_support import where
from gc_support import manifests, state

from kvstore import FileSystem, KVStoreError, MissingParentError, PublishError, Span, State

TOKENS = prompt(100)


@dataclass(frozen=True)
class Recording(FileSystem):
    """Remembers what was done, with what a test wants to know about each call."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    lock: Path | None = None
    free: list[bool] = field(default_factory=list)

    def write(self, fd, parts):
        self.calls.append(("write", ""))
        if self.lock is not None:
            with self.lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.free.append(True)
        return super().write(fd, parts)

    def sync_file(self, fd):
        self.calls.append(("sync", ""))

    def sync_dir(self, path):
        self.calls.append(("sync_dir", where(path)))

    def rename(self, source, target):
        self.calls.append(("rename", where(target.parent)))
        super().rename(source, target)


def test_data_are_durable_before_the_manifest_gets_its_name(tmp_path):
    fs = Recording()
    space = open_store(tmp_path / "cache", fs=fs).namespace(INFO)
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    fs.calls.clear()
    space.publish(TOKENS, [span(TOKENS, 5, 9)])
    written, synced = ("write", ""), ("sync", "")
    block = [written, synced, ("rename", "blocks"), ("sync_dir", "blocks")]
    manifest = [written, synced, ("rename", "nodes"), ("sync_dir", "nodes")]
    # The first sync of a folder is that of a new fan-out folder into its parent.
    assert [call for call in fs.calls if call != ("sync_dir", "tmp")] in (
        block + manifest,
        [written, synced, ("sync_dir", "blocks"), *block[2:], *manifest],
    )


def test_the_name_of_a_block_that_is_there_is_durable_before_the_manifest_gets_its_own(tmp_path):
    """Who gave it that name may have been killed before it was: a power cut would take it from under the manifest."""
    with open_store(tmp_path / "cache") as other:
        other.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 5))
        node_files(other.path)[0].unlink()
    fs = Recording()
    space = open_store(tmp_path / "cache", fs=fs).namespace(INFO)
    fs.calls.clear()
    assert space.publish(TOKENS, spans(TOKENS, 0, 5)).blocks == 0
    assert fs.calls.index(("sync_dir", "blocks")) < fs.calls.index(("rename", "nodes"))
    assert ("rename", "blocks") not in fs.calls


def test_nothing_is_written_under_the_publish_lock(tmp_path):
    """Another process could take the lock during every write."""
    layout = open_store(tmp_path / "cache").context.layout
    fs = Recording(lock=layout.lock("publish"))
    open_store(tmp_path / "cache", fs=fs).namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16, 20))
    assert len(fs.free) == len([call for call in fs.calls if call[0] == "write"]) == 5


@dataclass(frozen=True)
class Sweeping(FileSystem):
    """A collector in another process that removes a file at the moment it is to be touched."""

    what: str = "blocks"
    left: list[int] = field(default_factory=lambda: [1])

    def touch(self, path, time_ns):
        if self.what in path.parts and self.left:
            self.left.pop()
            path.unlink()
        return super().touch(path, time_ns)


def test_a_block_that_is_swept_away_before_the_commit_is_noticed_under_the_lock(tmp_path):
    with open_store(tmp_path / "cache") as store:
        store.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 5))
    with open_store(tmp_path / "cache", fs=Sweeping()) as store:
        with pytest.raises(MissingParentError, match="removed meanwhile"):
            store.namespace(INFO).publish(TOKENS, [span(TOKENS, 5, 9)])
        assert len(node_files(tmp_path / "cache")) == 1
        assert [path for path in (tmp_path / "cache" / "tmp").rglob("*") if path.is_file()] == []
    assert os.listdir(tmp_path / "cache" / "tmp") == []


def test_a_block_that_is_swept_away_while_it_is_made_young_is_written_again(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    node_files(tmp_path / "cache")[0].unlink()
    swept = open_store(tmp_path / "cache", fs=Sweeping()).namespace(INFO)
    swept.publish(TOKENS, spans(TOKENS, 0, 5))
    assert restore(swept, TOKENS).tokens == 5


def test_a_parent_that_is_swept_away_before_the_commit_is_noticed(tmp_path):
    open_store(tmp_path / "cache").namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16))
    store = open_store(tmp_path / "cache", fs=Sweeping(what="nodes"))
    with pytest.raises(KVStoreError):
        store.namespace(INFO).publish(TOKENS, [span(TOKENS, 16, 20)])
    assert node_files(tmp_path / "cache") == []


def test_a_kv_that_is_swept_away_before_its_state_commits_is_noticed(tmp_path):
    open_store(tmp_path / "cache").namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16))
    store = open_store(tmp_path / "cache", fs=Sweeping(what="nodes"))
    with pytest.raises(MissingParentError):
        store.namespace(INFO).publish_state(TOKENS[:16], state())
    assert manifests(store.path) == []


def test_a_failed_publish_leaves_no_staged_file(tmp_path, store, space):
    with pytest.raises(PublishError):
        space.publish(TOKENS, [*spans(TOKENS, 0, 16), Span(16, 4, SPECS, [])])
    assert [path for path in (tmp_path / "cache" / "tmp").rglob("*") if path.is_file()] == []
    store.close()
    assert FAST.read_file(tmp_path / "cache" / "kvstore.json", 1000)


def put(store, space, kind):
    if kind == "tokens":
        store.tokenizations(b"scope").put(b"request", bytes(8))
    else:
        space.publish(TOKENS, spans(TOKENS, 0, 16))


@pytest.mark.parametrize("kind", ["blocks", "nodes", "tokens"])
def test_what_cannot_get_its_name_leaves_no_staged_file(store, space, monkeypatch, kind):
    """A server may go on for months, and try again with each prompt."""
    real = FileSystem.rename

    def refusing(fs, source, target):
        if kind in target.parts:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        real(fs, source, target)

    monkeypatch.setattr(FileSystem, "rename", refusing)
    with pytest.raises((OSError, KVStoreError)):
        put(store, space, kind)
    assert [path for path in (store.path / "tmp").rglob("*") if path.is_file()] == []


def test_a_state_of_nothing_is_refused_and_counted(store, space):
    with pytest.raises(PublishError, match="nothing to publish"):
        space.publish_state([], State((), ()))
    assert store.counters.failed_publishes == 1
    with pytest.raises(PublishError, match="nothing to publish"):
        space.standing([])


def test_what_is_there_already_is_told_of_a_node_and_of_its_state(store, space):
    assert not space.has_node([])
    assert not space.has_node(TOKENS[:16])
    space.publish(TOKENS[:16], [span(TOKENS, 0, 16)])
    assert space.has_node(TOKENS[:16])
    assert not space.has_node(TOKENS[:15])
    assert not space.has_node(TOKENS[:16], "state")
    space.publish_state(TOKENS[:16], State((), ()))
    assert space.has_node(TOKENS[:16], "state")
    assert store.counters.lookups == 0
    path = space.lookup(TOKENS[:16]).steps[0].path
    path.unlink()
    path.mkdir()
    assert not space.has_node(TOKENS[:16])


def test_a_flipped_bit_in_the_name_of_a_tensor_refuses_nothing(tmp_path, space):
    """It is damage, which the next restore finds and the next publish heals; the tensors that come are right."""
    space.publish(TOKENS[:12], [span(TOKENS, 0, 12)])
    (block,) = (tmp_path / "cache" / "objects" / "blocks").rglob("*/*")
    block.write_bytes(block.read_bytes().replace(b'"0.keys"', b'"0.kexs"', 1))
    assert space.publish(TOKENS[:14], [span(TOKENS, 12, 14)]).nodes == 1
    assert restore(space, TOKENS[:14]).tokens == 0
    assert space.publish(TOKENS[:14], [span(TOKENS, 0, 14)]).nodes == 1
    assert restore(space, TOKENS[:14]).tokens == 14
