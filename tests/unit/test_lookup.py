"""The longest saved prefix: what is found, what is not, and what a lookup must not do on the way."""

from __future__ import annotations

import os
import random
import shutil
from array import array
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from core_support import INFO, block_files, node_files, open_store, prompt, restore, span, spans
from format_support import Forged, Ref, pack, root_of
from gc_support import state

from kvstore import FileSystem, NamespaceInfo, Span, TokenError
from kvstore.keys import pack_tokens
from kvstore.layout import NodeName
from kvstore.lookup import common_tokens

TOKENS = prompt(100)


@pytest.fixture
def wide(tmp_path):
    """A namespace with chunks of 512 tokens, long enough for two rungs."""
    return open_store(tmp_path / "wide", interval=512).namespace(INFO)


def differ_at(tokens: list[int], at: int, seed: int = 1) -> list[int]:
    """The first at tokens, then others."""
    return [*tokens[:at], *prompt(len(tokens) - at, seed)]


def test_an_empty_store_has_nothing(space):
    match = space.lookup(TOKENS)
    assert (match.count, match.border, match.steps, match.exact) == (0, 0, (), True)


def test_an_empty_prompt_has_nothing(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert space.lookup([]).count == 0


def test_full_chunks_are_found_one_after_the_other(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    match = space.lookup(TOKENS)
    assert (match.count, match.border, match.exact, len(match.steps)) == (48, 48, True, 3)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_no_more_is_found_than_the_prompt_has(space, length):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    assert space.lookup(TOKENS[:length]).count == length // 16 * 16


@pytest.mark.parametrize(
    ("length", "found"), [(5, 0), (6, 6), (9, 6), (10, 10), (13, 10), (14, 14), (16, 14), (99, 14)]
)
def test_the_longest_exact_tail_is_found(space, length, found):
    space.publish(TOKENS, spans(TOKENS, 0, 6, 10, 14))
    assert space.lookup(TOKENS[:length]).count == found


def test_a_tail_of_another_prompt_is_not_found(space):
    space.publish(TOKENS, spans(TOKENS, 0, 6))
    space.publish(differ_at(TOKENS, 5), spans(differ_at(TOKENS, 5), 0, 14))
    assert space.lookup(TOKENS).count == 6


def test_a_tail_after_other_tokens_is_not_found(space):
    other = differ_at(TOKENS, 0)[:16] + TOKENS[16:]
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    space.publish(other, spans(other, 0, 16))
    assert space.lookup(other).count == 16


def test_a_chunk_after_a_hole_is_not_found(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    second = space.lookup(TOKENS).steps[1]
    second.path.unlink()
    assert space.lookup(TOKENS).count == 16


@pytest.mark.parametrize("shared", [64, 65, 100, 255, 256, 300, 511])
def test_tokens_shared_with_a_chunk_that_goes_on_differently_are_found_to_the_token(wide, shared):
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 512))
    match = wide.lookup(differ_at(tokens, shared))
    assert (match.count, match.exact, match.border) == (shared, False, 0)


def test_an_overlap_below_the_first_rung_is_not_worth_it(wide):
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 512))
    assert wide.lookup(differ_at(tokens, 63)).count == 0


def test_a_prompt_that_ends_inside_a_chunk_finds_all_of_itself(wide):
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 512))
    assert wide.lookup(tokens[:200]).count == 200


def test_an_overlap_is_found_inside_a_later_chunk(wide):
    tokens = prompt(1024)
    wide.publish(tokens, spans(tokens, 0, 512, 1024))
    match = wide.lookup(differ_at(tokens, 512 + 77))
    assert (match.count, len(match.steps)) == (512 + 77, 2)


def test_the_border_is_the_last_end_of_a_block_inside_the_overlap(wide):
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 80, 200, 512))
    assert wide.lookup(differ_at(tokens, 199)).border == 80
    assert wide.lookup(differ_at(tokens, 200)).border == 200
    assert wide.lookup(differ_at(tokens, 201)).border == 200


def test_the_best_of_several_overlaps_is_found(wide):
    tokens = prompt(512)
    for shared in (70, 300, 150, 90):
        other = differ_at(tokens, shared, seed=shared)
        wide.publish(other, spans(other, 0, 512))
    assert wide.lookup(tokens).count == 300


