"""Something else in place of a file of ours, and lies in the small files: refused quickly and never followed.

Every place where a reader opens a file, with everything that a name can stand for; then the commands that look at a
whole directory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
import xxhash
from core_support import FAST, INFO, Memory, files, open_store, prompt, spans
from hostile_support import ODD, measured

from kvstore import KVStoreError, State, StateTensor, Store
from kvstore.breakdown import breakdown
from kvstore.clear import clear
from kvstore.fsck import check
from kvstore.gc import Policy, collect
from kvstore.layout import Layout
from kvstore.listing import listing
from kvstore.merge import merge
from kvstore.namespace import MAX_NAMESPACE_BYTES, read_namespace_file
from kvstore.prefix import find_prefix
from kvstore.repack import repack
from kvstore.tokenizations import MAX_TOKENS

TOKENS = prompt(20)
STATE = State((StateTensor("s", "U8", (8,)),), [bytes(range(8))], {"n": 1})
SCOPE, REQUEST = b"a tokenizer", b"a request"


def allocate_state(tensors: tuple[StateTensor, ...]) -> dict[str, memoryview]:
    return {tensor.name: memoryview(bytearray(tensor.nbytes)) for tensor in tensors}


@pytest.fixture
def root(tmp_path) -> Path:
    """Two nodes, a state at the second, a description, a tokenization."""
    with open_store(tmp_path / "cache") as store:
        space = store.namespace(INFO)
        space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
        space.publish_state(TOKENS, STATE)
        store.tokenizations(SCOPE).put(REQUEST, b"\1\0\0\0")
    return tmp_path / "cache"


def manifest(root: Path, first: str) -> Path:
    (path,) = [p for p in (root / "objects" / "nodes").rglob("*") if f"-{first}-" in p.name and p.suffix == ".kv"]
    return path


def block(root: Path, what: bytes) -> Path:
    (path,) = [p for p in (root / "objects" / "blocks").rglob("*") if p.is_file() and what in p.read_bytes()]
    return path


def tokens_entry(root: Path) -> Path:
    (path,) = [p for p in (root / "objects" / "tokens").rglob("*") if p.is_file()]
    return path


PLACES: dict[str, Callable[[Path], Path]] = {
    "the first manifest": lambda root: manifest(root, "16"),
    "the last manifest": lambda root: manifest(root, "4"),
    "the state's manifest": lambda root: manifest(root, "4").with_suffix(".state"),
    "the first block": lambda root: block(root, b'"first":"0"'),
    "the last block": lambda root: block(root, b'"count":"4"},"0.keys"'),
    "the state's block": lambda root: block(root, b'"values"'),
    "the tokenization": tokens_entry,
    "the description": lambda root: Layout(root).namespace_file(INFO.id),
}


def read_all(root: Path) -> tuple[int, dict | None, bytes | None, dict]:
    """All that a fresh server reads: tokens restored, the state's values, a tokenization, the description."""
    with Store.open(root, fs=FAST) as store:
        space = store.namespace(INFO)
        restored = space.read(space.lookup(TOKENS), Memory()).tokens
        values = space.read_state(space.lookup(TOKENS, trimmable=False), allocate_state)
        cached = store.tokenizations(SCOPE).get(REQUEST)
        return restored, values, cached, read_namespace_file(FAST, Layout(root).namespace_file(INFO.id))


WHOLE = (20, {"n": 1}, b"\1\0\0\0")

LEFT: dict[str, tuple[int, dict | None, bytes | None]] = {
    "the first manifest": (0, None, WHOLE[2]),
    "the last manifest": (16, None, WHOLE[2]),
    "the state's manifest": (20, None, WHOLE[2]),
    "the first block": (0, {"n": 1}, WHOLE[2]),
    "the last block": (16, {"n": 1}, WHOLE[2]),
    "the state's block": (20, None, WHOLE[2]),
    "the tokenization": (20, {"n": 1}, None),
    "the description": WHOLE,
}


