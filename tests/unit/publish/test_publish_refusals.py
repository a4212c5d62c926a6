"""What a publish refuses, and what is saved all the same."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from core_support import INFO, SPECS, block_files, kv, node_files, open_store, prompt, restore, span, spans

import kvstore.alike
from kvstore import (
    Durability,
    FileSystem,
    KVStoreError,
    MissingParentError,
    NamespaceInfo,
    PublishError,
    Span,
    TensorSpec,
    TokenError,
)
from kvstore.blocks import block_head
from kvstore.manifest import decode, encode
from kvstore.namespace import read_label

TOKENS = prompt(100)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ([], "nothing to publish"),
        ([(0, 17)], "cross a chunk border"),
        ([(8, 24)], "cross a chunk border"),
        ([(0, 16), (17, 20)], "does not follow"),
        ([(0, 16), (15, 20)], "does not follow"),
        ([(16, 20), (0, 16)], "does not follow"),
        ([(4, 4)], "does not follow"),
        ([(-16, 0)], "does not follow"),
        ([(0, 16), (16, 32), (32, 40)], "only 33 tokens"),
    ],
    ids=str,
)
def test_spans_that_the_format_cannot_hold_are_refused(tmp_path, store, space, cut, words):
    given = [Span(first, end - first, SPECS, []) for first, end in cut]
    with pytest.raises(PublishError, match=words):
        space.publish(TOKENS[:33], given)
    assert (node_files(tmp_path / "cache"), block_files(tmp_path / "cache")) == ([], [])
    assert store.counters.failed_publishes == 1


def test_data_that_do_not_fit_are_refused(tmp_path, space):
    with pytest.raises(PublishError, match="bytes"):
        space.publish(TOKENS, [Span(0, 5, SPECS, kv(TOKENS, 0, 4))])
    assert block_files(tmp_path / "cache") == []


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {"first": None},
        {"first": 0.0},
        {"count": 16.0},
        {"count": np.int64(16)},
        {"specs": (replace(SPECS[0], outer=2.0), *SPECS[1:])},
        {"specs": (replace(SPECS[0], outer=np.int64(2)), *SPECS[1:])},
        {"specs": (replace(SPECS[0], inner=(4.0,)), *SPECS[1:])},
        {"specs": (*SPECS[:2], replace(SPECS[2], outer=True))},
        {"specs": (replace(SPECS[0], name=1), *SPECS[1:])},
        {"specs": (replace(SPECS[0], name=1), replace(SPECS[1], name="1"), SPECS[2])},
        {"specs": (replace(SPECS[0], dtype=["BF16"]), *SPECS[1:])},
        {"data": [memoryview(bytes(2 * span(TOKENS, 0, 16).payload_bytes))[::2]]},
        {"data": None},
        {"data": (part for part in kv(TOKENS, 0, 16))},
        {"data": [np.frombuffer(b"".join(kv(TOKENS, 0, 16)), ">u2")]},
        {"data": [np.array([None] * (span(TOKENS, 0, 16).payload_bytes // 8), object)]},
        {"data": np.frombuffer(b"".join(kv(TOKENS, 0, 16)), "u1")},
        {"specs": ()},
        {"specs": None},
        {"specs": None, "data": []},
        {"specs": (spec for spec in SPECS)},
        {"decode": 1},
        {"decode": np.array([1, 0])},
        {"decode": None},
        {"phase": 1.5},
    ],
)
def test_what_no_reader_takes_is_refused_and_counted(tmp_path, store, space, node, changes):
    if node:
        space.publish(TOKENS, spans(TOKENS, 0, 16))
    before = node_files(tmp_path / "cache"), block_files(tmp_path / "cache")
    with pytest.raises(PublishError):
        space.publish(TOKENS, [replace(span(TOKENS, 16 * node, 16 * node + 16), **changes)])
    assert (node_files(tmp_path / "cache"), block_files(tmp_path / "cache")) == before
    assert store.counters.failed_publishes == 1


def test_what_is_no_span_is_refused_and_counted(store, space):
    for wrong in ([*spans(TOKENS, 0, 16), (16, 32)], iter(spans(TOKENS, 0, 16)), 5, None):
        with pytest.raises(PublishError, match="plain integers"):
            space.publish(TOKENS, wrong)
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    with pytest.raises(PublishError, match="nobody could read"):
        space.publish_state(TOKENS[:16], None)
    assert store.counters.failed_publishes == 5


def test_a_node_whose_tensors_end_in_the_middle_is_refused(space):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    with pytest.raises(PublishError, match="no tensors"):
        space.publish(TOKENS, [Span(5, 3, (), [])])


def test_an_engine_that_keeps_nothing_per_token_has_nodes_without_blocks(tmp_path, space):
    assert space.publish(TOKENS, [Span(0, 16, (), []), Span(16, 4, (), [])]).nodes == 2
    assert space.lookup(TOKENS).count == 20
    assert block_files(tmp_path / "cache") == []


def test_an_impossible_token_is_refused_and_counted(store, space):
    with pytest.raises(TokenError):
        space.publish([-200] * 16, spans(TOKENS, 0, 16))
    assert store.counters.failed_publishes == 1


def test_what_there_is_no_memory_for_is_counted(store, space, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("kvstore.store.publish", full)
    monkeypatch.setattr("kvstore.store.publish_state", full)
    for publish in (lambda: space.publish(TOKENS, spans(TOKENS, 0, 16)), lambda: space.publish_state(TOKENS, None)):
        with pytest.raises(MemoryError):
            publish()
    assert store.counters.failed_publishes == 2


@pytest.mark.parametrize("first", [5, 16, 20, 32])
def test_a_child_is_never_published_without_its_parent(tmp_path, space, first):
    end = first // 16 * 16 + 16
    with pytest.raises(MissingParentError, match="publish"):
        space.publish(TOKENS, [span(TOKENS, first, end)])
    assert (node_files(tmp_path / "cache"), block_files(tmp_path / "cache")) == ([], [])


def test_a_span_that_begins_inside_a_block_is_refused(space):
    space.publish(TOKENS, spans(TOKENS, 0, 5, 10))
    with pytest.raises(MissingParentError, match="border at token 7"):
        space.publish(TOKENS, [span(TOKENS, 7, 12)])


def test_nodes_before_the_failing_one_stay(tmp_path, space):
    bad = Span(32, 8, SPECS, [])
    with pytest.raises(PublishError):
        space.publish(TOKENS, [*spans(TOKENS, 0, 16, 32), bad])
    assert restore(space, TOKENS).tokens == 32


def test_a_prompt_may_be_longer_than_its_spans(space):
    space.publish(np.array(TOKENS), spans(TOKENS, 0, 16, 20))
    assert restore(space, TOKENS).tokens == 20


def unlike(first: int, count: int, specs=SPECS[:1]) -> Span:
    return Span(first, count, tuple(specs), [bytes(spec.span_bytes(count)) for spec in specs])


@pytest.mark.parametrize("at", [16, 8], ids=["next chunk", "same chunk"])
@pytest.mark.parametrize("once", [True, False], ids=["in one publish", "in two"])
@pytest.mark.parametrize(
    "specs",
    [
        SPECS[:1],
        SPECS[::-1],
        (*SPECS[:2], replace(SPECS[2], dtype="I32")),
        (*SPECS[:2], replace(SPECS[2], outer=2)),
        (*SPECS[:2], replace(SPECS[2], inner=(4,))),
        (*SPECS[:2], replace(SPECS[2], name="2.keys")),
    ],
)
def test_a_prompt_is_not_continued_with_other_tensors(space, at, once, specs):
    """No restore would get past them, and each publish after it would write them again."""
    before = spans(TOKENS, 0, at)
    if not once:
        space.publish(TOKENS, before)
    with pytest.raises(PublishError, match="other tensors than those before"):
        space.publish(TOKENS, [*before * once, unlike(at, 4, specs)])
    assert space.lookup(TOKENS).count == restore(space, TOKENS).tokens == at
    space.publish(TOKENS, spans(TOKENS, at, 16, 32) if at < 16 else spans(TOKENS, 16, 32))
    assert restore(space, TOKENS).tokens == 32


def test_what_is_saved_already_says_which_tensors_go_on(space):
    """And not what the same publish offered for it in vain."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    with pytest.raises(PublishError, match="other tensors"):
        space.publish(TOKENS, [unlike(0, 16), unlike(16, 4)])
    assert space.publish(TOKENS, [unlike(0, 16), span(TOKENS, 16, 20)]).end == 20
    assert restore(space, TOKENS).tokens == 20


