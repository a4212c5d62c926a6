"""What a publish writes, what it finds there already, and what it heals."""

from __future__ import annotations

import errno
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from core_support import (
    INFO,
    SPECS,
    block_files,
    files,
    kv,
    node_files,
    open_store,
    prompt,
    read_checked,
    restore,
    span,
    spans,
)
from format_support import Forged, Ref, pack, root_of
from gc_support import as_newer

from kvstore import FileSystem, FormatVersionError, MissingParentError, Span, UnavailableError
from kvstore._version import __version__
from kvstore.clear import clear
from kvstore.manifest import decode

TOKENS = prompt(100)


NOW = 1_700_000_000_000_000_000


def refs_of(path: Path):
    return decode(path.read_bytes()).blocks


def test_what_is_published_is_the_bytes_of_the_format_page(tmp_path):
    space = open_store(tmp_path / "cache", clock=lambda: NOW).namespace(INFO)
    published = space.publish(TOKENS, [span(TOKENS, 0, 5, decode=True, phase=8)])
    (block,) = block_files(tmp_path / "cache")
    data = block.read_bytes()
    payload = 8 + struct.unpack_from("<Q", data)[0]
    assert payload % 64 == 8
    assert data[payload:] == b"".join(kv(TOKENS, 0, 5))
    assert block.name == xxhash.xxh3_128(data).hexdigest()
    expected = Forged(
        INFO.fingerprint,
        root_of(INFO.fingerprint, 16),
        pack(TOKENS[:5]),
        (Ref(bytes.fromhex(block.name), len(data), 0, 5, payload, flags=1),),
        created=NOW,
        writer=f"kvstore {__version__}".encode(),
    )
    assert expected.path(tmp_path / "cache").read_bytes() == expected.encode()
    assert (published.end, published.nodes, published.written) == (5, 1, len(data) + len(expected.encode()))


