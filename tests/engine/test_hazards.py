"""What MLX's memory does behind one's back (limits.md of the design): each hazard shown, and that we are not in it.

Every test has a control, so that it notices when MLX changes and the hazard, or the protection, is no longer one.
"""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from mlx_lm.models.cache import KVCache

from kvstore import Durability, FileSystem, NamespaceInfo, Span, Store, TensorBuffer, TensorSpec
from kvstore.fs import preadv_full
from kvstore.interpreter import TURN_S
from kvstore_mlx import selfcheck
from kvstore_mlx.buffers import _PIECE, Filling, copy_rows, copy_whole, empty, has_non_finite
from kvstore_mlx.inplace import view_of
from kvstore_mlx.pool import Pool

HEADS, DIM = 2, 8


def grid(tokens: int, heads: int = HEADS, dim: int = DIM) -> np.ndarray:
    """Numbers that name their place."""
    return np.arange(heads * tokens * dim, dtype=np.float32).reshape(1, heads, tokens, dim)


def filled(tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.array(grid(tokens)), mx.array(grid(tokens) + 0.5))
    mx.eval(cache.keys, cache.values)
    return cache


def step(cache: KVCache) -> None:
    """What a decode step does to a cache."""
    cache.update_and_fetch(mx.full((1, HEADS, 1, DIM), -1.0), mx.full((1, HEADS, 1, DIM), -1.0))
    mx.eval(cache.keys, cache.values)


def address(array) -> int:
    return int(np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data)


def lent(array, begin: int, end: int) -> tuple[Pool, memoryview]:
    """A copy in a pool's memory, as the writer gets it."""
    pool = Pool(1 << 20)
    loan = pool.lend(HEADS * (end - begin) * DIM * array.dtype.size)
    part = copy_rows(array, 0, begin, end, loan)
    pool.keep = loan  # Dropped, it would give the memory back.
    return pool, part


@pytest.fixture(params=["in place", "safe"])
def path(request, monkeypatch):
    """Both answers of the self-check."""
    found = selfcheck.Answer(in_place=request.param == "in place", donates=True)
    monkeypatch.setattr("kvstore_mlx.buffers.answer", lambda: found)
    return request.param


class TestViewsThatMakeMLXCopyTheWholeCache:
    def test_the_hazard_is_there(self):
        cache = filled(200)
        before = address(cache.keys)
        view = cache.keys[..., :100, :]
        mx.eval(view)
        step(cache)
        assert address(cache.keys) != before
        assert np.array_equal(np.array(view), grid(200)[..., :100, :])

    def test_a_copy_leaves_no_view(self, path):
        cache = filled(200)
        before = address(cache.keys), address(cache.values)
        kept = [copy_rows(cache.keys, 0, 0, 200), lent(cache.values, 0, 200), copy_whole(cache.keys)]
        step(cache)
        assert (address(cache.keys), address(cache.values)) == before
        assert np.array_equal(np.frombuffer(kept[0], np.float32), grid(200).ravel())
        assert np.array_equal(np.frombuffer(kept[1][1], np.float32), grid(200).ravel() + 0.5)

    def test_a_restored_buffer_is_updated_where_it_is(self):
        filling = Filling({"keys": ("F32", (1, HEADS, 256, DIM))})
        filling.memory()["keys"][:] = np.zeros((HEADS, 256, DIM), np.float32).tobytes()
        cache = KVCache()
        cache.keys = filling.arrays()["keys"]
        cache.values = mx.zeros((1, HEADS, 256, DIM))
        cache.offset = 100
        del filling
        before = address(cache.keys)
        step(cache)
        assert address(cache.keys) == before
        assert np.array(cache.keys)[0, :, 100].tolist() == [[-1.0] * DIM] * HEADS


