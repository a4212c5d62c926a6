"""Manifests: docs/format.md, section 3. The bytes are built by hand from the table, not by the code under test."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import xxhash
from format_support import Forged, Ref, h, pack

from kvstore import DamagedManifestError, FormatVersionError
from kvstore.manifest import MAX_MANIFEST_BYTES, BlockRef, Manifest, decode, decode_references, encode, newer_format

FINGERPRINT, PARENT = b"\x11" * 32, b"\x22" * 32
TOKENS = pack([7, 8, 9, 10, 11])
REFS = (Ref(b"\xa0" * 16, 1000, 32, 3, 200), Ref(b"\xb0" * 16, 2**40, 35, 2, 264, flags=1))
GOOD = Forged(FINGERPRINT, PARENT, TOKENS, REFS, first=32)
DECODED = Manifest(
    "kv",
    FINGERPRINT,
    PARENT,
    h(b"kvstore/1 node", PARENT, TOKENS),
    32,
    16,
    TOKENS,
    (BlockRef(b"\xa0" * 16, 1000, 32, 3, 200), BlockRef(b"\xb0" * 16, 2**40, 35, 2, 264, decode=True)),
    1_700_000_000_000_000_000,
    "kvstore test",
)


def test_a_manifest_is_the_bytes_of_the_format_page():
    assert encode(DECODED) == GOOD.encode()


def test_offsets_are_those_of_the_table():
    data = encode(DECODED)
    assert data[:8] == b"KVSTNODE"
    assert struct.unpack_from("<II", data, 8) == (1, 1)
    assert (data[16:48], data[48:80], data[80:112]) == (FINGERPRINT, PARENT, DECODED.key)
    assert struct.unpack_from("<QIIIIQ", data, 112) == (32, 5, 16, 2, 12, DECODED.created_ns)
    assert data[144:164] == TOKENS
    assert len(data) == 144 + 20 + 2 * 48 + 12 + 16
    assert data[-16:] == xxhash.xxh3_128(data[:-16]).digest()


def test_the_bytes_of_the_format_page_are_read():
    assert decode(GOOD.encode()) == DECODED


def test_a_state_manifest_has_one_block_of_its_own_tokens():
    ref = Ref(b"\xc0" * 16, 10, 32, 5, 10)
    state = decode(GOOD.but(kind=2, refs=(ref,)).encode())
    assert state.kind == "state"
    assert state.blocks == (BlockRef(b"\xc0" * 16, 10, 32, 5, 10),)
    others = replace(ref, first=16), replace(ref, count=4), replace(ref, first=0, count=0), replace(ref, payload=11)
    for refs in (), (ref, ref), *((other,) for other in others):
        with pytest.raises(DamagedManifestError, match="exactly one block"):
            decode(GOOD.but(kind=2, refs=refs).encode())


def test_no_blocks_at_all_is_a_node_of_an_engine_that_keeps_nothing_per_token():
    assert decode(GOOD.but(refs=()).encode()).blocks == ()


def test_counts_and_name_follow_from_the_tokens():
    assert (DECODED.count, DECODED.end) == (5, 37)
    assert DECODED.name.file("kv") == GOOD.file_name()


def test_a_writer_with_a_long_name_is_cut_between_characters():
    named = decode(encode(Manifest(**{**fields(DECODED), "writer": "x" * 255 + "é"})))
    assert named.writer == "x" * 255


def fields(manifest: Manifest) -> dict:
    return {name: getattr(manifest, name) for name in Manifest.__slots__}


@pytest.mark.parametrize("cut", [0, 1, 8, 143, 144, 159, 163, 170, 262, -17, -16, -1])
def test_a_cut_manifest_is_damaged(cut):
    with pytest.raises(DamagedManifestError):
        decode(GOOD.encode()[:cut])


def test_anything_after_the_checksum_is_damage():
    with pytest.raises(DamagedManifestError):
        decode(GOOD.but(tail=b"\0").encode())


@pytest.mark.parametrize("at", range(0, 144 + 20 + 2 * 48 + 12 + 16, 3))
def test_a_flipped_bit_anywhere_is_damage(at):
    data = bytearray(GOOD.encode())
    data[at] ^= 1 << (at % 8)
    with pytest.raises(DamagedManifestError):
        decode(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"KVSTNODF"},
        {"version": 2},
        {"version": 0},
        {"kind": 0},
        {"kind": 3},
        {"key": b"\x33" * 32},
        {"parent": b"\x44" * 32, "key": DECODED.key},
        {"first": 33, "refs": ()},
        {"interval": 0},
        {"interval": 4, "refs": ()},
        {"interval": 1 << 17, "first": 0},
        {"count": 4},
        {"count": 2**32 - 1},
        {"n_refs": 1},
        {"n_refs": 2**32 - 1},
        {"tokens": b"", "refs": ()},
        {"writer": b"\xff\xfe"},
        {"writer": b"x" * 257},
        {"writer_bytes": 2**32 - 1},
    ],
    ids=repr,
)
def test_a_right_checksum_does_not_make_a_wrong_field_right(changes):
    with pytest.raises(DamagedManifestError):
        decode(GOOD.but(**changes).encode())


ONE = Ref(b"\xa0" * 16, 1000, 32, 5, 200)


@pytest.mark.parametrize(
    "refs",
    [
        (Ref(ONE.digest, 1000, 32, 4, 200),),
        (Ref(ONE.digest, 1000, 32, 6, 200),),
        (Ref(ONE.digest, 1000, 31, 5, 200),),
        (Ref(ONE.digest, 1000, 33, 4, 200),),
        (Ref(ONE.digest, 1000, 0, 5, 200),),
        (Ref(ONE.digest, 1000, 32, 3, 200), Ref(ONE.digest, 1000, 34, 3, 200)),
        (Ref(ONE.digest, 1000, 32, 3, 200), Ref(ONE.digest, 1000, 36, 1, 200)),
        (Ref(ONE.digest, 1000, 35, 2, 200), Ref(ONE.digest, 1000, 32, 3, 200)),
        (Ref(ONE.digest, 1000, 32, 0, 200), ONE),
        (ONE, Ref(ONE.digest, 1000, 37, 0, 200)),
        (Ref(ONE.digest, 200, 32, 5, 200),),
        (Ref(ONE.digest, 0, 32, 5, 0),),
        (Ref(ONE.digest, 1000, 32, 5, 200, flags=2),),
        (Ref(ONE.digest, 1000, 32, 5, 200, zero=1),),
        (Ref(ONE.digest, 1000, 2**64 - 1, 5, 200),),
        (Ref(ONE.digest, 1000, 32, 2**32 - 1, 200),),
    ],
    ids=[
        "too few",
        "too many",
        "begins early",
        "begins late",
        "of another chunk",
        "overlap",
        "hole",
        "order",
        "empty first",
        "empty last",
        "no payload",
        "no file",
        "unknown flag",
        "reserved",
        "first is huge",
        "count is huge",
    ],
)
def test_spans_must_cover_the_tokens_without_hole_or_overlap(refs):
    assert decode(GOOD.but(refs=(ONE,)).encode()).blocks[0].count == 5
    with pytest.raises(DamagedManifestError):
        decode(GOOD.but(refs=refs).encode())


def test_references_are_those_that_decoding_gives():
    found = decode_references(GOOD.encode())
    assert (found.parent, found.first, bytes(found.tokens)) == (PARENT, 32, TOKENS)
    assert found.blocks == ((b"\xa0" * 16, 1000), (b"\xb0" * 16, 2**40))


def test_references_of_a_newer_format_are_not_guessed():
    with pytest.raises(FormatVersionError, match="format 2"):
        decode_references(GOOD.but(version=2).encode())
    assert newer_format(GOOD.but(version=2**32 - 1).encode()) == 2**32 - 1


@pytest.mark.parametrize("bit", range(32))
def test_a_flipped_bit_in_the_format_s_number_is_no_newer_format(bit):
    data = bytearray(GOOD.encode())
    data[8 + bit // 8] ^= 1 << bit % 8
    assert newer_format(data) is None
    with pytest.raises(DamagedManifestError, match="format"):
        decode_references(data)


@pytest.mark.parametrize("version", [0, 1])
def test_formats_that_are_no_newer_ones(version):
    assert newer_format(GOOD.but(version=version).encode()) is None
    assert newer_format(GOOD.but(version=2, magic=b"KVSTXXXX").encode()) is None
    assert newer_format(b"") is None


@pytest.mark.parametrize("at", [0, 60, 112, 144, 170, -30, -1])
def test_references_of_a_damaged_manifest_are_refused(at):
    data = bytearray(GOOD.encode())
    data[at] ^= 4
    with pytest.raises(DamagedManifestError):
        decode_references(data)


@pytest.mark.parametrize("cut", [0, 20, 159, 200, -1])
def test_references_of_a_cut_manifest_are_refused(cut):
    with pytest.raises(DamagedManifestError):
        decode_references(GOOD.encode()[:cut])


def test_the_largest_manifest_fits_the_limit():
    tokens = pack(range(1 << 16))
    refs = tuple(Ref(b"\xa0" * 16, 1000, i, 1, 200) for i in range(1 << 16))
    data = GOOD.but(first=0, interval=1 << 16, tokens=tokens, refs=refs, writer=b"x" * 256).encode()
    assert len(data) == MAX_MANIFEST_BYTES
    assert len(decode(data).blocks) == 1 << 16
