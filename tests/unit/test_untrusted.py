"""JSON of others: what is refused before it is parsed, and that nothing honest is."""

from __future__ import annotations

import json

import pytest

from kvstore import PublishError, State, StateTensor, TensorSpec
from kvstore.blocks import DTYPE_BYTES, MAX_HEADER_BYTES, MAX_NAMES, MAX_TENSORS, block_head, read_specs
from kvstore.manifest import BlockRef
from kvstore.states import state_parts
from kvstore.untrusted import MAX_DIGITS, MAX_ELEMENTS, MAX_ITEMS, MAX_OBJECTS, fits, is_plain, parse, parse_exact


@pytest.mark.parametrize(
    ("part", "most"),
    [(b"{", MAX_OBJECTS), (b",", MAX_ITEMS), (b"[", MAX_ITEMS), (b"7", MAX_DIGITS), (b"x", 10**6)],
)
def test_as_many_parts_as_there_may_be(part, most):
    assert is_plain(part * most)
    if part != b"x":
        assert not is_plain(part * (most + 1))
        with pytest.raises(ValueError, match="more objects"):
            parse(b'"' + part * (most + 1) + b'"')


def test_items_of_both_kinds_count_together():
    assert is_plain(b"[" * 10 + b"," * (MAX_ITEMS - 10))
    assert not is_plain(b"[" * 10 + b"," * (MAX_ITEMS - 9))


def test_digits_of_several_numbers_do_not_add_up():
    assert parse(b"[" + b",".join([b"9" * MAX_DIGITS] * 10) + b"]") == [10**MAX_DIGITS - 1] * 10


@pytest.mark.parametrize("text", [b"", b"\xff", b"{}x", b'{"a":1,"a":1}', b'[{"b":{"a":1,"a":2}}]', b"{" * 2000])
def test_what_is_no_document_of_ours(text):
    with pytest.raises((ValueError, RecursionError)):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [b"NaN", b"Infinity", b"-Infinity", rb'"\ud800"', rb'"\uDFFF"', rb'"\uDBff"'],
)
def test_what_only_python_takes(text):
    for document in (text, b'{"a":[%s]}' % text):
        parse(document)
        with pytest.raises(ValueError, match=r"no number|surrogates not allowed"):
            parse_exact(document)


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\ud7ff\ue000", "\\ud800", "\0", 1e308, -0.0, 5e-324, 10**MAX_DIGITS - 1]
)
def test_what_every_reader_takes(text):
    assert parse_exact(json.dumps([text]).encode()) == parse(json.dumps([text]).encode()) == [text]


def test_half_a_pair_is_a_name_of_nothing():
    with pytest.raises(ValueError, match="surrogates"):
        parse_exact(rb'{"\ud83d":{"\ude00":1}}')


@pytest.mark.parametrize(
    ("sizes", "can"),
    [
        ([], True),
        ([0], True),
        ([MAX_ELEMENTS - 1], True),
        ([MAX_ELEMENTS], False),
        ([1 << 31, 1 << 31, 1], True),
        ([1 << 31, 1 << 32], False),
        ([0, 1 << 40, 1 << 40], False),
        ([1 << 39] * 18_000, False),
        ([1] * 100_000, True),
    ],
    ids=lambda value: str(value)[:30],
)
def test_which_arrays_can_exist(sizes, can):
    assert fits(sizes) is can


@pytest.mark.parametrize(("name", "width"), [("{}.keys", 128), ("{:x}", 1)])
def test_the_tensors_of_1000_layers_are_read_again(name, width):
    specs = tuple(TensorSpec(name.format(i), "BF16", 8, (width,)) for i in range(2_000))
    head = block_head(specs, 0, 2048, 0)
    assert len(head) < MAX_HEADER_BYTES
    size = len(head) + sum(spec.span_bytes(2048) for spec in specs)
    assert read_specs(head, BlockRef(b"", size, 0, 2048, len(head))) == specs


def test_many_tensors_a_layer_are_read_again():
    """Quantized keys and values, indexers, compressors: 16 tensors for each of 128 layers."""
    specs = tuple(TensorSpec(f"{i}.compressor.{part}", "U32", 8, (16,)) for i in range(128) for part in range(16))
    head = block_head(specs, 0, 2048, 0)
    size = len(head) + sum(spec.span_bytes(2048) for spec in specs)
    assert read_specs(head, BlockRef(b"", size, 0, 2048, len(head))) == specs


def test_what_no_reader_accepts_is_not_written():
    with pytest.raises(PublishError, match="more than any reader"):
        block_head((TensorSpec("{" * (MAX_TENSORS + 1), "U8", 1, ()),), 0, 1, 0)
    with pytest.raises(PublishError, match="more than any reader"):
        state_parts(State((), [], {f"{i:x}": 0 for i in range(MAX_NAMES + 1)}), 0, 1)
    with pytest.raises(PublishError, match="more than any reader"):
        state_parts(State((), [], {"n": 10**MAX_DIGITS}), 0, 1)
    with pytest.raises(PublishError, match="impossible shape"):
        state_parts(State((StateTensor("x", "U8", (0, 1 << 39, 1 << 39)),), [b""]), 0, 1)


def test_an_ordinary_description_is_far_from_the_limits():
    layers = {f"model.layers.{i}.{part}": {"group_size": 64, "bits": 4} for i in range(64) for part in range(10)}
    config = {"quantization": layers, "quantization_config": layers, "dtypes": sorted(DTYPE_BYTES)}
    assert parse(json.dumps(config, indent=2).encode()) == config
