"""The two long passes of a check, spread over processes and threads: all folders, and all bytes of all blocks."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from kvstore.fsck.data import Verifier
from kvstore.fsck.reading import FolderRead, read_folder
from kvstore.fsck.resume import Resume
from kvstore.fsck.tree import Folder
from kvstore.fsck.values import Reader

__all__ = ["Progress", "Verified", "read_folders", "verify_blocks"]

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and how much there is: files, or bytes while data are read."""

PROCESSES_FROM = 20_000
"""Files from which further processes are started: they need a quarter of a second to be there."""


def read_folders(
    reader: Reader, folders: Sequence[Folder], jobs: int, progress: Callable[[int], None]
) -> Iterator[tuple[Folder, FolderRead]]:
    """Examine folders in order, by other processes when there are many files: the work is Python's, not the disk's."""
    files = sum(len(folder.names) for folder in folders)
    one = partial(read_folder, reader)
    if jobs < 2 or files < PROCESSES_FROM:
        yield from _told(folders, map(one, folders), progress)
        return
    # Spawned, not forked: the caller may have threads.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    try:
        # Ctrl-C reaches every process of the terminal. This one ends the others, which are born deaf to it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            results = pool.map(one, folders)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield from _told(folders, results, progress)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _told(
    folders: Sequence[Folder], results: Iterator[FolderRead], progress: Callable[[int], None]
) -> Iterator[tuple[Folder, FolderRead]]:
    for folder, found in zip(folders, results, strict=True):
        yield folder, found
        progress(len(folder.names))


@dataclass(slots=True)
class Verified:
    """What reading all bytes of all blocks found. bad: digests to judge; failed: those that could not be read."""

    bad: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    blocks: int = 0
    size: int = 0
    resumed: int = 0
    resumed_size: int = 0


def verify_blocks(
    reader: Reader, folders: Sequence[Folder], jobs: int, resume: Resume, progress: Callable[[int], None]
) -> Verified:
    """Read every byte of every block in these folders, some folders at a time. Raises UnavailableError."""
    work = _Verification(reader, resume, progress)
    with ThreadPoolExecutor(jobs, "kvstore-fsck") as pool:
        try:
            futures = [pool.submit(work.folder, folder) for folder in folders]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            work.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return work.found


class _Verification:
    """What the threads of one verification share."""

    def __init__(self, reader: Reader, resume: Resume, progress: Callable[[int], None]) -> None:
        self.found = Verified()
        self.stop = threading.Event()
        self._verifier = Verifier(reader, self.stop.is_set)
        self._resume = resume
        self._progress = progress
        self._lock = threading.Lock()

    def folder(self, folder: Folder) -> None:
        """Read all blocks of one folder; returns early when asked to stop."""
        for name in folder.names:
            if self.stop.is_set():
                return
            self._block(bytes.fromhex(name))

    def _block(self, digest: bytes) -> None:
        try:
            result = self._verifier.verify(digest, lambda seen: self._resume.knows(digest, seen))
        except InterruptedError:
            return
        except OSError:
            with self._lock:
                self.found.failed.append(digest)
            return
        if result is None:
            return
        seen, right = result
        if right:
            self._resume.add(digest, seen)
        with self._lock:
            self._count(digest, seen[1], right)

    def _count(self, digest: bytes, size: int, right: bool | None) -> None:
        found = self.found
        if right is None:
            found.resumed += 1
            found.resumed_size += size
        else:
            found.blocks += 1
            found.size += size
            if not right:
                found.bad.append(digest)
        self._progress(size)