@pytest.fixture
def replaced(root, request):
    """Put something odd in the place of a file."""

    def replace(place: str, odd: str) -> Path:
        path = PLACES[place](root)
        path.unlink()
        ODD[odd](path)
        return path

    return replace


def test_an_untouched_directory_gives_all(root):
    *found, description = measured(lambda: read_all(root), 0.05)
    assert tuple(found) == WHOLE
    assert description["label"] == INFO.label


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", PLACES)
def test_something_odd_in_place_of_a_file_is_a_miss(root, replaced, place, odd):
    replaced(place, odd)
    *found, description = measured(lambda: read_all(root))
    restored, values, cached = found
    expected = LEFT[place]
    # (A state's node is not looked for through a block that was just found bad: it may be a miss, too.)
    assert (restored, cached) == (expected[0], expected[2])
    assert values in ({"n": 1}, None) if expected[1] else values is None
    assert bool(description) == (place != "the description")


@pytest.mark.parametrize("place", PLACES)
def test_a_link_to_the_very_file_is_not_followed(root, tmp_path, place):
    path = PLACES[place](root)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    *found, description = measured(lambda: read_all(root))
    assert found[0] == LEFT[place][0]
    assert (found[2] is None) == (place == "the tokenization")
    assert bool(description) == (place != "the description")
    if place.startswith("the state"):
        assert found[1] is None


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", PLACES)
def test_commands_on_the_whole_directory_live_with_it(root, tmp_path, replaced, place, odd):
    """They may count it, skip it, or say why they stop; none hangs, raises or reads it."""
    replaced(place, odd)
    outside = tmp_path / "outside"
    with Store.open(root, fs=FAST) as store, Store.open(outside, interval=16, fs=FAST) as other:
        context = store.context
        listing(context)
        breakdown(context)
        assert not check(context, read_data=True).error
        for file in Layout(root).nodes.rglob("*.kv"):
            try:
                find_prefix(context, file.name.split("-")[2])
            except KVStoreError:
                assert file.is_symlink() or not file.is_file()
        repack(context, older_than_ns=0, dry_run=True)
        merge(context, other.context)
        collect(context, Policy(size=0))
        assert not check(context, read_data=True, repair=True, settle_s=0).error
        assert not check(context, read_data=True).error
        clear(context)
    assert read_all(outside)[0] in {0, 16, 20}


CONFIGS: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"\xff\xfe",
    "arrays 30,000 deep": b"[" * 30_000,
    "objects 10,000 deep": b'{"a":' * 10_000,
    "20,000 objects": b"[" + b"{}," * 20_000 + b"{}]",
    "a number of 60,000 digits": b'{"format":' + b"9" * 60_000 + b"}",
    "an interval of 2**63": b'{"format":1,"interval":9223372036854775808}',
    "an interval of 65,537": b'{"format":1,"interval":65537}',
    "a negative interval": b'{"format":1,"interval":-16}',
    "an interval of 1e400": b'{"format":1,"interval":1e400}',
    "a text for an interval": b'{"format":1,"interval":"16"}',
    "true for a format": b'{"format":true,"interval":16}',
    "true for an interval": b'{"format":1,"interval":true}',
    "a format twice": b'{"format":2,"format":1,"interval":16}',
    "a newer format": b'{"format":2,"interval":16}',
    "a format of 2**63": b'{"format":9223372036854775808,"interval":16}',
    "a list": b"[1]",
    "larger than it may be": b'{"format":1,"interval":16}' + b" " * (1 << 16),
}


def refused(root: Path) -> str:
    with pytest.raises(KVStoreError) as caught:
        Store.open(root, fs=FAST)
    return str(caught.value)


@pytest.mark.parametrize("lie", CONFIGS)
def test_a_lie_in_kvstore_json_is_a_sentence_and_changes_nothing(root, lie):
    (root / "kvstore.json").write_bytes(CONFIGS[lie])
    before = files(root)
    assert len(measured(lambda: refused(root))) < 1000
    assert files(root) == before


@pytest.mark.parametrize("odd", ODD)
def test_something_odd_in_place_of_kvstore_json_is_a_sentence(root, odd):
    (root / "kvstore.json").unlink()
    ODD[odd](root / "kvstore.json")
    assert str(root) in measured(lambda: refused(root))


