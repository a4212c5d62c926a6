"""Spans and states reach the disk in order, never with NaN; what a lying disk makes of them turns caching off."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from recording_support import SPECS, FakeLive, fake_plan, state_at

from kvstore import FileSystem, NamespaceInfo, Span
from kvstore.keys import pack_tokens
from kvstore.states import State, StateTensor
from kvstore_mlx.forms import Form
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.jobs import Boundary, Job
from kvstore_mlx.verification import differs
from kvstore_mlx.writer import Writer

TOKENS = list(range(1, 601))


@pytest.fixture
def form(store):
    return Form(fake_plan(stateful=True), store.namespace(NamespaceInfo({"model": "fake"})))


def span(first: int, end: int) -> Span:
    return Span(first, end - first, SPECS, FakeLive(end).copy(first, end))


def boundary(end: int, **more) -> Boundary:
    return Boundary(end, FakeLive(end).state(decode=False, **more))


def with_tensor(dtype: str, data: np.ndarray) -> Boundary:
    tensors = (StateTensor("1.keys", dtype, data.shape),)
    return Boundary(100, State(tensors, [data.view(np.uint8).reshape(-1)]))


def job(form: Form, *items) -> Job:
    tokens = pack_tokens(TOKENS[: max(item.end for item in items)])
    return Job(form, tokens, list(items))


def test_spans_and_states_in_order(form, writer):
    assert writer.offer(job(form, span(0, 100), boundary(100), span(100, 128), boundary(128), span(128, 200)))
    assert writer.drain(10)
    assert form.namespace.lookup(TOKENS).count == 200
    assert [state_at(form, TOKENS[:end]) for end in (100, 128, 200)] == [{"tokens": 100}, {"tokens": 128}, None]


def test_a_state_without_its_rows_is_not_written(form, writer, caplog):
    alone = job(form, boundary(100))
    assert writer.offer(alone)
    assert writer.drain(10)
    assert alone.fate.broken
    assert form.namespace.lookup(TOKENS, trimmable=False).count == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "bad",
    [
        with_tensor("F32", np.array([1.0, np.nan], np.float32)),
        with_tensor("F32", np.array([[np.inf, 1.0]], np.float32)),
        with_tensor("F16", np.array([-np.inf, 1.0], np.float16)),
        with_tensor("BF16", np.array([0x3F80, 0x7FC0], np.uint16)),
    ],
    ids=["NaN", "infinity", "half", "bfloat16"],
)
def test_nan_in_a_state_is_not_saved(form, writer, caplog, bad):
    whole = job(form, span(0, 100), bad, span(100, 128))
    assert writer.offer(whole)
    assert writer.drain(10)
    assert "NaN or infinity" in caplog.text
    assert whole.fate.broken
    # What came before is there; what came after would have been computed from it.
    assert form.namespace.lookup(TOKENS).count == 100
    assert form.namespace.lookup(TOKENS, trimmable=False).count == 0


def test_integers_that_look_like_nan_are_saved(form, writer):
    """A quantized or counting tensor may hold any bits."""
    item = with_tensor("U32", np.array([0x7FC00000, 0xFFFFFFFF], np.uint32))
    assert writer.offer(job(form, span(0, 100), item))
    assert writer.drain(10)
    assert form.namespace.lookup(TOKENS, trimmable=False).count == 100


class TestVerification:
    """Once a namespace and process what was published is read back: a disk that lies turns caching off."""

    @staticmethod
    def lie(monkeypatch, part: bytes) -> list[int]:
        """A disk that flips a byte of every write that holds these bytes, before the digest could know."""
        real = FileSystem.write
        flipped = []

        def write(self, fd, parts):
            made = []
            for one in parts:
                data = bytearray(memoryview(one).cast("B"))
                if part in data:
                    at = data.index(part)
                    data[at] ^= 1
                    flipped.append(at)
                made.append(bytes(data))
            return real(self, fd, made)

        monkeypatch.setattr(FileSystem, "write", write)
        return flipped

    def test_a_disk_that_returns_other_bytes(self, form, store, caplog, monkeypatch):
        """Found by the digest at once, which makes it a miss; nothing wrong is ever served."""
        writer = Writer(Housekeeping(store, 1 << 30))
        flipped = self.lie(monkeypatch, np.array([7.0], np.float32).tobytes())
        assert writer.offer(job(form, span(0, 100)))
        assert writer.close(10)
        assert flipped
        self.is_off(form, caplog)

    def test_a_state_that_comes_back_as_another(self, form, store, caplog, monkeypatch):
        writer = Writer(Housekeeping(store, 1 << 30))
        flipped = self.lie(monkeypatch, np.array([100.0] * 4, np.float32).tobytes())
        assert writer.offer(job(form, span(0, 100), boundary(100)))
        assert writer.close(10)
        assert flipped
        self.is_off(form, caplog)

    @staticmethod
    def is_off(form, caplog) -> None:
        lines = [record.getMessage() for record in caplog.records if "caching is off for this model" in record.message]
        assert len(lines) == 1
        assert form.trouble
        assert form.trouble in lines[0]

    def test_bytes_that_were_wrong_before_they_were_hashed(self, form, writer, caplog, monkeypatch):
        """Digests cannot see what went wrong between the engine's memory and the hash; the comparison does."""
        kept = span(0, 100)

        def publish(self, tokens, spans):
            (one,) = spans
            data = [np.array(part) for part in one.data]
            data[1][5] ^= 1
            return real(self, tokens, [Span(one.first, one.count, one.specs, data)])

        real = type(form.namespace).publish
        monkeypatch.setattr(type(form.namespace), "publish", publish)
        assert writer.offer(job(form, kept, span(100, 128)))
        assert writer.drain(10)
        self.is_off(form, caplog)
        assert "0.values of tokens 0 to 100 reads back as other bytes" in form.trouble
        assert form.namespace.lookup(TOKENS).count == 100  # The rest of the job was dropped.
        assert writer.offer(job(form, span(100, 128)))
        assert writer.drain(10)
        assert form.namespace.lookup(TOKENS).count == 100
        self.is_off(form, caplog)  # Still one line.

    def test_a_state_that_was_wrong_before_it_was_hashed(self, form, writer, caplog, monkeypatch):
        real = type(form.namespace).publish_state

        def publish_state(self, tokens, state):
            return real(self, tokens, State(state.tensors, state.data, {**state.values, "tokens": 99}))

        monkeypatch.setattr(type(form.namespace), "publish_state", publish_state)
        assert writer.offer(job(form, span(0, 100), boundary(100), span(100, 128)))
        assert writer.drain(10)
        self.is_off(form, caplog)
        assert "a boundary state reads back as another one" in form.trouble
        assert form.namespace.lookup(TOKENS).count == 100

    def test_the_other_form_goes_on(self, form, store, writer, monkeypatch):
        other = Form(fake_plan(), store.namespace(NamespaceInfo({"model": "other"})))
        form.trouble = "the disk lies"
        refused = job(form, span(0, 100))
        assert writer.offer(refused)
        assert writer.offer(job(other, span(0, 100)))
        assert writer.drain(10)
        assert refused.fate.broken
        assert (form.namespace.lookup(TOKENS).count, other.namespace.lookup(TOKENS).count) == (0, 100)

    def test_once_a_namespace(self, form, store, writer, monkeypatch):
        seen = []
        monkeypatch.setattr("kvstore_mlx.writer.differs", lambda *args: seen.append(type(args[2])) or "")
        for _ in range(2):
            assert writer.offer(job(form, span(0, 100), boundary(100), span(100, 128), boundary(128)))
            assert writer.drain(10)
        other = Form(fake_plan(stateful=True), store.namespace(NamespaceInfo({"model": "other"})))
        # Other bytes: a block that is there already is not written, and not read back.
        assert writer.offer(job(other, span(0, 64)))
        assert writer.drain(10)
        assert seen == [Span, State, Span]

    def test_good_bytes_are_good(self, form):
        own = span(0, 100)
        tokens = pack_tokens(TOKENS[:100])
        form.namespace.publish(tokens, [own])
        assert differs(form, tokens, own) == ""
        later, tokens = span(100, 120), pack_tokens(TOKENS[:120])
        form.namespace.publish(tokens, [later])
        assert differs(form, tokens, later) == ""
        state = FakeLive(120).state(decode=False)
        form.namespace.publish_state(tokens, state)
        assert differs(form, tokens, state) == ""

    def test_what_is_not_there_any_more_is_not_wrong(self, form, store):
        """Collected: manifests go before what they name."""
        own, tokens = span(0, 100), pack_tokens(TOKENS[:100])
        state = FakeLive(100).state(decode=False)
        form.namespace.publish(tokens, [own])
        form.namespace.publish_state(tokens, state)
        assert differs(form, tokens, own) == differs(form, tokens, state) == ""
        for path in (store.path / "objects" / "nodes").rglob("*"):
            if path.is_file():
                path.unlink()
        assert differs(form, tokens, own) == differs(form, tokens, state) == ""

    def test_damage_of_something_else_is_a_miss_and_no_more(self, form, store):
        """An old block of the same prompt that has rotted says nothing about this disk's last write."""
        form.namespace.publish(pack_tokens(TOKENS[:128]), [span(0, 128)])
        (block,) = [path for path in (store.path / "objects" / "blocks").rglob("*") if path.is_file()]
        later, tokens = span(128, 200), pack_tokens(TOKENS[:200])
        form.namespace.publish(tokens, [later])
        assert differs(form, tokens, later) == ""
        data = bytearray(block.read_bytes())
        data[-1] ^= 1
        block.write_bytes(data)
        assert differs(form, tokens, later) == ""

    def test_a_manifest_that_reads_back_wrong(self, form, store):
        own, tokens = span(0, 100), pack_tokens(TOKENS[:100])
        form.namespace.publish(tokens, [own])
        (node,) = [path for path in (store.path / "objects" / "nodes").rglob("*.kv") if path.is_file()]
        data = bytearray(node.read_bytes())
        data[-1] ^= 1
        node.write_bytes(data)
        assert "reads back as other bytes" in differs(form, tokens, own)