class TestMemoryviewsThatDangle:
    def test_the_hazard_is_there(self):
        """A memoryview pins the object; the object's memory goes when an update cannot be done in place."""
        cache = filled(200)
        was = address(cache.keys)
        look = memoryview(cache.keys).cast("B")
        view = cache.keys[..., :1, :]
        mx.eval(view)
        step(cache)
        assert address(cache.keys) != was
        where = np.frombuffer(look, np.uint8).ctypes.data
        assert where == was, "the memoryview followed the array, so it is no hazard any more"

    def test_a_copy_survives_what_happens_to_the_cache(self, path):
        """An update that moves the cache, its old memory reused by others, and the cache gone."""
        cache = filled(200)
        plain = copy_rows(cache.keys, 0, 10, 190)
        pool, part = lent(cache.keys, 10, 190)
        view = cache.keys[..., :1, :]
        mx.eval(view)
        step(cache)
        del view
        for number in range(20):
            mx.eval(mx.full(cache.keys.shape, float(number)))
        del cache
        mx.clear_cache()
        expected = grid(200)[:, :, 10:190].ravel()
        assert np.array_equal(np.frombuffer(plain, np.float32), expected)
        assert np.array_equal(np.frombuffer(part, np.float32), expected)
        assert pool.lent

    def test_no_memoryview_of_a_cache_outlives_a_copy(self):
        cache = filled(200)
        gc.disable()
        try:
            counts = [sys.getrefcount(cache.keys)]
            look = memoryview(cache.keys)
            counts.append(sys.getrefcount(cache.keys))
            look.release()
            del look
            kept = [copy_rows(cache.keys, 0, 0, 9), copy_whole(cache.keys), lent(cache.keys, 0, 9)]
            counts.append(sys.getrefcount(cache.keys))
            assert len(kept) == 3
            assert counts[1] > counts[0], "a memoryview holds its array, or this test sees nothing"
            assert counts[2] == counts[0]
        finally:
            gc.enable()

    def test_a_restore_keeps_no_look_at_the_engine_s_memory(self, space):
        space.publish(range(64), [Span(0, 64, (SPEC,), [grid(64).tobytes()])])
        filling = Filling({SPEC.name: ("F32", (1, HEADS, 256, DIM))})

        def allocate(specs, tokens):
            return {name: TensorBuffer(view, 256) for name, view in filling.memory().items()}

        gc.disable()
        try:
            restored = space.read(space.lookup(range(64)), allocate)
            array = filling.arrays()[SPEC.name]
            # The dictionary's, this name's, and the argument's.
            assert sys.getrefcount(array) == 3
        finally:
            gc.enable()
        assert restored.tokens == 64
        assert np.array_equal(np.array(array)[:, :, :64], grid(64))


class TestArraysThatAreNotContiguous:
    def test_the_hazard_is_there(self):
        """preadv into such a view would write over what lies between its rows."""
        array = mx.array(grid(40))
        view = array[..., 5:9, :]
        mx.eval(view)
        look = memoryview(view)
        assert not look.c_contiguous
        assert view_of(view) is None

    @pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.bool_, mx.float64])
    def test_copies_have_the_right_rows(self, path, dtype):
        stream = mx.cpu if dtype == mx.float64 else None
        whole = mx.array(grid(40) % 2 if dtype == mx.bool_ else grid(40) % 100).astype(dtype, stream=stream)
        mx.eval(whole)
        for array in (whole, whole[..., 5:30, :], mx.swapaxes(whole, 1, 2)[:, 3:33]):
            mx.eval(array)
            exact = mx.contiguous(array[:, :, 1:2]).astype(mx.float32, stream=stream)
            wanted = np.array(exact).ravel().tolist()
            heads = array.shape[1]
            pool = Pool(1 << 20)
            loan = pool.lend(heads * DIM * dtype.size)
            for data in (copy_rows(array, 0, 1, 2), copy_rows(array, 0, 1, 2, loan)):
                assert as_floats(bytes(data), dtype) == wanted
            assert (
                as_floats(copy_whole(array).tobytes(), dtype)
                == np.array(mx.contiguous(array).astype(mx.float32, stream=stream)).ravel().tolist()
            )

    def test_a_restore_into_one_is_refused(self, space):
        space.publish(range(64), [Span(0, 64, (SPEC,), [grid(64).tobytes()])])
        whole = mx.zeros((1, HEADS * 2, 64, DIM))
        mx.eval(whole)
        strided = whole[:, ::2]
        mx.eval(strided)

        def allocate(specs, tokens):
            return {SPEC.name: TensorBuffer(memoryview(strided), 64)}

        with pytest.raises(ValueError, match="does not fit"):
            space.read(space.lookup(range(64)), allocate)
        assert not np.array(whole).any()


def as_floats(data: bytes, dtype) -> list[float]:
    if dtype == mx.bfloat16:
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).tolist()
    names = {mx.float32: "f4", mx.float16: "f2", mx.uint8: "u1", mx.bool_: "?", mx.float64: "f8"}
    return np.frombuffer(data, names[dtype]).astype(np.float32).tolist()


