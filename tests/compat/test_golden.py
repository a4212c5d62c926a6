"""Format 1 is frozen: what was written once is read for ever, and the same input still makes the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import golden
import pytest
import xxhash

from kvstore import FormatVersionError, NamespaceInfo, Store, TensorBuffer

HERE = Path(__file__).parent / "golden-v1"
PARTS = ("objects", "namespaces", "CACHEDIR.TAG")


def tree(root: Path, parts=PARTS) -> dict[str, bytes]:
    files = [
        path for part in parts for path in ([root / part] if (root / part).is_file() else (root / part).rglob("*"))
    ]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(HERE, tmp_path / "cache")
    return tmp_path / "cache"


def read(store: Store, tokens: list[int], info=golden.INFO):
    namespace = store.namespace(info)
    match = namespace.lookup(tokens)
    memory: dict[str, TensorBuffer] = {}

    def allocate(specs, count):
        memory.update({spec.name: TensorBuffer(memoryview(bytearray(spec.span_bytes(count))), count) for spec in specs})
        return memory

    restored = namespace.read(match, allocate)
    return restored.tokens, memory


def test_the_same_input_makes_the_same_bytes(tmp_path):
    golden.build(tmp_path / "new")
    assert tree(tmp_path / "new") == tree(HERE)


@pytest.mark.parametrize(
    ("tokens", "count"),
    [(golden.PROMPT, 180), (golden.PROMPT[:150], 150), (golden.PROMPT[:140], 128), (golden.BRANCH, 128)],
)
def test_it_is_read_byte_for_byte(copy, tokens, count):
    with Store.open(copy, create=False) as store:
        restored, memory = read(store, tokens)
        assert restored == count
        for spec in golden.SPECS:
            runs = b"".join(memory[spec.name].runs(spec, 0, count))
            assert runs == golden.payload(spec, tokens, 0, count)


def test_the_state_is_read(copy):
    with Store.open(copy, create=False) as store:
        namespace = store.namespace(golden.INFO)
        match = namespace.lookup(golden.PROMPT, trimmable=False)
        assert match.count == 128
        memory = {"conv": memoryview(bytearray(8))}
        assert namespace.read_state(match, lambda tensors: memory) == golden.STATE.values
        assert bytes(memory["conv"]) == golden.STATE.data[0]


def test_the_tokenization_is_read(copy):
    with Store.open(copy, create=False) as store:
        assert store.tokenizations(golden.SCOPE).get(golden.REQUEST) == struct.pack("<3I", 1, 2, 2**32 - 1)


def test_a_salt_is_needed_to_find_a_salted_prefix(copy):
    with Store.open(copy, create=False) as store:
        assert store.namespace(golden.SALTED).lookup(golden.PROMPT[:20]).count == 20
        unsalted = NamespaceInfo(golden.SALTED.description)
        assert store.namespace(unsalted).lookup(golden.PROMPT[:20]).count == 0


def test_a_reader_from_the_format_page_alone_agrees():
    """Nothing of kvstore is used here but the constants of the example: hashlib, struct, json, xxhash."""

    def hashed(*fields: bytes) -> bytes:
        return hashlib.sha256(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).digest()

    config = json.loads((HERE / "kvstore.json").read_bytes())
    assert (config["format"], config["interval"]) == (1, 64)
    description = {"engine": "golden", "model": {"layers": 2, "name": "tiny é"}}
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    fingerprint = hashed(b"kvstore/1 namespace", canonical, b"")
    ns = fingerprint[:16].hex()
    parent = hashed(b"kvstore/1 root", fingerprint, (64).to_bytes(4, "little"))
    for first, count in ((0, 64), (64, 64), (128, 52)):
        tokens = struct.pack(f"<{count}I", *golden.PROMPT[first : first + count])
        key = hashed(b"kvstore/1 node", parent, tokens)
        rung = f"{xxhash.xxh3_64_intdigest(tokens[:256]) & 0xFFFFFF:06x}" if count >= 64 else "000000"
        name = f"{parent[:16].hex()}-{count}-{key[:16].hex()}-{rung}000000000000.kv"
        data = (HERE / "objects" / "nodes" / ns / parent[:1].hex() / name).read_bytes()
        head = struct.unpack_from("<8sII32s32s32sQIIIIQ", data)
        assert head[:6] == (b"KVSTNODE", 1, 1, fingerprint, parent, key)
        assert head[6:9] == (first, count, 64)
        blocks, writer = head[9:11]
        assert data[144 : 144 + 4 * count] == tokens
        at = 144 + 4 * count
        for _ in range(blocks):
            digest, size, begin, rows, offset, flags, zero = struct.unpack_from("<16sQQIIII", data, at)
            at += 48
            block = (HERE / "objects" / "blocks" / digest[:1].hex() / digest.hex()).read_bytes()
            assert (len(block), xxhash.xxh3_128_digest(block)) == (size, digest)
            header = json.loads(block[8 : 8 + int.from_bytes(block[:8], "little")])
            assert offset == 8 + int.from_bytes(block[:8], "little")
            assert header["0.keys"]["shape"] == [2, rows, 2]
            assert header["__metadata__"] == {"format": "kvstore/1", "first": str(begin), "count": str(rows)}
            assert (flags, zero) == (int(begin == 150), 0)
        assert data[at : at + writer] == b"golden 1"
        assert data[at + writer :] == xxhash.xxh3_128_digest(data[: at + writer])
        parent = key


def test_a_copy_without_its_empty_folders_can_be_written(copy):
    """git, and some copies, leave empty folders out."""
    assert not (copy / "tmp").exists()
    with Store.open(copy) as store:
        more = [*golden.PROMPT[:180], *range(12)]
        store.namespace(golden.INFO).publish(more, [golden.span(more, 180, 192)])
        assert store.namespace(golden.INFO).lookup(more).count == 192


def test_a_newer_format_is_refused_and_untouched(copy):
    config = json.loads((copy / "kvstore.json").read_bytes())
    (copy / "kvstore.json").write_text(json.dumps({**config, "format": 2, "new": [1]}))
    before = tree(copy, (*PARTS, "kvstore.json", "locks", "tmp", "quarantine"))
    with pytest.raises(FormatVersionError, match="has format 2, and this kvstore knows format 1; upgrade"):
        Store.open(copy)
    assert tree(copy, (*PARTS, "kvstore.json", "locks", "tmp", "quarantine")) == before
