"""A model is known by its content: read once, remembered while its files stay as they are, never by name or place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import mlx.core as mx
import pytest
from mlx import nn
from pty_support import after, plain, run_at

from kvstore_mlx import weights
from kvstore_mlx.weights import Memory, parameters_digest, weights_digest


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path / "memory" / "weights.json")


@pytest.fixture
def reads(monkeypatch):
    """The files that were read, by name."""
    names: list[str] = []
    real = weights._read

    def counted(file, told):
        names.append(file.name)
        return real(file, told)

    monkeypatch.setattr(weights, "_read", counted)
    return names


def make(folder, **files: bytes):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return folder


def test_it_is_over_names_and_contents(tmp_path, memory):
    folder = make(tmp_path / "a", model_1=b"one", model_2=b"two", other=b"three")
    rows = [
        ["model_1.safetensors", hashlib.sha256(b"one").hexdigest()],
        ["model_2.safetensors", hashlib.sha256(b"two").hexdigest()],
    ]
    assert weights_digest(folder, "model*.safetensors", memory) == hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def test_a_renamed_or_copied_folder_is_the_same_model(tmp_path, memory):
    first = weights_digest(make(tmp_path / "a", model=b"weights"), "model*", memory)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert weights_digest(tmp_path / "b", "model*", memory) == first
    make(tmp_path / "b", model=b"Weights")
    assert weights_digest(tmp_path / "b", "model*", memory) != first


def test_files_are_read_once_across_processes(tmp_path, reads):
    folder = make(tmp_path / "a", model_1=b"one", model_2=b"two")
    path = tmp_path / "memory.json"
    first = weights_digest(folder, "model*", Memory(path))
    assert sorted(reads) == ["model_1.safetensors", "model_2.safetensors"]
    assert weights_digest(folder, "model*", Memory(path)) == first
    (tmp_path / "a").rename(tmp_path / "renamed")
    assert weights_digest(tmp_path / "renamed", "model*", Memory(path)) == first
    assert len(reads) == 2


def test_an_edit_in_place_is_seen_although_size_and_mtime_stay(tmp_path, memory, reads):
    folder = make(tmp_path / "a", model=b"one")
    before = weights_digest(folder, "model*", memory)
    status = (folder / "model.safetensors").stat()
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.write(b"two")
    os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (folder / "model.safetensors").stat().st_mtime_ns == status.st_mtime_ns
    assert weights_digest(folder, "model*", memory) != before
    assert len(reads) == 2


def test_a_hub_snapshot_is_not_read(tmp_path, memory, reads):
    name = hashlib.sha256(b"content").hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(b"content")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / name)
    linked = weights_digest(tmp_path / "snapshot", "model*", memory)
    assert reads == []
    # The same content in a plain folder is the same model.
    assert weights_digest(make(tmp_path / "plain", model=b"content"), "model*", memory) == linked


def test_a_link_elsewhere_is_read(tmp_path, memory, reads):
    lying = tmp_path / ("0" * 64)
    lying.write_bytes(b"content")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").symlink_to(lying)
    weights_digest(tmp_path / "a", "model*", memory)
    assert reads == ["model.safetensors"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 100_000, b'{"1:2:3:4:5": "short"}', b"\xff"])
def test_a_damaged_memory_costs_reading_again(tmp_path, reads, content):
    path = tmp_path / "memory.json"
    path.write_bytes(content)
    folder = make(tmp_path / "a", model=b"one")
    weights_digest(folder, "model*", Memory(path))
    weights_digest(folder, "model*", Memory(path))
    assert len(reads) == 1


def test_no_flipped_bit_in_the_memory_is_another_model(tmp_path, reads):
    """It would be one for as long as the file is remembered, and nothing that was saved would be found."""
    path = tmp_path / "memory.json"
    folder = make(tmp_path / "a", model_1=b"one", model_2=b"two")
    right = weights_digest(folder, "model*", Memory(path))
    data = path.read_bytes()
    statuses = [(folder / f"model_{number}.safetensors").stat() for number in (1, 2)]
    digests = [hashlib.sha256(content).hexdigest() for content in (b"one", b"two")]
    forgotten = 0
    for at in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            memory = Memory(path)
            found = [memory.get(status) for status in statuses]
            assert all(known in {None, digest} for known, digest in zip(found, digests, strict=True)), (at, bit)
            forgotten += found.count(None)
    assert forgotten > 8 * len(data)  # a whole file is lost with its braces, one row with a digit
    assert len(reads) == 2
    assert weights_digest(folder, "model*", Memory(path)) == right


def test_a_memory_of_an_older_version_costs_reading_again(tmp_path, reads):
    """It had no checksums."""
    folder = make(tmp_path / "a", model=b"one")
    status = (folder / "model.safetensors").stat()
    path = tmp_path / "memory.json"
    path.write_text(json.dumps({Memory._key(status): "0" * 64}))
    right = weights_digest(folder, "model*", Memory(path))
    assert reads == ["model.safetensors"]
    assert weights_digest(folder, "model*", Memory(path)) == right
    assert len(reads) == 1


def test_a_memory_that_cannot_be_written_is_let_be(tmp_path, reads):
    (tmp_path / "file").write_text("in the way")
    folder = make(tmp_path / "a", model=b"one")
    for _ in range(2):
        weights_digest(folder, "model*", Memory(tmp_path / "file" / "weights.json"))
    assert len(reads) == 2


class TestParameters:
    """Models that are no files are told apart by what they hold."""

    def digest(self, dtype=mx.float32, **changes):
        layer = nn.Linear(4, 3)
        layer.update({"weight": mx.arange(12).reshape(3, 4).astype(dtype), "bias": mx.zeros(3, dtype), **changes})
        return parameters_digest(layer)

    def test_content_counts(self):
        base = self.digest()
        assert self.digest() == base
        changed = mx.arange(12).reshape(3, 4).astype(mx.float32)
        changed[2, 3] = -1
        others = {
            self.digest(weight=changed),
            self.digest(bias=mx.ones(3)),
            self.digest(mx.float16),
            self.digest(weight=mx.arange(12).reshape(4, 3).astype(mx.float32)),
        }
        assert len(others | {base}) == 5

    def test_a_view_counts_by_its_content(self):
        """Parameters may be strided views; a memoryview of one covers more than it."""
        whole = mx.arange(24).reshape(3, 8).astype(mx.float32)
        view = whole[:, ::2]
        assert self.digest(weight=view) == self.digest(weight=mx.contiguous(view))


def test_a_bar_tells_how_much_was_read(tmp_path, memory, monkeypatch):
    from contextlib import contextmanager

    from kvstore.cli import common

    told = []

    @contextmanager
    def bar(text):
        assert "weights" in text
        yield lambda done, total: told.append((done, total))

    monkeypatch.setattr(common, "bar", bar)
    monkeypatch.setattr(weights, "_READ", 1000)
    folder = make(tmp_path / "a", model_1=bytes(2500), model_2=bytes(1500))
    weights_digest(folder, "model*.safetensors", memory)
    assert told == []  # that is read in no time
    monkeypatch.setattr(weights, "_SAY_ABOVE", 100)
    weights_digest(make(tmp_path / "b", model_1=bytes(2501), model_2=bytes(1501)), "model*.safetensors", memory)
    assert max(told) == (4002, 4002)
    assert {total for _, total in told} == {4002}


def test_the_bar_is_drawn_while_a_model_is_loaded(tmp_path, tiny_llama):
    """By the real command, with a model that is too small to be worth one."""
    words = ["generate", "--model", tiny_llama, "--prompt", "why?", "--max-tokens", "2", "--verbose", "False"]
    program = after("from kvstore_mlx import weights", "weights._SAY_ABOVE = 0")
    answers = []
    for terminal in ("err", None):
        # Each with a cache folder of its own, in which nothing is remembered.
        env = {"XDG_CACHE_HOME": str(tmp_path / f"{terminal}"), "HOME": str(tmp_path / f"{terminal}")}
        seen = run_at(terminal, *words, "--kv-cache-dir", tmp_path / f"kv-{terminal}", program=program, env=env)
        assert seen.code == 0, seen
        assert ("reading the model's weights" in plain(seen.err)) == ("\u2501" in seen.err) == (terminal == "err")
        answers.append(seen.out)
    assert answers[0] == answers[1] != ""
