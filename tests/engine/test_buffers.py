"""Rows out of MLX memory and back into it; what that memory does behind one's back is in test_hazards.py."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cache_support import attention_plan
from mlx_lm.models.cache import KVCache

from kvstore.blocks import TensorSpec
from kvstore_mlx.buffers import address_phase, copy_rows, copy_whole, empty, has_non_finite
from kvstore_mlx.live import Live
from kvstore_mlx.plan import _part as part_of
from kvstore_mlx.restoring import Restoring

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def tokens_array(batch: int, heads: int, tokens: int, dim: int, dtype) -> mx.array:
    """Row values that name their batch index, head and token (small enough for bfloat16 to hold exactly)."""
    grid = np.arange(batch)[:, None, None] * 64 + np.arange(heads)[None, :, None] * 32 + np.arange(tokens)[None, None]
    array = mx.array(np.repeat(grid[..., None], dim, -1).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def values(data, dtype) -> np.ndarray:
    """Copied bytes [heads, rows, row bytes] as floats [heads, rows, dim]."""
    array = mx.array(data.reshape(-1)).view(dtype).astype(mx.float32)
    return np.array(array).reshape(*data.shape[:2], -1)


def address(array) -> int:
    return int(np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copied_from_the_right_place(dtype):
    array = tokens_array(2, 2, 24, 4, dtype)
    got = values(copy_rows(array, 1, 5, 9), dtype)
    assert got.shape == (2, 4, 4)
    assert got[0, :, 0].tolist() == [69, 70, 71, 72]
    assert got[1, :, 3].tolist() == [101, 102, 103, 104]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_strided_view_are_its_own(dtype):
    """A memoryview of a non-contiguous slice covers its neighbours' memory; the copy must not."""
    whole = tokens_array(2, 2, 24, 4, dtype)
    view = whole[..., 3:20, :]
    mx.eval(view)
    assert not memoryview(view).c_contiguous
    assert values(copy_rows(view, 0, 0, 2), dtype)[:, :, 0].tolist() == [[3, 4], [35, 36]]
    assert bytes(copy_whole(view)) == bytes(copy_whole(mx.contiguous(view)))


def live(caches: list, tokens: int | None) -> Live:
    return Live(attention_plan(lambda: [KVCache() for _ in caches]), caches, None, tokens)


def test_a_copy_does_not_change_with_the_engine():
    cache = KVCache()
    cache.update_and_fetch(tokens_array(1, 2, 8, 32, mx.float32), tokens_array(1, 2, 8, 32, mx.float32))
    copied = live([cache], 8).rows.copy(0, 8)
    before = [bytes(part) for part in copied]
    for _ in range(300):
        cache.update_and_fetch(mx.full((1, 2, 1, 32), 9.0), mx.full((1, 2, 1, 32), 9.0))
        mx.eval(cache.keys, cache.values)
    assert [bytes(part) for part in copied] == before