DESCRIPTIONS: dict[str, str] = {
    "arrays": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "340,000 objects": "[" + "{}," * 340_000 + "{}]",
    "340,000 arrays": "[" + "[]," * 340_000 + "[]]",
    "200,000 strings": "[" + '"ab",' * 200_000 + '""]',
    "a million digits": "9" * 1_000_000,
    "a label of a million letters": json.dumps({"label": "x" * 1_000_000}),
    "a label of other letters": '{"label":"' + "\U0001f600" * 200_000 + '"}',
    "a label that is none": '{"label":{"a":1},"fingerprint":[],"description":7}',
    "a path for a fingerprint": '{"label":"","fingerprint":"../../../../etc/passwd","salted":false,"description":{}}',
    "larger than it may be": " " * (MAX_NAMESPACE_BYTES + 1),
}


@pytest.mark.parametrize("lie", DESCRIPTIONS)
def test_a_lie_in_a_description_costs_little_and_is_a_note_of_fsck(root, lie):
    path = Layout(root).namespace_file(INFO.id)
    path.write_text(DESCRIPTIONS[lie])
    measured(lambda: read_namespace_file(FAST, path))
    with Store.open(root, fs=FAST) as store:
        assert [each.label for each in listing(store.context).conversations][:1] != [INFO.label]
        found = [each for each in check(store.context).findings if each.code.startswith("namespace")]
    assert [each.severity for each in found] == ["note"]
    assert read_all(root)[:3] == WHOLE


def entry(count: int, body: bytes, key: bytes, magic: bytes = b"KVSTTOKS", version: int = 1) -> bytes:
    """A tokenization with a right checksum, whatever it says."""
    data = struct.pack("<8sII32sQ", magic, version, count, key, 0) + body
    return data + xxhash.xxh3_128_digest(data)


