"""One pass over a directory: it sees everything that is ours, counts everything, and touches nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest
from core_support import INFO, open_store
from gc_support import DAY, TENANT, ahead, blocks, manifests, prompt, publish, restore, space_of, state

import kvstore.scan as scanning
from kvstore.fsck import ExitCode, check
from kvstore.gc import Policy, collect
from kvstore.layout import FANOUT, Layout, NodeName
from kvstore.scan import appeared, free_bytes, scan, usage

FOREIGN = [
    ".DS_Store",
    "._4f0c",
    ".nfs000000000001",
    ".tmp.Xy12ab",
    "0123 (conflicted copy)",
    "Icon\r",
    "desktop.ini",
    "0" * 31,
    "0" * 33,
    "F" * 32,
]


def filled(path: Path):
    store = open_store(path)
    space = space_of(store)
    publish(space, prompt(40))
    space.publish_state(prompt(40), state())
    publish(space_of(store, TENANT), prompt(20, 1))
    return store


def on_disk(root: Path) -> int:
    """What du says, in bytes."""
    output = subprocess.run(["du", "-s", "--block-size=1", str(root)], check=True, capture_output=True, text=True)
    return int(output.stdout.split()[0])


def test_every_manifest_and_block_is_found_with_its_status(tmp_path):
    with filled(tmp_path / "s") as store:
        found = scan(store.context)
        layout = store.context.layout
        assert sorted(file.path(layout) for file in found.nodes) == manifests(store.path)
        assert sorted(layout.block(digest) for digest in found.blocks) == blocks(store.path)
        for file in found.nodes:
            status = file.path(layout).stat()
            assert file[2:] == (
                status.st_size,
                status.st_blocks * 512,
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_ino,
            )
            name, kind = NodeName.parse(file.file)
            assert (file.name, file.kind) == (name, kind)
            assert (file.parent, file.key, file.tokens, file.rungs) == (name.parent, name.key, name.count, name.rungs)
        for digest, block in found.blocks.items():
            status = layout.block(digest).stat()
            assert block.digest == digest
            assert block[1:] == (
                status.st_size,
                status.st_blocks * 512,
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_ino,
            )
        assert found.tally.foreign == 0


def test_the_total_is_what_du_says(tmp_path):
    with filled(tmp_path / "s") as store:
        (store.path / "strange").mkdir()
        (store.path / "strange" / "file").write_bytes(bytes(70_000))
        (store.context.layout.tokens / "ab").mkdir()
        (store.context.layout.tokens / "ab" / ("ab" * 16)).write_bytes(bytes(5000))
        (store.context.layout.quarantine / "1.x").write_bytes(bytes(9000))
        (store.context.layout.tmp / "unknown").write_bytes(bytes(9000))
        store.check_writable()
        assert scan(store.context).tally.allocated == usage(store.context) == on_disk(store.path)


def test_an_empty_store_is_scanned(tmp_path):
    with open_store(tmp_path / "s") as store:
        found = scan(store.context)
        assert (found.nodes, found.blocks, found.staging, found.quarantine) == ([], {}, [], [])
        assert found.tally.allocated == on_disk(store.path)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_counted_and_left_alone(tmp_path, name):
    with filled(tmp_path / "s") as store:
        before = scan(store.context)
        layout = store.context.layout
        folder = manifests(store.path)[0].parent
        places = [layout.nodes, folder.parent, folder, layout.blocks, blocks(store.path)[0].parent, layout.namespaces]
        for place in [*places, layout.tmp, layout.quarantine, layout.root]:
            (place / name).write_bytes(b"x")
        after = scan(store.context)
        assert after.tally.foreign == len(places) + 3
        assert [file.file for file in after.nodes] == [file.file for file in before.nodes]
        assert after.blocks.keys() == before.blocks.keys()
        assert (len(after.staging), after.quarantine) == (len(before.staging), [])


def test_what_lies_in_the_wrong_folder_is_not_ours(tmp_path):
    with filled(tmp_path / "s") as store:
        node, block = manifests(store.path)[0], blocks(store.path)[0]
        for path in (node, block):
            wrong = path.parent.parent / next(name for name in FANOUT if name != path.parent.name)
            wrong.mkdir(exist_ok=True)
            path.rename(wrong / path.name)
        found = scan(store.context)
        assert found.tally.foreign == 2
        assert node.name not in {file.file for file in found.nodes}
        assert bytes.fromhex(block.name) not in found.blocks


@pytest.mark.parametrize("name", ["c" * 32, "00"])
def test_a_file_in_place_of_a_folder_is_not_ours(tmp_path, name):
    with filled(tmp_path / "s") as store:
        known = scan(store.context).nodes
        above = store.context.layout.nodes if len(name) > 2 else manifests(store.path)[0].parent.parent
        (above / name).write_bytes(b"x")
        found = scan(store.context)
        assert found.tally.foreign == 1
        assert found.nodes == known
        assert appeared(store.context.layout, known) == []
        assert appeared(store.context.layout, known[1:]) == known[:1]
        with ahead(store.path, 400 * DAY) as later:
            assert collect(later.context).error == ""


def test_links_fifos_and_folders_with_our_names_are_not_ours(tmp_path):
    with filled(tmp_path / "s") as store:
        node, block = manifests(store.path)[0], blocks(store.path)[0]
        elsewhere = tmp_path / "elsewhere"
        block.rename(elsewhere)
        block.symlink_to(elsewhere)
        node.unlink()
        os.mkfifo(node)
        third = manifests(store.path)[1]
        third.unlink()
        third.mkdir()
        found = scan(store.context)
        assert found.tally.foreign == 3
        assert {node.name, third.name}.isdisjoint(file.file for file in found.nodes)
        assert bytes.fromhex(block.name) not in found.blocks


def test_a_link_in_place_of_a_node_folder_is_an_error(tmp_path):
    # A lookup follows it, so its manifests' blocks are in use; deleting behind it could reach another store.
    with filled(tmp_path / "s") as store:
        folder = manifests(store.path)[0].parent
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
        with pytest.raises(NotADirectoryError, match="link"):
            scan(store.context)
        folder.unlink()
        (tmp_path / "moved").rename(folder)
        folder.parent.rename(tmp_path / "moved")
        folder.parent.symlink_to(tmp_path / "moved")
        with pytest.raises(NotADirectoryError, match="link"):
            scan(store.context)


def test_a_link_in_place_of_a_block_folder_is_not_followed(tmp_path):
    with filled(tmp_path / "s") as store:
        folder = blocks(store.path)[0].parent
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved")
        found = scan(store.context)
        assert not any(digest.hex().startswith(folder.name) for digest in found.blocks)
        assert found.tally.foreign == 1


def test_a_file_that_vanishes_during_the_scan_is_passed_over(tmp_path, monkeypatch):
    with filled(tmp_path / "s") as store:
        gone = manifests(store.path)[0]
        real = os.lstat

        def vanishing(path, **options):
            if path == gone.name:
                gone.unlink()
            return real(path, **options)

        monkeypatch.setattr(os, "lstat", vanishing)
        assert gone.name not in {file.file for file in scan(store.context).nodes}
        assert not gone.exists()


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    with filled(tmp_path / "s") as store:
        unreadable = manifests(store.path)[0].parent
        real = os.open

        def refuse(path, *args, **kwargs):
            if Path(path) == unreadable:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError):
            scan(store.context)


def test_staging_folders_and_what_was_set_aside_are_listed(tmp_path):
    with filled(tmp_path / "s") as store:
        layout = store.context.layout
        folder = layout.tmp / "host-a.0badcafe.123.01234567"
        folder.mkdir()
        (folder / "1").write_bytes(bytes(5000))
        newest = (folder / "1").stat().st_ctime_ns
        node, block = manifests(store.path)[0], blocks(store.path)[0]
        node.rename(layout.quarantine / f"1a2b.{node.name}")
        block.rename(layout.quarantine / f"1a2b.{block.name}")
        found = scan(store.context)
        own, other = sorted(found.staging, key=lambda each: each.path != store.context.staging._folder)
        assert own.owner.pid == os.getpid()
        assert (other.path, other.owner.host, other.owner.pid) == (folder, "host-a", 123)
        assert other.newest_ns >= newest
        assert other.allocated >= 8192
        assert {file.path.name for file in found.quarantine} == {f"1a2b.{node.name}", f"1a2b.{block.name}"}


def test_a_scan_leaves_no_descriptor_open(tmp_path):
    with filled(tmp_path / "s") as store:
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        scan(store.context)
        after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        assert before == after


def test_free_bytes_are_those_of_the_file_system(tmp_path):
    with open_store(tmp_path / "s") as store:
        status = os.statvfs(store.path)
        assert abs(free_bytes(store.context) - status.f_bavail * status.f_frsize) < 1 << 30


def test_a_deep_foreign_tree_is_counted_without_recursion(tmp_path):
    with open_store(tmp_path / "s") as store:
        deep = store.path / "deep"
        here = deep
        for _ in range(300):
            here.mkdir()
            here /= "d"
        assert usage(store.context) == on_disk(store.path)


def test_scanning_is_fast_enough_to_be_used(tmp_path):
    # The real figures come from tools/make_big_store.py; this only catches an accidental factor of ten.
    with open_store(tmp_path / "s") as store:
        folder = store.context.layout.blocks / "ab"
        folder.mkdir()
        for i in range(2000):
            (folder / f"ab{i:030x}").touch()
        spent = []
        for _ in range(3):
            start = time.thread_time()
            assert len(scan(store.context).blocks) == 2000
            spent.append(time.thread_time() - start)
        assert min(spent) < 1


def test_node_names_are_cut_as_the_layout_parses_them():
    name = NodeName("a" * 32, 7, "b" * 32, "c" * 18)
    for kind in ("kv", "state"):
        file = scanning.NodeFile("0" * 32, name.file(kind), *[0] * 5)
        assert (file.kind, file.parent, file.key, file.tokens, file.rungs, file.name) == (
            kind,
            name.parent,
            name.key,
            7,
            name.rungs,
            name,
        )
        assert file.path(Layout(Path("/x"))) == Layout(Path("/x")).node("0" * 32, name, kind)


def in_capitals(store) -> tuple[Path, Path]:
    """Give a folder of manifests, with a letter in its name, that name in capitals; before and after."""
    folder = next(path.parent for path in manifests(store.path) if not path.parent.name.isdigit())
    return folder, folder.rename(folder.with_name(folder.name.upper()))


@pytest.mark.parametrize("which", ["fan-out", "namespace"])
def test_blocks_of_manifests_that_no_lookup_finds_stay(tmp_path, which):
    """Where case counts, a folder in capitals is not ours; but its manifests are, as soon as it has its name back."""
    with filled(tmp_path / "s") as store:
        before, after = in_capitals(store)
        if which == "namespace":
            after.rename(before)
            before, after = before.parent, before.parent.rename(before.parent.with_name(before.parent.name.upper()))
        known = blocks(store.path)
        found = scan(store.context)
        assert (found.tally.foreign, found.tally.hidden) == (1, 1)
        with ahead(store.path, 2 * DAY) as later:
            report = collect(later.context)
            assert (report.error, report.blocks, report.orphans) == ("", 0, 0)
            assert report.waiting > 0
            (finding,) = (each for each in check(later.context).findings if each.severity == "error")
            assert (finding.code, finding.path) == ("folder-hidden", str(after.relative_to(store.path)))
            assert check(later.context, repair=True).exit_code == ExitCode.LEFT
        assert blocks(store.path) == known
        after.rename(before)
        with ahead(store.path, 2 * DAY) as later:
            assert check(later.context, read_data=True).exit_code == ExitCode.CLEAN
            assert restore(later.namespace(INFO), prompt(40)).tokens == 40


def test_where_case_is_folded_a_folder_in_capitals_is_ours(tmp_path, monkeypatch):
    """Shown here by pretending: the system calls take small letters for capitals."""
    with filled(tmp_path / "s") as store:
        known = scan(store.context)
        before, after = in_capitals(store)

        def folding(real):
            def call(path, *arguments, **named):
                if isinstance(path, str | os.PathLike) and str(path).startswith(str(before)):
                    path = str(path).replace(str(before), str(after), 1)
                return real(path, *arguments, **named)

            return call

        for name in ("open", "stat", "lstat", "listdir", "utime", "unlink"):
            monkeypatch.setattr(os, name, folding(getattr(os, name)))
        found = scan(store.context)
        assert (found.tally.foreign, found.tally.hidden) == (0, 0)
        assert sorted(file.file for file in found.nodes) == sorted(file.file for file in known.nodes)
        assert appeared(store.context.layout, known.nodes) == []
        assert [file.file for file in appeared(store.context.layout, [])] == [file.file for file in found.nodes]
        assert restore(space_of(store), prompt(40)).tokens == 40
        with ahead(store.path, 2 * DAY) as later:
            assert check(later.context, read_data=True).exit_code == ExitCode.CLEAN
            report = collect(later.context)
            assert (report.error, report.orphans, report.waiting) == ("", 0, 0)


@pytest.mark.parametrize("kind", ["blocks", "tokens"])
def test_a_folder_of_blocks_in_capitals_is_foreign_and_keeps_nothing(tmp_path, kind):
    with filled(tmp_path / "s") as store:
        (store.context.layout.blocks.parent / kind / "AB").mkdir()
        found = scan(store.context)
        assert (found.tally.foreign, found.tally.hidden) == (1, 0)


class TestWhatThisUserMayNotSee:
    """Folders of the system's own at the root of an external drive: .Trashes, .Spotlight-V100."""

    @pytest.fixture
    def hidden(self, monkeypatch):
        """Folders that cannot be opened; as root, permissions would not do."""
        folders: set[Path] = set()
        plain = os.open

        def opened(path, *args, **kwargs):
            if Path(path) in folders:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return plain(path, *args, **kwargs)

        monkeypatch.setattr("kvstore.walk.os.open", opened)
        return folders

    @pytest.mark.parametrize("place", [".Trashes", "objects/foreign", "tmp/foreign", "foreign/below"])
    def test_a_foreign_folder_is_left_out(self, tmp_path, hidden, place):
        with filled(tmp_path / "cache") as store:
            before = scan(store.context)
            folder = store.path / place
            (folder / "inside").mkdir(parents=True)
            hidden.add(folder)
            found = scan(store.context)
            assert (found.nodes, found.tally.foreign) == (before.nodes, 1)
            assert usage(store.context) >= before.tally.allocated
            assert not collect(store.context, Policy(size=1 << 40)).error

    @pytest.mark.parametrize("place", ["objects/blocks", "objects/nodes", "tmp", "quarantine"])
    def test_a_folder_of_ours_is_an_error(self, tmp_path, hidden, place):
        """A collector that could not see part of the directory must know it."""
        with filled(tmp_path / "cache") as store:
            hidden.add(store.path / place)
            with pytest.raises(PermissionError):
                scan(store.context)
