"""Clearing: what was asked for goes, whatever its age; nothing else does; a person is asked first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from core_support import FAST, INFO, files, open_store, prompt, restore, spans
from gc_support import DAY, HOUR, TENANT, blocks, check_valid, manifests, named, publish, set_used, state
from upkeep_support import grow, invoke, invoke_json, later, snapshot

import kvstore.clear
import kvstore.cli.clear
from kvstore import FileSystem, MissingParentError, NamespaceInfo, Store, pack_tokens
from kvstore.clear import ClearReport, clear, clear_unused
from kvstore.context import this_process
from kvstore.gc import usage
from kvstore.keys import TOKEN_BYTES, checksum
from kvstore.locks import gc_lock
from kvstore.manifest import decode

ONE, TWO, THREE = prompt(40), [*prompt(16), *prompt(10, 1)], prompt(20, 2)
FOREIGN = (".DS_Store", "._x", ".nfs0001", "notes.txt")


@pytest.fixture
def full(tmp_path) -> Store:
    """Two namespaces, a state, a tokenization, a quarantined file, an orphan, and files that are not kvstore's."""
    with open_store(tmp_path / "s") as store:
        publish(store.namespace(INFO), ONE)
        publish(store.namespace(INFO), TWO)
        grow(store.namespace(INFO), THREE, 5, 9, 16, 20)
        store.namespace(INFO).publish_state(ONE, state(1))
        store.namespace(INFO).publish_state(ONE[:16], state(2))
        publish(store.namespace(TENANT), prompt(30, 3))
        publish(store.namespace(INFO), prompt(9, 8))
        store.namespace(INFO).lookup(prompt(9, 8)).steps[0].path.unlink()
        store.tokenizations(b"scope").put(b"request", bytes(8))
        layout = store.context.layout
        (layout.quarantine / f"1.{blocks(store.path)[0].name}").write_bytes(b"?" * 5000)
        for folder in (store.path, layout.nodes, manifests(store.path)[0].parent, layout.blocks, layout.quarantine):
            for name in FOREIGN:
                (folder / name).write_bytes(b"foreign")
        yield store


def ours(root: Path) -> list[str]:
    """Every file that kvstore wrote and that holds something."""
    return [name for name in files(root) if Path(name).name not in {*FOREIGN, "kvstore.json", "CACHEDIR.TAG"}]


def foreign(root: Path) -> int:
    return sum(path.name in FOREIGN for path in root.rglob("*"))


def test_all_leaves_an_empty_valid_directory_and_what_is_not_ours(full):
    assert ours(full.path)
    before, config = usage(full.context), (full.path / "kvstore.json").read_bytes()
    report = clear(full.context)
    assert ours(full.path) == []
    assert foreign(full.path) == 5 * len(FOREIGN)
    assert (report.error, report.busy, report.skipped, report.failed) == ("", False, 0, 0)
    assert (report.nodes, report.states) == (3 + 1 + 4 + 2, 2)
    assert (report.tokenizations, report.quarantined, report.namespaces) == (1, 1, 2)
    assert report.freed_bytes == before - usage(full.context)
    assert report.after_bytes == usage(full.context)
    assert (full.path / "kvstore.json").read_bytes() == config
    with open_store(full.path) as store:
        publish(store.namespace(INFO), ONE)
        assert restore(store.namespace(INFO), ONE).tokens == 40


def test_all_of_an_empty_directory_is_nothing(tmp_path):
    with open_store(tmp_path / "s") as store:
        report = clear(store.context)
        assert report == ClearReport(after_bytes=usage(store.context))


def test_one_namespace_goes_and_the_other_stays(full):
    kept = {path for path in manifests(full.path) if path.parent.parent.name == full.namespace(TENANT).id}
    orphans = {path.name for path in blocks(full.path)} - named(full.path)
    report = clear(full.context, full.namespace(INFO).id)
    assert set(manifests(full.path)) == kept
    assert (report.nodes, report.states, report.namespaces, report.tokenizations, report.quarantined) == (8, 2, 1, 0, 0)
    assert {path.name for path in blocks(full.path)} == named(full.path) | orphans
    assert not full.context.layout.namespace_file(full.namespace(INFO).id).exists()
    assert full.context.layout.namespace_file(full.namespace(TENANT).id).exists()
    check_valid(full.path)
    with open_store(full.path) as store:
        assert restore(store.namespace(TENANT), prompt(30, 3)).tokens == 30
        assert restore(store.namespace(INFO), ONE).tokens == 0


