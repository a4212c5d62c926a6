"""Boundary states: saved whole beside a node, found by a stat, and what an engine without trimming resumes from."""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from core_support import block_files

import kvstore.states
from kvstore import (
    MissingParentError,
    NamespaceInfo,
    PublishError,
    Span,
    State,
    StateTensor,
    Store,
    TensorSpec,
)
from kvstore.blocks import pack_header
from kvstore.keys import block_digest
from kvstore.manifest import decode, encode
from kvstore.states import state_parts

INTERVAL = 32
SPEC = TensorSpec("0.keys", "F32", 1, (1,))
TOKENS = list(range(1, 101))


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "cache", interval=INTERVAL) as opened:
        yield opened


@pytest.fixture
def namespace(store):
    return store.namespace(NamespaceInfo({"model": "recurrent"}))


def span(first: int, end: int) -> Span:
    return Span(first, end - first, (SPEC,), [struct.pack(f"<{end - first}f", *range(first, end))])


def publish_to(namespace, end: int, tokens=TOKENS) -> None:
    at = 0
    spans = []
    while at < end:
        border = min((at // INTERVAL + 1) * INTERVAL, end)
        spans.append(span(at, border))
        at = border
    namespace.publish(tokens[:end], spans)


def state(mark: int) -> State:
    return State(
        (StateTensor("conv", "F32", (1, 3)), StateTensor("none", "BF16", (0, 7)), StateTensor("scalar", "I32", ())),
        [struct.pack("<3f", mark, mark + 1, mark + 2), b"", struct.pack("<i", -mark)],
        {"cursor": mark, "flag": True, "text": "é", "nothing": None, "float": 0.1, "slots": "[1,null]"},
    )


def read(namespace, match):
    memory = {}

    def allocate(tensors):
        memory.update({tensor.name: bytearray(tensor.nbytes) for tensor in tensors})
        memory["tensors"] = tensors
        return memory

    return namespace.read_state(match, allocate), memory


def test_a_state_comes_back_as_it_was(namespace):
    publish_to(namespace, 64)
    namespace.publish_state(TOKENS[:64], state(5))
    values, memory = read(namespace, namespace.lookup(TOKENS, trimmable=False))
    assert values == state(5).values
    assert [type(value) for value in values.values()] == [int, bool, str, type(None), float, str]
    assert struct.unpack("<3f", memory["conv"]) == (5, 6, 7)
    assert struct.unpack("<i", memory["scalar"]) == (-5,)
    # What has a zero size has no bytes, and keeps its shape.
    assert StateTensor("none", "BF16", (0, 7)) in memory["tensors"]


def test_what_a_state_takes_is_known_before_and_counted_after(store, namespace):
    publish_to(namespace, 64)
    assert namespace.state_size(namespace.lookup(TOKENS)) == 0
    assert namespace.state_size(namespace.lookup([9])) == 0
    published = namespace.publish_state(TOKENS[:64], state(5))
    match = namespace.lookup(TOKENS, trimmable=False)
    (block,) = decode(match.steps[-1].path.with_suffix(".state").read_bytes()).blocks
    assert namespace.state_size(match) == block.size == published.blocks
    before = store.counters.snapshot()["restored_bytes"]
    read(namespace, match)
    assert store.counters.snapshot()["restored_bytes"] == before + block.size
    # An overlap that ends elsewhere has none.
    assert namespace.state_size(replace(match, exact=False)) == 0


def test_a_damaged_state_is_counted_once(store, namespace):
    publish_to(namespace, 64)
    namespace.publish_state(TOKENS[:64], state(5))
    match = namespace.lookup(TOKENS, trimmable=False)
    match.steps[-1].path.with_suffix(".state").write_bytes(b"no manifest")
    assert namespace.state_size(match) == 0
    assert read(namespace, match)[0] is None
    assert store.counters.snapshot()["damaged"] == 1


def test_resume_points_are_states(namespace):
    publish_to(namespace, 100)
    assert namespace.lookup(TOKENS).count == 100
    assert namespace.lookup(TOKENS, trimmable=False).count == 0
    namespace.publish_state(TOKENS[:32], state(1))
    assert namespace.lookup(TOKENS, trimmable=False).count == 32
    namespace.publish_state(TOKENS, state(2))
    assert namespace.lookup(TOKENS, trimmable=False).count == 100
    assert namespace.lookup(TOKENS[:99], trimmable=False).count == 32
    assert namespace.lookup([*TOKENS, 7, 8], trimmable=False).count == 100
    # An overlap that ends inside a node is for engines that can trim.
    assert namespace.lookup([*TOKENS[:98], 7], trimmable=False).count == 32


def test_the_longest_tail_with_a_state_wins(namespace):
    publish_to(namespace, 40)
    namespace.publish(TOKENS[:50], [span(40, 50)])
    namespace.publish(TOKENS[:60], [span(50, 60)])
    namespace.publish_state(TOKENS[:40], state(1))
    namespace.publish_state(TOKENS[:50], state(2))
    match = namespace.lookup(TOKENS, trimmable=False)
    assert match.count == 50
    assert read(namespace, match)[0]["cursor"] == 2


def test_a_state_needs_its_node(store, namespace):
    with pytest.raises(MissingParentError):
        namespace.publish_state(TOKENS[:32], state(1))
    assert block_files(store.path) == [], "nothing is written for nothing"
    publish_to(namespace, 32)
    with pytest.raises(MissingParentError):
        namespace.publish_state(TOKENS[:40], state(1))


def test_a_state_is_written_once(namespace, store):
    publish_to(namespace, 32)
    assert namespace.publish_state(TOKENS[:32], state(1)).written
    assert namespace.publish_state(TOKENS[:32], state(1)).written == 0
    assert namespace.publish_state(TOKENS[:32], state(9)).written == 0  # the first writer wins
    assert read(namespace, namespace.lookup(TOKENS, trimmable=False))[0]["cursor"] == 1


def test_a_damaged_state_falls_back_to_the_one_before(namespace, store):
    publish_to(namespace, 64)
    for end in (32, 64):
        namespace.publish_state(TOKENS[:end], state(end))
    match = namespace.lookup(TOKENS, trimmable=False)
    from kvstore.manifest import decode

    (ref,) = decode(match.steps[-1].path.with_suffix(".state").read_bytes()).blocks
    path = store.context.layout.block(ref.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert read(namespace, match)[0] is None
    assert store.counters.damaged == 1
    before = namespace.lookup(TOKENS, trimmable=False)
    assert before.count == 32
    assert read(namespace, before)[0]["cursor"] == 32
    # And a publish that holds the right bytes heals it.
    assert namespace.publish_state(TOKENS[:64], state(64)).written
    assert read(namespace, namespace.lookup(TOKENS, trimmable=False))[0]["cursor"] == 64


def test_a_removed_state_is_no_resume_point(namespace):
    publish_to(namespace, 64)
    namespace.publish_state(TOKENS[:64], state(1))
    namespace.lookup(TOKENS, trimmable=False).steps[-1].path.with_suffix(".state").unlink()
    assert namespace.lookup(TOKENS, trimmable=False).count == 0
    assert namespace.lookup(TOKENS).count == 64


@pytest.mark.parametrize(
    "bad",
    [
        State((StateTensor("a", "F32", (2,)),), [b"1234"]),
        State((StateTensor("a", "F32", (1,)),), []),
        State((StateTensor("a", "F32", (1,)), StateTensor("a", "F32", (1,))), [b"1234", b"1234"]),
        State((), [], {"x": [1]}),
        State((), [], {"x": float("nan")}),
        State((), [], {"x": float("inf")}),
        State((), [], {"x": 10**5000}),
        State((), [], {1: 2}),
        State((StateTensor("__metadata__", "F32", (2,)),), [bytes(8)]),
        State((StateTensor("__metadata__", "F32", (0,)),), [b""]),
        State((StateTensor("a", "F32", (-1, -2)),), [bytes(8)]),
        State((StateTensor("a", "F32", (0, -2)),), [b""]),
        State((StateTensor("a", "F32", (0, 1 << 40)),), [b""]),
        State((StateTensor("a", "C64", (2,)),), [bytes(16)]),
        State((StateTensor(5, "F32", (2,)),), [bytes(8)]),
        State((StateTensor("a", "F32", None),), [bytes(8)]),
        State((StateTensor("a", "F32", (1,)), StateTensor("a", "F32", (0,))), [b"1234", b""]),
        State((StateTensor(1, "F32", (1,)), StateTensor("1", "F32", (1,))), [b"1234", b"1234"]),
        State((StateTensor(None, "F32", (1,)),), [b"1234"]),
        State((StateTensor(["a"], "F32", (1,)),), [b"1234"]),
        State((StateTensor("a", ["F32"], (1,)),), [b"1234"]),
        State((StateTensor("a", "F32", (1.0,)),), [b"1234"]),
        State((StateTensor("a", "F32", (np.int64(1),)),), [b"1234"]),
        State((StateTensor("a", "F32", (2,)),), [memoryview(bytes(16))[::2]]),
        State((StateTensor("a", "F32", (2,)),), ["12345678"]),
        State((StateTensor("a", "F32", (2,)),), [np.ones(2, ">f4")]),
        State((StateTensor("a", "F32", (2,)),), [np.array([None], object)]),
        State((StateTensor("a", "F32", (2,)),), (part for part in [bytes(8)])),
        State((), [], {}, 0, None),
        State((), [], {}, 0, np.array([1, 0])),
        State((), [], {1: 2, "1": 3}),
        State((), [], {"x": np.bool_(1)}),
        State((), [], {"x": "\udc80"}),
        State((), [], {"\ud800": 1}),
        State((StateTensor("a\udc80", "U8", (1,)),), [b"1"]),
        State((StateTensor("a\udc80", "U8", (0,)),), [b""]),
        State((), [], None),
        State(None, []),
        State((), None),
        State((), [], {}, 1.5),
    ],
)
def test_what_does_not_fit_is_refused(store, namespace, bad):
    publish_to(namespace, 32)
    with pytest.raises(PublishError):
        namespace.publish_state(TOKENS[:32], bad)
    assert store.counters.failed_publishes == 1
    assert namespace.lookup(TOKENS, trimmable=False).count == 0


def test_the_tensors_of_a_state_are_checked_once(monkeypatch):
    checked, real = [], kvstore.states._tensor
    monkeypatch.setattr(kvstore.states, "_tensor", lambda row: checked.append(row) or real(row))
    state_parts(state(1), 0, 32)
    assert len(checked) == len(state(1).tensors)


@pytest.mark.parametrize(
    "odd",
    [
        State((), []),
        State([StateTensor("a", "F32", [1])], [np.ones(1, "<f4")]),
        State((StateTensor("", "F32", ()),), [bytes(4)]),
        State((StateTensor("a", "F32", (0, (1 << 40) - 1)),), [b""], {"__metadata__": 1, "": 2}),
        State((StateTensor("a", "U8", (1,)), StateTensor("b", "U8", (0,))), [b"1", b""], {"a": 1, "b": 2}),
        State((StateTensor("a\U0001f600", "U8", (1,)),), [b"1"], {"\U0001f600": "\\ud800", "a\U0001f600": 10**199}),
    ],
)
def test_what_is_published_is_read(namespace, odd):
    publish_to(namespace, 32)
    namespace.publish_state(TOKENS[:32], odd)
    values, memory = read(namespace, namespace.lookup(TOKENS, trimmable=False))
    assert values == odd.values
    assert memory["tensors"] == tuple(replace(tensor, shape=tuple(tensor.shape)) for tensor in odd.tensors)


def test_a_node_of_an_engine_without_kv(namespace):
    """A purely recurrent model: nodes without blocks carry the tokens, states carry everything else."""
    for first, end in ((0, 32), (32, 50)):
        namespace.publish(TOKENS[:end], [Span(first, end - first, (), [])])
    namespace.publish_state(TOKENS[:50], state(3))
    match = namespace.lookup(TOKENS, trimmable=False)
    assert match.count == 50
    assert read(namespace, match)[0]["cursor"] == 3


def test_a_state_block_is_a_safetensors_file(namespace, store):
    from safetensors.numpy import load

    publish_to(namespace, 32)
    namespace.publish_state(TOKENS[:32], state(4))
    blocks = [path for path in store.context.layout.blocks.rglob("*") if path.is_file()]
    (mine,) = [path for path in blocks if b'"conv"' in path.read_bytes()]
    tensors = load(mine.read_bytes())
    assert tensors["conv"].tolist() == [[4, 5, 6]]
    assert tensors["scalar"] == -4
    size = int.from_bytes(mine.read_bytes()[:8], "little")
    metadata = json.loads(mine.read_bytes()[8 : 8 + size])["__metadata__"]
    assert json.loads(metadata["empty"]) == [["none", "BF16", [0, 7]]]


def forge(namespace, store, tensors: dict, data: bytes, size: int | None = None) -> Path:
    """Put a state with an honest header in the place of a node's, its file cut or grown to size; the block's path."""
    publish_to(namespace, 9)
    namespace.publish_state(TOKENS[:9], state(1))
    (path,) = (store.path / "objects" / "nodes").rglob("*.state")
    manifest = decode(path.read_bytes())
    metadata = {"format": "kvstore/1", "first": "0", "count": "9", "values": "{}", "empty": "[]"}
    head = pack_header({"__metadata__": metadata, **tensors}, 0, 0)
    whole = head + data
    payload = max(entry["data_offsets"][1] for entry in tensors.values())
    ref = replace(manifest.blocks[0], digest=block_digest([whole]), size=len(head) + payload, payload=len(head))
    block = store.context.layout.block(ref.digest)
    block.parent.mkdir(exist_ok=True)
    block.write_bytes(whole)
    os.truncate(block, ref.size if size is None else size)
    path.write_bytes(encode(replace(manifest, blocks=(ref,))))
    return block


def bytes_of(size: int) -> dict:
    return {"s": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}


@pytest.mark.parametrize("size", [5 << 20, 1 << 30, 1 << 39])
def test_a_header_alone_asks_for_no_memory(namespace, store, size):
    """A sparse file costs its maker nothing, and says any size."""
    try:
        forge(namespace, store, bytes_of(size), b"")
    except OSError as error:
        pytest.skip(f"no file of {size} bytes here: {error.strerror}")

    def allocate(tensors):
        raise AssertionError(f"asked for {tensors}")

    match = namespace.lookup(TOKENS[:9], trimmable=False)
    assert match.count == 9
    before = time.thread_time()
    assert namespace.read_state(match, allocate) is None
    assert time.thread_time() - before < 0.5
    assert namespace.lookup(TOKENS[:9], trimmable=False).count == 0


@pytest.mark.parametrize("length", [1, 4096, 5 << 20])
def test_a_file_with_holes_that_is_what_its_name_says_is_read(namespace, store, length):
    """File systems that compress store zeros as holes."""
    data = os.urandom(length) + bytes(6 << 20)
    block = forge(namespace, store, bytes_of(len(data)), data)
    whole = block.read_bytes()
    block.write_bytes(whole[: len(whole) - (6 << 20)])
    os.truncate(block, len(whole))
    memory = {}

    def allocate(tensors):
        memory.update({tensor.name: memoryview(bytearray(tensor.nbytes)) for tensor in tensors})
        return memory

    assert namespace.read_state(namespace.lookup(TOKENS[:9], trimmable=False), allocate) == {}
    assert memory["s"] == data
