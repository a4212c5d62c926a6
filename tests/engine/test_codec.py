"""MLX memory as spans and back: what limits.md calls hazards, each with a test."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from kvstore.blocks import TensorSpec
from kvstore_mlx.buffers import address_phase, copy_rows, empty, has_non_finite, spec_of
from kvstore_mlx.codec import Restoring, batch_rows, sequence_rows, unsupported

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def tokens_array(batch: int, heads: int, tokens: int, dim: int, dtype) -> mx.array:
    """Row values that name their batch index, head and token (small enough for bfloat16 to hold exactly)."""
    grid = np.arange(batch)[:, None, None] * 64 + np.arange(heads)[None, :, None] * 32 + np.arange(tokens)[None, None]
    array = mx.array(np.repeat(grid[..., None], dim, -1).astype(np.float32)).astype(dtype)
    mx.eval(array)
    return array


def values(data: np.ndarray, dtype) -> np.ndarray:
    """Copied bytes [heads, rows, row bytes] as floats [heads, rows, dim]."""
    array = mx.array(data.reshape(-1)).view(dtype).astype(mx.float32)
    return np.array(array).reshape(*data.shape[:2], -1)


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


def test_a_copy_does_not_change_with_the_engine():
    cache = KVCache()
    cache.update_and_fetch(tokens_array(1, 2, 8, 4, mx.float32), tokens_array(1, 2, 8, 4, mx.float32))
    copied = sequence_rows([cache], 8).copy(0, 8)
    before = [part.copy() for part in copied]
    for _ in range(300):
        cache.update_and_fetch(mx.full((1, 2, 1, 4), 9.0), mx.full((1, 2, 1, 4), 9.0))
        mx.eval(cache.keys, cache.values)
    assert all((part == kept).all() for part, kept in zip(copied, before, strict=True))


def test_saving_does_not_make_the_next_update_copy_the_cache():
    """Holding any view of the cache would; the buffer must stay the engine's alone."""
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 200, 4)), mx.zeros((1, 2, 200, 4)))
    mx.eval(cache.keys, cache.values)
    address = np.frombuffer(memoryview(cache.keys).cast("B"), np.uint8).ctypes.data
    sequence_rows([cache], 200).copy(0, 200)
    cache.update_and_fetch(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 4)))
    mx.eval(cache.keys, cache.values)
    assert np.frombuffer(memoryview(cache.keys).cast("B"), np.uint8).ctypes.data == address


def test_padding_of_a_batch_is_left_out():
    short, long = KVCache(), KVCache()
    short.update_and_fetch(tokens_array(1, 2, 5, 4, mx.float32), tokens_array(1, 2, 5, 4, mx.float32))
    long.update_and_fetch(tokens_array(1, 2, 11, 4, mx.float32) + 500, tokens_array(1, 2, 11, 4, mx.float32))
    batch = BatchKVCache.merge([short, long])
    keys, _ = batch_rows([batch], 0, 5).copy(0, 5)
    assert values(keys, mx.float32)[0, :, 0].tolist() == [0, 1, 2, 3, 4]
    keys, _ = batch_rows([batch], 1, 11).copy(9, 11)
    assert values(keys, mx.float32)[0, :, 0].tolist() == [509, 510]


def test_layers_that_disagree_are_refused():
    a, b = KVCache(), KVCache()
    for cache, tokens in ((a, 8), (b, 7)):
        cache.update_and_fetch(mx.zeros((1, 2, tokens, 4)), mx.zeros((1, 2, tokens, 4)))
    with pytest.raises(ValueError, match=r"layers hold \[7, 8\] tokens where 8 were computed"):
        sequence_rows([a, b], 8)
    assert sequence_rows([a, b], None).count == 7
    with pytest.raises(ValueError, match="tokens where 9 were computed"):
        batch_rows([BatchKVCache.merge([a])], 0, 9)
    with pytest.raises(ValueError, match="no codec for RotatingKVCache"):
        sequence_rows([RotatingKVCache(8)], None)


def test_classes_without_codec_are_named():
    assert unsupported([KVCache(), RotatingKVCache(4), KVCache()]) == "RotatingKVCache"
    assert unsupported([KVCache()]) is None


def test_a_restore_lands_in_the_engine_s_own_layout():
    restoring = Restoring(layers=2, room=300)
    specs = tuple(TensorSpec(f"{layer}.{part}", "BF16", 2, (4,)) for layer in range(2) for part in ("keys", "values"))
    buffers = restoring.allocate(specs, 40)
    assert {buffer.capacity for buffer in buffers.values()} == {512}
    for number, spec in enumerate(specs):
        for head, run in enumerate(buffers[spec.name].runs(spec, 0, 40)):
            run[:] = np.full((40, 4), number * 2 + head, np.float32).view(np.uint16)[:, 1::2].tobytes()
    caches = restoring.caches(40)
    assert [cache.offset for cache in caches] == [40, 40]
    keys, _ = caches[1].keys_and_values()
    assert keys.shape == (1, 2, 40, 4)
    assert np.unique(np.array(keys[0, 1].astype(mx.float32))).tolist() == [5.0]
    # There is room: the next update does not move the buffer.
    address = np.frombuffer(memoryview(caches[0].keys).cast("B"), np.uint8).ctypes.data
    caches[0].update_and_fetch(mx.zeros((1, 2, 1, 4), mx.bfloat16), mx.zeros((1, 2, 1, 4), mx.bfloat16))
    mx.eval(caches[0].keys)
    assert np.frombuffer(memoryview(caches[0].keys).cast("B"), np.uint8).ctypes.data == address


def test_blocks_of_another_model_are_refused():
    with pytest.raises(ValueError, match="blocks hold 2 tensors, the model has 4"):
        Restoring(2, 0).allocate((TensorSpec("0.keys", "F32", 1, (4,)), TensorSpec("0.values", "F32", 1, (4,))), 4)


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


def test_what_a_block_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="cannot be cut by token"):
        spec_of("x", mx.zeros((1, 2, 3, 0)))
    with pytest.raises(ValueError, match="cannot be cut by token"):
        spec_of("x", mx.zeros((2, 3)))
    assert spec_of("x", mx.zeros((1, 2, 3, 4), mx.bfloat16)) == TensorSpec("x", "BF16", 2, (4,))


def test_the_phase_is_an_address_within_a_cache_line():
    assert 0 <= address_phase() < 64
