"""The inside of a block: docs/format.md, section 4."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from core_support import SPECS, prompt, span
from format_support import block_bytes

from kvstore import DamagedBlockError, PublishError, Span, TensorBuffer, TensorSpec
from kvstore.blocks import MAX_HEADER_BYTES, block_head, block_parts, pack_header, payload_phase, read_specs
from kvstore.manifest import BlockRef

HALF = TensorSpec("0.keys", "F16", 2, (3,))
BYTE = TensorSpec("0.values", "U8", 1, (5,))
FLOATS = np.arange(2 * 4 * 3, dtype=np.float16).reshape(2, 4, 3)
BYTES = np.arange(100, 120, dtype=np.uint8).reshape(1, 4, 5)


def whole(some: Span) -> bytes:
    return b"".join(bytes(part) for part in block_parts(some)[0])


def block(data: bytes, payload: int, first: int = 0, count: int = 4) -> BlockRef:
    return BlockRef(xxhash.xxh3_128(data).digest(), len(data), first, count, payload)


def two(phase: int = 0) -> Span:
    return Span(8, 4, (HALF, BYTE), [FLOATS.tobytes(), BYTES.tobytes()], phase=phase)


def test_a_block_is_the_bytes_of_the_format_page():
    text = (
        b'{"__metadata__":{"format":"kvstore/1","first":"8","count":"4"},'
        b'"0.keys":{"dtype":"F16","shape":[2,4,3],"data_offsets":[0,48]},'
        b'"0.values":{"dtype":"U8","shape":[1,4,5],"data_offsets":[48,68]}}'
    )
    padded = text.ljust(256 - 8)
    assert whole(two()) == struct.pack("<Q", 248) + padded + FLOATS.tobytes() + BYTES.tobytes()
    assert block_parts(two())[1] == 256


def test_a_block_is_readable_by_the_safetensors_library(tmp_path):
    path = tmp_path / "block.safetensors"
    path.write_bytes(whole(two(phase=13)))
    tensors = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(tensors["0.keys"], FLOATS)
    np.testing.assert_array_equal(tensors["0.values"], BYTES)
    with safetensors.safe_open(path, framework="np") as opened:
        assert opened.metadata() == {"format": "kvstore/1", "first": "8", "count": "4"}


def test_the_specs_of_a_block_of_the_safetensors_library_are_read():
    """What another writer makes from the same tensors is a block too, if it only puts the metadata in."""
    metadata = {"format": "kvstore/1", "first": "8", "count": "4"}
    data = safetensors.numpy.save({"0.keys": FLOATS, "0.values": BYTES}, metadata)
    payload = 8 + struct.unpack_from("<Q", data)[0]
    assert set(read_specs(data[:payload], block(data, payload, 8))) == {HALF, BYTE}


@pytest.mark.parametrize("phase", [0, 1, 8, 16, 48, 63, 64, 1000, -1])
def test_the_payload_begins_at_the_wanted_phase(phase):
    parts, payload = block_parts(two(phase))
    assert payload % 64 == phase % 64
    assert len(parts[0]) == payload
    assert read_specs(parts[0], block(whole(two(phase)), payload, 8)) == (HALF, BYTE)


@pytest.mark.parametrize("phase", [0, 24, 64, 4000, 4096 + 24, -1])
def test_a_large_payload_begins_at_the_wanted_phase_of_a_page(phase):
    large = TensorSpec("0.keys", "F16", 8, (128,))
    head = block_head([large], 0, 512, phase)
    ref = BlockRef(bytes(16), len(head) + large.span_bytes(512), 0, 512, len(head))
    assert large.span_bytes(512) == 1 << 20
    assert len(head) % 4096 == phase % 4096
    assert read_specs(head, ref) == (large,)
    assert payload_phase(ref) == phase % 4096


def test_a_small_payload_is_not_padded_to_a_page():
    small = TensorSpec("0.keys", "F16", 8, (128,))
    head = block_head([small], 0, 511, 4000)
    assert len(head) == 4000 % 64 + 128
    assert payload_phase(BlockRef(bytes(16), len(head) + small.span_bytes(511), 0, 511, len(head))) == 4000 % 64


def test_a_header_with_no_room_for_a_page_of_padding_is_still_written():
    """What a reader accepts is written, whatever the phase."""
    most = 1600
    name = next(
        size
        for size in range(60, 200)
        if len(block_head([TensorSpec(f"{i:0{size}}", "U8", 1024, ()) for i in range(most)], 0, 1, 0))
        > MAX_HEADER_BYTES - 2048
    )
    specs = [TensorSpec(f"{i:0{name}}", "U8", 1024, ()) for i in range(most)]
    for phase in (0, 7, 24, 4095):
        assert len(block_head(specs, 0, 1, phase)) % 64 == phase % 64


@pytest.mark.parametrize("short", range(-2, 18))
def test_padding_to_a_page_refuses_no_header_that_padding_to_a_line_allows(short):
    """Headers of just less than the largest with room for a page: their length bytes count, too."""
    entry = {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}
    empty = len(json.dumps({"": entry}, separators=(",", ":")))
    for phase in (0, 1, 7, 4095):
        head = pack_header({"a" * (MAX_HEADER_BYTES - 4096 - short - empty): entry}, phase, 1 << 20)
        assert len(head) <= MAX_HEADER_BYTES
        assert len(head) % 64 == phase % 64


def test_the_cut_of_the_data_into_buffers_does_not_change_the_file():
    data = FLOATS.tobytes() + BYTES.tobytes()
    pieces = [data[:1], b"", bytearray(data[1:50]), memoryview(data)[50:]]
    assert whole(Span(8, 4, (HALF, BYTE), pieces)) == whole(two())


def test_data_may_be_typed_buffers():
    assert whole(Span(8, 4, (HALF, BYTE), [memoryview(FLOATS), memoryview(BYTES)])) == whole(two())


@pytest.mark.parametrize("size", [0, 67, 69])
def test_data_of_another_size_than_the_tensors_are_refused(size):
    with pytest.raises(PublishError, match="68 bytes"):
        block_parts(Span(8, 4, (HALF, BYTE), [bytes(size)]))


@pytest.mark.parametrize(
    "specs",
    [
        (HALF, HALF),
        (TensorSpec("__metadata__", "U8", 1, (4,)),),
        (TensorSpec("0", "F12", 1, (4,)),),
        (TensorSpec("0", "U8", 0, (4,)),),
        (TensorSpec("0", "U8", 1, (4, 0)),),
        (TensorSpec("0", "U8", -1, (-4,)),),
        (TensorSpec("0", "U8", 2.0, (4,)),),
        (TensorSpec("0", "U8", 2, (4.0,)),),
        (TensorSpec("0", "U8", True, (4,)),),
        (TensorSpec("0", "U8", np.int64(2), (4,)),),
        (TensorSpec("0", ["U8"], 1, (4,)),),
        (TensorSpec(1, "U8", 1, (4,)),),
        (TensorSpec(None, "U8", 1, (4,)),),
        (TensorSpec(1, "U8", 1, (4,)), TensorSpec("1", "U8", 1, (4,))),
        (TensorSpec(b"0", "U8", 1, (4,)),),
        (TensorSpec(["0"], "U8", 1, (4,)),),
        (TensorSpec("0\ud800", "U8", 1, (4,)),),
    ],
    ids=repr,
)
def test_tensors_that_a_reader_would_refuse_are_not_written(specs):
    size = int(sum(max(0, spec.outer * 4 * int(np.prod(spec.inner))) for spec in specs))
    with pytest.raises(PublishError):
        block_parts(Span(0, 4, specs, [bytes(size)]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"specs": None}, "nobody could read"),
        ({"specs": (HALF, None)}, "nobody could read"),
        ({"specs": (replace(HALF, inner=None), BYTE)}, "nobody could read"),
        ({"data": None}, "nobody could read"),
        ({"data": ["x" * 68]}, "nobody could read"),
        ({"data": [memoryview(bytes(136))[::2]]}, "contiguous"),
        ({"data": [np.asfortranarray(FLOATS), BYTES]}, "contiguous"),
        ({"phase": 1.5}, "nobody could read"),
    ],
    ids=["no specs", "no spec", "no shape", "no data", "text", "strided", "by columns", "phase"],
)
def test_what_is_no_tensor_and_no_data_is_a_publish_error(changes, words):
    with pytest.raises(PublishError, match=words):
        block_parts(replace(two(), **changes))


@pytest.mark.parametrize("inner", [[3], (3,)], ids=repr)
def test_specs_may_be_lists(inner):
    assert whole(replace(two(), specs=[replace(HALF, inner=inner), BYTE])) == whole(two())


def test_a_header_that_a_reader_would_refuse_is_not_written():
    specs = tuple(TensorSpec(f"{i}" + "x" * 1000, "U8", 1, ()) for i in range(MAX_HEADER_BYTES // 1000))
    with pytest.raises(PublishError, match="header"):
        block_parts(Span(0, 1, specs, [bytes(len(specs))]))


@pytest.mark.parametrize(
    ("dtype", "size"), [("BOOL", 1), ("F8_E4M3", 1), ("BF16", 2), ("F16", 2), ("U32", 4), ("F32", 4), ("I64", 8)]
)
def test_a_row_is_one_token_of_one_head(dtype, size):
    spec = TensorSpec("x", dtype, 4, (2, 3))
    assert spec.row_bytes == 6 * size
    assert spec.span_bytes(10) == 4 * 10 * 6 * size


def test_a_tensor_may_have_one_element_a_token():
    spec = TensorSpec("scale", "F32", 2, ())
    parts, payload = block_parts(Span(0, 3, (spec,), [bytes(24)]))
    assert read_specs(parts[0], BlockRef(b"", payload + 24, 0, 3, payload)) == (spec,)


def test_runs_are_one_a_head_at_the_stride_of_the_capacity():
    memory = bytearray(range(2 * 10 * 3))
    runs = TensorBuffer(memoryview(memory), 10).runs(TensorSpec("x", "U8", 2, (3,)), 4, 2)
    assert [bytes(run) for run in runs] == [bytes(range(12, 18)), bytes(range(42, 48))]


@pytest.mark.parametrize(
    ("view", "capacity"),
    [
        (memoryview(bytes(60)), 10),
        (memoryview(bytearray(120))[::2], 10),
        (memoryview(bytearray(60)).cast("B", (6, 10)), 10),
        (memoryview(bytearray(60)).cast("H"), 10),
        (memoryview(bytearray(59)), 10),
        (memoryview(bytearray(61)), 10),
        (memoryview(bytearray(18)), 3),
    ],
    ids=["read-only", "strided", "2-d", "not bytes", "short", "long", "too few tokens"],
)
def test_memory_that_does_not_fit_is_refused(view, capacity):
    spec = TensorSpec("x", "U8", 2, (3,))
    TensorBuffer(memoryview(bytearray(60)), 10).check(spec, 4)
    with pytest.raises(ValueError, match="does not fit"):
        TensorBuffer(view, capacity).check(spec, 4)


METADATA = {"format": "kvstore/1", "first": "8", "count": "4"}


def header(**changes) -> dict:
    entry = {"dtype": "U8", "shape": [1, 4, 5], "data_offsets": [0, 20], **changes}
    return {"__metadata__": METADATA, "x": entry}


def specs_of(head: dict | str | bytes, size: int = 20, count: int = 4):
    data = block_bytes(head)
    return read_specs(data, BlockRef(b"", len(data) + size, 8, count, len(data)))


def test_a_good_header_gives_its_tensors():
    assert specs_of(header()) == (TensorSpec("x", "U8", 1, (5,)),)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "U9"},
        {"dtype": ["U8"]},
        {"dtype": None},
        {"shape": []},
        {"shape": [20]},
        {"shape": [1, 5, 4]},
        {"shape": [1.0, 4, 5]},
        {"shape": [True, 4, 5]},
        {"shape": [-1, 4, -5]},
        {"shape": [1, 4, 5, 0]},
        {"shape": ["1", 4, 5]},
        {"shape": "145"},
        {"shape": [2**63, 4, 5]},
        {"shape": [1, 4, 2**63]},
        {"shape": [1, 4, float("nan")]},
        {"data_offsets": [1, 21]},
        {"data_offsets": [0, 19]},
        {"data_offsets": [0.0, 20.0]},
        {"data_offsets": [False, 20]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 20, 20]},
        {"data_offsets": None},
    ],
    ids=repr,
)
def test_an_impossible_tensor_is_damage(changes):
    with pytest.raises(DamagedBlockError, match=r"cannot be read|payload size"):
        specs_of(header(**changes))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        None,
        [],
        "kvstore/1",
        {**METADATA, "first": "0"},
        {**METADATA, "first": 8},
        {**METADATA, "first": "08"},
        {**METADATA, "count": "5"},
        {**METADATA, "count": 4},
        {**METADATA, "count": True},
        {**METADATA, "format": "kvstore/2"},
        *({name: METADATA[name] for name in METADATA if name != lost} for lost in METADATA),
    ],
    ids=repr,
)
def test_a_header_of_other_tokens_or_of_another_format_is_damage(metadata):
    """Section 4: a reader checks the header against the manifest's span, not only the tensors' shapes."""
    with pytest.raises(DamagedBlockError, match=r"cannot be read|other tokens"):
        specs_of({**header(), "__metadata__": metadata})


def test_metadata_may_say_more():
    assert specs_of({**header(), "__metadata__": {**METADATA, "made by": "somebody"}})


def test_a_tensor_that_counts_true_tokens_is_damage():
    def of(tokens):
        return {**header(shape=[1, tokens, 5], data_offsets=[0, 5]), "__metadata__": {**METADATA, "count": "1"}}

    assert specs_of(of(1), 5, count=1)
    with pytest.raises(DamagedBlockError, match="impossible shape"):
        specs_of(of(True), 5, count=1)


U8 = {"dtype": "U8", "shape": [1, 4, 5]}


@pytest.mark.parametrize("offsets", [([0, 20], [0, 20]), ([0, 20], [10, 30]), ([0, 20], [21, 41]), ([20, 40], [0, 20])])
def test_tensors_must_follow_each_other(offsets):
    names = {f"{i}": {**U8, "data_offsets": list(pair)} for i, pair in enumerate(offsets)}
    with pytest.raises(DamagedBlockError, match=r"holes|payload size"):
        specs_of({"__metadata__": METADATA, **names}, max(end for _, end in offsets))


GOOD = json.dumps({"__metadata__": METADATA})


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "[]",
        '"x"',
        "1",
        "{}",
        GOOD[:-1],
        '{"x":{}}',
        GOOD[:-1] + ',"x":null}',
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf" + GOOD.encode(),
        GOOD.encode("utf-16"),
        GOOD[:-1] + ',"x":' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_header_that_is_not_one_is_damage(text):
    with pytest.raises(DamagedBlockError, match=r"cannot be read|not possible"):
        specs_of(text)


def test_a_name_that_is_there_twice_is_damage():
    entry = json.dumps({**U8, "data_offsets": [0, 20]})
    with pytest.raises(DamagedBlockError, match="twice"):
        specs_of(f'{GOOD[:-1]},"x":{entry},"x":{entry}}}')


@pytest.mark.parametrize("payload", [0, 7, 8, MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_an_impossible_payload_offset_is_damage(payload):
    with pytest.raises(DamagedBlockError, match="not possible"):
        read_specs(b"", BlockRef(b"", 2**40, 0, 4, payload))


def test_a_header_length_other_than_the_manifest_says_is_damage():
    data = block_bytes(header())
    for wrong in (len(data) - 9, len(data) - 7, 2**63):
        changed = struct.pack("<Q", wrong) + data[8:]
        with pytest.raises(DamagedBlockError, match="length"):
            read_specs(changed, BlockRef(b"", len(data) + 20, 8, 4, len(data)))


def test_tensors_are_laid_out_in_the_order_they_were_given():
    _, payload = block_parts(span(prompt(4), 0, 4))
    described = json.loads(whole(span(prompt(4), 0, 4))[8:payload])
    names = [name for name in described if name != "__metadata__"]
    assert names == [spec.name for spec in SPECS]
    offsets = [described[name]["data_offsets"] for name in names]
    assert all(before[1] == after[0] for before, after in pairwise(offsets))
