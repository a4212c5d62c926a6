"""A directory whose author knows the format: checksums, names and digests are right, and the content is not.

Whoever may write into the directory can lie about KV (see SECURITY.md); what must not happen is that a lie costs the
reader its memory, its time or its life.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from core_support import INFO, Memory, files, open_store, prompt, spans
from format_support import Forged, Ref, block_bytes, install_block, pack, root_of
from hostile_support import measured

from kvstore import Match, Namespace, State, StateTensor, TensorSpec
from kvstore.blocks import MAX_HEADER_BYTES
from kvstore.fsck import check
from kvstore.manifest import decode
from kvstore.states import state_parts

TOKENS = prompt(16)

ROOT = root_of(INFO.fingerprint, 16)
GOOD = {"dtype": "U8", "shape": [1, 16, 4], "data_offsets": [0, 64]}
PAYLOAD = bytes(range(64))


METADATA = {"format": "kvstore/1", "first": "0", "count": "16"}
OPEN = json.dumps({"__metadata__": METADATA})[:-1]
"""A header's honest beginning, for lies that no dict can hold."""


def header(**tensors) -> dict:
    return {"__metadata__": METADATA, **tensors}


@pytest.fixture
def root(tmp_path) -> Path:
    open_store(tmp_path / "cache").close()
    return tmp_path / "cache"


def node(*refs: Ref, **changes) -> Forged:
    return Forged(INFO.fingerprint, ROOT, pack(TOKENS), refs).but(**changes)


def ref_to(root: Path, head: bytes, **changes) -> Ref:
    """An honest reference to a block of that header, with changes; the block is put where the reference says."""
    data = head + PAYLOAD
    honest = {"digest": install_block(root, data), "size": len(data), "first": 0, "count": 16, "payload": len(head)}
    return Ref(**{**honest, **changes})


def good_ref(root: Path, **changes) -> Ref:
    return ref_to(root, block_bytes(header(x=GOOD)), **changes)


def read(root: Path, tokens=TOKENS) -> int:
    """Tokens that a fresh process restores."""
    with open_store(root, interval=None) as store:
        space = store.namespace(INFO)
        return space.read(space.lookup(tokens), Memory()).tokens


def test_what_is_forged_without_a_lie_is_served(root):
    node(good_ref(root)).install(root)
    assert measured(lambda: read(root)) == 16


MANIFEST_LIES = {
    "size 2**63": {"size": 2**63},
    "size 2**64 - 1": {"size": 2**64 - 1},
    "size 0": {"size": 0},
    "payload 0": {"payload": 0},
    "payload inside the length": {"payload": 7},
    "payload after the file": {"payload": 100_000},
    "payload 4 GiB": {"payload": 2**32 - 1},
    "payload 4 GiB of 8 EiB": {"payload": 2**32 - 1, "size": 2**63},
    "span of nothing": {"count": 0},
    "span of 4 billion": {"count": 2**32 - 1},
    "span of 15": {"count": 15},
    "span from 1": {"first": 1, "count": 15},
    "span from 2**63": {"first": 2**63},
    "unknown block": {"digest": b"\xee" * 16},
    "unknown flags": {"flags": 0x80000000},
}


@pytest.mark.parametrize("lie", MANIFEST_LIES)
def test_a_lie_in_a_reference_is_a_miss(root, lie):
    node(good_ref(root, **MANIFEST_LIES[lie])).install(root)
    assert measured(lambda: read(root)) == 0


NODE_LIES = {
    "another magic": {"magic": b"KVSTXXXX"},
    "a newer format": {"version": 2},
    "a state under the name of spans": {"kind": 2},
    "another place": {"first": 16},
    "a place 2**63": {"first": 2**63},
    "a shorter interval": {"interval": 15},
    "a longer interval": {"interval": 32},
    "another namespace": {"fingerprint": b"\1" * 32},
    "4 billion tokens": {"count": 2**32 - 1},
    "4 billion blocks": {"n_refs": 2**32 - 1},
    "4 billion letters": {"writer_bytes": 2**32 - 1},
    "another key": {"key": b"\1" * 32},
    "a second manifest behind": {"tail": b"\0" * 1000},
}


@pytest.mark.parametrize("lie", NODE_LIES)
def test_a_lie_in_a_manifest_is_a_miss(root, lie):
    honest = node(good_ref(root))
    path = honest.path(root)
    path.parent.mkdir(parents=True)
    path.write_bytes(honest.but(**NODE_LIES[lie]).encode())
    assert measured(lambda: read(root)) == 0