def test_a_damaged_child_is_passed_over_for_the_next_best(wide):
    tokens = prompt(512)
    for shared in (100, 300):
        other = differ_at(tokens, shared, seed=shared)
        wide.publish(other, spans(other, 0, 512))
    wide.lookup(tokens).steps[-1].path.write_bytes(b"damaged")
    assert wide.lookup(tokens).count == 100


@pytest.mark.parametrize("end", [63, 64, 255, 256, 1023, 1024, 2047])
def test_a_tail_of_any_length_is_resumed_at_its_state(tmp_path, end):
    """However many rungs its name has: where a model has recurrent state, an overlap with it is of no use."""
    space = open_store(tmp_path / "cache", interval=2048).namespace(INFO)
    tokens = prompt(2047)
    space.publish(tokens, [Span(0, end, (), [])])
    space.publish_state(tokens[:end], state())
    for length in (end, 2047):
        assert space.lookup(tokens[:length], trimmable=False).count == end


@pytest.mark.parametrize("seed", range(30))
def test_of_any_children_the_best_is_found(wide, seed):
    """Against every child compared token by token, where there are no more than a lookup opens."""
    rng = random.Random(seed)
    tokens = prompt(512, seed)[: rng.choice([40, 63, 64, 130, 255, 256, 300, 511, 512])]
    children = []
    for number in range(rng.randrange(1, 8)):
        base = rng.choice([tokens, *children])
        shared = rng.randrange(len(base) + 1)
        child = [*base[:shared], *prompt(512, 1000 * seed + number)][: rng.choice([20, 64, 100, 256, 400, 512])]
        wide.publish(child, spans(child, 0, len(child)))
        children.append(child)
    exact = max((len(child) for child in children if child == tokens[: len(child)]), default=0)
    overlaps = [common_tokens(pack_tokens(child), pack_tokens(tokens)) for child in children]
    overlap = max((count for count in overlaps if count >= 64), default=0)
    match = wide.lookup(tokens)
    assert match.count == max(exact, overlap)
    assert match.exact == (exact >= overlap or overlap in map(len, children) or not match.count)


def test_names_of_a_thousand_children_are_not_taken_apart(wide, monkeypatch):
    """As many conversations may part within one chunk; a lookup had taken 5 ms for their names."""
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 300))
    [step] = wide.lookup(tokens).steps
    own = step.name
    for number in range(1000):
        other = replace(own, key=f"{number:032x}", rungs=f"{number + 1:06x}{own.rungs[6:]}", count=1 + number % 512)
        step.path.with_name(other.file("kv")).touch()
    parsed = []
    parse = NodeName.parse
    monkeypatch.setattr(NodeName, "parse", staticmethod(lambda name: parsed.append(name) or parse(name)))
    assert wide.lookup(differ_at(tokens, 200)).count == 200
    assert len(parsed) < 20


def test_an_exact_tail_wins_over_an_equal_overlap(wide):
    """What follows can be published onto it without writing the tail again."""
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 512))
    wide.publish(tokens, spans(tokens, 0, 100))
    match = wide.lookup(differ_at(tokens, 100))
    assert (match.count, match.exact, match.border) == (100, True, 100)


def test_an_overlap_longer_than_the_exact_tail_wins(wide):
    tokens = prompt(512)
    wide.publish(tokens, spans(tokens, 0, 512))
    wide.publish(tokens, spans(tokens, 0, 100))
    match = wide.lookup(differ_at(tokens, 101))
    assert (match.count, match.exact) == (101, False)


@dataclass(frozen=True)
class Watching(FileSystem):
    """Remembers which files were opened for reading."""

    opened: list[str] = field(default_factory=list)

    def open_fd(self, path):
        self.opened.append(str(path))
        return super().open_fd(path)


def test_a_lookup_opens_at_most_eight_candidates_and_no_block(tmp_path):
    fs = Watching()
    space = open_store(tmp_path / "cache", interval=128, fs=fs).namespace(INFO)
    tokens = prompt(128)
    for seed in range(1, 21):
        other = differ_at(tokens, 64 + seed, seed)
        space.publish(other, spans(other, 0, 128))
    fs.opened.clear()
    assert space.lookup(tokens).count >= 64
    assert len(fs.opened) == 8
    assert all(path.endswith(".kv") for path in fs.opened)


