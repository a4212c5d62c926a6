"""Whether MLX's memory can be used in place: what is found, what is remembered, and what is done when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest

from kvstore_mlx import buffers, selfcheck
from kvstore_mlx.selfcheck import Answer, Notes

KEY = "mlx 1 | cpu | here | linux"
GOOD = Answer(in_place=True, donates=True, reason="", milliseconds=1.5)


def test_this_machine_is_looked_at_in_milliseconds():
    first, again = selfcheck.check(), selfcheck.check()
    assert (again.in_place, again.donates, again.reason) == (True, True, "")
    assert min(first.milliseconds, again.milliseconds) < 500


def copied(array):
    """A machine where a memoryview is of a copy: filling it changes nothing."""
    return memoryview(bytearray(memoryview(array).cast("B")))


def stale(array):
    """A machine where a memoryview shows something else than was computed."""
    view = memoryview(bytearray(memoryview(array).cast("B")))
    view[3] ^= 1
    return view


def careless(array):
    """An MLX whose views of strided arrays say that they are contiguous."""
    view = memoryview(array)
    return view.cast("B") if view.c_contiguous else memoryview(bytearray(np.array(array).nbytes))


def refusing(array):
    raise BufferError("arrays are on the device")


@pytest.mark.parametrize(
    ("view_of", "reason"),
    [
        (copied, "does not see what was written"),
        (stale, "does not see"),
        (careless, "a strided array says that it is contiguous"),
        (refusing, "arrays are on the device"),
        (lambda array: None, "cannot be written to"),
        (lambda array: memoryview(bytes(array.nbytes)), "cannot be written to"),
    ],
)
def test_a_machine_where_memory_is_not_shared_is_found_out(monkeypatch, view_of, reason):
    monkeypatch.setattr(selfcheck, "view_of", view_of)
    found = selfcheck.check()
    assert (found.in_place, found.donates) == (False, False)
    assert reason in found.reason


def test_computed_values_that_memory_does_not_show_are_found_out(monkeypatch):
    """Filling works, reading does not."""
    real = selfcheck.view_of
    monkeypatch.setattr(selfcheck, "view_of", lambda array: stale(array) if array.ndim == 1 else real(array))
    assert "what MLX computed is not what its memory shows" in selfcheck.check().reason


def test_an_update_that_goes_wrong_is_found_out(monkeypatch):
    real = mx.full
    monkeypatch.setattr(mx, "full", lambda shape, value, dtype: real(shape, value + 1, dtype))
    assert "an update of an array that was filled in place" in selfcheck.check().reason


def test_updates_that_are_not_in_place_are_noticed(monkeypatch):
    """Such a machine is slow and right: memory is still used in place."""
    addresses = iter(range(100))
    monkeypatch.setattr(selfcheck, "_address", lambda array: next(addresses))
    found = selfcheck.check()
    assert (found.in_place, found.donates) == (True, False)


def test_an_answer_is_remembered_by_its_key(tmp_path, monkeypatch):
    path = tmp_path / "new" / "selfcheck.json"
    monkeypatch.setattr(selfcheck, "check", lambda: GOOD)
    assert Notes(path).get(KEY) is None
    assert Notes(path).look(KEY) == GOOD
    assert Notes(path).get(KEY) == GOOD
    assert Notes(path).get(KEY + "2") is None
    assert Notes(path).look(KEY + "2") == GOOD
    assert Notes(path).get(KEY) == GOOD
    assert os.listdir(path.parent) == ["selfcheck.json"]


def test_the_key_names_what_an_answer_holds_for(monkeypatch):
    keys = {selfcheck.machine_key()}
    monkeypatch.setattr(selfcheck, "version", lambda package: "9.9")
    keys.add(selfcheck.machine_key())
    monkeypatch.setattr(selfcheck.platform, "node", lambda: "another machine")
    keys.add(selfcheck.machine_key())
    monkeypatch.setattr(mx, "default_device", lambda: "Device(gpu, 0)")
    keys.add(selfcheck.machine_key())
    assert len(keys) == 4


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps({KEY: None}).encode(),
        json.dumps({KEY: {}}).encode(),
        json.dumps({KEY: {**asdict(GOOD), "more": 1}}).encode(),
        json.dumps({KEY: {**asdict(GOOD), "in_place": "yes"}}).encode(),
        json.dumps({KEY: {**asdict(GOOD), "in_place": 1}}).encode(),
        json.dumps({KEY: {"looking": True}}).encode(),
    ],
    ids=lambda text: repr(text[:60]),
)
def test_notes_that_are_none_are_not_believed(tmp_path, monkeypatch, text):
    path = tmp_path / "selfcheck.json"
    path.write_bytes(text)
    assert Notes(path).get(KEY) is None
    monkeypatch.setattr(selfcheck, "check", lambda: GOOD)
    assert Notes(path).look(KEY) == GOOD
    assert Notes(path).get(KEY) == GOOD


def test_no_flipped_bit_says_that_memory_may_be_used_in_place(tmp_path):
    path = tmp_path / "selfcheck.json"
    path.write_text(json.dumps({KEY: asdict(Answer(in_place=False, donates=False, reason="why", milliseconds=1.5))}))
    data = path.read_bytes()
    for at in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            found = Notes(path).get(KEY)
            assert found is None or not found.in_place, (at, bit)


def test_notes_that_cannot_be_kept_are_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(selfcheck, "check", lambda: GOOD)
    (tmp_path / "file").touch()
    assert Notes(tmp_path / "file" / "selfcheck.json").look(KEY) == GOOD


def test_a_process_that_dies_while_it_looks_is_the_last_one(tmp_path):
    """The next takes the safe path, says why, and does not look again by itself."""
    path = tmp_path / "selfcheck.json"
    code = f"""
