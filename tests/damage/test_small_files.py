"""Every bit and every length of the small files: a miss or a sentence for what decides, and nothing lost by the rest.

kvstore.json is the one file whose damage may be a refusal: without it nothing else is known. A description, a quota and
counters decide nothing that is served, so all there is to ask is that nobody raises and the truth comes back with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from core_support import INFO, open_store, prompt, restore
from gc_support import publish

from kvstore import KVStoreError
from kvstore.fsck import check
from kvstore.gc import Policy, collect
from kvstore.listing import listing
from kvstore.namespace import read_label, read_namespace_file
from kvstore.quotas import read_quotas, write_quota
from kvstore.stats import StatsFile, fold, read_stats

TOKENS = prompt(40)
WHAT = "Every bit of a small file flipped, and every length of it"


@pytest.fixture
def root(tmp_path) -> Path:
    with open_store(tmp_path / "cache") as store:
        publish(store.namespace(INFO), TOKENS)
    return tmp_path / "cache"


def everything(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A small file in every state of damage: each bit flipped, each length, longer, and zeros."""
    for at in range(len(data)):
        for bit in range(8):
            yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        yield f"cut to {at}", data[:at]
    yield "longer", data + b"\0"
    yield "twice", data + data
    yield "zeros", bytes(len(data))


@pytest.fixture
def damaged(record_property) -> Callable[[Path], Iterator[str]]:
    """Put a file into every state of damage, count them, and put it back."""

    def damage(path: Path) -> Iterator[str]:
        data, seen = path.read_bytes(), 0
        for name, changed in everything(data):
            path.write_bytes(changed)
            yield name
            seen += 1
        path.write_bytes(data)
        record_property("what", WHAT)
        record_property("damages", seen)

    return damage


def test_no_damage_of_a_tokenization_gives_other_tokens(root, damaged):
    request, tokens = b"a request", b"\1\0\0\0\2\0\0\0"
    with open_store(root) as store:
        store.tokenizations(b"scope").put(request, tokens)
    (path,) = (path for path in (root / "objects" / "tokens").rglob("*") if path.is_file())
    for name in damaged(path):
        with open_store(root) as store:
            # When it was made is of no use to a reader, and under the checksum all the same.
            assert store.tokenizations(b"scope").get(request) is None, name
    with open_store(root) as store:
        assert store.tokenizations(b"scope").get(request) == tokens


def test_no_damage_of_kvstore_json_gives_wrong_bytes(root, damaged):
    """A sentence, everything, or (with another interval, which is in every key) nothing."""
    seen = {"refused": 0, "served": 0, "missed": 0}
    sentences = set()
    for name in damaged(root / "kvstore.json"):
        try:
            with open_store(root, None) as store:
                found = restore(store.namespace(INFO), TOKENS).tokens
        except KVStoreError as error:
            sentences.add(str(error))
            seen["refused"] += 1
        else:
            assert found in {0, 40}, name
            seen["served" if found else "missed"] += 1
    assert min(seen.values()) > 3, seen
    assert all(str(root) in sentence for sentence in sentences)


@pytest.mark.parametrize("name", ["CACHEDIR.TAG", f"namespaces/{INFO.id}.json"])
def test_no_damage_of_what_is_for_people_costs_anything(root, damaged, name):
    path = root / name
    for number, _ in enumerate(damaged(path)):
        with open_store(root) as store:
            context = store.context
            assert isinstance(read_label(context.fs, context.layout, INFO.id), str)
            assert isinstance(read_namespace_file(context.fs, path), dict)
            if number % 16 == 0:
                assert restore(store.namespace(INFO), TOKENS).tokens == 40
                assert len(listing(context).conversations) == 1
                report = check(context)
                assert not report.error
                assert report.errors == 0
    path.unlink()
    with open_store(root) as store:
        assert restore(store.namespace(INFO), TOKENS).tokens == 40


def test_no_damage_of_a_quota_raises_or_limits_another_namespace(root, damaged):
    """It is text for people to write, without a checksum: a flip may be another size, as 1GiB is of 5GiB."""
    sizes = set()
    with open_store(root) as store:
        context = store.context
        write_quota(context, INFO.id, 5 << 30)
        for number, name in enumerate(damaged(context.layout.quota_file(INFO.id))):
            quotas = read_quotas(context)
            assert set(quotas.sizes) <= {INFO.id}, name
            assert bool(quotas.problems) != bool(quotas.sizes), name
            sizes.update(quotas.sizes.values())
            if number % 16 == 0:
                assert not collect(context, Policy(quotas=quotas.sizes, dry_run=True)).error
        assert read_quotas(context).sizes == {INFO.id: 5 << 30}
    assert 1 << 30 in sizes, "the sentence about this in docs/format.md and docs/reliability.md"
    assert min(sizes) >= 0


def test_no_damage_of_counters_raises_or_costs_other_processes_theirs(root, damaged):
    with open_store(root) as store:
        context = store.context
        mine, others = StatsFile(context), StatsFile(context)
        mine.add(requests=3, disk_tokens=1000)
        others.add(requests=5)
        assert mine.flush()
        assert others.flush()
        for number, name in enumerate(damaged(mine.path)):
            found = read_stats(context)
            assert found.rows[others.path.stem].counts["requests"] == 5, name
            assert all(0 <= count < 1 << 63 for row in found.rows.values() for count in row.counts.values()), name
            assert all(type(row.began) is type(row.updated) is int for row in found.rows.values()), name
            found.read_speed()
            if number % 16 == 0:
                fold(context)
        assert read_stats(context).total("requests") == 8
        # What its process writes next is whole, whatever lay there.
        mine.path.write_bytes(b"{")
        mine.add(requests=1)
        assert mine.flush()
        assert read_stats(context).total("requests") == 9
