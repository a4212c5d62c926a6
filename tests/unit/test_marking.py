"""Marking: what manifests name, which tails a sibling contains, and what cannot be read."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest
from core_support import open_store
from gc_support import TENANT, as_newer, manifests, named, prompt, publish, space_of, state

from kvstore import DamagedManifestError, FileSystem
from kvstore.keys import checksum
from kvstore.manifest import MAX_MANIFEST_BYTES, decode, decode_references
from kvstore.marking import mark
from kvstore.scan import scan


def marks_of(store):
    return mark(store.context, scan(store.context).nodes)


def contained(store) -> set[tuple[int, int]]:
    """Lengths of (tail, sibling that contains it)."""
    marks = marks_of(store)
    tokens = [node.file.tokens for node in marks.nodes]
    return {(tokens[tail], tokens[longer]) for tail, found in marks.containers.items() for longer in found}


def test_references_are_those_of_the_whole_manifest(tmp_path):
    with open_store(tmp_path / "s") as store:
        space = space_of(store)
        publish(space, prompt(30), 0, 5, 9, 16, 30)
        space.publish_state(prompt(30), state())
        paths = manifests(store.path)
        assert len(paths) == 5
        for path in paths:
            data = path.read_bytes()
            whole, found = decode(data), decode_references(data)
            assert (found.parent, found.first, bytes(found.tokens)) == (whole.parent, whole.first, whole.tokens)
            assert found.blocks == tuple((ref.digest, ref.size) for ref in whole.blocks)


def test_every_changed_byte_of_a_manifest_makes_its_references_unknown(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(9))
        data = manifests(store.path)[0].read_bytes()
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            with pytest.raises(DamagedManifestError):
                decode_references(bytes(damaged))
        for size in range(len(data)):
            with pytest.raises(DamagedManifestError):
                decode_references(data[:size])
        with pytest.raises(DamagedManifestError):
            decode_references(data + b"\0")


def test_counts_beyond_all_bounds_are_refused_without_reading_them():
    head = struct.pack("<8s I I 32s 32s 32s Q I I I I Q", b"KVSTNODE", 1, 1, *[bytes(32)] * 3, 0, *[2**32 - 1] * 4, 0)
    data = head + bytes(100)
    with pytest.raises(DamagedManifestError):
        decode_references(data + checksum(data))


def test_blocks_are_counted_once_a_manifest(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(14), 0, 5, 9, 14)
        publish(space_of(store, TENANT), prompt(5))
        marks = marks_of(store)
        # The first span's block is named by three nodes of one namespace and, equal bytes being one file, by the other.
        assert sorted(marks.named.values()) == [1, 2, 4]
        assert {digest.hex() for digest in marks.named} == named(store.path)


def test_a_tail_that_a_longer_sibling_begins_with_is_contained(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(30), 0, 5, 9, 16, 20, 30)
        assert contained(store) == {(5, 9), (5, 16), (9, 16), (4, 14)}


def test_a_tail_that_a_sibling_merely_resembles_is_not_contained(tmp_path):
    # Equal rungs, one token differs after the 64th: only the tokens can tell.
    with open_store(tmp_path / "s", 256) as store:
        space, tokens = space_of(store), prompt(200)
        publish(space, tokens[:70], 0, 70)
        publish(space, tokens[:100], 0, 100)
        other = [*tokens[:69], 7, *tokens[70:]]
        publish(space, other, 0, 200)
        assert contained(store) == {(70, 100)}


def test_a_tail_longer_than_a_rung_is_found_by_its_rungs(tmp_path):
    with open_store(tmp_path / "s", 2048) as store:
        space, tokens = space_of(store), prompt(2048)
        for end in (10, 64, 300, 1024, 1500):
            publish(space, tokens[:end], 0, end)
        assert contained(store) == {
            (10, 64), (10, 300), (10, 1024), (10, 1500), (64, 300), (64, 1024), (64, 1500), (300, 1024), (300, 1500),
            (1024, 1500),
        }  # fmt: skip


def test_equal_tokens_under_another_parent_or_namespace_are_not_contained(tmp_path):
    with open_store(tmp_path / "s") as store:
        tokens = prompt(16)
        publish(space_of(store), tokens + tokens[:9], 0, 16, 25)
        publish(space_of(store), prompt(16, 1) + tokens[:5], 0, 16, 21)
        publish(space_of(store, TENANT), tokens[:5], 0, 5)
        assert contained(store) == set()


def test_a_state_is_neither_tail_nor_container(tmp_path):
    with open_store(tmp_path / "s") as store:
        space = space_of(store)
        for end in (5, 9):
            publish(space, prompt(end), 0, end)
            space.publish_state(prompt(end), state(end))
        marks = marks_of(store)
        kinds = {marks.nodes[i].file.kind for tail, found in marks.containers.items() for i in (tail, *found)}
        assert kinds == {"kv"}


def test_damage_and_newer_versions_are_told_apart(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(60))
        paths = manifests(store.path)
        data = bytearray(paths[0].read_bytes())
        data[-1] ^= 1
        paths[0].write_bytes(data)
        as_newer(paths[1])
        paths[2].write_bytes(b"")
        data = bytearray(paths[3].read_bytes())
        data[8] = 2
        paths[3].write_bytes(data)
        by_name = {node.file.file: node.unreadable for node in marks_of(store).nodes}
        assert [by_name[path.name] for path in paths] == ["damaged", "newer", "damaged", "damaged"]


def test_a_manifest_larger_than_any_is_damaged_and_not_read(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(9))
        with manifests(store.path)[0].open("r+b") as file:
            file.truncate(MAX_MANIFEST_BYTES + 1)
        assert [node.unreadable for node in marks_of(store).nodes] == ["damaged"]


def test_a_manifest_that_vanished_named_nothing(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(30))
        found = scan(store.context)
        for path in manifests(store.path):
            path.unlink()
        marks = mark(store.context, found.nodes)
        assert (marks.nodes, marks.named) == ([], {})


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ELOOP])
def test_any_other_error_ends_the_marking(tmp_path, code):
    class Failing(FileSystem):
        def read_file(self, path: Path | str, limit: int):
            if "/nodes/" in str(path):
                raise OSError(code, "no", str(path))
            return super().read_file(path, limit)

    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(9))
    with open_store(tmp_path / "s", None, Failing()) as store, pytest.raises(OSError, match="no"):
        marks_of(store)