def test_a_publish_takes_the_place_of_a_manifest_of_another_interval(root):
    """All else in it is right, so a lookup, which opens none, finds it again and again."""
    path = node(good_ref(root), interval=32).install(root)
    path.with_suffix(".state").write_bytes(node(good_ref(root), interval=32, kind=2).encode())
    with open_store(root) as store:
        space = store.namespace(INFO)
        match = space.lookup(TOKENS)
        assert (match.count, space.state_size(match), space.read(match, Memory()).tokens) == (16, 0, 0)
        assert store.counters.damaged == 2
        assert space.lookup(TOKENS).count == 0
        space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert read(root) == 16
    assert decode(path.read_bytes()).interval == 16


def test_overlapping_spans_are_a_miss(root):
    half = good_ref(root, count=9)
    node(half, good_ref(root, first=8, count=8)).install(root)
    assert measured(lambda: read(root)) == 0


def test_a_node_without_tokens_is_a_miss(root):
    node(tokens=b"", refs=()).install(root)
    assert measured(lambda: read(root)) == 0


def test_a_manifest_far_larger_than_a_chunk_is_not_parsed(tmp_path):
    root = tmp_path / "wide"
    open_store(root, interval=128).close()
    tokens = [*prompt(64), *range(65536 - 64)]
    giant = Forged(
        INFO.fingerprint,
        root_of(INFO.fingerprint, 128),
        pack(tokens),
        tuple(Ref(bytes(16), 1000, i, 1, 100) for i in range(65536)),
        interval=1 << 16,
    )
    giant.install(root)
    assert measured(lambda: read(root, prompt(100))) == 0


def test_a_manifest_of_as_many_blocks_as_tokens_costs_little(tmp_path):
    """In a directory of the default interval. None of the blocks is there."""
    root = tmp_path / "wide"
    open_store(root, interval=2048).close()
    tokens = prompt(2048)
    refs = tuple(Ref(bytes(16), 1000, i, 1, 100) for i in range(2048))
    one = Forged(INFO.fingerprint, root_of(INFO.fingerprint, 2048), pack(tokens), refs, interval=2048)
    one.install(root)
    assert measured(lambda: read(root, tokens)) == 0
    one.but(refs=(*refs, refs[-1])).install(root)
    assert measured(lambda: read(root, tokens)) == 0


def test_a_huge_file_in_place_of_a_manifest_is_not_read(root):
    path = node(good_ref(root)).install(root)
    os.truncate(path, 1 << 42)
    assert measured(lambda: read(root)) == 0


