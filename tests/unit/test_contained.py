"""Repack drops cold tails that a longer node contains: no prefix is lost, and what they held apart is joined."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from core_support import INFO, open_store, prompt, restore, span
from gc_support import DAY, TENANT, check_valid, manifests, state
from upkeep_support import OLD_NS, counts, grow, invoke, invoke_json, later, named_bytes, refs, rest, snapshot

import kvstore.sweep
from kvstore.locks import gc_lock
from kvstore.manifest import decode
from kvstore.repack import RepackReport, repack

TOKENS = prompt(340)
ENDS = (70, 100, 128, 200, 256, 266, 340)
LEFT = [128, 256, 266, 340]
"""The tail of 10 tokens has no rung: a lookup that finds it by its key would not find it inside the longer one."""


@pytest.fixture
def cold(tmp_path) -> Path:
    """A conversation of 340 tokens (chunks of 128) that grew in turns and rests, with all of its tails."""
    with open_store(tmp_path / "s", 128) as store:
        grow(store.namespace(INFO), TOKENS, *ENDS)
        rest(store)
    return tmp_path / "s"


def run(root: Path, **options) -> RepackReport:
    """Repack two days later: what was written by the tests is not young any more."""
    with later(root, 2 * DAY) as store:
        return repack(store.context, **options)


def tail(root: Path, end: int, kind: str = "kv") -> Path:
    (path,) = [path for path in manifests(root) if path.suffix == f".{kind}" and decode(path.read_bytes()).end == end]
    return path


def ends(root: Path) -> list[int]:
    return sorted(decode(path.read_bytes()).end for path in manifests(root) if path.suffix == ".kv")


def test_tails_go_and_blocks_are_joined(cold):
    before = named_bytes(cold)
    report = run(cold)
    assert (report.dropped, report.nodes, report.replaced, report.written) == (3, 2, 5, 2)
    assert (report.warm, report.bound, report.skipped, report.damaged, report.error) == (0, 1, 0, 0, "")
    assert counts(cold) == {128: [128], 256: [128], 266: [10], 340: [10, 74]}
    assert named_bytes(cold) < before
    check_valid(cold)
    with open_store(cold, None) as store:
        for end in ENDS:
            assert restore(store.namespace(INFO), TOKENS[:end]).tokens == end
    again = run(cold)
    assert (again.dropped, again.nodes) == (0, 0)


def test_a_dry_run_says_the_same_and_changes_nothing(cold):
    before = snapshot(cold)
    would = run(cold, dry_run=True)
    assert snapshot(cold) == before
    did = run(cold)
    assert (would.dropped, would.nodes, would.replaced, would.written, would.bound) == (3, 2, 5, 2, 1)
    assert (did.dropped, did.nodes, did.replaced, did.written, did.bound) == (3, 2, 5, 2, 1)


def test_what_was_just_written_stays_whatever_is_asked_for(cold):
    with open_store(cold, None) as store:
        assert repack(store.context, older_than_ns=0).dropped == 0
    assert ends(cold) == list(ENDS)


def test_a_warm_tail_stays(cold):
    os.utime(tail(cold, 70))  # two days ago for the repack, and its sibling is older
    assert run(cold, older_than_ns=3 * DAY).dropped == 2
    assert ends(cold) == [70, *LEFT]


def test_a_tail_that_was_used_later_than_its_siblings_stays(cold):
    os.utime(tail(cold, 100), ns=(OLD_NS, OLD_NS + 1))
    report = run(cold)
    assert (report.dropped, ends(cold)) == (2, [100, *LEFT])
    # The shorter one is contained in it, too, and the blocks that both name are joined for both.
    assert counts(cold)[128] == [100, 28]
    assert counts(cold)[100] == [100]


def test_a_resume_point_stays(cold):
    with open_store(cold, None) as store:
        store.namespace(INFO).publish_state(TOKENS[:200], state())
        rest(store)
    assert run(cold).dropped == 2
    assert ends(cold) == [128, 200, 256, 266, 340]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_tail_stays_when_the_only_longer_node_is_not_whole(cold, harm):
    with open_store(cold, None) as store:
        harm(store.context.layout.block(refs(cold)[256][-1].digest))
        assert restore(store.namespace(INFO), TOKENS).tokens == 200
    report = run(cold)
    assert report.dropped == 2
    assert ends(cold) == [128, 200, 256, 266, 340]
    with open_store(cold, None) as store:
        assert restore(store.namespace(INFO), TOKENS[:200]).tokens == 200


def test_a_damaged_manifest_keeps_what_lies_beside_it(cold):
    other = [*TOKENS[:128], *prompt(3, 5)]
    with open_store(cold, None) as store:
        store.namespace(INFO).publish(other, [span(other, 128, 131)])
        rest(store)
    path = tail(cold, 131)
    path.write_bytes(path.read_bytes()[:-1])
    assert run(cold).dropped == 2
    assert [path for path in manifests(cold) if "-72-" in path.name]


def test_a_tail_with_blocks_of_its_own_stays(cold):
    """Computed twice: its bytes may differ from the sibling's, and it holds none of the sibling's blocks apart."""
    space_tokens = TOKENS[:256]
    with open_store(cold, None) as store:
        tail(cold, 200).unlink()
        store.namespace(INFO).publish(space_tokens[:200], [span(space_tokens, 128, 200, phase=8)])
        rest(store)
    assert refs(cold)[200][0] != refs(cold)[256][0]
    assert run(cold).dropped == 2
    assert ends(cold) == [128, 200, 256, 266, 340]


@pytest.mark.parametrize(("branches", "dropped"), [(7, 2), (8, 1)])
def test_a_tail_stays_where_a_lookup_would_not_find_the_longer_node(tmp_path, branches, dropped):
    """A lookup opens eight siblings that share as many rungs; the container must be among them."""
    root = tmp_path / "s"
    with open_store(root, 512) as store:
        space = store.namespace(INFO)
        grow(space, prompt(400), 100, 300, 400)
        for seed in range(branches):
            other = [*prompt(400)[:80], *prompt(340, seed + 1)]  # longer, so that a lookup prefers them
            space.publish(other, [span(other, 0, 420)])
        rest(store)
    assert run(root).dropped == dropped
    with open_store(root, None) as store:
        for end in (100, 300, 400):
            assert restore(store.namespace(INFO), prompt(400)[:end]).tokens == end


def test_a_tail_of_another_conversation_stays(cold):
    other = [*TOKENS[:228], *prompt(22, 7)]
    with open_store(cold, None) as store:
        store.namespace(INFO).publish(other, [span(other, 128, 250)])
        rest(store)
    assert run(cold).dropped == 3
    assert ends(cold) == [128, 250, 256, 266, 340]


def test_one_namespace_only(cold):
    with open_store(cold, None) as store:
        space = store.namespace(TENANT)
        grow(space, prompt(128, 1), 90, 128)
        rest(store)
    assert run(cold, namespaces=[space.id]).dropped == 1
    assert run(cold).dropped == 3


# Others come between the look and the lock.


@contextmanager
def before_the_lock(monkeypatch, act: Callable[[], object]):
    """Let something happen after the tails were chosen, before they go."""
    lock, waiting = kvstore.sweep.publish_lock, [act]

    def locked(layout):
        while waiting:
            waiting.pop()()
        return lock(layout)

    monkeypatch.setattr(kvstore.sweep, "publish_lock", locked)
    yield
    assert not waiting
    monkeypatch.undo()


def publish_a_state(root: Path) -> None:
    with open_store(root, None) as store:
        store.namespace(INFO).publish_state(TOKENS[:70], state())


def place_a_state(root: Path) -> None:
    """Nothing of the KV's times tells of it."""
    tail(root, 70).with_suffix(".state").write_bytes(b"")


