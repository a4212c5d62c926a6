"""Engines that keep nothing per token: their nodes have no blocks, and grow inside a chunk like any other's.

Found by the conformance suite: a tail without blocks could not be continued from the border that a lookup names, and a
span with tensors after one without made a manifest that no reader accepts.
"""

from __future__ import annotations

import pytest
from core_support import node_files, prompt, restore, span, spans

from kvstore import MissingParentError, PublishError, Span

TOKENS = prompt(40)


def nothing(first: int, end: int) -> Span:
    return Span(first, end - first, (), [])


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


def test_a_restore_compares_the_tokens_and_reads_nothing(space):
    space.publish(TOKENS, [nothing(0, 16), nothing(16, 32), nothing(32, 40)])

    def allocate(_specs, _tokens):
        raise AssertionError("there is nothing to allocate for")

    for asked, found, border in (([*TOKENS, 1], 40, 40), (TOKENS[:32], 32, 32), (TOKENS[:31], 16, 16)):
        restored = space.read(space.lookup(asked), allocate)
        assert (restored.tokens, restored.size, restored.border) == (found, 0, border)
