"""Files on their way to a name: written into this process's staging folder, durable before anybody renames them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.context import Context
from kvstore.keys import Buffer

__all__ = ["stage", "staged_file"]


def stage(context: Context, parts: Sequence[Buffer], size: int = 0) -> Path:
    """Write a staged file and make its data durable."""
    with staged_file(context, size) as (fd, path):
        for batch in context.pace.batches(parts):
            context.fs.write(fd, batch)
    return path


@contextmanager
def staged_file(context: Context, size: int = 0) -> Iterator[tuple[int, Path]]:
    """A staged file to be written: its data are durable when this is left, and it is gone when that failed."""
    fd, path = context.staging.create()
    try:
        try:
            context.fs.allocate(fd, size)
            yield fd, path
            context.fs.sync_file(fd)
        finally:
            os.close(fd)
    except BaseException:
        context.staging.discard(path)
        raise
