r"""Which blocks an interrupted check has already read, in a file that its user names.

Outside the cache directory as a rule, because a check without repair changes nothing in there and works on a read-only
volume. A block is known by its digest and by what its stat said when its bytes were read: one that was replaced,
touched or copied again is read again. The file is appended to, block by block; each record has a checksum of its own,
so that a kill at any moment costs at most the last one. It is removed when all blocks were read: the next check reads
everything again, because finding out what a disk has lost since the last one is what it is for.

    16 bytes  magic "kvstore-fsck/1\n\0"
    48 bytes  a record: digest, then as 8 bytes each inode, size, ctime in nanoseconds, and XXH3-64 of all that
"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from kvstore.errors import UnavailableError
from kvstore.fsck.findings import Seen

__all__ = ["Resume"]

MAGIC = b"kvstore-fsck/1\n\0"
_RECORD = struct.Struct("<16s Q Q Q")
_CHECK = struct.Struct("<Q")
_SIZE = _RECORD.size + _CHECK.size
_MASK = (1 << 64) - 1


class Resume:
    """An open record of verified blocks; with no path it remembers nothing. Safe to use from several threads."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1
        self._known: set[bytes] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Read what is there and go on behind it. Raises UnavailableError for a file of something else."""
        if self._path is None:
            return self
        try:
            # Not the seam: this file is not part of a cache directory.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._load()
        except OSError as error:
            self._close()
            raise self._unavailable(error) from error
        except UnavailableError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _load(self) -> None:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            data = file.read()
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise UnavailableError(f"{self._path} is not a record of an earlier check; name another file")
        os.pwrite(self._fd, MAGIC, 0)
        end = len(MAGIC)
        while (record := data[end : end + _SIZE]) and len(record) == _SIZE:
            body = record[: _RECORD.size]
            if xxhash.xxh3_64_intdigest(body) != _CHECK.unpack_from(record, _RECORD.size)[0]:
                break
            self._known.add(body)
            end += _SIZE
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)

    def knows(self, digest: bytes, seen: Seen) -> bool:
        """Whether the bytes of this block, as it lies there, were read and right."""
        return bool(self._known) and _record(digest, seen) in self._known

    def add(self, digest: bytes, seen: Seen) -> None:
        """Remember a block whose bytes were right. Raises UnavailableError."""
        if self._fd < 0:
            return
        body = _record(digest, seen)
        try:
            with self._lock:
                os.write(self._fd, body + _CHECK.pack(xxhash.xxh3_64_intdigest(body)))
        except OSError as error:
            raise self._unavailable(error) from error

    def finish(self) -> None:
        """Every block was read: the record has done its work. Raises UnavailableError."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> UnavailableError:
        return UnavailableError(f"cannot write {self._path} ({error.strerror}); name another file to resume from")


def _record(digest: bytes, seen: Seen) -> bytes:
    inode, size, _, ctime_ns = seen
    return _RECORD.pack(digest, inode & _MASK, size, ctime_ns & _MASK)
