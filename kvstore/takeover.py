"""Put an own copy in the place of a file that another user's process published and that this one cannot make young.

A commit makes young what it refers to (rule 5), so that a collector which chose one of these files before leaves it. In
a directory that users share on purpose, files may be readable and not ours to touch. A copy with the same bytes is
young, the rename gives it the name in one step, and whoever has the old file open goes on reading that.

Two users who go on with one chunk in turn copy what the other wrote of it each time: files that are writable for their
group (docs/sharing.md) are touched and not copied. So the copies keep the pace of a publish, and count as written.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.context import Context
from kvstore.errors import DamagedManifestError, MissingParentError, UnavailableError
from kvstore.fs import mostly_holes, preadv_full
from kvstore.layout import Layout
from kvstore.locks import publish_lock
from kvstore.manifest import decode
from kvstore.pacing import slices
from kvstore.staged import staged_file

__all__ = ["same_file", "take_over"]

_BUFFER_BYTES = 4 << 20


def take_over(context: Context, path: Path) -> int:
    """Replace a block or manifest by a copy of it, checked on the way; the bytes written. Not to be called with the
    publish lock held.

    One that vanished, or changed meanwhile and is young by that, is left as it is. Raises MissingParentError for a
    damaged one, UnavailableError where this user may neither read nor replace it, and OSError when a copy fails.
    """
    try:
        try:
            fd, seen = context.fs.open_fd(path)
        except FileNotFoundError:
            return 0
        try:
            copy = _copied(context, fd, seen, path)
            try:
                with publish_lock(context.layout):
                    if not _is_same(context, path, seen):
                        context.staging.discard(copy)
                        return seen.st_size
                    context.fs.rename(copy, path)
            except BaseException:
                context.staging.discard(copy)
                raise
        finally:
            context.fs.close(fd)  # Only now the old file gives its space back, which takes time: the lock is free.
    except PermissionError as error:
        raise UnavailableError(
            f"{path} is another user's and can be neither touched nor replaced, so what continues it cannot be kept; "
            "make the directory's files writable for its group"
        ) from error
    context.fs.sync_dir(path.parent)
    return seen.st_size


def _copied(context: Context, fd: int, seen: os.stat_result, path: Path) -> Path:
    if mostly_holes(fd, seen):
        raise _damaged(context, path)
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, seen.st_size)))
    rest = context.pace.resting()
    with staged_file(context, seen.st_size) as copy:
        for at in range(0, seen.st_size, _BUFFER_BYTES):
            view = buffer[: seen.st_size - at]
            try:
                preadv_full(fd, [view], at)
            except EOFError as error:
                raise _damaged(context, path) from error
            for piece in slices(view):
                rest()
                copy.write([piece])
        if Layout.is_block_name(path.name):
            if copy.digest().hex() != path.name:
                raise _damaged(context, path)
        else:
            # A manifest fits into the buffer, which still holds it.
            try:
                decode(buffer)
            except DamagedManifestError as error:
                raise _damaged(context, path) from error
    return copy.path


def _damaged(context: Context, path: Path) -> MissingParentError:
    context.damaged.add(path)
    return MissingParentError(f"{path} is damaged; publish what it holds first")


def _is_same(context: Context, path: Path, seen: os.stat_result) -> bool:
    try:
        return same_file(context.fs.stat(path), seen)
    except FileNotFoundError:
        return False


def same_file(now: os.stat_result, seen: os.stat_result) -> bool:
    """Whether a file is the one that was seen, and was not used since."""
    return (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns)
