"""Whether this machine's MLX lets its arrays be filled and read in place, looked at once and remembered.

What the adapter relies on was measured on MLX's CPU backend and is promised nowhere. So at first use on a machine a
few arrays of some hundred kilobytes are filled through memoryviews and read back through MLX's own operations, and the
other way round; that takes milliseconds. Where it does not come out right the safe path is taken: arrays made of
copies, at the price of memory and speed. The answer is remembered by MLX version, device and machine. A process that
dies while it looks leaves a mark behind, and the next one takes the safe path: a server must not die at every start.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import platformdirs

from kvstore_mlx.inplace import hollow, view_of

__all__ = ["SAFE_ENV", "Answer", "Notes", "answer", "check", "device", "machine_key"]

log = logging.getLogger("kvstore")

SAFE_ENV = "KVSTORE_SAFE_BUFFERS"
"""Set to anything but 0, the safe path is taken without looking."""

_TOKENS, _HEADS, _DIM = 256, 4, 128
_MAX_REMEMBERED = 64

_LOOKING_S = 60.0
"""Looking takes milliseconds. An older mark is one of a process that ended, whoever has its number now."""


_looking: set[str] = set()
"""What this process looks at just now, in any of its threads."""


@dataclass(frozen=True)
class Answer:
    """in_place: arrays may be filled and read as memory. donates: an update in place keeps an array's memory where it
    is (speed only). reason: why not in place, for people. milliseconds: what looking took.
    """

    in_place: bool
    donates: bool
    reason: str = ""
    milliseconds: float = 0.0


@cache
def answer() -> Answer:
    """What holds on this machine: forced by the environment, remembered, or found out now."""
    if os.environ.get(SAFE_ENV, "0") not in {"", "0"}:
        known = Answer(in_place=False, donates=False, reason=f"{SAFE_ENV} is set")
    else:
        notes, key = Notes(), machine_key()
        known = notes.get(key) or notes.look(key)
    if not known.in_place:
        log.warning("kvstore: MLX's memory is not used in place, so restores are slower: %s", known.reason)
    return known


def machine_key() -> str:
    """What an answer holds for: the version of MLX, the device it computes on, and the machine."""
    return " | ".join([f"mlx {version('mlx')}", device(), platform.node(), platform.platform()])


def device() -> str:
    """What MLX computes on, for people and keys."""
    info: dict[str, Any] = {}
    with suppress(Exception):  # Not all versions and backends have it; what they lack tells nothing apart.
        info = mx.device_info()
    return f"{mx.default_device()} {info.get('device_name', '')}".strip()


def check() -> Answer:
    """Look now. Never raises: whatever fails is a reason for the safe path."""
    started = time.perf_counter()
    try:
        reason = _trouble()
        donates = not reason and _donates()
    except Exception as error:
        reason, donates = f"looking failed ({error!r:.200})", False
    return Answer(not reason, donates, reason, (time.perf_counter() - started) * 1e3)


def _trouble() -> str:
    """The first thing that does not come out right, or an empty string."""
    shape = (1, _HEADS, _TOKENS, _DIM)
    arrays = hollow({"a": ("U16", shape), "b": ("U32", shape), "c": ("BF16", shape)})
    # Filled after they were evaluated, each with numbers that name their place.
    patterns = {
        "a": np.arange(np.prod(shape), dtype=np.uint16).reshape(shape),
        "b": np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)[:, ::-1] * np.uint32(2654435761),
        "c": np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)[..., ::-1] & np.uint16(0xBFFF),
    }
    for name, pattern in patterns.items():
        view = view_of(arrays[name])
        if view is None or view.readonly or view.nbytes != pattern.nbytes:
            return f"a new {arrays[name].dtype} array cannot be written to"
        view[:] = pattern.tobytes()
    for name, pattern in patterns.items():
        array = arrays[name].view(mx.uint16) if name == "c" else arrays[name]
        if not mx.array_equal(array, mx.array(pattern)).item():
            return f"MLX does not see what was written into a {arrays[name].dtype} array"
        # By an operation that reads strided, too, as attention does.
        if not np.array_equal(np.array(array[:, 1:3, 5:9] + 1), pattern[:, 1:3, 5:9] + 1):
            return f"MLX computes with something else than what was written into a {arrays[name].dtype} array"
    made = mx.arange(1 << 16, dtype=mx.uint32) * 3 + 1
    mx.eval(made)
    view = view_of(made)
    if view is None or bytes(view) != (np.arange(1 << 16, dtype=np.uint32) * 3 + 1).tobytes():
        return "what MLX computed is not what its memory shows"
    slices = arrays["b"][..., 3:7, :]
    mx.eval(slices)
    view = view_of(slices)
    if view is not None and bytes(view) != patterns["b"][..., 3:7, :].tobytes():
        return "a strided array says that it is contiguous"
    return _update_trouble(arrays["b"], patterns["b"])


def _update_trouble(array: Any, pattern: Any) -> str:
    """An engine's update of memory that was filled in place: the new rows there, and all others as they were."""
    expected = pattern.copy()
    expected[..., 9:10, :] = 7
    array[..., 9:10, :] = mx.full((1, _HEADS, 1, _DIM), 7, mx.uint32)
    mx.eval(array)
    view = view_of(array)
    if view is None or bytes(view) != expected.tobytes():
        return "an update of an array that was filled in place goes wrong"
    return ""