HEADER_LIES: dict[str, bytes | str | dict] = {
    "arrays 100,000 deep": OPEN + ',"x":' + "[" * 100_000 + "]" * 100_000 + "}",
    "arrays 20,000 deep": OPEN + ',"x":' + "[" * 20_000 + "]" * 20_000 + "}",
    "objects 2,090 deep": OPEN + ',"x":' + '{"a":' * 2_090 + "1" + "}" * 2_091,
    "objects 100,000 deep": OPEN + ',"x":' + '{"a":' * 100_000 + "1" + "}" * 100_001,
    "an open array 1,000,000 deep": "[" * 1_000_000,
    "a number of 1,000,000 digits": OPEN + ',"x":' + "9" * 1_000_000 + "}",
    "2**63 heads": header(x={**GOOD, "shape": [2**63, 16, 4], "data_offsets": [0, 2**63 * 64]}),
    "a product that wraps to 64": header(x={**GOOD, "shape": [2**58 + 1, 16, 4]}),
    "2**63 in an offset": header(x={**GOOD, "data_offsets": [0, 2**63]}),
    "negative sizes": header(x={**GOOD, "shape": [-1, 16, -4]}),
    "negative offsets": header(x={**GOOD, "data_offsets": [-64, 0]}),
    "floats": header(x={**GOOD, "shape": [1.0, 16.0, 4.0], "data_offsets": [0.0, 64.0]}),
    "booleans": header(x={**GOOD, "shape": [True, 16, 4]}),
    "infinity": OPEN + ',"x":{"dtype":"U8","shape":[1,16,Infinity],"data_offsets":[0,Infinity]}}',
    "strings": header(x={**GOOD, "shape": ["1", "16", "4"]}),
    "a size of zero": header(x={**GOOD, "shape": [1, 16, 4, 0], "data_offsets": [0, 0]}),
    "overlapping tensors": header(x=GOOD, y=GOOD),
    "a hole": header(x={**GOOD, "data_offsets": [8, 72]}),
    "another count": header(x={**GOOD, "shape": [1, 8, 8]}),
    "an unknown dtype": header(x={**GOOD, "dtype": "U8; DROP"}),
    "a dtype that cannot be hashed": header(x={**GOOD, "dtype": {}}),
    "no dtype": header(x={"shape": [1, 16, 4], "data_offsets": [0, 64]}),
    "no metadata": {"x": GOOD},
    "metadata of other tokens": {"__metadata__": {**METADATA, "first": "16"}, "x": GOOD},
    "metadata of more tokens": {"__metadata__": {**METADATA, "count": "17"}, "x": GOOD},
    "metadata of another format": {"__metadata__": {**METADATA, "format": "kvstore/2"}, "x": GOOD},
    "metadata that are no object": {"__metadata__": "kvstore/1", "x": GOOD},
    "a name twice": OPEN + "," + ",".join([f'"x":{json.dumps(GOOD)}'] * 2) + "}",
    "metadata twice": OPEN + f',{OPEN[1:]},"x":{json.dumps(GOOD)}}}',
    "metadata that are no strings": {"__metadata__": {**METADATA, "more": 1}, "x": GOOD},
    "metadata that are null": {"__metadata__": {**METADATA, "more": None}, "x": GOOD},
    "a field that no tensor has": header(x={**GOOD, "more": "1"}),
    "NaN in a field": OPEN + ',"x":' + json.dumps(GOOD)[:-1] + ',"more":NaN}}',
    "half of a surrogate pair": header(**{"x\ud800": GOOD}),
    "the other half in capitals": OPEN + ',"x\\uDC00":' + json.dumps(GOOD) + "}",
    "half of a surrogate pair in the metadata": {"__metadata__": {**METADATA, "more": "\ud800"}, "x": GOOD},
    "a space in front": " " + json.dumps(header(x=GOOD)),
    "a line feed behind": json.dumps(header(x=GOOD)) + "\n",
    "zeros behind": json.dumps(header(x=GOOD)) + "\0\0",
    "a second object behind": json.dumps(header(x=GOOD)) + "{}",
    "an array": [],
    "nothing": "",
    "not UTF-8": OPEN.encode() + b',"\xff":1}',
    "2,000 tensors of 16 GiB": header(**{f"{i}": {**GOOD, "shape": [1, 16, 2**30]} for i in range(2_000)}),
}


