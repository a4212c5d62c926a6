"""Callers that want only what a prefill computed get the part before the first decoded block, and no state after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_support import INFO, open_store, prompt, restore, span, spans

from kvstore.states import State, StateTensor

TOKENS = prompt(60)


def state(*, decode: bool) -> State:
    return State((StateTensor("x", "U8", (3,)),), [b"abc"], {}, 0, decode)


def decoded(first: int, end: int):
    return replace(span(TOKENS, first, end), decode=True)


@pytest.mark.parametrize(("ends", "found", "border"), [((16, 32, 40), 32, 32), ((16, 20, 32, 40), 20, 20)])
def test_a_prefix_ends_before_the_first_decoded_block(space, ends, found, border):
    """Of the spans that end at these tokens the first ones, up to found, are prefilled."""
    at = 0
    for end in ends:
        space.publish(TOKENS, [span(TOKENS, at, end) if end <= found else decoded(at, end)])
        at = end
    assert space.lookup(TOKENS).count == 40
    match = space.lookup(TOKENS, prefill_only=True)
    assert (match.count, match.border, match.exact) == (found, border, found == 32)
    memory = {}

    def allocate(specs, tokens):
        from kvstore.blocks import TensorBuffer

        memory.update(
            {each.name: TensorBuffer(memoryview(bytearray(each.span_bytes(tokens))), tokens) for each in specs}
        )
        return memory

    assert space.read(match, allocate).tokens == found


@pytest.mark.parametrize(("shared", "found", "beyond"), [(90, 90, 10), (110, 100, 0)])
def test_what_is_read_beyond_a_prefilled_part(tmp_path, shared, found, beyond):
    space = open_store(tmp_path / "cache", interval=128).namespace(INFO)
    tokens = prompt(128)
    space.publish(tokens, [span(tokens, 0, 100), replace(span(tokens, 100, 128), decode=True)])
    match = space.lookup([*tokens[:shared], *prompt(50, 9)], prefill_only=True)
    assert (match.count, match.beyond) == (found, beyond)


def test_what_was_prefilled_after_a_decoded_block_is_left_out_too(space):
    space.publish(TOKENS, [span(TOKENS, 0, 16), decoded(16, 32), *spans(TOKENS, 32, 48)])
    assert space.lookup(TOKENS, prefill_only=True).count == 16
    assert space.lookup(TOKENS).count == 48


def test_nothing_is_left_of_a_decoded_beginning(space):
    space.publish(TOKENS, [decoded(0, 16)])
    assert space.lookup(TOKENS, prefill_only=True).count == 0
    assert restore(space, TOKENS).tokens == 16


def test_states_say_for_themselves_what_they_are(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    for end, decode in ((16, False), (32, True), (48, True)):
        space.publish_state(TOKENS[:end], state(decode=decode))
    assert space.lookup(TOKENS, trimmable=False).count == 48
    match = space.lookup(TOKENS, trimmable=False, prefill_only=True)
    assert match.count == 16
    memory = bytearray(3)
    assert space.read_state(match, lambda _tensors: {"x": memoryview(memory)}) == {}
    assert memory == b"abc"


def test_a_state_after_decoded_blocks_is_left_out(space):
    space.publish(TOKENS, [*spans(TOKENS, 0, 16), decoded(16, 32)])
    space.publish_state(TOKENS[:32], state(decode=False))
    assert space.lookup(TOKENS, trimmable=False, prefill_only=True).count == 0


def test_a_shorter_tail_that_was_prefilled_counts(space):
    """What was decoded after a prompt lies in a longer tail of the same chunk, which is found first."""
    space.publish(TOKENS[:20], spans(TOKENS, 0, 16, 20))
    space.publish_state(TOKENS[:16], state(decode=False))
    space.publish_state(TOKENS[:20], state(decode=False))
    space.publish(TOKENS[:26], [decoded(20, 26)])
    space.publish_state(TOKENS[:26], state(decode=True))
    assert space.lookup(TOKENS, trimmable=False).count == 26
    assert space.lookup(TOKENS, trimmable=False, prefill_only=True).count == 20


def test_a_shorter_tail_whose_longer_one_has_only_a_decoded_state(space):
    space.publish(TOKENS[:20], spans(TOKENS, 0, 16, 20))
    space.publish_state(TOKENS[:20], state(decode=False))
    space.publish(TOKENS[:26], spans(TOKENS, 20, 26))
    space.publish_state(TOKENS[:26], state(decode=True))
    assert space.lookup(TOKENS, trimmable=False, prefill_only=True).count == 20
