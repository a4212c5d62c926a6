"""Tokenizations of whole requests: exact, checked, and no loss when one is gone."""

from __future__ import annotations

import hashlib

import pytest

from kvstore import Store, pack_tokens

REQUEST = b'{"messages":[{"role":"user","content":"hi"}],"tools":null}'
TOKENS = pack_tokens([1, 5, 70000, 2**32 - 1])


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "cache") as opened:
        yield opened


def files(store) -> list:
    return [path for path in store.context.layout.tokens.rglob("*") if path.is_file()]


def test_an_entry_comes_back(store):
    cache = store.tokenizations(b"tokenizer 1")
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, TOKENS)
    assert cache.get(REQUEST) == TOKENS


def test_scopes_and_requests_are_apart(store):
    store.tokenizations(b"a").put(REQUEST, TOKENS)
    assert store.tokenizations(b"b").get(REQUEST) is None
    assert store.tokenizations(b"a").get(REQUEST + b" ") is None
    # Lengths are hashed too: moving a byte from the scope to the request is another key.
    store.tokenizations(b"xy").put(b"z", TOKENS)
    assert store.tokenizations(b"x").get(b"yz") is None


def test_the_name_is_the_hash_that_the_format_page_names(store):
    store.tokenizations(b"scope").put(b"request", TOKENS)
    hashed = b"".join(len(part).to_bytes(8, "little") + part for part in (b"kvstore/1 tokens", b"scope", b"request"))
    (path,) = files(store)
    assert path.name == hashlib.sha256(hashed).hexdigest()[:32]
    assert path.parent.name == path.name[:2]


@pytest.mark.parametrize("offset", [0, 8, 12, 20, 50, 57, -1])
def test_a_damaged_entry_is_a_miss_and_heals(store, offset):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, TOKENS)
    assert cache.get(REQUEST) == TOKENS


def test_a_truncated_entry_is_a_miss(store):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    for size in (0, 30, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:size])
        assert cache.get(REQUEST) is None


def test_nothing_is_left_in_staging(store):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    cache.put(REQUEST, TOKENS)
    assert [path for path in store.context.layout.tmp.rglob("*") if path.is_file()] == []