def filled(begin: str, item: str, end: str) -> str:
    """As much as fits into a header."""
    return begin + item * ((MAX_HEADER_BYTES - 8 - len(begin) - len(end)) // len(item)) + end


HEADER_LIES |= {
    "87,000 objects": filled(OPEN + ',"x":[', "{},", "{}]}"),
    "87,000 objects in the metadata": filled('{"__metadata__":[', "{},", "{}]}"),
    "87,000 arrays": filled(OPEN + ',"x":[', "[],", "[]]}"),
    "65,000 numbers": filled(OPEN + ',"x":[', "1e9,", "1]}"),
    "52,000 strings": filled(OPEN + ',"x":[', '"ab",', '""]}'),
    "61 numbers of 4,299 digits": filled(OPEN + ',"x":[', "9" * 4299 + ",", "1]}"),
    "numbers of 199 digits": filled(OPEN + ',"x":[', "9" * 199 + ",", "1]}"),
    "11,000 names": OPEN + "," + ",".join(f'"{i:x}":0' for i in range(11_000)) + "}",
    "20,000 names": OPEN + "," + ",".join(f'"{i:x}":0' for i in range(20_000)) + "}",
    "18,000 dimensions": filled(
        OPEN + ',"x":{"dtype":"U8","shape":[1,16,', "1099511627775,", '1],"data_offsets":[0,64]}}'
    ),
    "20,000 dimensions of 1": OPEN + ',"x":{"dtype":"U8","shape":[1,16,' + "1," * 20_000 + '1],"data_offsets":[0,1]}}',
    "130,000 dimensions of 1": filled(OPEN + ',"x":{"dtype":"U8","shape":[1,16,', "1,", '1],"data_offsets":[0,16]}}'),
    "a name of 260,000 letters": filled(OPEN + ',"', "x", '":0}'),
    "43,000 escapes": filled(OPEN + ',"x":"', "\\u0041", '"}'),
    "2,090 tensors of one name": OPEN + ',"x":{"dtype":"U8","shape":[1,16,1],"data_offsets":[0,16]}' * 2_090 + "}",
    "2,090 objects": OPEN + ',"x":[' + "{}," * 2_090 + "{}]}",
    "11,000 arrays": OPEN + ',"x":[' + "[]," * 11_000 + "[]]}",
    "23,000 strings": OPEN + ',"x":[' + '"ab",' * 23_000 + '""]}',
    "23,000 numbers": OPEN + ',"x":[' + "1e9," * 23_000 + "1]}",
    "21,000 surrogate pairs": filled(OPEN + ',"x":"', "\\ud83d\\ude00", '"}'),
    "2,090 tensors of another size than the file": header(
        **{f"{i:x}": {"dtype": "U8", "shape": [1, 16], "data_offsets": [16 * i, 16 * i + 16]} for i in range(2_090)}
    ),
}


@pytest.mark.parametrize("lie", HEADER_LIES)
def test_a_lie_in_a_header_is_a_miss(root, lie):
    content = HEADER_LIES[lie]
    head = block_bytes("[]" if content == [] else content)
    node(ref_to(root, head)).install(root)
    assert measured(lambda: read(root)) == 0


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_lie_in_the_length_of_a_header_is_a_miss(root, length):
    head = block_bytes(header(x=GOOD), length=length)
    node(ref_to(root, head)).install(root)
    assert measured(lambda: read(root)) == 0


def test_a_sparse_block_of_a_terabyte_with_a_giant_header_is_not_read(root):
    digest = b"\x42" * 16
    path = root / "objects" / "blocks" / digest.hex()[:2] / digest.hex()
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, 1 << 40)
    node(Ref(digest, 1 << 40, 0, 16, 1 << 31)).install(root)
    assert measured(lambda: read(root)) == 0


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../evil", "", "\0", "a" * 10_000, "x\n\x1b[31m", "__class__"])
def test_a_tensor_name_is_only_a_name(root, name):
    head = block_bytes(header(**{name: GOOD}))
    node(ref_to(root, head)).install(root)
    before = files(root.parent)
    with open_store(root) as store:
        space = store.namespace(INFO)
        memory = Memory()
        assert space.read(space.lookup(TOKENS), memory).tokens == 16
    assert memory.specs == (TensorSpec(name, "U8", 1, (4,)),)
    assert memory.rows(memory.specs[0], 0, 16) == PAYLOAD
    assert files(root.parent) == before


STATE = {
    "__metadata__": {**METADATA, "values": '{"n":1}', "empty": "[]"},
    "s": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]},
}


def state(metadata: dict | None = None, **tensors) -> dict:
    return {"__metadata__": {**STATE["__metadata__"], **(metadata or {})}, **(tensors or {"s": STATE["s"]})}


