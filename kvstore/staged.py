"""Files on their way to a name: written into this process's staging folder, durable before anybody renames them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from kvstore.context import Context
from kvstore.fs import FileSystem
from kvstore.keys import Buffer

__all__ = ["Staged", "stage", "staged_file"]


@dataclass
class Staged:
    """A file that is being written, without a name yet. wanted: whether it is to be made durable and kept."""

    fd: int
    path: Path
    _fs: FileSystem
    _hashed: xxh3_128
    wanted: bool = True

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Write what comes next, and hash it. In this order: the system's copy waits less for memory than a hash does,
        and finds the bytes a place in the processor's cache, as long as there are few at a time.
        """
        self._fs.write(self.fd, pieces)
        for piece in pieces:
            self._hashed.update(piece)

    def digest(self) -> bytes:
        """XXH3-128 of all that write was given."""
        return self._hashed.digest()


def stage(context: Context, parts: Sequence[Buffer]) -> Path:
    """Write a staged file and make its data durable."""
    with staged_file(context) as staged:
        context.fs.write(staged.fd, parts)
    return staged.path


@contextmanager
def staged_file(context: Context, size: int = 0) -> Iterator[Staged]:
    """A staged file to be written: its data are durable when this is left. It is gone when that failed, or when it is
    not wanted.
    """
    fd, path = context.staging.create()
    try:
        try:
            context.fs.allocate(fd, size)
            staged = Staged(fd, path, context.fs, xxh3_128())
            yield staged
            if staged.wanted:
                context.fs.sync_file(fd)
        finally:
            os.close(fd)
        if not staged.wanted:
            context.staging.discard(path)
    except BaseException:
        context.staging.discard(path)
        raise
