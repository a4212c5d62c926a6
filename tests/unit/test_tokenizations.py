"""Tokenizations of whole requests: exact, checked, and no loss when one is gone."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time

import pytest
from upkeep_support import fifo, link

from kvstore import FileSystem, NotACacheDirectoryError, Store, pack_tokens
from kvstore.keys import checksum
from kvstore.tokenizations import MAX_ENTRY_BYTES

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


def test_an_entry_of_a_newer_version_is_a_miss_and_stays(store):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(newer := bytes(data[:-16]) + checksum(bytes(data[:-16])))
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, TOKENS)
    assert path.read_bytes() == newer
    assert store.counters.damaged == 0


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("newer", [True, False])
def test_what_was_damaged_and_was_replaced_is_not_replaced_again(store, newer, seen):
    """By another process, of this version or of a newer one, which alone reads what it wrote.

    Not seen: while this one tokenizes, as it does for seconds between the miss and the entry of a long request.
    """
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert cache.get(REQUEST) is None
    data = good[:-16]
    if newer:
        data = data[:8] + b"\x02" + data[9:]
    path.write_bytes(data + checksum(data))
    if seen:
        assert cache.get(REQUEST) == (None if newer else TOKENS)
    there = path.stat()
    cache.put(REQUEST, TOKENS)
    assert (path.read_bytes(), path.stat().st_ino) == (data + checksum(data), there.st_ino)
    assert store.context.damaged == set()


def test_what_was_damaged_and_cannot_be_read_now_stays(store, monkeypatch):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    path.write_bytes(b"short")
    assert cache.get(REQUEST) is None

    def failing(fs, asked, limit):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(asked))

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "read_file", failing)
        with pytest.raises(OSError, match="Input/output"):
            cache.put(REQUEST, TOKENS)
    assert path.read_bytes() == b"short"
    cache.put(REQUEST, TOKENS)
    assert cache.get(REQUEST) == TOKENS


@pytest.mark.parametrize("instead", [link, fifo])
def test_what_is_no_file_is_damaged_and_heals(store, instead):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    instead(path)
    assert cache.get(REQUEST) is None
    assert store.counters.damaged == 1
    cache.put(REQUEST, TOKENS)
    assert cache.get(REQUEST) == TOKENS
    assert not path.is_symlink()


def test_a_folder_under_its_name_is_a_miss_that_no_file_replaces(store):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    path.unlink()
    path.mkdir()
    assert cache.get(REQUEST) is None
    with pytest.raises(IsADirectoryError):
        cache.put(REQUEST, TOKENS)
    assert path.is_dir()
    assert not any(store.context.layout.tmp.rglob("[0-9a-f]"))


def test_what_is_larger_than_ours_may_be_a_newer_version_s_and_stays(store):
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    os.truncate(path, MAX_ENTRY_BYTES + 1)
    assert cache.get(REQUEST) is None
    cache.put(REQUEST, TOKENS)
    assert path.stat().st_size == MAX_ENTRY_BYTES + 1
    assert store.counters.damaged == 0


@pytest.mark.parametrize(("minutes", "touched"), [(59, False), (61, True)])
def test_a_use_is_noted_once_an_hour(store, minutes, touched):
    """Nothing else keeps what is used from being trimmed as the oldest."""
    cache = store.tokenizations(b"s")
    cache.put(REQUEST, TOKENS)
    (path,) = files(store)
    now = time.time_ns()
    used = now - minutes * 60 * 10**9
    os.utime(path, ns=(used, used))
    assert cache.get(REQUEST) == TOKENS
    assert path.stat().st_mtime_ns >= now if touched else path.stat().st_mtime_ns == used


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


def test_a_copy_without_empty_folders_is_completed(tmp_path, store):
    root = tmp_path / "copy"
    (root / "objects").mkdir(parents=True)
    shutil.copy(store.path / "kvstore.json", root)
    with Store.open(root, create=False) as copy:
        cache = copy.tokenizations(b"s")
        cache.put(REQUEST, TOKENS)
        assert cache.get(REQUEST) == TOKENS
    assert sorted(path.name for path in root.iterdir()) == ["kvstore.json", "objects", "tmp"]


def test_nothing_is_made_where_no_directory_is(store):
    """It may be the folder below the volume that is not mounted now."""
    shutil.rmtree(store.path)
    for folder in (store.path, store.path / "objects"):
        folder.mkdir()
        with pytest.raises(NotACacheDirectoryError):
            store.tokenizations(b"s").put(REQUEST, TOKENS)
        assert not any(folder.iterdir())


def test_a_budget_is_kept_by_dropping_what_was_not_used(store):
    cache = store.tokenizations(b"a")
    for number in range(6):
        cache.put(b"%d" % number, TOKENS)
    paths = {number: next(path for path in files(store) if is_of(path, number)) for number in range(6)}
    for number, path in paths.items():
        os.utime(path, ns=(number * 10**9, number * 10**9))
    size = paths[0].stat().st_size
    foreign = store.context.layout.tokens / ".DS_Store"
    foreign.write_bytes(bytes(4 * size))
    cache.trim(6 * size)
    assert len(files(store)) == 7
    cache.trim(4 * size)
    assert {number for number, path in paths.items() if path.exists()} == {2, 3, 4, 5}
    cache.trim(0)
    assert files(store) == [foreign]
    assert cache.get(b"5") is None


def is_of(path, number: int) -> bool:
    from kvstore.keys import request_key

    return path.name == request_key(b"a", b"%d" % number)[:16].hex()


def test_trimming_a_directory_that_is_gone_is_nothing(store):
    shutil.rmtree(store.context.layout.tokens)
    store.tokenizations(b"a").trim(0)