STATE_LIES: dict[str, bytes | str | dict] = {
    "arrays 100,000 deep": "[" * 100_000,
    "values 100,000 deep": state({"values": "[" * 100_000}),
    "values that are no object": state({"values": "[1]"}),
    "values that are no scalars": state({"values": '{"n":[1]}'}),
    "no values": {"__metadata__": {**METADATA, "empty": "[]"}, "s": STATE["s"]},
    "2**63 elements": state(s={**STATE["s"], "shape": [2**63]}),
    "negative elements": state(s={**STATE["s"], "shape": [-8, -8]}),
    "an empty tensor among the others": state(s={**STATE["s"], "shape": [0]}),
    "a tensor without data that has a size": state({"empty": '[["e","U8",[1099511627775]]]'}),
    "a hole": state(s={**STATE["s"], "data_offsets": [1, 65]}),
    "bytes behind the last tensor": state(s={"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}),
    "no metadata": {"s": STATE["s"]},
    "metadata of other tokens": state({"first": "16"}),
    "metadata of more tokens": state({"count": "17"}),
    "metadata of another format": state({"format": "kvstore/2"}),
    "a name twice": json.dumps(STATE)[:-1] + f',"s":{json.dumps(STATE["s"])}}}',
    "a name with bytes and without": state({"empty": '[["s","U8",[0]]]'}),
    "a name twice without bytes": state({"empty": '[["e","U8",[0]],["e","U8",[0]]]'}),
    "a value twice": state({"values": '{"n":1,"n":2}'}),
    "a tensor without bytes of a reserved name": state({"empty": '[["__metadata__","U8",[0]]]'}),
    "a size of 2**40": state({"empty": '[["e","U8",[0,1099511627776]]]'}),
    "tensors in another order than their bytes": state(
        t={"dtype": "U8", "shape": [32], "data_offsets": [32, 64]},
        s={"dtype": "U8", "shape": [32], "data_offsets": [0, 32]},
    ),
    "a dtype that no block has": state(s={**STATE["s"], "dtype": "F8_E8M0"}),
    "a dtype that no block has, without bytes": state({"empty": '[["e","C64",[0]]]'}),
    "tensors without bytes that are no list": state({"empty": "{}"}),
    "a tensor without bytes that is no list": state({"empty": '[{"e":1,"U8":2,"":3}]'}),
    "sizes that are no list": state(s={"dtype": "U8", "shape": "", "data_offsets": [0, 1]}),
    "offsets that are floats": state(s={**STATE["s"], "data_offsets": [0.0, 64.0]}),
    "offsets that are no numbers": state(s={**STATE["s"], "data_offsets": [False, 64]}),
    "a field that no tensor has": state(s={**STATE["s"], "more": 1}),
    "metadata that are no strings": state({"more": 1}),
    "half of a surrogate pair as a value": state({"values": '{"n":"\\ud800"}'}),
    "half of a surrogate pair as a name of a value": state({"values": '{"\\udfff":1}'}),
    "half of a surrogate pair without bytes": state({"empty": '[["\\ud800","U8",[0]]]'}),
    "201 digits": state({"values": '{"n":%s}' % ("9" * 201)}),
} | {f"a value of {text}": state({"values": f'{{"n":{text}}}'}) for text in ("NaN", "Infinity", "-Infinity", "1e999")}

INSIDE = {
    "87,000 objects": "[" + "{}," * 87_000 + "{}]",
    "87,000 arrays": "[" + "[]," * 87_000 + "[]]",
    "23,000 strings": "[" + '"ab",' * 23_000 + '""]',
    "4,000 digits": "9" * 4_000,
    "dimensions": '[["e","U8",[0,' + "1099511627775," * 18_000 + "0]]]",
    "100,000 arrays deep": "[" * 100_000,
}
STATE_LIES |= {
    f"{name} in {where}": state({where: text}) for name, text in INSIDE.items() for where in ("values", "empty")
}
STATE_LIES |= {
    "12,000 dimensions": state(s={**STATE["s"], "shape": [2**40 - 1] * 12_000}),
    "12,000 dimensions and a zero": state(s={**STATE["s"], "shape": [2**40 - 1] * 12_000 + [0]}),
    "overlapping tensors": state(s=STATE["s"], t=STATE["s"]),
    "arrays in escapes": json.dumps(state({"values": "?"})).replace(
        "?", "\\u005b" + "\\u005b\\u005d\\u002c" * 14_000 + "[]]"
    ),
    "2,101 objects in escapes": json.dumps(state({"values": '{"n":"?"}'})).replace("?", "\\u007b" * 2_100),
    "12,001 colons in escapes": json.dumps(state({"values": '{"n":"?"}'})).replace("?", "\\u003a" * 12_000),
    "12,001 colons in escapes without bytes": json.dumps(state({"empty": '[["?","U8",[0]]]'})).replace(
        "?", "\\u003a" * 12_001
    ),
}


def read_state(root: Path) -> dict | None:
    with open_store(root) as store:
        space = store.namespace(INFO)
        return read_state_of(space, space.lookup(TOKENS, trimmable=False))


def install_state(root: Path, content: bytes | str | dict, **changes) -> None:
    head = block_bytes(content)
    ref = ref_to(root, head, **changes)
    node(good_ref(root)).install(root)
    forged = node(ref, kind=2)
    forged.path(root).with_suffix(".state").write_bytes(forged.encode())


def test_a_state_that_is_forged_without_a_lie_is_served(root):
    install_state(root, STATE)
    assert measured(lambda: read_state(root)) == {"n": 1}


@pytest.mark.parametrize("lie", STATE_LIES)
def test_a_lie_in_the_header_of_a_state_is_a_miss(root, lie):
    install_state(root, STATE_LIES[lie])
    assert measured(lambda: read_state(root)) is None


@pytest.mark.parametrize("lie", STATE_LIES)
def test_a_lie_in_the_header_of_a_state_is_found_and_healed(root, lie):
    install_state(root, STATE_LIES[lie])
    with open_store(root) as store:
        assert [finding.code for finding in check(store.context, settle_s=0).findings if finding.severity == "error"]
        space = store.namespace(INFO)
        match = space.lookup(TOKENS, trimmable=False)
        assert (match.count, read_state_of(space, match)) == (16, None)
        assert store.counters.damaged == 1
        assert space.lookup(TOKENS, trimmable=False).count == 0
        space.publish_state(TOKENS, State((StateTensor("s", "U8", (1,)),), [b"s"], {"n": 2}))
        assert read_state_of(space, space.lookup(TOKENS, trimmable=False)) == {"n": 2}
    assert read_state(root) == {"n": 2}


def read_state_of(space: Namespace, match: Match) -> dict | None:
    return space.read_state(match, lambda tensors: {t.name: memoryview(bytearray(t.nbytes)) for t in tensors})


def stateful(root: Path) -> tuple[list[int], Path, Ref, bytes]:
    """Two chunks with a state at the first; the prompt, where the other's would lie, that state, and its parent."""
    tokens = prompt(32)
    with open_store(root) as store:
        space = store.namespace(INFO)
        space.publish(tokens, spans(tokens, 0, 16, 32))
        space.publish_state(tokens[:16], State((StateTensor("s", "U8", (1,)),), [b"s"], {"n": 16}))
        first, second = space.lookup(tokens).steps
    above = decode(first.path.with_suffix(".state").read_bytes())
    (ref,) = above.blocks
    forged = Ref(ref.digest, ref.size, ref.first, ref.count, ref.payload)
    return tokens, second.path.with_suffix(".state"), forged, above.key


@pytest.mark.parametrize(
    "lie",
    [{}, {"first": 0}, {"first": 48}, {"refs": ()}, {"refs": 2}],
    ids=["another's block", "another's place", "a place to come", "no block", "two blocks"],
)
def test_the_state_of_another_prefix_is_a_miss(root, lie):
    """Name, checksum and digest are right; what it holds is the state of 16 tokens before."""
    tokens, path, ref, parent = stateful(root)
    refs = (ref,) * lie.get("refs", 1) if lie.get("refs") != () else ()
    at = lie.get("first", 16)
    if at == 48:
        parts, payload = state_parts(State((), [], {"n": 48}), 48, 16)
        refs = (Ref(install_block(root, b"".join(parts)), len(b"".join(parts)), 48, 16, payload),)
    forged = Forged(INFO.fingerprint, parent, pack(tokens[16:]), refs, first=at, kind=2)
    path.write_bytes(forged.encode())
    assert path.stem == forged.file_name().removesuffix(".kv")
    with open_store(root) as store:
        assert [finding.code for finding in check(store.context, settle_s=0).findings if finding.severity == "error"]
        space = store.namespace(INFO)
        match = space.lookup(tokens, trimmable=False)
        assert match.count == 32
        assert space.state_size(match) == 0
        assert read_state_of(space, match) is None
        assert store.counters.damaged == 1
        # What it named is whole, and stays in use.
        before = space.lookup(tokens, trimmable=False)
        assert (before.count, read_state_of(space, before)) == (16, {"n": 16})
        space.publish_state(tokens, State((StateTensor("s", "U8", (1,)),), [b"t"], {"n": 32}))
        assert read_state_of(space, space.lookup(tokens, trimmable=False)) == {"n": 32}


@pytest.mark.parametrize("changes", [{"size": 2**63}, {"payload": 2**32 - 1}, {"payload": 0}, {"digest": b"\1" * 16}])
def test_a_lie_in_the_reference_to_a_state_is_a_miss(root, changes):
    install_state(root, STATE, **changes)
    assert measured(lambda: read_state(root)) is None


def test_a_sparse_state_with_a_header_of_gigabytes_is_not_read(root):
    digest = b"\x42" * 16
    path = root / "objects" / "blocks" / digest.hex()[:2] / digest.hex()
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, 3 << 30)
    install_state(root, STATE, digest=digest, size=3 << 30, payload=2 << 30)
    assert measured(lambda: read_state(root)) is None