def test_blocks_that_the_other_namespace_names_too_stay(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(store.namespace(INFO), ONE)
        publish(store.namespace(TENANT), ONE)
        assert len(blocks(store.path)) == 3
        report = clear(store.context, store.namespace(INFO).id)
        assert (report.nodes, report.blocks) == (3, 0)
        assert restore(store.namespace(TENANT), ONE).tokens == 40


def test_what_was_not_used_for_long_goes_by_the_collectors_rules(full):
    set_used(full, full.namespace(INFO), ONE, 50 * 86400)
    set_used(full, full.namespace(INFO), TWO, 20 * 86400)
    with later(full.path, HOUR) as store:
        report = clear_unused(store.context, 30 * DAY)
    assert (report.nodes, report.states, report.error) == (2, 1, "")  # the chunk that TWO shares stays, with its state
    with open_store(full.path) as store:
        assert restore(store.namespace(INFO), ONE).tokens == 16
        assert restore(store.namespace(INFO), TWO).tokens == 26
    with later(full.path, 2 * HOUR) as store:
        report = clear_unused(store.context, HOUR, full.namespace(TENANT).id)
    assert report.nodes == 2
    check_valid(full.path)


def test_a_dry_run_changes_nothing_and_says_the_same(full):
    before = snapshot(full.path)
    for namespace in (None, full.namespace(INFO).id):
        would = clear(full.context, namespace, dry_run=True)
        assert would.dry_run
        assert would.nodes
        assert snapshot(full.path) == before
    would = clear(full.context, dry_run=True)
    would.dry_run = False
    assert clear(full.context) == would


def test_damaged_manifests_go_too(full):
    for path in manifests(full.path)[:3]:
        path.write_bytes(path.read_bytes()[:-1])
    assert clear(full.context).error == ""
    assert ours(full.path) == []


def manifest_of(root: Path, tokens: list[int]) -> Path:
    """The KV manifest of the node that ends with these tokens."""
    packed = pack_tokens(tokens)
    for path in manifests(root):
        manifest = decode(path.read_bytes())
        ends = manifest.kind == "kv" and manifest.end == len(tokens)
        if ends and manifest.tokens == packed[manifest.first * TOKEN_BYTES :]:
            return path
    raise AssertionError("there is no such node")


def test_what_a_newer_version_wrote_stays_with_its_siblings_and_ancestors(full):
    """Its references cannot be known; they can only be blocks of its chunk."""
    sibling = [*ONE[:32], *prompt(5, 9)]
    publish(full.namespace(INFO), sibling)
    newer = manifest_of(full.path, ONE)
    data = bytearray(newer.read_bytes())
    data[8] = 2
    newer.write_bytes(data[:-16] + checksum(data[:-16]))
    report = clear(full.context)
    left = {path for path in manifests(full.path) if path.suffix == ".kv"}
    assert left == {newer, *(manifest_of_rest(full.path, newer, tokens) for tokens in (sibling, ONE[:32], ONE[:16]))}
    assert report.skipped
    with open_store(full.path, None) as store:
        assert restore(store.namespace(INFO), sibling).tokens == 37
    assert (full.path / "namespaces" / f"{full.namespace(INFO).id}.json").exists()
    assert not (full.path / "namespaces" / f"{full.namespace(TENANT).id}.json").exists()


def manifest_of_rest(root: Path, unreadable: Path, tokens: list[int]) -> Path:
    """manifest_of beside a manifest that cannot be read."""
    data = unreadable.read_bytes()
    unreadable.unlink()
    try:
        return manifest_of(root, tokens)
    finally:
        unreadable.write_bytes(data)


def test_folders_that_killed_processes_left_in_tmp_go_and_those_of_others_stay(full):
    me = this_process()
    gone = full.context.layout.tmp / f"{me.host}.0badb007.1.00000001"
    running = full.context.layout.tmp / f"{me.host}.{me.boot}.{os.getppid()}.00000002"
    for folder in (gone, running):
        folder.mkdir()
        (folder / "1").write_bytes(bytes(9000))
    with later(full.path, HOUR) as store:
        report = clear(store.context)
    assert (report.staging, gone.exists(), running.exists()) == (1, False, True)
    assert report.after_bytes == usage(full.context)


# Beside others.


@dataclass(frozen=True)
class Hooked(FileSystem):
    """Calls hook once, before the first unlink of a path that ends so."""

    durability: object = FAST.durability
    suffix: str = ""
    hook: object = None
    done: list[bool] = field(default_factory=list)

    def unlink(self, path):
        if str(path).endswith(self.suffix) and not self.done:
            self.done.append(True)
            self.hook()
        super().unlink(path)


def test_a_node_that_is_used_meanwhile_stays_with_its_ancestors(tmp_path):
    with open_store(tmp_path / "s") as store:
        publish(store.namespace(INFO), ONE)
        publish(store.namespace(INFO), prompt(40, 5))
        used = manifest_of(store.path, ONE[:32])
    with open_store(tmp_path / "s", None, Hooked(hook=lambda: os.utime(used))) as store:
        report = clear(store.context)
    assert report.skipped == 2  # the second chunk, and the first because of it
    assert set(manifests(tmp_path / "s")) == {used, manifest_of(tmp_path / "s", ONE[:16])}
    check_valid(tmp_path / "s")
    with open_store(tmp_path / "s", None) as store:
        assert restore(store.namespace(INFO), ONE).tokens == 32


def test_a_node_that_appears_meanwhile_stays_with_its_ancestors(tmp_path, monkeypatch):
    """It is looked at after a publisher made it young for a child whose folder was listed before, so it looks unchanged
    to the sweep, and the child is not known.
    """
    with open_store(tmp_path / "s") as store:
        space = store.namespace(INFO)
        publish(space, ONE[:16])
        publish(space, prompt(20, 3))
        real = kvstore.clear.appeared

        def between(*args):
            space.publish(ONE[:32], spans(ONE, 16, 32))
            first = {file.file for file in real(*args)}
            space.publish(ONE, spans(ONE, 32, 40))
            return [file for file in real(*args) if file.file in first]

        monkeypatch.setattr(kvstore.clear, "appeared", between)
        report = clear(store.context)
        assert (report.nodes, report.skipped, report.error) == (2, 2, "")
        check_valid(store.path)
        assert restore(space, ONE).tokens == 40


def test_a_publisher_that_builds_on_what_goes_fails_before_it_commits(tmp_path):
    """Or it was faster, and then what it built on stays."""
    with open_store(tmp_path / "s") as store:
        publish(store.namespace(INFO), ONE[:32])
    results = []

    def build() -> None:
        with open_store(tmp_path / "s", None) as store:
            for end in range(33, 41):
                try:
                    store.namespace(INFO).publish(ONE[:end], spans(ONE, 32, end))
                    results.append(end)
                except MissingParentError:
                    results.append(0)

    thread = threading.Thread(target=build)
    with open_store(tmp_path / "s", None) as store:
        thread.start()
        for _ in range(5):
            assert clear(store.context).error == ""
            check_valid(tmp_path / "s")
        thread.join()
    assert len(results) == 8
    check_valid(tmp_path / "s")


def test_a_block_that_a_publisher_takes_up_again_meanwhile_stays(tmp_path):
    """It was touched before the clearing looked at it, and named after that; its old manifest was a victim."""
    with open_store(tmp_path / "s") as store:
        grow(store.namespace(INFO), ONE, 5)
    touched, go = threading.Event(), threading.Event()

    @dataclass(frozen=True)
    class Slow(FileSystem):
        durability: object = FAST.durability

        def touch(self, path, time_ns):
            done = super().touch(path, time_ns)
            if "blocks" in path.parts:
                touched.set()
                go.wait(1)
            return done

    def publish_on() -> None:
        with open_store(tmp_path / "s", None, Slow()) as store:
            store.namespace(INFO).publish(ONE[:9], spans(ONE, 5, 9))

    publisher = threading.Thread(target=publish_on)

    @dataclass(frozen=True)
    class Waiting(FileSystem):
        """Between the manifests and their blocks, waits for the publisher."""

        durability: object = FAST.durability

        def sync_dir(self, path):
            go.set()
            publisher.join(3)

    with open_store(tmp_path / "s", None, Waiting()) as store:
        publisher.start()
        assert touched.wait(5)
        assert clear(store.context).error == ""
    publisher.join()
    check_valid(tmp_path / "s")


def test_while_a_collection_runs_nothing_is_done(full):
    before = snapshot(full.path)
    with gc_lock(full.context.layout):
        report = clear(full.context)
        assert report.busy
        assert invoke("clear", full.path, "--all", "--yes")[0] == 1
    assert report.nodes == 0
    assert snapshot(full.path) == before


def test_files_that_cannot_be_deleted_are_counted_and_keep_what_they_need(full):
    leaf = manifest_of(full.path, ONE[:32])

    @dataclass(frozen=True)
    class Refusing(FileSystem):
        durability: object = FAST.durability

        def unlink(self, path):
            if path == leaf:
                raise PermissionError(1, "Operation not permitted", str(path))
            super().unlink(path)

    with open_store(full.path, None, Refusing()) as store:
        report = clear(store.context)
    assert report.failed == 1
    assert leaf.exists()
    check_valid(full.path)
    with open_store(full.path, None) as store:
        assert restore(store.namespace(INFO), ONE).tokens == 32


class KilledError(BaseException):
    pass


@dataclass(frozen=True)
class Killing(FileSystem):
    """Is killed after some unlinks."""

    durability: object = FAST.durability
    left: list[int] = field(default_factory=list)

    def unlink(self, path):
        self.left[0] -= 1
        if self.left[0] < 0:
            raise KilledError
        super().unlink(path)


def test_a_kill_in_the_middle_leaves_a_valid_directory(full, tmp_path):
    whole = clear(full.context, dry_run=True)
    total = whole.nodes + whole.states + whole.blocks + whole.tokenizations + whole.quarantined + whole.namespaces
    assert total > 20
    left = set()
    for limit in range(0, total, 3):
        root = Path(shutil.copytree(full.path, tmp_path / f"copy{limit}"))
        store = open_store(root, None, Killing(left=[limit]))
        with pytest.raises(KilledError):
            clear(store.context)
        check_valid(root)
        left.add(len(manifests(root)))
        with open_store(root, None) as store:
            assert clear(store.context).error == ""
        assert ours(root) == []
    assert len(left) > 3


# The command.


def test_without_a_terminal_it_refuses_and_says_how(full):
    before = snapshot(full.path)
    code, out, err = invoke("clear", full.path, "--all")
    assert (code, out) == (1, "")
    assert "say --yes" in " ".join(err.split())
    assert snapshot(full.path) == before


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_it_asks_and_takes_no_for_an_answer(full, monkeypatch, answer, gone):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr(kvstore.cli.clear, "sys", type("sys", (), {"stdin": Terminal()}))
    code, _, err = invoke("clear", full.path, "--namespace", full.namespace(INFO).id[:8], given=answer)
    assert "Delete 8 nodes, 2 boundary states, " in err
    assert full.namespace(INFO).id in err
    assert code == (0 if gone else 1)
    assert (len(manifests(full.path)) == 2) is gone


def test_yes_needs_no_terminal(full):
    code, out, err = invoke("clear", full.path, "--all", "--yes")
    assert (code, err) == (0, "")
    assert out.startswith("Deleted 10 nodes, 2 boundary states, ")
    assert ours(full.path) == []


def test_the_command_in_json_and_dry(full):
    before = snapshot(full.path)
    document = invoke_json("clear", full.path, "--all", "--dry-run")
    assert (document["directory"], document["nodes"], document["dry_run"]) == (str(full.path), 10, True)
    assert snapshot(full.path) == before
    set_used(full, full.namespace(INFO), ONE, 50 * 86400)
    assert invoke_json("clear", full.path, "--older-than", "30d", "--dry-run")["nodes"] == 0  # its ctime is of now
    assert snapshot(full.path).keys() == before.keys()


@pytest.mark.parametrize(
    "options", [[], ["--all", "--namespace", "ab"], ["--all", "--older-than", "3d"], ["--yes"], ["--dry-run"]]
)
def test_what_to_delete_must_be_said_and_only_once(full, options):
    before = snapshot(full.path)
    code, _, err = invoke("clear", full.path, *options)
    assert code == 2
    assert "say what to delete" in " ".join(err.replace("│", " ").split())
    assert snapshot(full.path) == before


@pytest.mark.parametrize(
    ("options", "sentence", "exit_code"),
    [(["--namespace", "zz"], "no namespace begins with", 1), (["--older-than", "30"], "is not an age", 2)],
)
def test_mistakes_are_one_sentence(full, options, sentence, exit_code):
    code, out, err = invoke("clear", full.path, "--yes", *options)
    assert (code, out) == (exit_code, "")
    assert sentence in " ".join(err.split())


def test_two_namespaces_with_one_beginning_are_not_one(full):
    alike = next(info for number in range(99) if (info := NamespaceInfo({"n": number})).id[0] == INFO.id[0])
    publish(full.namespace(alike), ONE)
    before = snapshot(full.path)
    code, _, err = invoke("clear", full.path, "--yes", "--namespace", INFO.id[0])
    assert code == 1
    assert "2 namespaces begin with" in " ".join(err.split())
    assert snapshot(full.path) == before


def test_through_the_console_script(full):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "clear", str(full.path), "--all"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("kvstore: nothing was deleted")
    assert len(manifests(full.path)) == 12
