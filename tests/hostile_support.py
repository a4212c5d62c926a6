"""What refusing a hostile file may cost, and what can lie in place of a file."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

SECONDS = 0.010
BYTES = 10 << 20
_TRIES = 50

_T = TypeVar("_T")


_WAITED_S = 5.0


_REFERENCE = "[" + "{}," * 20_000 + "{}]"
_REFERENCE_S = 0.0008


@cache
def _slower() -> float:
    """How many times longer than where the limit was set this machine takes, by something to parse; 1 at least."""
    spent = []
    for _ in range(5):
        before = time.thread_time()
        json.loads(_REFERENCE)
        spent.append(time.thread_time() - before)
    return max(1.0, min(spent) / _REFERENCE_S)


def measured(work: Callable[[], _T], seconds: float = SECONDS) -> _T:
    """The result of work, which must be quick and small: the best of up to 50 tries, by the processor's time because
    something else may run meanwhile, and the peak of what Python allocates (a header, a manifest, whatever they were
    parsed to). Nothing may wait, either: for that five seconds by the clock are long.
    """
    spent = []
    seconds *= _slower()
    for _ in range(_TRIES):
        began, before = time.perf_counter(), time.thread_time()
        result = work()
        spent.append(time.thread_time() - before)
        assert time.perf_counter() - began < _WAITED_S
        if len(spent) > 2 and min(spent) < seconds:
            break
    tracemalloc.start()
    try:
        work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(spent) < seconds, f"took {min(spent) * 1000:.1f} ms"
    assert peak < BYTES, f"took {peak / 2**20:.1f} MiB"
    return result


def _device(path: Path) -> None:
    """/dev/zero itself where this user may make it; a link to it says the same to a reader that follows links."""
    with suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        return
    pytest.skip("making a device needs root")


def _socket(path: Path) -> None:
    # By its short relative name: a socket's address has room for 108 bytes.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


ODD: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a device": _device,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": _loop,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a folder": Path.mkdir,
    "a sparse file of 4 TiB": lambda path: _sparse(path, 1 << 42),
    "an empty file": Path.touch,
}
"""What is no file of ours, whatever its bytes, and how it is put there."""


def _sparse(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)