import os, pathlib
from kvstore_mlx import selfcheck
selfcheck.check = lambda: os.abort()
selfcheck.Notes(pathlib.Path({str(path)!r})).look({KEY!r})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60, env=environment())
    assert run.returncode < 0
    found = Notes(path).get(KEY)
    assert (found.in_place, found.donates) == (False, False)
    assert "kvstore doctor --again" in found.reason


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def test_a_process_that_looks_just_now_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "selfcheck.json"
    path.write_text(json.dumps({KEY: {"looking": os.getppid(), "since": time.time()}}))
    assert Notes(path).get(KEY) is None
    seen = []
    monkeypatch.setattr(selfcheck, "check", lambda: seen.append(Notes(path).get(KEY)) or GOOD)
    assert Notes(path).look(KEY) == GOOD
    assert seen == [None], "another thread of this process"


@pytest.mark.parametrize(("pid", "age"), [("own", 1.0), ("parent", 61.0), ("parent", -61.0), ("parent", None)])
def test_a_mark_of_a_dead_process_is_known_whoever_has_its_number(tmp_path, pid, age):
    """In a container every server is process 1: one that died while it looked died at each start."""
    path = tmp_path / "selfcheck.json"
    number = os.getpid() if pid == "own" else os.getppid()
    since = {} if age is None else {"since": time.time() - age}
    path.write_text(json.dumps({KEY: {"looking": number, **since}}))
    found = Notes(path).get(KEY)
    assert not found.in_place
    assert "kvstore doctor --again" in found.reason


def test_no_more_is_remembered_than_a_user_has_machines(tmp_path, monkeypatch):
    path = tmp_path / "selfcheck.json"
    monkeypatch.setattr(selfcheck, "check", lambda: GOOD)
    for number in range(70):
        Notes(path).look(str(number))
    notes = json.loads(path.read_text())
    assert (len(notes), "0" in notes, "69" in notes) == (64, False, True)


@pytest.fixture
def unasked(tmp_path, monkeypatch):
    """A process that has not looked yet, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    selfcheck.answer.cache_clear()
    yield tmp_path / "kvstore" / "selfcheck.json"
    selfcheck.answer.cache_clear()


def test_the_first_use_looks_and_the_next_process_remembers(unasked, monkeypatch):
    assert selfcheck.answer().in_place
    assert list(json.loads(unasked.read_text())) == [selfcheck.machine_key()]
    selfcheck.answer.cache_clear()
    monkeypatch.setattr(selfcheck, "check", lambda: pytest.fail("it looked again"))
    assert selfcheck.answer().in_place


@pytest.mark.parametrize(("value", "safe"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_can_ask_for_the_safe_path(unasked, monkeypatch, value, safe):
    monkeypatch.setenv(selfcheck.SAFE_ENV, value)
    assert selfcheck.answer().in_place != safe
    assert unasked.exists() != safe


def test_a_machine_where_it_fails_is_told_so_once_and_goes_on(unasked, monkeypatch, caplog):
    monkeypatch.setattr(selfcheck, "view_of", copied)
    for _ in range(3):
        assert not selfcheck.answer().in_place
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    monkeypatch.undo()
    (array,) = buffers.empty({"a": ("BF16", (1, 2, 3, 4))}).values()
    assert array.shape == (1, 2, 3, 4)


def test_every_way_into_mlx_s_memory_asks(monkeypatch):
    """What is not safe must not be done: with the answer no, nobody takes a memoryview."""
    monkeypatch.setattr(buffers, "answer", lambda: Answer(in_place=False, donates=False))

    def forbidden(*_):
        pytest.fail("MLX's memory was used")

    monkeypatch.setattr(buffers, "view_of", forbidden)
    monkeypatch.setattr(buffers, "hollow", forbidden)

    class NotOfArrays(type):
        def __call__(cls, data):
            return forbidden() if isinstance(data, mx.array) else memoryview(data)

    # A name of the module's own comes before the built-in one.
    monkeypatch.setattr(buffers, "memoryview", NotOfArrays("memoryview", (), {}), raising=False)
    array = mx.arange(24, dtype=mx.float32).reshape(1, 2, 3, 4)
    expected = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert buffers.copy_rows(array, 0, 1, 3).tobytes() == expected[:, 1:3].tobytes()
    assert buffers.copy_whole(array).tobytes() == expected.tobytes()
    assert buffers.copy_whole(array[..., ::2]).tobytes() == expected[..., ::2].tobytes()
    assert buffers.copy_whole(array > 5).tobytes() == (expected > 5).tobytes()
    assert buffers.copy_whole(mx.array(7, mx.bfloat16)).tobytes() == bytes.fromhex("e040")
    assert buffers.address_phase() == 0
    buffers.empty({"a": ("F32", (1, 2, 3, 4))})
    filling = buffers.Filling({"a": ("F32", (1, 2, 3, 4))})
    filling.memory()["a"][:] = expected.tobytes()
    assert np.array_equal(np.array(filling.arrays()["a"])[0], expected)