SPEC = TensorSpec("0.keys", "F32", HEADS, (DIM,))


@pytest.fixture
def space(tmp_path):
    with Store.open(tmp_path / "cache", interval=2048, fs=FileSystem(durability=Durability.NONE)) as store:
        yield store.namespace(NamespaceInfo({"model": "hazards"}))


class TestConvoysOnTheInterpreterLock:
    """A thread that lets go of the lock for each small call waits 5 ms for it each time, beside a busy one."""

    @pytest.fixture
    def busy(self):
        """Another thread that computes in Python all the time, and how far it is."""
        stop, number = threading.Event(), [0]

        def spin() -> None:
            while not stop.is_set():
                number[0] += 1

        thread = threading.Thread(target=spin, daemon=True)
        thread.start()
        yield number
        stop.set()
        thread.join()

    def test_the_hazard_is_there(self, busy):
        """A hash lets the other thread have the lock; a slice's assignment does not, and so copies are made with it."""
        source, target = bytes(1 << 21), memoryview(bytearray(1 << 16))

        def others_ran(work) -> int:
            ran = 0
            for _ in range(60):
                before = busy[0]
                work()
                ran += busy[0] != before
            return ran

        def copy() -> None:
            target[:] = source[: 1 << 16]

        assert others_ran(lambda: hashlib.sha256(source)) > others_ran(copy)

    def test_a_published_chunk_is_hashed_in_slices_and_short_turns(self, space, monkeypatch):
        """Not a run at a time: small ones of 8 heads of 72 tensors would be 576 calls for a chunk of any size."""
        tokens, heads = 256, 8
        specs = tuple(TensorSpec(f"{number}", "F32", heads, (DIM,)) for number in range(6))
        arrays = [mx.array(grid(tokens, heads)) for _ in specs]
        mx.eval(arrays)
        loan = Pool(1 << 22).lend(sum(spec.span_bytes(tokens) for spec in specs))
        data = [copy_rows(array, 0, 0, tokens, loan) for array in arrays]
        turns = turns_of_updates(monkeypatch)
        space.publish(range(tokens), [Span(0, tokens, specs, data)])
        monkeypatch.undo()
        # The header, each tensor, and once more where a slice ends in one.
        slices = sum(spec.span_bytes(tokens) for spec in specs) // (1 << 20)
        assert 1 < len(turns) <= len(specs) + 1 + slices
        assert max(turns) < 0.001, "nobody decodes beside it, and a turn of another thread would be 5 ms"
        assert space.lookup(range(tokens)).count == tokens

    def test_a_copy_does_not_wait_for_the_lock(self, busy):
        """576 runs of a chunk, small ones: at 5 ms each that would be 2.9 s."""
        arrays = [mx.array(grid(64, 8)) for _ in range(72)]
        mx.eval(arrays)
        taken = []
        for _ in range(3):
            loan = Pool(1 << 24).lend(72 * 8 * 64 * DIM * 4)
            started = time.perf_counter()
            parts = [copy_rows(array, 0, 0, 64, loan) for array in arrays]
            taken.append(time.perf_counter() - started)
            assert all(bytes(part) == grid(64, 8).tobytes() for part in parts)
        assert min(taken) < 1.5

    def test_a_restore_waits_for_short_turns_only(self, space, busy):
        """576 runs again, each hashed by itself into the engine's own layout."""
        tokens, heads = 64, 8
        specs = tuple(TensorSpec(f"{number}", "F32", heads, (DIM,)) for number in range(72))
        space.publish(range(tokens), [Span(0, tokens, specs, [grid(tokens, heads).tobytes()] * len(specs))])
        memory = {spec.name: bytearray(2 * spec.span_bytes(tokens)) for spec in specs}
        during = []

        def allocate(_specs, _tokens):
            return {name: TensorBuffer(memoryview(data), 2 * tokens) for name, data in memory.items()}

        def watched(*args):
            during.append(sys.getswitchinterval())
            return preadv_full(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore.scatter.preadv_full", watched)
            assert space.read(space.lookup(range(tokens)), allocate).tokens == tokens
        assert during
        assert max(during) == pytest.approx(TURN_S)
        assert busy[0]


def turns_of_updates(monkeypatch) -> list[float]:
    """The interpreter's turn, in seconds, at each update of the hash of a block that is written from here on."""
    turns: list[float] = []

    class Counting:
        def __init__(self, *data) -> None:
            self._state = xxhash.xxh3_128(*data)

        def update(self, data) -> None:
            turns.append(sys.getswitchinterval())
            self._state.update(data)

        def digest(self) -> bytes:
            return self._state.digest()

    monkeypatch.setattr("kvstore.staged.xxh3_128", Counting)
    return turns


@pytest.mark.parametrize(("dtype", "bad"), [("F32", 0x7F800000), ("F16", 0x7C01), ("BF16", 0xFF80)])
def test_a_number_that_is_none_is_found_wherever_it_is(dtype, bad):
    """In whichever of the pieces that the data are looked at in, the last and short one too."""
    words = np.zeros(_PIECE * 2 + 5, np.uint32 if dtype == "F32" else np.uint16)
    assert not has_non_finite(words.data, dtype)
    assert not has_non_finite(b"", dtype)
    for at in (0, _PIECE - 1, _PIECE, 2 * _PIECE, len(words) - 1):
        words[at] = bad
        assert has_non_finite(words.data, dtype)
        words[at] = 0


class TestTheSafePath:
    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "U8", "I8", "U16", "I32", "U32", "I64", "U64", "BOOL"])
    def test_what_is_filled_is_what_mlx_sees(self, path, dtype):
        filling = Filling({str(number): (dtype, (1, HEADS, 5, 4)) for number in range(6)})
        given = {}
        rng = np.random.default_rng(1)
        for name, view in filling.memory().items():
            size = view.nbytes
            given[name] = (rng.integers(0, 2, size) if dtype == "BOOL" else rng.integers(0, 60, size)).astype("u1")
            view[:] = given[name].tobytes()
        arrays = filling.arrays()
        assert list(arrays) == list(given)
        for name, array in arrays.items():
            assert array.shape == (1, HEADS, 5, 4)
            assert copy_whole(array).tobytes() == given[name].tobytes()
            # By a way that neither path uses.
            expected = np.frombuffer(given[name].tobytes(), NUMPY[dtype]) if dtype != "BF16" else None
            if expected is not None:
                assert np.array_equal(np.array(array).ravel(), expected)

    @pytest.mark.parametrize("shape", [(), (1,), (3,), (0,), (1, 0, 4), (1, 2, 3, 4, 5)])
    @pytest.mark.parametrize("dtype", ["F32", "BF16", "U8", "BOOL"])
    def test_states_of_any_shape_can_be_filled(self, path, shape, dtype):
        filling = Filling({"state": (dtype, shape), "other": ("I32", (2,))})
        memory = filling.memory()
        memory["state"][:] = bytes([1] * memory["state"].nbytes)
        memory["other"][:] = np.array([5, 6], np.int32).tobytes()
        arrays = filling.arrays()
        assert arrays["state"].shape == shape
        assert copy_whole(arrays["state"]).tobytes() == bytes([1] * memory["state"].nbytes)
        assert arrays["other"].tolist() == [5, 6]

    def test_empty_arrays_can_be_made(self, path):
        (array,) = empty({"a": ("BF16", (1, 2, 3, 4))}).values()
        assert (array.shape, array.dtype) == ((1, 2, 3, 4), mx.bfloat16)