TOKENIZATIONS: dict[str, Callable[[bytes], bytes]] = {
    "4 billion tokens": lambda key: entry(2**32 - 1, b"\1\0\0\0", key),
    "one token less": lambda key: entry(0, b"\1\0\0\0", key),
    "another key": lambda _: entry(1, b"\1\0\0\0", sha256(b"another").digest()),
    "another magic": lambda key: entry(1, b"\1\0\0\0", key, magic=b"KVSTNODE"),
    "a newer format": lambda key: entry(1, b"\1\0\0\0", key, version=2),
    "cut": lambda key: entry(1, b"\1\0\0\0", key)[:-1],
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("lie", TOKENIZATIONS)
def test_a_lie_in_a_tokenization_is_a_miss(root, lie):
    path = tokens_entry(root)
    key = path.read_bytes()[16:48]
    assert entry(1, b"\1\0\0\0", key)[:48] == path.read_bytes()[:48]
    path.write_bytes(TOKENIZATIONS[lie](key))
    assert measured(lambda: read_all(root))[2] is None


@pytest.mark.parametrize("size", [64 + 16 + 4 * MAX_TOKENS, 1 << 26, 1 << 42])
def test_a_tokenization_as_large_as_one_can_be_costs_its_size_at_most(root, size):
    """A sparse file is quickly made, and its first bytes can be right."""
    path = tokens_entry(root)
    key = path.read_bytes()[16:48]
    path.write_bytes(struct.pack("<8sII32sQ", b"KVSTTOKS", 1, min((size - 80) // 4, 2**32 - 1), key, 0))
    os.truncate(path, size)
    assert measured(lambda: read_all(root))[2] is None


def test_more_tokens_than_a_reader_takes_are_not_saved(root):
    with Store.open(root, fs=FAST) as store:
        cache = store.tokenizations(SCOPE)
        cache.put(b"much", bytes(4 * MAX_TOKENS))
        cache.put(b"more", bytes(4 * MAX_TOKENS + 4))
        assert cache.get(b"much") == bytes(4 * MAX_TOKENS)
        assert cache.get(b"more") is None
    assert len([p for p in (root / "objects" / "tokens").rglob("*") if p.is_file()]) == 2


@pytest.mark.parametrize("name", ["publish.lock", "gc.lock"])
@pytest.mark.parametrize("odd", [odd for odd in ODD if "4 TiB" not in odd and odd != "an empty file"])
def test_something_odd_in_place_of_a_lock_hangs_nobody(root, name, odd):
    """Readers take no lock. A publish and a collection work or say why not, and the lock itself is let be."""
    (root / "locks" / name).unlink(missing_ok=True)
    ODD[odd](root / "locks" / name)
    assert read_all(root)[:3] == WHOLE
    with Store.open(root, fs=FAST) as store:
        try:
            store.namespace(INFO).publish(prompt(16, 1), spans(prompt(16, 1), 0, 16))
        except KVStoreError:
            assert name == "publish.lock"
        collect(store.context, Policy(size=0))


@pytest.mark.parametrize("name", ["publish.lock", "gc.lock"])
def test_a_lock_that_is_a_link_costs_nobody_a_file(root, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o644)
    (root / "locks" / name).unlink(missing_ok=True)
    (root / "locks" / name).symlink_to(victim)
    with Store.open(root, fs=FAST) as store:
        try:
            store.namespace(INFO).publish(prompt(16, 1), spans(prompt(16, 1), 0, 16))
        except KVStoreError:
            assert name == "publish.lock"
        collect(store.context, Policy(size=0))
    assert victim.read_text() == "mine"
    assert victim.stat().st_mode & 0o777 == 0o644


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "a namespace": lambda root: Layout(root).nodes / INFO.id,
    "a folder of manifests": lambda root: manifest(root, "16").parent,
    "a folder of blocks": lambda root: block(root, b'"first":"0"').parent,
    "a folder of tokenizations": lambda root: tokens_entry(root).parent,
    "objects": lambda root: root / "objects",
    **{f"{name}/": lambda root, name=name: root / name for name in ("namespaces", "tmp", "locks", "quarantine")},
    **{f"objects/{name}/": lambda root, name=name: root / "objects" / name for name in ("nodes", "blocks", "tokens")},
}


@pytest.mark.parametrize(
    "odd", ["a FIFO", "an empty file", "a link to itself", "a link to nothing", "a link elsewhere"]
)
@pytest.mark.parametrize("place", FOLDERS)
def test_something_odd_in_place_of_a_folder(root, tmp_path, place, odd):
    """Readers find less. Commands and publishes work or say in a sentence why not, and delete nothing behind a link."""
    path = FOLDERS[place](root)
    elsewhere = path.rename(tmp_path / "elsewhere")
    ODD.get(odd, lambda path: path.symlink_to(elsewhere))(path)
    before = files(elsewhere)

    def look() -> int:
        with Store.open(root, fs=FAST) as store:
            space = store.namespace(INFO)
            restored = space.read(space.lookup(TOKENS), Memory()).tokens
            space.read_state(space.lookup(TOKENS, trimmable=False), allocate_state)
            store.tokenizations(SCOPE).get(REQUEST)
            return restored

    restored = measured(look)
    if odd != "a link elsewhere":
        needed = (
            place.startswith(("a namespace", "a folder of m", "a folder of b", "objects")) and "tokens" not in place
        )
        assert restored in ({0, 16} if needed else {20})
    with Store.open(root, fs=FAST) as store, Store.open(tmp_path / "outside", interval=16, fs=FAST) as other:
        context = store.context
        for work in (lambda: listing(context), lambda: breakdown(context)):
            with suppress(OSError):  # the commands make a sentence of it
                work()
        check(context, read_data=True)
        repack(context, older_than_ns=0)
        with suppress(KVStoreError):
            merge(context, other.context)
        with suppress(KVStoreError):
            store.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, 16, 20))
        collect(context, Policy(size=0))
        check(context, read_data=True, repair=True, settle_s=0)
        clear(context)
    # (What is published may come to lie behind a link that somebody made; what was there stays.)
    assert before.items() <= files(elsewhere).items()
