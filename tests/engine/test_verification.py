"""Reading back what was just published: a lie turns caching off, what is gone does not, and no prefix is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recording_support import INTERVAL, SPECS, FakeLive, fake_plan

from kvstore import Durability, NamespaceInfo, Span, Store, pack_tokens
from kvstore import publish as publish_module
from kvstore.manifest import decode
from kvstore.states import State, StateTensor
from kvstore_mlx.forms import Form
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.jobs import Boundary, Job
from kvstore_mlx.verification import differs
from kvstore_mlx.writer import Writer

TOKENS = pack_tokens(range(1, 3 * INTERVAL + 1))


def span(first: int, end: int) -> Span:
    return Span(first, end - first, SPECS, FakeLive(end).copy(first, end))


def rounded_otherwise(made: Span) -> Span:
    """The same tokens as another process has them that computed them in other pieces."""
    return replace(made, data=[(np.asarray(data).view(np.float32) + 1).view(np.uint8) for data in made.data])


def publish(form: Form, *ends: int) -> Span:
    first = 0
    for end in ends:
        last = span(first, end)
        form.namespace.publish(TOKENS[: end * 4], [last])
        first = end
    return last


def block_of(store: Store, form: Form, end: int) -> tuple[Path, int]:
    """The last block of a prefix, and where its payload begins."""
    match = form.namespace.lookup(TOKENS[: end * 4])
    ref = decode(match.steps[-1].path.read_bytes()).blocks[-1]
    return store.context.layout.block(ref.digest), ref.payload


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_is_there_is_what_was_written(form):
    last = publish(form, INTERVAL, 2 * INTERVAL)
    assert differs(form, TOKENS[: 8 * INTERVAL], last) == ""


@pytest.mark.parametrize("where", ["first byte", "last byte"])
def test_another_byte_of_its_data_is_told(store, form, where):
    last = publish(form, INTERVAL)
    path, payload = block_of(store, form, INTERVAL)
    change(path, payload if where == "first byte" else -1)
    assert "reads back as other bytes" in differs(form, TOKENS[: 4 * INTERVAL], last)


def test_another_byte_of_its_header_is_told(store, form):
    last = publish(form, INTERVAL)
    path, payload = block_of(store, form, INTERVAL)
    change(path, payload - 1)
    assert "another name" in differs(form, TOKENS[: 4 * INTERVAL], last)


def test_a_block_that_is_cut_is_told(store, form):
    last = publish(form, INTERVAL)
    path, _ = block_of(store, form, INTERVAL)
    path.write_bytes(path.read_bytes()[:-1])
    assert "other bytes" in differs(form, TOKENS[: 4 * INTERVAL], last)


def test_what_was_collected_meanwhile_is_no_lie(form):
    last = publish(form, INTERVAL)
    form.namespace.lookup(TOKENS[: 4 * INTERVAL]).steps[-1].path.unlink()
    assert differs(form, TOKENS[: 4 * INTERVAL], last) == ""


def test_only_the_span_s_own_block_is_read(store, form):
    """Damage before it is none of its business, and a long prefix must not be read into memory for it."""
    last = publish(form, INTERVAL, 2 * INTERVAL)
    path, _ = block_of(store, form, INTERVAL)
    path.unlink()
    assert differs(form, TOKENS[: 8 * INTERVAL], last) == ""


def test_a_server_stops_caching_when_its_disk_lies(store, form, monkeypatch, caplog):
    """One line, no exception, and nothing more is written into this namespace."""
    state = State((StateTensor("x", "U8", (3,)),), [b"abc"], {"y": 1})
    writer = Writer(Housekeeping(store, 1 << 30))
    real = form.namespace.publish

    def lying(tokens, spans):
        published = real(tokens, spans)
        path, payload = block_of(store, form, INTERVAL)
        change(path, payload + 5)
        return published

    monkeypatch.setattr(form.namespace, "publish", lying)
    items = [span(0, INTERVAL), Boundary(INTERVAL, state)]
    job = Job(form, TOKENS[: 4 * INTERVAL], items)
    assert writer.offer(job)
    assert writer.drain(10)
    assert job.fate.broken
    assert "reads back as other bytes" in form.trouble
    assert caplog.text.count("caching is off for this model") == 1
    job = Job(form, TOKENS[: 8 * INTERVAL], [span(INTERVAL, 2 * INTERVAL)])
    assert writer.offer(job)
    assert writer.close(10)
    assert job.fate.broken
    assert form.namespace.lookup(TOKENS).count == INTERVAL


def test_a_state_is_compared_too(store, form):
    publish(form, INTERVAL)
    tokens = TOKENS[: 4 * INTERVAL]
    state = State((StateTensor("x", "F32", (2,)),), [np.ones(2, np.float32).tobytes()], {"y": 1, "z": None})
    form.namespace.publish_state(tokens, state)
    assert differs(form, tokens, state) == ""
    other = State(state.tensors, [np.zeros(2, np.float32).tobytes()], state.values)
    assert "another one than was written" in differs(form, tokens, other)
    assert "another one than was written" in differs(form, tokens, State(state.tensors, state.data, {"y": 1}))


def test_a_block_that_lay_there_damaged_is_no_lie_of_the_disk(store, form):
    """Another server wrote it, and a bit has flipped since: that is a miss and is healed, and caching goes on."""
    publish(form, INTERVAL)
    path, payload = block_of(store, form, INTERVAL)
    change(path, payload - 1)
    other = Form(fake_plan(), store.namespace(NamespaceInfo({"model": "the same bytes"})))
    writer = Writer(Housekeeping(store, 1 << 30))
    assert writer.offer(Job(other, TOKENS[: 4 * INTERVAL], [span(0, INTERVAL)]))
    assert writer.close(10)
    assert other.trouble == ""


@pytest.mark.parametrize("kind", ["span", "state"])
def test_a_node_that_another_process_published_first_is_no_lie_of_the_disk(store, form, monkeypatch, kind):
    """It computed the same prompt in other pieces, so its bytes are others; the commit finds its manifest there."""
    tokens = TOKENS[: 4 * INTERVAL]
    ours, theirs = (State((StateTensor("x", "U8", (3,)),), [data], {}) for data in (b"abc", b"abd"))
    if kind == "state":
        publish(form, INTERVAL)
    with Store.open(store.path, durability=Durability.NONE) as other:
        there = other.namespace(form.namespace._space.info)
        real = publish_module.put_node

        def late(*args):
            monkeypatch.setattr(publish_module, "put_node", real)
            if kind == "span":
                there.publish(tokens, [rounded_otherwise(span(0, INTERVAL))])
            else:
                there.publish_state(tokens, theirs)
            return real(*args)

        monkeypatch.setattr(publish_module, "put_node", late)
        writer = Writer(Housekeeping(store, 1 << 30))
        item = span(0, INTERVAL) if kind == "span" else Boundary(INTERVAL, ours)
        job = Job(form, tokens, [item])
        assert writer.offer(job)
        assert writer.close(10)
    assert not job.fate.broken, "it is saved, by another one"
    assert form.trouble == ""
    assert store.counters.written_bytes > 0, "a block was written, for nothing"


def test_a_longer_node_of_another_process_is_not_taken_for_what_was_published(store, form):
    """Once that is gone, a lookup finds what begins with the same tokens."""
    end = INTERVAL // 2
    last = publish(form, end)
    form.namespace.lookup(TOKENS[: 4 * end]).steps[-1].path.unlink()
    longer = [rounded_otherwise(span(0, end)), span(end, INTERVAL - 1)]
    form.namespace.publish(TOKENS[: 4 * (INTERVAL - 1)], longer)
    form.namespace.lookup(TOKENS[: 4 * end]).steps[-1].path.unlink()
    assert form.namespace.lookup(TOKENS[: 4 * end]).count == end
    assert differs(form, TOKENS[: 4 * end], last) == ""