@pytest.mark.parametrize(
    "act",
    [
        publish_a_state,
        place_a_state,
        lambda root: os.utime(tail(root, 70)),
        lambda root: [path.unlink() for path in (tail(root, 100), tail(root, 128))],
    ],
)
def test_a_tail_that_is_needed_meanwhile_stays(cold, monkeypatch, act):
    with before_the_lock(monkeypatch, lambda: act(cold)):
        run(cold)
    assert tail(cold, 70).is_file()
    assert not [path for path in manifests(cold) if "-72-" in path.name], "the others went"


def test_a_tail_that_is_gone_meanwhile_is_no_trouble(cold, monkeypatch):
    with before_the_lock(monkeypatch, lambda: tail(cold, 70).unlink()):
        report = run(cold)
    assert (report.error, ends(cold)) == ("", LEFT)


def test_beside_a_collection_no_tail_goes_and_the_rest_is_done(cold):
    with open_store(cold, None) as store, gc_lock(store.context.layout) as mine:
        assert mine
        assert run(cold, dry_run=True).dropped == 3
        report = run(cold)
        assert "A collection runs" in invoke("repack", cold)[1]
    assert (report.busy, report.dropped, report.error, ends(cold)) == (True, 0, "", list(ENDS))
    assert not run(cold).busy


# The command.


def test_the_command_says_how_many(cold, monkeypatch):
    monkeypatch.setattr("kvstore.contained.PROTECT_NS", 0)
    would = invoke("repack", cold, "--dry-run")[1]
    assert would.startswith("Would drop 3 tails that a longer node contains.\nWould join 5 blocks of 2 nodes into 2 (")
    assert invoke_json("repack", cold, "--dry-run")["dropped"] == 3
    assert invoke("repack", cold)[1].startswith("Dropped 3 tails that a longer node contains.\nJoined 5 blocks ")
    assert ends(cold) == LEFT