@dataclass(frozen=True)
class Opening(FileSystem):
    """Remembers what was opened to be read."""

    opened: list[Path] = field(default_factory=list)

    def open_fd(self, path):
        self.opened.append(Path(path))
        return super().open_fd(path)


def test_one_header_is_read_to_go_on_from_what_is_saved(tmp_path):
    fs = Opening(durability=Durability.NONE)
    with open_store(tmp_path / "cache", fs=fs) as store:
        space, tokens = store.namespace(INFO), prompt(96)
        space.publish(tokens, spans(tokens, 0, 16, 32, 48))
        blocks = store.context.layout.blocks
        fs.opened.clear()
        space.publish(tokens, spans(tokens, 48, 64, 80))
        assert len([path for path in fs.opened if path.is_relative_to(blocks)]) == 1
        fs.opened.clear()
        space.publish(tokens, spans(tokens, 0, 16, 32, 48, 64, 80))
        assert not [path for path in fs.opened if path.is_relative_to(blocks)]


def test_a_block_before_that_cannot_be_read_stops_no_publish(space, tmp_path):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (block,) = block_files(tmp_path / "cache")
    block.write_bytes(bytes(block.stat().st_size))
    assert space.publish(TOKENS, spans(TOKENS, 16, 32)).end == 32


@pytest.mark.parametrize("size", [-1, 1, 1 << 28])
def test_a_block_before_that_is_no_block_is_not_read_to_tell_its_tensors(space, tmp_path, monkeypatch, size):
    """A forged one takes 4 KiB on disk, is any number of gigabytes long, and has an honest header."""
    space.publish(TOKENS, [unlike(0, 16)])
    (block,) = block_files(tmp_path / "cache")
    (node,) = node_files(tmp_path / "cache")
    ref = decode(node.read_bytes()).blocks[0]
    if size > 1:
        large = replace(SPECS[0], inner=(size,))
        head = block_head((large,), 0, 16, 0)
        ref = replace(ref, size=len(head) + large.span_bytes(16), payload=len(head))
        node.write_bytes(encode(replace(decode(node.read_bytes()), blocks=(ref,))))
        block.write_bytes(head)
    os.truncate(block, ref.size if size > 1 else ref.size + size)

    def read(*_):
        raise AssertionError("read")

    monkeypatch.setattr(kvstore.alike, "digest_of_file", read)
    assert space.publish(TOKENS, spans(TOKENS, 16, 32)).end == 32