def test_a_lookup_of_full_chunks_lists_and_opens_nothing(tmp_path, monkeypatch):
    fs = Watching()
    space = open_store(tmp_path / "cache", fs=fs).namespace(INFO)
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    fs.opened.clear()
    listed = []
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or [])
    assert space.lookup(TOKENS[:48]).count == 48
    assert (fs.opened, listed) == ([], [])


@dataclass(frozen=True)
class Asked(FileSystem):
    """Remembers what was asked through the seam, in order: the call and the name."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    def stat(self, path):
        self.calls.append(("stat", str(path)))
        return super().stat(path)

    def list_dir(self, path):
        self.calls.append(("list", str(path)))
        return super().list_dir(path)

    def open_fd(self, path):
        self.calls.append(("open", str(path)))
        return super().open_fd(path)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """64 chunks of a prompt among other content: other prompts beside its first chunk, tails behind its last."""
    root = tmp_path_factory.mktemp("deep") / "cache"
    tokens = prompt(65 * 16)
    with open_store(root) as store:
        space = store.namespace(INFO)
        space.publish(tokens, spans(tokens, *range(0, 65 * 16, 16)))
        for seed in range(1, 30):
            space.publish(prompt(16, seed), spans(prompt(16, seed), 0, 16))
            other = differ_at(tokens[: 64 * 16 + 10], 64 * 16, seed)
            space.publish(other, [span(other, 64 * 16, 64 * 16 + 10)])
        store.namespace(NamespaceInfo({"model": "another"})).publish(tokens, spans(tokens, 0, 16))
    return root, tokens


@pytest.mark.parametrize(
    ("length", "stats", "listings"),
    [(64 * 16, 64, 0), (64 * 16 + 5, 64, 1), (65 * 16, 65, 1), (10 * 16, 10, 0)],
    ids=["whole chunks", "a rest", "a chunk that is not there", "a part of what is there"],
)
def test_a_lookup_is_one_stat_a_chunk_and_at_most_one_listing(deep, monkeypatch, length, stats, listings):
    """Whatever else the store holds. Listed is the one folder that the children of the last chunk lie in."""
    root, tokens = deep
    fs = Asked()
    with open_store(root, None, fs) as store:
        space = store.namespace(INFO)
        fs.calls.clear()
        past_the_seam: list[str] = []
        for name in ("stat", "lstat", "listdir", "scandir", "open"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, _n=name, _r=real, **k: past_the_seam.append(_n) or _r(*a, **k))
        match = space.lookup(tokens[:length])
        monkeypatch.undo()
    assert match.count == min(length, 64 * 16)
    assert [call for call, _ in fs.calls] == ["stat"] * stats + ["list"] * listings
    assert len(past_the_seam) == len(fs.calls)
    assert len({path for _, path in fs.calls}) == stats + listings
    if listings:
        last = match.steps[-1].name.key
        assert fs.calls[-1][1] == str(root / "objects" / "nodes" / INFO.id / last[:2])


def test_a_lookup_of_another_prompt_is_one_stat_and_one_listing(deep):
    root, _ = deep
    fs = Asked()
    with open_store(root, None, fs) as store:
        space = store.namespace(INFO)
        fs.calls.clear()
        assert space.lookup(prompt(64 * 16, 99)).count == 0
    assert [call for call, _ in fs.calls] == ["stat", "list"]


def test_a_lookup_changes_nothing(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    before = {path: path.lstat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    assert space.lookup(TOKENS).count == 20
    assert {path: path.lstat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == before


@pytest.mark.parametrize("make", [list, tuple, iter, pack_tokens, np.array, lambda t: array("I", t)])
def test_a_prompt_may_be_any_kind_of_sequence(space, make):
    space.publish(make(TOKENS[:20]), spans(TOKENS, 0, 16, 20))
    assert space.lookup(make(TOKENS[:30])).count == 20


def test_an_impossible_token_is_an_error_of_the_caller(space):
    for bad in ([-200], [2**32], [0.5]):
        with pytest.raises(TokenError):
            space.lookup([*TOKENS[:16], *bad])


@pytest.mark.parametrize(
    "info",
    [
        NamespaceInfo({"model": "test", "dtype": "f16"}),
        NamespaceInfo(INFO.description, salt=b"tenant"),
    ],
    ids=["description", "salt"],
)
def test_another_namespace_sees_nothing(store, space, info):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    assert store.namespace(info).lookup(TOKENS).count == 0


def test_the_label_does_not_separate(store, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    assert store.namespace(NamespaceInfo(INFO.description, label="renamed")).lookup(TOKENS).count == 16


def test_foreign_files_beside_manifests_are_ignored(space):
    space.publish(TOKENS, spans(TOKENS, 0, 10))
    manifest = space.lookup(TOKENS).steps[0].path
    for name in (".DS_Store", f"._{manifest.name}", f".{manifest.name}.x8Sd3f", f"{manifest.stem} (1).kv", "notes.txt"):
        (manifest.parent / name).write_bytes(b"\0" * 200)
    longer = manifest.name.replace("-10-", "-12-")
    (manifest.parent / longer).with_suffix(".state").write_bytes(b"")
    assert restore(space, TOKENS).tokens == 10


def test_children_of_another_parent_in_the_same_folder_are_ignored(tmp_path, space):
    """The folder is named by two digits of the parent only."""
    space.publish(TOKENS, spans(TOKENS, 0, 6))
    root = root_of(INFO.fingerprint, 16)
    cousin = Forged(
        INFO.fingerprint, root[:1] + bytes(31), pack(TOKENS[:10]), (Ref(b"\1" * 16, 100, 0, 10, 64),)
    ).install(tmp_path / "cache")
    assert cousin.parent == space.lookup(TOKENS).steps[0].path.parent
    assert space.lookup(TOKENS).count == 6


def test_a_shorter_tail_is_found_when_the_longest_was_damaged(space):
    space.publish(TOKENS, spans(TOKENS, 0, 6))
    space.publish(TOKENS, spans(TOKENS, 0, 10))
    space.lookup(TOKENS).steps[0].path.write_bytes(b"damaged")
    assert restore(space, TOKENS).tokens == 0
    assert restore(space, TOKENS).tokens == 6


def test_a_vanished_directory_is_a_miss(tmp_path, space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))
    shutil.rmtree(tmp_path / "cache")
    assert space.lookup(TOKENS).count == 0


def test_a_folder_that_cannot_be_listed_is_a_shorter_match(space, monkeypatch):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 20))

    def listdir(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert space.lookup(TOKENS).count == 16


def test_lookups_and_hits_are_counted(store, space):
    space.lookup(TOKENS)
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    space.lookup(TOKENS)
    space.lookup(TOKENS[:3])
    counted = store.counters.snapshot()
    assert (counted["lookups"], counted["hits"]) == (3, 1)


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1], [2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3, 4], [1, 2, 9, 4], 2),
        # Equal in three of four bytes, and equal again after: neither is a common token.
        ([0x01020304, 7], [0x01020305, 7], 0),
        ([5, 0x01020304], [5, 0x11020304], 1),
    ],
)
def test_common_tokens_are_counted_exactly(a, b, count):
    assert common_tokens(pack(a), pack(b)) == count


def test_common_tokens_are_exact_at_every_length():
    tokens = prompt(70)
    for at in range(70):
        assert common_tokens(pack(tokens), pack([*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]])) == at


def test_a_directory_of_two_unions_holds_the_prefixes_of_both(tmp_path):
    prompts = {"a": prompt(40, 1), "b": prompt(40, 2)}
    shared = prompt(20, 3)
    for name, tokens in prompts.items():
        space = open_store(tmp_path / name).namespace(INFO)
        space.publish(tokens, spans(tokens, 0, 16, 32, 40))
        space.publish(shared, [span(shared, 0, 16), span(shared, 16, 20)])
    shutil.copytree(tmp_path / "a", tmp_path / "both")
    shutil.copytree(tmp_path / "b", tmp_path / "both", dirs_exist_ok=True)
    both = open_store(tmp_path / "both").namespace(INFO)
    assert [restore(both, tokens).tokens for tokens in (*prompts.values(), shared)] == [40, 40, 20]
    assert len(node_files(tmp_path / "both")) == 3 + 3 + 2
    assert len(block_files(tmp_path / "both")) == 3 + 3 + 2
