"""What a process remembers as damaged is damaged, and forgotten when a restore has read it whole.

Found by tests/stress/test_faults.py: a block that could not be opened once, or that another process has healed since,
was restored as part of a tail, and then every publish from there was refused for as long as the process ran.

Found by review: any error of reading counted as damage, so a publish that was out of descriptors once hid its whole
prefix, and the next one put healthy files into quarantine.
"""

from __future__ import annotations

import errno
import os

import pytest
from core_support import INFO, block_files, node_files, open_store, prompt, restore, span, spans

import kvstore.commit
from kvstore import Store, UnavailableError

TOKENS = prompt(40)


@pytest.fixture
def other(tmp_path, store) -> Store:
    """Another process's store."""
    return open_store(tmp_path / "cache")


def test_a_block_that_another_process_healed_can_be_built_upon(tmp_path, store, space, other):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (shared,) = block_files(tmp_path / "cache")
    space.publish(TOKENS, spans(TOKENS, 5, 16))
    whole = shared.read_bytes()
    shared.write_bytes(whole[:-1] + b"?")
    (_, full) = node_files(tmp_path / "cache")
    assert restore(space, TOKENS).tokens == 0
    assert {full, shared} <= store.context.damaged
    # The other one publishes it again; this one does not know, and the tail it finds is whole.
    for _ in range(3):
        restored = restore(other.namespace(INFO), TOKENS)
        borders = [border for border in (5, 16) if border > restored.border]
        if not borders:
            break
        other.namespace(INFO).publish(TOKENS, spans(TOKENS, restored.border, *borders))
    assert shared.read_bytes() == whole
    for _ in range(3):
        border = restore(space, TOKENS).border
        if border == 16:
            break
        space.publish(TOKENS, [span(TOKENS, border, 16)])
    assert restore(space, TOKENS).tokens == 16


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_block_that_could_not_be_opened_once_can_be_built_upon(tmp_path, store, space, monkeypatch, code):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (shared,) = block_files(tmp_path / "cache")
    space.publish(TOKENS, spans(TOKENS, 5, 16))
    real = os.open

    def refusing(path, *arguments, **named):
        if os.fspath(path) == str(shared):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **named)

    with monkeypatch.context() as failing:
        failing.setattr(os, "open", refusing)
        assert restore(space, TOKENS).tokens == 0
    assert store.context.damaged == ({shared} if code == errno.EIO else set())
    assert (store.counters.damaged, store.counters.missing) == (0, 1)
    assert restore(space, TOKENS).tokens == 16
    space.publish(TOKENS, spans(TOKENS, 5, 16, 32))
    assert restore(space, TOKENS).tokens == 32


def test_a_block_that_a_reader_reports_when_it_has_just_been_replaced_can_be_built_upon(store, space, monkeypatch):
    """It had opened the damaged file before, and says so while the publish that healed it commits."""
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    real = kvstore.commit.publish_lock

    def lock(layout):
        store.context.damaged.update(block_files(store.path))
        return real(layout)

    monkeypatch.setattr(kvstore.commit, "publish_lock", lock)
    assert space.publish(TOKENS, spans(TOKENS, 5, 16)).nodes == 1
    assert restore(space, TOKENS).tokens == 16


def test_what_was_found_damaged_stays_so_when_nothing_could_take_its_place(tmp_path, store, space, monkeypatch):
    """Only what the publish itself took for damaged is doubtful."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (node,) = node_files(tmp_path / "cache")
    node.write_bytes(b"damaged")
    assert restore(space, TOKENS).tokens == 0

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as failing:
        failing.setattr(store.context.staging, "create", full)
        with pytest.raises(UnavailableError):
            space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert space.lookup(TOKENS).count == 0
    assert store.counters.damaged == 1


def test_a_state_that_cannot_be_looked_for_is_a_miss(space, monkeypatch):
    """lookup never raises OSError: not from the one stat that asks for a boundary state either."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    real = os.stat

    def failing(path, **named):
        if str(path).endswith(".state"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **named)

    monkeypatch.setattr(os, "stat", failing)
    assert space.lookup(TOKENS, trimmable=False).count == 0
    assert space.lookup(TOKENS).count == 16


def test_a_staging_folder_that_was_made_and_not_synced_is_removed(tmp_path, store, space, monkeypatch):
    """Found by tests/stress/test_faults.py: each failed publish left an empty folder in tmp/."""
    fs = type(store.context.fs)
    real = fs.sync_dir

    def failing(self, path):
        if path.name == "tmp":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, path)

    monkeypatch.setattr(fs, "sync_dir", failing)
    for _ in range(3):
        with pytest.raises(Exception, match="Input/output error"):
            store.check_writable()
        monkeypatch.setattr(fs, "sync_dir", real)
        store.check_writable()
        monkeypatch.setattr(fs, "sync_dir", failing)
        store.close()
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
