"""What an engine refuses of a block that is whole: its own error, and what nobody takes is in nobody's way.

Found by review: an engine's OSError for a state was taken for one of the file's, and the whole state for damaged; and a
prompt whose first block an engine refuses was read whole at each request, and could never be saved again.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest
from core_support import SPECS, Memory, block_files, kv, prompt, restore, spans

from kvstore import Span, State, StateTensor, TensorBuffer, TensorSpec
from kvstore.errors import DamagedBlockError

TOKENS = prompt(40)
OTHERS = (TensorSpec("0.keys", "F32", 2, (4,)),)
STATE = State((StateTensor("conv", "F32", (4,)),), [bytes(range(16))], {"n": 7})

ERRORS = [
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(errno.EINVAL, "Invalid argument"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    EOFError("the engine's own"),
    DamagedBlockError("the engine's own"),
    MemoryError(),
    KeyError("conv"),
]


def refusing(specs, tokens):
    if specs != SPECS:
        raise ValueError("not those of this model")
    return Memory()(specs, tokens)


def publish_others(space, end: int) -> None:
    data = [bytes(OTHERS[0].span_bytes(end))]
    space.publish(TOKENS, [Span(0, end, OTHERS, data)])


def raising(error):
    def allocate(*_):
        raise error

    return allocate


def test_a_prompt_of_other_tensors_is_refused_once_and_saved_again(tmp_path, store, space):
    publish_others(space, 16)
    (wrong,) = block_files(tmp_path / "cache")
    with pytest.raises(ValueError, match="not those of this model"):
        space.read(space.lookup(TOKENS), refusing)
    assert space.lookup(TOKENS).count == 0
    assert (store.counters.damaged, store.counters.missing) == (0, 0)
    assert space.publish(TOKENS, spans(TOKENS, 0, 16, 32)).nodes == 2
    assert restore(space, TOKENS).tokens == 32
    assert wrong in block_files(tmp_path / "cache"), "it is whole, and may be somebody's"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_engine_that_fails_otherwise_refuses_nothing(store, space, error):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    with pytest.raises(type(error)) as found:
        space.read(space.lookup(TOKENS), raising(error))
    assert found.value is error
    assert not store.context.damaged
    assert restore(space, TOKENS).tokens == 32
    assert (store.counters.damaged, store.counters.missing) == (0, 0)


def test_memory_that_does_not_fit_refuses_nothing(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16))

    def allocate(specs, _count):
        return {spec.name: TensorBuffer(memoryview(bytearray(spec.span_bytes(8))), 8) for spec in specs}

    with pytest.raises(ValueError, match="does not fit 16 tokens"):
        space.read(space.lookup(TOKENS), allocate)
    assert restore(space, TOKENS).tokens == 16


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_an_engine_raises_for_a_state_is_its_own(store, space, error):
    space.publish(TOKENS, [Span(0, 16, SPECS, kv(TOKENS, 0, 16))])
    space.publish_state(TOKENS[:16], STATE)
    with pytest.raises(type(error)) as found:
        space.read_state(space.lookup(TOKENS, trimmable=False), raising(error))
    assert found.value is error
    assert not store.context.damaged
    assert (store.counters.damaged, store.counters.missing) == (0, 0)
    memory = {"conv": memoryview(bytearray(16))}
    assert space.read_state(space.lookup(TOKENS, trimmable=False), lambda _: memory) == STATE.values
    assert bytes(memory["conv"]) == bytes(range(16))


def test_memory_of_another_order_of_bytes_is_no_memory_for_a_state(space):
    space.publish(TOKENS, [Span(0, 16, SPECS, kv(TOKENS, 0, 16))])
    space.publish_state(TOKENS[:16], STATE)
    match = space.lookup(TOKENS, trimmable=False)
    with pytest.raises(ValueError, match="no plain numbers"):
        space.read_state(match, lambda _: {"conv": memoryview(np.zeros(4, ">f4"))})
    with pytest.raises(ValueError, match="does not fit"):
        space.read_state(match, lambda _: {"conv": memoryview(bytearray(8))})
    assert space.lookup(TOKENS, trimmable=False).count == 16


def test_a_refused_state_is_passed_by_and_replaced(space):
    space.publish(TOKENS, [Span(0, 16, SPECS, kv(TOKENS, 0, 16))])
    space.publish_state(TOKENS[:16], State((StateTensor("other", "F32", (4,)),), [bytes(16)]))
    match = space.lookup(TOKENS, trimmable=False)
    with pytest.raises(ValueError, match="no state of this model"):
        space.read_state(match, raising(ValueError("no state of this model")))
    assert space.lookup(TOKENS, trimmable=False).count == 0
    assert restore(space, TOKENS).tokens == 16
    assert space.publish_state(TOKENS[:16], STATE).nodes == 1
    memory = {"conv": memoryview(bytearray(16))}
    assert space.read_state(space.lookup(TOKENS, trimmable=False), lambda _: memory) == STATE.values