NUMPY = {
    "F32": "f4", "F16": "f2", "U8": "u1", "I8": "i1", "U16": "u2", "I32": "i4", "U32": "u4", "I64": "i8", "U64": "u8",
    "BOOL": "?",
}  # fmt: skip


def test_a_process_with_a_dangling_view_would_read_others_bytes():
    """Why a copy is made at all: the bytes under a view that dangles change. In a process of its own: it may crash."""
    code = """
import json
import mlx.core as mx, numpy as np
from mlx_lm.models.cache import KVCache
cache = KVCache()
cache.update_and_fetch(mx.ones((1, 8, 4000, 64)), mx.ones((1, 8, 4000, 64)))
mx.eval(cache.keys, cache.values)
look = np.frombuffer(memoryview(cache.keys).cast("B"), np.uint8)
before = bytes(look[:4096])
view = cache.keys[..., :1, :]
mx.eval(view)
cache.update_and_fetch(mx.ones((1, 8, 1, 64)), mx.ones((1, 8, 1, 64)))
mx.eval(cache.keys, cache.values)
del view
others = [mx.full(cache.keys.shape, 5.0) for _ in range(4)]
mx.eval(others)
print(json.dumps(bytes(look[:4096]) == before), flush=True)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode < 0 or json.loads(run.stdout) is False
