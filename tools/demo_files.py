"""What the demo does with a cache directory from outside: measure it, wait for it, and make the system forget it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.manifest import decode

__all__ = ["DROP_IMPOSSIBLE", "directory_bytes", "drop_page_cache", "saved_tokens", "wait_written"]

_QUIET_S = 1.0
"""A directory that did not change for this long, with nothing in its staging folder, is written."""

DROP_IMPOSSIBLE = "not dropped: this platform has no posix_fadvise"


def directory_bytes(directory: Path) -> int:
    """What the files of a directory take on disk."""
    return sum(status.st_blocks * 512 for _, status in _files(directory))


def saved_tokens(directory: Path) -> int:
    """The length of the longest prompt in a cache directory."""
    ends = [0]
    for path, _ in _files(directory / "objects" / "nodes"):
        if path.suffix == ".kv":
            try:
                ends.append(decode(path.read_bytes()).end)
            except FileNotFoundError:
                continue
    return max(ends)


def wait_written(directory: Path, tokens: int, timeout: float) -> bool:
    """Wait until a server has written what it wants to, at least a prompt of so many tokens; False after timeout."""
    deadline = time.monotonic() + timeout
    seen: object = None
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = [(path, status.st_size, status.st_mtime_ns) for path, status in _files(directory)]
        staged = any(path.is_relative_to(directory / "tmp") for path, *_ in now)
        if staged or now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= _QUIET_S and saved_tokens(directory) >= tokens:
            return True
        time.sleep(0.05)
    return False


def drop_page_cache(directory: Path) -> str:
    """Drop the contents of all files from the system's page cache; how that went, as a phrase for the report."""
    if not hasattr(os, "posix_fadvise"):
        return DROP_IMPOSSIBLE
    total, left = 0, 0
    for path, status in _files(directory):
        with path.open("rb") as file:
            # Only clean pages are dropped.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        resident = _resident_bytes(path, status.st_size)
        if resident is None:
            return "dropped with posix_fadvise, which could not be verified"
        total += status.st_size
        left += resident
    if left:
        return f"not dropped: {left >> 20} of {total >> 20} MiB stayed in spite of posix_fadvise"
    return "dropped with posix_fadvise, verified with mincore"


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files below a directory in a fixed order; those that vanish meanwhile are left out."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            try:
                yield path, path.lstat()
            except FileNotFoundError:
                continue


def _resident_bytes(path: Path, size: int) -> int | None:
    """How much of a file is in the page cache; None when the system does not tell."""
    if sys.platform != "linux":
        return None
    if size == 0:
        return 0
    # A private mapping: ctypes only takes the address of what could be written to.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
        pages: Any = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        try:
            address = ctypes.c_void_p(ctypes.addressof(first))
            failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), pages)
        finally:
            # The mapping cannot be closed while something points into it.
            del first
    return None if failed else min(size, sum(page & 1 for page in pages) * mmap.PAGESIZE)