def test_a_block_before_is_read_at_the_pace_of_a_publish(store, space, monkeypatch):
    monkeypatch.setattr("kvstore.pacing._WORTH_A_REST_S", 0.0)
    large = TensorSpec("k", "U8", 1, (1 << 20,))
    space.publish(TOKENS, [unlike(0, 16, [large])])
    rests = []
    store.context.pace._sleep = rests.append
    store.context.pace.share = lambda: 0.1
    with pytest.raises(PublishError, match="other tensors"):
        space.publish(TOKENS, spans(TOKENS, 16, 32))
    assert rests


def test_blocks_of_other_tensors_end_the_restore_where_they_begin(space, tmp_path):
    """Two writers at once, or one that does not ask."""
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    (block,) = block_files(tmp_path / "cache")
    hidden = block.rename(tmp_path / "hidden")
    block.write_bytes(bytes(hidden.stat().st_size))
    space.publish(TOKENS, [unlike(16, 4)])
    hidden.rename(block)
    assert restore(space, TOKENS).tokens == 16
    # And the right ones take their place.
    space.publish(TOKENS, spans(TOKENS, 16, 20))
    assert restore(space, TOKENS).tokens == 20


@pytest.mark.parametrize("labelled", ["mod\udc80el", "\ud800", Path("a/model")])
def test_a_label_that_utf8_cannot_hold_is_shown_in_part(tmp_path, labelled):
    with open_store(tmp_path / "cache") as store:
        space = store.namespace(replace(INFO, label=labelled))
        space.publish(TOKENS, spans(TOKENS, 0, 16))
        assert store.counters.failed_publishes == 0
        assert restore(space, TOKENS).tokens == 16
        label = read_label(store.context.fs, store.context.layout, space.id)
    assert label == str(labelled).encode(errors="replace").decode()


@pytest.mark.parametrize("value", ["\udc80", b"bytes", {1, 2}])
def test_what_no_fingerprint_can_be_made_of_is_refused_when_the_namespace_is_opened(tmp_path, value):
    with open_store(tmp_path / "cache") as store, pytest.raises(KVStoreError, match="JSON values that UTF-8 can hold"):
        store.namespace(NamespaceInfo({"model": value}))
