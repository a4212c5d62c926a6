"""Names of things, against values computed by hand: a change of any of them orphans every directory in the world."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array

import numpy as np
import pytest
import xxhash

from kvstore import TokenError, pack_tokens
from kvstore.keys import block_digest, checksum, namespace_fingerprint, node_key, root_key, rungs, unpack_tokens


def by_hand(*fields: bytes) -> bytes:
    """H of docs/format.md, written from its text."""
    return hashlib.sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()


def test_tokens_are_packed_as_uint32_little_endian():
    assert pack_tokens([1, 258, 2**32 - 1]) == bytes.fromhex("01000000 02010000 ffffffff")


@pytest.mark.parametrize(
    "tokens",
    [
        [7, 0, 70000],
        (7, 0, 70000),
        array("I", [7, 0, 70000]),
        array("q", [7, 0, 70000]),
        np.array([7, 0, 70000]),
        np.array([7, 0, 70000], dtype=np.uint32),
        iter([7, 0, 70000]),
        struct.pack("<3I", 7, 0, 70000),
    ],
    ids=["list", "tuple", "array-I", "array-q", "numpy-int64", "numpy-uint32", "iterator", "bytes"],
)
def test_tokens_of_any_kind_pack_alike(tokens):
    assert pack_tokens(tokens) == struct.pack("<3I", 7, 0, 70000)


def test_packed_bytes_pass_through_without_a_copy():
    packed = struct.pack("<2I", 1, 2)
    assert pack_tokens(packed) is packed


def test_nothing_packs_to_nothing():
    assert pack_tokens([]) == b""


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.0], ["a"], [None], "ab", None, b"12345", np.array([-200])])
def test_what_is_not_a_token_id_is_refused(bad):
    with pytest.raises(TokenError):
        pack_tokens(bad)


def test_unpacking_gives_the_ids_back():
    assert list(unpack_tokens(bytes.fromhex("01000000ffffffff"))) == [1, 2**32 - 1]


def test_fingerprint_is_sha256_of_canonical_json_and_salt():
    text = '{"a":"é","b":[1,2]}'.encode()
    assert namespace_fingerprint({"b": [1, 2], "a": "é"}, b"pepper") == by_hand(b"kvstore/1 namespace", text, b"pepper")


def test_fingerprint_has_this_value_forever():
    assert (
        namespace_fingerprint({"model": "m", "layers": 2}).hex()
        == hashlib.sha256(
            b'\x13\0\0\0\0\0\0\0kvstore/1 namespace\x18\0\0\0\0\0\0\0{"layers":2,"model":"m"}\0\0\0\0\0\0\0\0'
        ).hexdigest()
    )


def test_fingerprint_does_not_depend_on_the_order_of_a_description():
    assert namespace_fingerprint({"a": 1, "b": 2}) == namespace_fingerprint(json.loads('{"b": 2, "a": 1}'))


def test_salt_separates_tenants():
    description = {"model": "m"}
    tenants = {namespace_fingerprint(description, salt) for salt in (b"", b"a", b"b")}
    assert len(tenants) == 3


def test_root_key_binds_namespace_and_interval():
    fingerprint = bytes(range(32))
    assert root_key(fingerprint, 2048) == by_hand(b"kvstore/1 root", fingerprint, bytes.fromhex("00080000"))


def test_node_key_chains_parent_and_tokens():
    parent, tokens = bytes(range(32)), struct.pack("<3I", 5, 6, 7)
    assert node_key(parent, tokens) == by_hand(b"kvstore/1 node", parent, tokens)


def test_fields_are_length_prefixed_so_that_no_two_lists_collide():
    assert node_key(b"ab", b"c") != node_key(b"a", b"bc")


def test_rungs_are_low_bits_of_the_first_tokens_hashes():
    tokens = struct.pack("<1024I", *range(1024))
    expected = "".join(f"{xxhash.xxh3_64(tokens[: 4 * n]).intdigest() % (1 << 24):06x}" for n in (64, 256, 1024))
    assert rungs(tokens, 1024) == expected
    assert len(expected) == 18


@pytest.mark.parametrize(("count", "known"), [(63, 0), (64, 1), (255, 1), (256, 2), (1023, 2), (1024, 3)])
def test_rungs_longer_than_the_chunk_are_zeros(count, known):
    tokens = struct.pack("<1024I", *range(1, 1025))
    got = rungs(tokens[: 4 * count], count)
    assert got[: 6 * known] == rungs(tokens, 1024)[: 6 * known]
    assert got[6 * known :] == "0" * (18 - 6 * known)


def test_a_rung_changes_with_its_last_token_and_not_with_the_next():
    base = list(range(65))
    last, after = [*base[:63], 9, 64], [*base[:64], 9]
    assert rungs(pack_tokens(last), 65) != rungs(pack_tokens(base), 65)
    assert rungs(pack_tokens(after), 65) == rungs(pack_tokens(base), 65)


def test_block_digest_is_xxh3_128_of_the_joined_parts():
    assert block_digest([b"ab", bytearray(b"c"), memoryview(b"")]) == xxhash.xxh3_128(b"abc").digest()
    # XXH3-128 of nothing with seed 0, from the xxHash specification, big-endian.
    assert block_digest([]).hex() == "99aa06d3014798d86001c324468d497f"


def test_checksum_is_xxh3_128():
    assert checksum(b"") == bytes.fromhex("99aa06d3014798d86001c324468d497f")
