"""Engines that keep nothing per token: their nodes have no blocks, and grow inside a chunk like any other's.

Found by the conformance suite: a tail without blocks could not be continued from the border that a lookup names, and a
span with tensors after one without made a manifest that no reader accepts.
"""

from __future__ import annotations

import os
import time

import pytest
from core_support import INFO, Memory, node_files, open_store, prompt, restore, span, spans
from format_support import Forged

from kvstore import MissingParentError, PublishError, Span
from kvstore.manifest import decode

TOKENS = prompt(64)


def nothing(first: int, end: int) -> Span:
    return Span(first, end - first, (), [])


def emptied(space, *which: int) -> None:
    """Let nodes of the prompt (by number) say that they have no blocks, and be whole otherwise."""
    for step in [space.lookup(TOKENS).steps[number] for number in which]:
        manifest = decode(step.path.read_bytes())
        forged = Forged(manifest.fingerprint, manifest.parent, manifest.tokens, (), manifest.first)
        assert decode(forged.encode()).file_name == step.path.name
        step.path.write_bytes(forged.encode())


def test_a_tail_without_blocks_grows_from_the_border_that_a_lookup_names(space):
    for end in (1, 2, 9, 16, 17, 40):
        first = space.lookup(TOKENS[:end]).border
        ends = [*range((first // 16 + 1) * 16, end, 16), end]
        space.publish(TOKENS, [nothing(*pair) for pair in zip([first, *ends], ends, strict=False)])
        assert space.lookup(TOKENS).count == end


def test_only_where_a_tail_ends(space):
    space.publish(TOKENS, [nothing(0, 5)])
    with pytest.raises(MissingParentError, match="border at token 4"):
        space.publish(TOKENS, [nothing(4, 6)])


@pytest.mark.parametrize("before", [[nothing(0, 5)], []], ids=["in one publish", "in two"])
def test_tensors_do_not_begin_in_the_middle_of_a_chunk(tmp_path, space, before):
    if not before:
        space.publish(TOKENS, [nothing(0, 5)])
    with pytest.raises(PublishError, match="have tensors"):
        space.publish(TOKENS, [*before, span(TOKENS, 5, 16)])
    assert [path.name.split("-")[1] for path in node_files(tmp_path / "cache")] == ["5"]
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    assert restore(space, TOKENS).tokens == 32


@pytest.mark.parametrize("at", [16, 32], ids=["the next chunk", "the last chunk"])
@pytest.mark.parametrize("once", [True, False], ids=["in one publish", "in two"])
def test_a_chunk_without_tensors_does_not_continue_one_that_has_some(space, at, once):
    """A restore would take its tokens for filled as soon as a chunk with tensors followed."""
    before = spans(TOKENS, *range(0, at + 1, 16))
    if not once:
        space.publish(TOKENS, before)
    with pytest.raises(PublishError, match="no tensors, but those before them do"):
        space.publish(TOKENS, [*before * once, nothing(at, at + 16)])
    assert restore(space, TOKENS).tokens == at
    space.publish(TOKENS, [span(TOKENS, at, at + 16)])
    assert restore(space, TOKENS).tokens == at + 16


@pytest.mark.parametrize("once", [True, False], ids=["in one publish", "in two"])
def test_a_chunk_with_tensors_does_not_continue_one_without(space, once):
    before = [nothing(0, 16), nothing(16, 32)]
    if not once:
        space.publish(TOKENS, before)
    with pytest.raises(PublishError, match="have tensors, but those before them have none"):
        space.publish(TOKENS, [*before * once, span(TOKENS, 32, 48)])
    assert space.lookup(TOKENS).count == 32


def test_tensors_take_the_place_of_a_node_that_says_it_has_none(tmp_path, space):
    """Nobody could restore it, and nobody could publish what follows; it is set aside, not lost."""
    space.publish(TOKENS, [nothing(0, 16), nothing(16, 32)])
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    assert restore(space, TOKENS).tokens == 48
    assert len(list((tmp_path / "cache" / "quarantine").iterdir())) == 2
    # The other way round there is more than was asked for.
    assert space.publish(TOKENS, [nothing(0, 16)]).nodes == 0


@pytest.mark.parametrize(
    ("which", "left"),
    [([0], 0), ([0, 1], 0), ([0, 1, 2], 0), ([1], 16), ([1, 2], 16), ([2], 32), ([1, 3], 16), ([0, 2], 0), ([3], 48)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_hole_between_blocks_is_never_restored_over(space, caplog, which, left, threads):
    """However it came there: rows that nobody filled are the one thing that no digest tells."""
    space.publish(TOKENS, spans(TOKENS, *range(0, 65, 16)))
    emptied(space, *which)
    assert restore(space, TOKENS, threads=threads).tokens == left
    assert "has no blocks, unlike others of its prompt" in caplog.text
    # Remembered: the next lookup ends before it, and a publish from there puts it right.
    match = space.lookup(TOKENS)
    assert match.count == match.border == left
    space.publish(TOKENS, spans(TOKENS, *range(left, 65, 16)))
    assert restore(space, TOKENS, threads=threads).tokens == 64


@pytest.mark.parametrize("end", [33, 40, 47, 48, 49])
def test_a_hole_is_none_where_a_prompt_ends_before_it(space, end):
    space.publish(TOKENS, spans(TOKENS, *range(0, 65, 16)))
    emptied(space, 3)
    assert restore(space, TOKENS[:end]).tokens == min(end // 16 * 16, 48)


def test_a_tail_without_blocks_behind_blocks_is_a_hole_too(tmp_path):
    """With rungs, so that a part of it would be matched as well."""
    with open_store(tmp_path / "wide", interval=128) as store:
        space, tokens = store.namespace(INFO), prompt(256)
        space.publish(tokens, spans(tokens, 0, 128, 228))
        (tail,) = (path for path in node_files(store.path) if "-100-" in path.name)
        manifest = decode(tail.read_bytes())
        tail.write_bytes(Forged(manifest.fingerprint, manifest.parent, manifest.tokens, (), 128, 128).encode())
        for asked in (tokens, tokens[:228], tokens[:200]):
            with open_store(tmp_path / "wide", None) as fresh:
                assert restore(fresh.namespace(INFO), asked).tokens == 128


def test_a_use_is_counted_and_noted_like_any_other_s(tmp_path):
    """Its age is all that eviction goes by."""
    with open_store(tmp_path / "wide", interval=128) as store:
        space, tokens = store.namespace(INFO), prompt(256)
        space.publish(tokens, [nothing(0, 128), nothing(128, 228)])
        old = time.time_ns() - 2 * 3600 * 10**9
        paths = node_files(store.path)
        for path in paths:
            os.utime(path, ns=(old, old))
        restored = space.read(space.lookup(tokens[:200]), Memory())
        assert (restored.tokens, restored.size, restored.border) == (200, 0, 128)
        assert store.counters.restored_tokens == 200
        assert [path for path in paths if path.stat().st_mtime_ns == old] == []


def test_a_restore_reads_nothing(space):
    space.publish(TOKENS, [nothing(0, 16), nothing(16, 32), nothing(32, 40)])

    def allocate(_specs, _tokens):
        raise AssertionError("there is nothing to allocate for")

    for asked, found, border in (([*TOKENS, 1], 40, 40), (TOKENS[:32], 32, 32), (TOKENS[:31], 16, 16)):
        restored = space.read(space.lookup(asked), allocate)
        assert (restored.tokens, restored.size, restored.border) == (found, 0, border)
