"""What is damaged in the source stays there; what is damaged in the target is healed."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from core_support import INFO, files, open_store, restore, span
from gc_support import TENANT, as_newer, check_valid, publish, state
from merge_support import ONE, THREE, TWO, by_end
from upkeep_support import HARM, assert_restores, fifo, flip, grow, invoke, link, refs

from kvstore import FileSystem
from kvstore.keys import checksum
from kvstore.manifest import decode, encode
from kvstore.merge import merge
from kvstore.stats import StatsFile, read_stats
from kvstore.tokenizations import MAX_ENTRY_BYTES

DAMAGE = HARM | {
    "link": lambda path: (path.rename(f"{path}.away"), path.symlink_to(f"{path}.away")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_block_stays_behind_with_all_that_continues_its_node(pair, how):
    a, b = pair
    (ref,) = decode(by_end(a.path)[32].read_bytes()).blocks
    path = a.context.layout.block(ref.digest)
    DAMAGE[how](path)
    report = merge(a.context, b.context)
    assert report.damaged >= 1
    assert report.problems
    assert all(path.name in sentence or by_end(a.path)[32].name in sentence for sentence in report.problems)
    # The tail after it, and the state at it; the tenant has nothing to do with it.
    assert (report.without_parent, report.nodes, report.states, report.error) == (2, 2, 0, "")
    check_valid(b.path)
    assert_restores(b.path, [(INFO, TWO), (TENANT, THREE)])
    with open_store(b.path, None) as store:
        assert restore(store.namespace(INFO), ONE).tokens == 16
    assert not b.context.layout.block(ref.digest).exists()
    assert not any((b.path / "tmp").rglob("[0-9a-f]"))


def test_a_state_at_the_first_chunk_stays_behind_with_its_damaged_kv(pair):
    a, b = pair
    a.namespace(TENANT).publish_state(THREE[:16], state(5))
    flip(a.namespace(TENANT).lookup(THREE[:16]).steps[0].path)
    report = merge(a.context, b.context)
    assert (report.damaged, report.without_parent, report.states) == (1, 2, 1)
    check_valid(b.path)


@pytest.mark.parametrize("how", [how for how in DAMAGE if how not in ("gone", "link", "fifo")])
def test_a_damaged_manifest_stays_behind(pair, how):
    a, b = pair
    path = by_end(a.path)[32]
    DAMAGE[how](path)
    report = merge(a.context, b.context)
    assert (report.damaged, report.without_parent, report.nodes) == (1, 2, 2)
    assert path.name in report.problems[0]
    assert not (b.path / path.relative_to(a.path)).exists()


def without_blocks(path: Path) -> None:
    path.write_bytes(encode(replace(decode(path.read_bytes()), blocks=())))


def test_a_node_without_blocks_does_not_come_between_others(pair):
    """It is whole in itself, and a restore over it would take what was never filled for saved."""
    a, b = pair
    without_blocks(by_end(a.path)[32])
    report = merge(a.context, b.context)
    assert (report.damaged, report.without_parent) == (1, 2)
    assert "one has no blocks" in report.problems[0]
    assert by_end(b.path).keys() == {16, 28}
    assert restore(b.namespace(INFO), ONE).tokens == 16


def test_a_node_without_blocks_in_the_target_gives_way_to_one_that_has_some(pair):
    a, b = pair
    publish(b.namespace(INFO), ONE[:16])
    without_blocks(by_end(b.path)[16])
    merge(a.context, b.context)
    assert restore(b.namespace(INFO), ONE).tokens == 40
    assert len(list((b.path / "quarantine").iterdir())) == 1


def test_blocks_are_not_put_upon_a_node_that_has_none(pair):
    """The source's own chunk is damaged, so the target's stays, and what continues it in the source is left out."""
    a, b = pair
    by_end(a.path)[16].write_bytes(b"damaged")
    without_blocks(by_end(b.path)[16])
    report = merge(a.context, b.context)
    assert any("one has no blocks" in problem for problem in report.problems)
    assert by_end(b.path).keys() == {16, 28}


def test_a_newer_manifest_of_the_target_stays(pair):
    a, b = pair
    first = by_end(b.path)[16]
    as_newer(first)
    before = first.read_bytes()
    foreseen = merge(a.context, b.context, dry_run=True)
    report = merge(a.context, b.context)
    assert first.read_bytes() == before
    assert not list((b.path / "quarantine").iterdir())
    assert (report.there, report.damaged) == (1, 0), "it is there, and not brought"
    assert (foreseen.there, foreseen.nodes) == (report.there, report.nodes)


def test_a_manifest_of_another_prefix_stays_behind(pair):
    a, b = pair
    ends = by_end(a.path)
    wrong = ends[40].with_name(ends[40].name.replace("-8-", "-7-"))
    ends[40].rename(wrong)
    report = merge(a.context, b.context)
    assert (report.damaged, report.nodes) == (1, 3)
    assert wrong.name in report.problems[0]


def test_a_damaged_block_that_two_nodes_name_is_read_and_reported_once(tmp_path):
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        grow(a.namespace(INFO), ONE, 5, 9, 12)
        flip(a.context.layout.block(refs(a.path)[5][0].digest))
        report = merge(a.context, b.context)
        assert (report.nodes, report.blocks) == (0, 0)
        assert len(report.problems) == 1
        assert report.damaged == 4  # the block, and three manifests that name it


def tokenization_of(root: Path) -> Path:
    (found,) = (path for path in (root / "objects" / "tokens").rglob("*") if path.is_file())
    return found


def newer_tokenization(path: Path) -> bytes:
    """Make a tokenization one of a format to come, with a field more, whole in itself."""
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    body = bytes(data[:-16]) + bytes(8)
    path.write_bytes(body + checksum(body))
    return path.read_bytes()


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_newer_tokenization_of_the_target_stays(pair, dry_run):
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    path = tokenization_of(b.path)
    before = newer_tokenization(path)
    report = merge(a.context, b.context, dry_run=dry_run)
    assert (report.tokenizations, report.damaged, report.newer) == (0, 0, 0)
    assert path.read_bytes() == before


def test_a_damaged_tokenization_of_the_target_gives_way(pair):
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    tokenization_of(b.path).write_bytes(b"short")
    assert merge(a.context, b.context).tokenizations == 1
    assert b.tokenizations(b"scope").get(b"request") == bytes(8)


def test_a_tokenization_of_the_target_that_cannot_be_read_now_stays(pair, monkeypatch):
    """A newer kvstore may have written it: nobody knows before the disk answers."""
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(12))
    (path,) = (path for path in b.context.layout.tokens.rglob("*") if path.is_file())
    before = path.read_bytes()
    read = FileSystem.read_file

    def failing(fs, asked, limit):
        if asked == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(fs, asked, limit)

    monkeypatch.setattr(FileSystem, "read_file", failing)
    report = merge(a.context, b.context)
    assert (report.tokenizations, report.error) == (0, "")
    assert path.read_bytes() == before


@pytest.mark.parametrize("instead", [link, fifo])
def test_what_is_no_file_in_place_of_a_tokenization_of_the_target_gives_way(pair, instead):
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    path = tokenization_of(b.path)
    instead(path)
    assert merge(a.context, b.context).tokenizations == 1
    assert b.tokenizations(b"scope").get(b"request") == bytes(8)


def folder(path: Path) -> None:
    path.parent.mkdir()
    path.mkdir()


def file_above(path: Path) -> None:
    path.parent.write_bytes(b"a file")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("instead", [folder, file_above])
def test_a_tokenization_without_a_place_in_the_target_stays_behind_alone(pair, instead, dry_run):
    a, b = pair
    path = b.path / tokenization_of(a.path).relative_to(a.path)
    for number in range(9):
        a.tokenizations(b"scope").put(b"%d" % number, bytes(8))
    alone = sum(each.name[:2] == path.name[:2] for each in a.context.layout.tokens.rglob("?" * 32))
    instead(path)
    stats = StatsFile(a.context)
    stats.add(requests=3)
    assert stats.flush()
    report = merge(a.context, b.context, dry_run=dry_run)
    assert report.error == ""
    left = 1 if instead is folder else alone
    assert (report.tokenizations, report.namespaces, report.damaged) == (10 - left, 1, left)
    assert any(path.name in sentence for sentence in report.problems)
    assert path.is_dir() == (instead is folder)
    if not dry_run:
        assert b.context.layout.namespace_file(a.namespace(TENANT).id).exists()
        assert read_stats(b.context).total("requests") == 3
        assert not any((b.path / "tmp").rglob("[0-9a-f]"))


def test_a_tokenization_larger_than_ours_can_be_stays_in_the_target(pair):
    """A newer kvstore may have other limits."""
    a, b = pair
    b.tokenizations(b"scope").put(b"request", bytes(8))
    path = tokenization_of(b.path)
    os.truncate(path, MAX_ENTRY_BYTES + 1)
    assert merge(a.context, b.context).tokenizations == 0
    assert path.stat().st_size == MAX_ENTRY_BYTES + 1


@pytest.mark.parametrize(("end", "kind", "behind"), [(32, "blocks", 2), (40, "blocks", 0), (40, "nodes", 0)])
def test_a_node_without_a_place_in_the_target_stays_behind_with_what_continues_it(pair, end, kind, behind):
    a, b = pair
    node = source = by_end(a.path)[end]
    if kind == "blocks":
        (ref,) = decode(source.read_bytes()).blocks
        source = a.context.layout.block(ref.digest)
    place = (b.path / source.relative_to(a.path)).parent
    assert not place.exists()
    place.write_bytes(b"a file")
    report = merge(a.context, b.context)
    # The tail after it, and the state at it; the tenant has nothing to do with it.
    assert (report.error, report.damaged, report.without_parent) == ("", 1, behind)
    assert report.nodes + report.states == 4 - behind
    assert node.name in report.problems[0]
    assert str(place) in report.problems[0]
    assert (report.tokenizations, report.namespaces) == (1, 1)
    assert place.read_bytes() == b"a file"
    assert not any((b.path / "tmp").rglob("[0-9a-f]"))
    place.unlink()
    assert merge(a.context, b.context).damaged == 0
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO), (TENANT, THREE)])


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", ["tmp", "objects/tokens", "objects/blocks"])
def test_a_file_in_place_of_a_folder_that_all_needs_ends_it(pair, name, dry_run):
    a, b = pair
    shutil.rmtree(b.path / name)
    (b.path / name).write_bytes(b"a file")
    report = merge(a.context, b.context, dry_run=dry_run)
    assert (report.nodes, report.problems) == (0, [])
    assert "where a folder should be; move it away" in report.error


def test_what_a_newer_kvstore_wrote_stays_behind_and_is_no_damage(pair):
    a, b = pair
    as_newer(by_end(a.path)[40])
    newer_tokenization(tokenization_of(a.path))
    report = merge(a.context, b.context)
    assert (report.newer, report.damaged, report.nodes, report.tokenizations) == (2, 0, 3, 0)
    assert all("has format 2, which a newer kvstore wrote; merge with that one" in each for each in report.problems)
    assert "2 files of a newer kvstore left out; merge with that one." in invoke("merge", a.path, b.path)[1]


def test_damaged_tokenizations_and_descriptions_stay_behind(pair):
    a, b = pair
    (tokenization,) = (path for path in (a.path / "objects" / "tokens").rglob("*") if path.is_file())
    flip(tokenization)
    description = a.context.layout.namespace_file(a.namespace(TENANT).id)
    description.write_text("{")
    report = merge(a.context, b.context)
    assert (report.tokenizations, report.namespaces, report.damaged) == (0, 0, 2)
    assert not b.context.layout.namespace_file(a.namespace(TENANT).id).exists()
    assert_restores(b.path, [(TENANT, THREE)])


def test_foreign_files_are_left_behind_and_counted(pair):
    a, b = pair
    folder = by_end(a.path)[40].parent
    for name in (".DS_Store", "._x", ".nfs0001", f"{by_end(a.path)[40].name} (conflicted copy)"):
        (folder / name).write_bytes(b"?")
    (a.path / "objects" / "tokens" / "notes.txt").write_bytes(b"?")
    report = merge(a.context, b.context)
    assert (report.nodes, report.foreign, report.damaged) == (4, 5, 0)
    assert all(Path(name).name not in {".DS_Store", "._x", "notes.txt"} for name in files(b.path))


def test_a_block_that_the_target_lost_is_brought_back(pair):
    a, b = pair
    (ref,) = decode(by_end(b.path)[16].read_bytes()).blocks
    b.context.layout.block(ref.digest).unlink()
    report = merge(a.context, b.context)
    assert (report.there, report.blocks) == (1, 6)
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO)])


def test_a_manifest_that_is_damaged_in_the_target_is_set_aside_for_the_good_one(pair):
    a, b = pair
    flip(by_end(b.path)[16])
    report = merge(a.context, b.context)
    assert (report.nodes, report.there) == (5, 0)
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO)])
    assert [path.name.partition(".")[2] for path in (b.path / "quarantine").iterdir()] == [by_end(b.path)[16].name]


def test_a_manifest_whose_blocks_nobody_has_gives_way_to_one_whose_blocks_are_there(tmp_path):
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        publish(a.namespace(INFO), ONE[:16])
        b.namespace(INFO).publish(ONE[:16], [span(ONE, 0, 16, phase=8)])
        (ref,) = refs(b.path)[16]
        assert ref != refs(a.path)[16][0]
        b.context.layout.block(ref.digest).unlink()
        report = merge(a.context, b.context)
        assert (report.nodes, report.damaged) == (1, 0)
        assert_restores(b.path, [(INFO, ONE[:16])])