def _donates() -> bool:
    """Whether an array that nobody else looks at stays where it is when some of its rows are set."""
    array = hollow({"a": ("F32", (1, _HEADS, _TOKENS, _DIM))})["a"]
    before = _address(array)
    for row in (0, 1, _TOKENS - 1):
        array[..., row : row + 1, :] = mx.ones((1, _HEADS, 1, _DIM))
        mx.eval(array)
    return _address(array) == before


def _address(array: Any) -> int:
    return int(np.frombuffer(memoryview(array).cast("B"), np.uint8).ctypes.data)


class Notes:
    """Answers of this user's machines, in one small file of the cache folder. Losing it costs looking again."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path = path or Path(platformdirs.user_cache_dir("kvstore")) / "selfcheck.json"
        self._clock = clock

    def get(self, key: str) -> Answer | None:
        """What is remembered; None when nothing is, or when somebody is looking just now."""
        note = self._read().get(key)
        if not isinstance(note, dict):
            return None
        looking = note.get("looking")
        if type(looking) is int:
            since = note.get("since")
            recent = type(since) is float and abs(self._clock() - since) < _LOOKING_S
            # In a container every process may have this number: one that is ours was left by another, unless we look.
            if recent and (key in _looking if looking == os.getpid() else _lives(looking)):
                return None
            return Answer(
                in_place=False,
                donates=False,
                reason="a process ended while it looked; `kvstore doctor --again` looks again",
            )
        with suppress(TypeError):
            found = Answer(**note)
            if [type(value) for value in asdict(found).values()] == [bool, bool, str, float]:
                return found
        return None

    def look(self, key: str) -> Answer:
        """Find out, with a mark in the file meanwhile, and remember it."""
        try:
            _looking.add(key)
            self._write(key, {"looking": os.getpid(), "since": self._clock()})
            found = check()
            self._write(key, asdict(found))
        finally:
            _looking.discard(key)
        return found

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError):
            notes = json.loads(self._path.read_bytes())
            if isinstance(notes, dict):
                return notes
        return {}

    def _write(self, key: str, note: dict[str, Any]) -> None:
        """A file that cannot be written is let be."""
        notes = self._read()
        notes.pop(key, None)
        notes[key] = note
        while len(notes) > _MAX_REMEMBERED:
            del notes[next(iter(notes))]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd, staged = tempfile.mkstemp(dir=self._path.parent, prefix=".selfcheck-")
            try:
                with os.fdopen(fd, "w") as stream:
                    json.dump(notes, stream)
                os.replace(staged, self._path)
            except BaseException:
                os.unlink(staged)
                raise


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return pid > 0
