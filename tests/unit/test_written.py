"""What a publish wrote is counted, whatever became of it."""

from __future__ import annotations

import pytest
from core_support import block_files, node_files, open_store, prompt, restore, spans

import kvstore.commit
from kvstore import LockTimeoutError, MissingParentError, NamespaceInfo
from kvstore.locks import publish_lock
from kvstore.states import State, StateTensor

TOKENS = prompt(40)
STATE = State((StateTensor("1.keys", "F32", (1, 4)),), [bytes(16)])


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.locks.publish_lock.__wrapped__.__defaults__", (0.01,))
    with open_store(tmp_path / "cache") as made:
        yield made


@pytest.fixture
def space(store):
    return store.namespace(NamespaceInfo({"model": "written"}))


def size_of(paths) -> int:
    return sum(path.stat().st_size for path in paths)


def test_as_many_bytes_are_counted_as_were_written_and_as_are_there(store, space):
    published = space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    kept = size_of([*block_files(store.path), *node_files(store.path)])
    assert store.context.counters.written_bytes == published.written == kept
    assert store.context.counters.published_nodes == published.nodes == 3
    again = space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    assert (again.written, again.nodes, store.context.counters.written_bytes) == (0, 0, kept)
    state = space.publish_state(TOKENS, STATE)
    assert store.context.counters.written_bytes == kept + state.written
    assert store.context.counters.published_nodes == 4


def test_a_block_whose_commit_fails_is_counted(store, space):
    """It stays until its grace time ends, whoever goes on."""
    with publish_lock(store.context.layout), pytest.raises(LockTimeoutError):
        space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    assert store.context.counters.written_bytes == size_of(block_files(store.path)) > 0
    assert store.context.counters.published_nodes == 0
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    before = store.context.counters.written_bytes
    with publish_lock(store.context.layout), pytest.raises(LockTimeoutError):
        space.publish_state(TOKENS[:16], STATE)
    assert store.context.counters.written_bytes > before
    assert store.context.counters.written_bytes == size_of([*block_files(store.path), *node_files(store.path)])


def test_what_came_before_a_hole_is_counted(store, space, monkeypatch):
    """The parent of the third went while the third was written."""
    commit, done = store.context.fs.rename, []

    def rename(source, target):
        if target.suffix == ".kv":
            done.append(target)
        if len(done) == 2 and target.suffix != ".kv":
            done.pop().unlink()
        commit(source, target)

    monkeypatch.setattr(type(store.context.fs), "rename", lambda _fs, source, target: rename(source, target))
    with pytest.raises(MissingParentError):
        space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 40))
    counters = store.context.counters
    assert counters.published_nodes == 2
    assert counters.written_bytes > size_of([*block_files(store.path), *node_files(store.path)]), "and what went"


@pytest.mark.parametrize("moment", ["the block's folder is made", "the block is durable", "the manifest is durable"])
def test_of_two_who_publish_the_same_one_is_counted(store, space, moment, monkeypatch):
    """The other one does all of it at some moment of the first."""
    other = open_store(store.path)
    space._describe()
    fs, left = type(store.context.fs), [1 if moment.startswith("the manifest") else 0]

    def act():
        if left and not left[0]:
            left.clear()
            other.namespace(NamespaceInfo({"model": "written"})).publish(TOKENS, spans(TOKENS, 0, 16))
        elif left:
            left[0] -= 1

    make_dir, sync_file = fs.make_dir, fs.sync_file
    if moment.endswith("made"):
        monkeypatch.setattr(
            fs, "make_dir", lambda fs, path: make_dir(fs, path) and path.parent.name == "blocks" and act()
        )
    else:
        monkeypatch.setattr(fs, "sync_file", lambda fs, fd: (sync_file(fs, fd), act()))
    assert space.publish(TOKENS, spans(TOKENS, 0, 16)).nodes == 0
    assert left == []
    counted = [each.context.counters.snapshot() for each in (store, other)]
    kept = size_of([*block_files(store.path), *node_files(store.path)])
    assert sum(each["written_bytes"] for each in counted) == kept
    assert sum(each["published_nodes"] for each in counted) == 1


def test_a_block_that_another_heals_before_the_lock_is_taken_is_kept_once(store, space, monkeypatch):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (block,), (node,) = block_files(store.path), node_files(store.path)
    node.unlink()
    whole = block.read_bytes()
    block.write_bytes(b"short")
    real = kvstore.commit.kept_open

    def heal(fs, path):
        block.write_bytes(whole)
        return real(fs, path)

    monkeypatch.setattr(kvstore.commit, "kept_open", heal)
    published = space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert (published.nodes, published.blocks, published.written) == (1, 0, node.stat().st_size)
    assert restore(space, TOKENS).tokens == 16
    assert not list((store.path / "quarantine").iterdir())
    assert not [path for path in (store.path / "tmp").rglob("*") if path.is_file()]