def test_the_chunk_after_names_the_chunk_before_as_its_parent(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    root = root_of(INFO.fingerprint, 16)
    first = Forged(INFO.fingerprint, root, pack(TOKENS[:16]), ())
    second = Forged(INFO.fingerprint, first.node_key, pack(TOKENS[16:20]), (), first=16)
    manifest = decode(second.path(tmp_path / "cache").read_bytes())
    assert (manifest.parent, manifest.key, manifest.first) == (first.node_key, second.node_key, 16)


def test_the_namespace_is_described_for_people(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    content = json.loads((tmp_path / "cache" / "namespaces" / f"{INFO.id}.json").read_text())
    assert content["description"] == {"model": "test", "dtype": "bf16"}
    assert (content["label"], content["salted"], content["fingerprint"]) == ("a test", False, INFO.fingerprint.hex())


def test_the_description_comes_back_after_it_was_cleared(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    description = tmp_path / "cache" / "namespaces" / f"{INFO.id}.json"
    with open_store(tmp_path / "cache") as other:
        assert clear(other.context).namespaces == 1
    assert not description.exists()
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    assert json.loads(description.read_text())["label"] == "a test"


def test_a_salt_is_never_written(tmp_path, store):
    space = store.namespace(replace(INFO, salt=b"s3cr3t-salt"))
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    assert not [name for name, data in files(tmp_path / "cache").items() if b"s3cr3t" in data]
    assert json.loads((tmp_path / "cache" / "namespaces" / f"{space.id}.json").read_text())["salted"] is True


def test_a_growing_tail_writes_only_the_new_tokens(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (old,) = block_files(tmp_path / "cache")
    before = old.stat().st_ino
    published = space.publish(TOKENS, [span(TOKENS, 5, 12)])
    small, grown = (refs_of(path) for path in node_files(tmp_path / "cache"))
    assert grown[0] == small[0]
    assert [(ref.first, ref.count) for ref in grown] == [(0, 5), (5, 7)]
    assert old.stat().st_ino == before
    new = next(path for path in block_files(tmp_path / "cache") if path != old)
    assert new.read_bytes()[grown[1].payload :] == b"".join(kv(TOKENS, 5, 12))
    assert published.written == new.stat().st_size + node_files(tmp_path / "cache")[1].stat().st_size


def test_a_chunk_grows_full_and_the_next_begins(space):
    for first, end in ((0, 5), (5, 9), (9, 16), (16, 20), (20, 32), (32, 33)):
        published = space.publish(TOKENS[:end], [span(TOKENS, first, end)])
        assert (published.end, published.nodes) == (end, 1)
        assert restore(space, TOKENS).tokens == end


def test_a_branch_inside_a_chunk_shares_the_blocks_before_it(tmp_path):
    space = open_store(tmp_path / "cache", interval=128).namespace(INFO)
    one, two = prompt(128), [*prompt(128)[:90], *prompt(38, 9)]
    space.publish(one, spans(one, 0, 70, 128))
    match = space.lookup(two)
    restored = read_checked(space, match, two)
    assert (match.count, restored.tokens, restored.border) == (90, 90, 70)
    space.publish(two, [span(two, 70, 128)])
    assert restore(space, two).tokens == restore(space, one).tokens == 128
    first, second = (refs_of(path) for path in node_files(tmp_path / "cache") if "-128-" in path.name)
    assert first[0] == second[0]
    assert first[1].digest != second[1].digest


def test_a_chunk_grows_from_another_node_with_that_border_when_the_first_has_lost_its_block(tmp_path, space):
    branch = [*TOKENS[:5], *prompt(4, 9)]
    space.publish(branch, [span(branch, 0, 5, phase=8), span(branch, 5, 9)])
    shortest, _ = node_files(tmp_path / "cache")
    shortest.unlink()
    known = set(block_files(tmp_path / "cache"))
    space.publish(TOKENS, [span(TOKENS, 0, 5)])
    (lost,) = set(block_files(tmp_path / "cache")) - known
    lost.unlink()
    space.publish(TOKENS, [span(TOKENS, 5, 14)])
    assert restore(space, TOKENS).tokens == 14


def test_a_tail_that_is_no_prefix_of_the_prompt_is_not_built_upon(space):
    other = [*TOKENS[:4], 1, *TOKENS[5:]]
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    with pytest.raises(MissingParentError, match="border at token 5"):
        space.publish(other, [span(other, 5, 12)])


def test_publishing_again_writes_nothing_and_makes_it_young(tmp_path):
    times = iter(range(NOW, NOW + 1000 * 10**9, 10**9))
    store = open_store(tmp_path / "cache", clock=lambda: next(times))
    space = store.namespace(INFO)
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (manifest,) = node_files(tmp_path / "cache")
    store.context.recent.clear()
    before, content = manifest.stat(), files(tmp_path / "cache")
    again = space.publish(TOKENS, spans(TOKENS, 0, 5))
    assert (again.end, again.nodes, again.written) == (5, 0, 0)
    assert files(tmp_path / "cache") == content
    assert manifest.stat().st_ino == before.st_ino
    assert NOW + 10**9 < manifest.stat().st_mtime_ns < NOW + 1000 * 10**9
    assert list(store.context.recent) == [str(manifest)], "where it cannot be touched, this process knows of it"


def test_the_first_writer_wins(space):
    """KV of the same tokens can differ in the last bits between two computations; what was served first stays."""
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    others = [bytes(len(part)) for part in kv(TOKENS, 0, 5)]
    assert space.publish(TOKENS, [Span(0, 5, SPECS, others)]).nodes == 0
    assert restore(space, TOKENS).tokens == 5


def test_a_block_that_is_there_is_made_young_and_not_written_again(tmp_path):
    space = open_store(tmp_path / "cache").namespace(INFO)
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (block,), (manifest,) = block_files(tmp_path / "cache"), node_files(tmp_path / "cache")
    inode = block.stat().st_ino
    os.utime(block, ns=(1, 1))
    manifest.unlink()
    published = space.publish(TOKENS, spans(TOKENS, 0, 5))
    assert (published.nodes, published.written) == (1, manifest.stat().st_size)
    assert block.stat().st_ino == inode
    assert block.stat().st_mtime_ns > NOW


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_block_that_is_there_needs_no_room(tmp_path, code):
    """On a full disk, too, where it cannot be written to find out: its manifest may be gone, or another model's KV be
    the same.
    """

    class Full(FileSystem):
        full = False

        def allocate(self, fd, size):
            if Full.full and size:
                raise OSError(code, os.strerror(code))
            super().allocate(fd, size)

    space = open_store(tmp_path / "cache", fs=Full()).namespace(INFO)
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    [manifest] = node_files(tmp_path / "cache")
    manifest.unlink()
    Full.full = True
    if code == errno.EIO:
        with pytest.raises(UnavailableError):
            space.publish(TOKENS, spans(TOKENS, 0, 5))
    else:
        assert space.publish(TOKENS, spans(TOKENS, 0, 5)).nodes == 1
        assert restore(space, TOKENS).tokens == 5
        with pytest.raises(UnavailableError):
            space.publish(TOKENS, spans(TOKENS, 0, 5, 9))
    assert not [path for path in (tmp_path / "cache" / "tmp").rglob("*") if path.is_file()]


@pytest.mark.parametrize("known", [False, True], ids=["gone", "damaged and set aside by somebody else"])
def test_a_missing_block_is_written_again(tmp_path, store, space, known):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (block,) = block_files(tmp_path / "cache")
    block.unlink()
    if known:
        store.context.damaged.add(block)
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    assert store.context.damaged == set()
    assert restore(space, TOKENS).tokens == 5


@pytest.mark.parametrize("how", ["link", "fifo", "folder", "short"])
def test_what_lies_in_place_of_a_block_is_replaced_by_the_block(tmp_path, space, how):
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    (block,) = block_files(tmp_path / "cache")
    size = block.stat().st_size
    data = block.read_bytes()
    block.unlink()
    if how == "link":
        # A link whose own size is that of the block: only its kind tells.
        block.symlink_to("/" + "./" * ((size - 2) // 2) + "x" * (1 + size % 2))
        assert block.lstat().st_size == size
    elif how == "fifo":
        os.mkfifo(block)
    elif how == "folder":
        block.mkdir()
    else:
        block.write_bytes(data[:-1])
    space.publish(TOKENS, spans(TOKENS, 0, 5))
    assert restore(space, TOKENS).tokens == 5
    assert not block.is_symlink()
    assert block.read_bytes() == data


def test_a_flipped_bit_heals_with_the_next_publish(tmp_path, store, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    whole = files(tmp_path / "cache")
    tail = refs_of(space.lookup(TOKENS).steps[1].path)[0]
    block = store.context.layout.block(tail.digest)
    data = bytearray(block.read_bytes())
    data[-3] ^= 0x10
    block.write_bytes(data)
    assert restore(space, TOKENS).tokens == 16
    assert restore(space, TOKENS).tokens == 16
    space.publish(TOKENS, [span(TOKENS, 16, 20)])
    assert store.context.damaged == set(), "who goes on from here must not wait for a restore"
    assert restore(space, TOKENS).tokens == 20
    healed = files(tmp_path / "cache")
    assert {name: healed[name] for name in whole if ".kv" not in name} == {
        n: d for n, d in whole.items() if ".kv" not in n
    }
    aside = {name: content for name, content in healed.items() if name.startswith("quarantine")}
    assert bytes(data) in aside.values()


def test_quarantine_never_overwrites_within_a_tick(tmp_path):
    """Damaged and healed twice while the clock stands still."""
    with open_store(tmp_path / "cache", clock=lambda: NOW) as store:
        space = store.namespace(INFO)
        for damage in (b"once", b"twice"):
            space.publish(TOKENS, spans(TOKENS, 0, 5))
            (path,) = node_files(store.path)
            path.write_bytes(damage)
            assert restore(space, TOKENS).tokens == 0
        space.publish(TOKENS, spans(TOKENS, 0, 5))
        set_aside = {p.read_bytes() for p in (store.path / "quarantine").iterdir()}
        assert set_aside == {b"once", b"twice"}
        assert restore(space, TOKENS).tokens == 5


def test_a_damaged_manifest_heals_with_the_next_publish(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    path = space.lookup(TOKENS).steps[0].path
    path.write_bytes(b"damaged")
    assert restore(space, TOKENS).tokens == 0
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert restore(space, TOKENS).tokens == 20
    assert [p.read_bytes() for p in (tmp_path / "cache" / "quarantine").iterdir()] == [b"damaged"]


def test_a_newer_manifest_is_never_set_aside(tmp_path, space):
    """Its blocks are some newer program's; to this one it is a miss, and it stays where it is."""
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    path = space.lookup(TOKENS).steps[1].path
    as_newer(path)
    before = files(tmp_path / "cache")
    for _ in range(2):
        assert restore(space, TOKENS).tokens == 16
        with pytest.raises(FormatVersionError, match="format 2, which a newer kvstore wrote"):
            space.publish(TOKENS, [span(TOKENS, 16, 20)])
    assert files(tmp_path / "cache") == before
    # What a process took for damaged before the newer one put its own there.
    path.write_bytes(b"damaged")
    assert restore(space, TOKENS).tokens == 16
    path.write_bytes(before[str(path.relative_to(tmp_path / "cache"))])
    with pytest.raises(FormatVersionError):
        space.publish(TOKENS, [span(TOKENS, 16, 20)])
    assert files(tmp_path / "cache") == before