def test_saving_does_not_make_the_next_update_copy_the_cache():
    """Holding any view of the cache would; the buffer must stay the engine's alone."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 200, 32)), mx.zeros((1, 2, 200, 32)))
    mx.eval(cache.keys, cache.values)
    where = address(cache.keys)
    live([cache], 200).rows.copy(0, 200)
    cache.update_and_fetch(mx.ones((1, 2, 1, 32)), mx.ones((1, 2, 1, 32)))
    mx.eval(cache.keys, cache.values)
    assert address(cache.keys) == where


def test_a_restore_lands_in_the_engine_s_own_layout():
    def make():
        return [KVCache(), KVCache()]

    filled = make()
    for cache in filled:
        cache.update_and_fetch(mx.zeros((1, 2, 3, 4), mx.bfloat16), mx.zeros((1, 2, 3, 4), mx.bfloat16))
    from kvstore_mlx.plan import Plan

    plan = Plan.of(make, filled)
    restoring = Restoring(plan, room=300)
    specs = tuple(TensorSpec(f"{layer}.{part}", "BF16", 2, (4,)) for layer in range(2) for part in ("keys", "values"))
    assert plan.specs == specs
    buffers = restoring.allocate(specs, 40)
    assert {buffer.capacity for buffer in buffers.values()} == {512}
    for number, spec in enumerate(specs):
        for head, run in enumerate(buffers[spec.name].runs(spec, 0, 40)):
            run[:] = np.full((40, 4), number * 2 + head, np.float32).view(np.uint16)[:, 1::2].tobytes()
    caches, logits, _ = restoring.caches(40, None)
    assert logits is None
    assert [cache.offset for cache in caches] == [40, 40]
    keys, _ = caches[1].keys_and_values()
    assert keys.shape == (1, 2, 40, 4)
    assert np.unique(np.array(keys[0, 1].astype(mx.float32))).tolist() == [5.0]
    # There is room: the next update does not move the buffer.
    del keys, restoring, buffers, run
    where = address(caches[0].keys)
    caches[0].update_and_fetch(mx.zeros((1, 2, 1, 4), mx.bfloat16), mx.zeros((1, 2, 1, 4), mx.bfloat16))
    mx.eval(caches[0].keys)
    assert address(caches[0].keys) == where


def test_blocks_of_another_model_are_refused():
    plan = attention_plan(lambda: [KVCache(), KVCache()])
    with pytest.raises(ValueError, match="blocks hold 2 tensors that are not those of this model"):
        Restoring(plan, 0).allocate((TensorSpec("0.keys", "F32", 1, (4,)), TensorSpec("0.values", "F32", 1, (4,))), 4)
    # As many, and of other dtypes or shapes.
    for changed in (TensorSpec("0.keys", "F16", 2, (32,)), TensorSpec("0.keys", "F32", 2, (16,))):
        with pytest.raises(ValueError, match="not those of this model"):
            Restoring(plan, 0).allocate((changed, *plan.specs[1:]), 4)


def test_empty_arrays_are_writable_memory():
    (array,) = empty({"a": ("BF16", (1, 2, 300, 8))}).values()
    view = memoryview(array)
    assert (array.shape, array.dtype, view.readonly, view.c_contiguous) == ((1, 2, 300, 8), mx.bfloat16, False, True)
    view.cast("B")[:] = b"\x80\x3f" * (view.nbytes // 2)
    assert mx.all(array == 1).item()


@pytest.mark.parametrize(("dtype", "name"), list(zip(DTYPES, ["F32", "F16", "BF16"], strict=True)))
def test_nan_and_infinity_are_seen(dtype, name):
    for bad in (float("nan"), float("inf"), float("-inf")):
        array = mx.ones((1, 1, 40, 8), dtype)
        array[0, 0, 17, 3] = bad
        assert has_non_finite(copy_rows(array, 0, 0, 40), name)
        assert not has_non_finite(copy_rows(array, 0, 18, 40), name)
    largest = mx.full((1, 1, 1, 8), float(mx.finfo(dtype).max), dtype)
    assert not has_non_finite(copy_rows(largest, 0, 0, 1), name)


_EXPONENTS = {"F16": (2, 0x7C00), "BF16": (2, 0x7F80), "F32": (4, 0x7F800000), "F64": (8, 0x7FF0 << 48)}


def _words_of(name):
    """Each word of 16 bits; of the longer ones those around every border, and some thousands of any."""
    size, exponent = _EXPONENTS[name]
    if size == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    sign = 1 << 8 * size - 1
    borders = [0, 1, exponent - 1, exponent, exponent + 1, exponent | exponent >> 9, sign - 1]
    any_word = np.random.default_rng(7).integers(0, 1 << 8 * size, 4000, dtype=f"u{size}")
    some = np.array([word | minus for word in borders for minus in (0, sign)], dtype=f"u{size}")
    return np.concatenate([some, any_word, any_word | exponent])


@pytest.mark.parametrize("but_minus", [False, True])
@pytest.mark.parametrize("name", _EXPONENTS)
def test_a_word_is_no_number_when_its_exponent_is_all_ones(name, but_minus):
    """Alone, and beside zeros of both signs and the largest numbers."""
    size, exponent = _EXPONENTS[name]
    sign = 1 << 8 * size - 1
    beside = np.array([0, sign, exponent - 1, exponent - 1 | sign], dtype=f"u{size}")
    assert not has_non_finite(beside.data, name, but_minus=but_minus)
    for word in _words_of(name):
        expected = int(word) & exponent == exponent and not (but_minus and int(word) == exponent | sign)
        assert has_non_finite(word.tobytes(), name, but_minus=but_minus) is expected, hex(word)
        assert has_non_finite(beside.tobytes() + word.tobytes(), name, but_minus=but_minus) is expected, hex(word)


def test_what_a_block_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="cannot be cut by token"):
        part_of("x", mx.zeros((2, 3)))
    with pytest.raises(ValueError, match="cannot be cut by token"):
        part_of("x", mx.zeros((1, 2, 3, 4), mx.complex64))
    assert not part_of("x", mx.zeros((1, 2, 3, 0))).stored
    assert part_of("x", mx.zeros((1, 2, 3, 4), mx.bfloat16)).spec == TensorSpec("x", "BF16", 2, (4,))


def test_the_phase_is_an_address_within_a_page():
    assert 0 <= address_phase() < 4096
