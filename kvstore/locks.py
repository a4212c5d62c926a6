"""The two locks of a cache directory, held for milliseconds and never for a server's lifetime.

filelock over flock: the kernel releases a lock with its process, so a killed one leaves nothing behind. The soft
fallback (a marker file) is refused because a killed holder would block everybody; lock files are kept, because
unlinking one while another process waits on it lets two in.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from filelock import BaseFileLock, FileLock, Timeout

from kvstore.errors import LockTimeoutError, UnavailableError
from kvstore.layout import Layout

__all__ = ["POLL_S", "PUBLISH_TIMEOUT_S", "gc_lock", "publish_lock"]

PUBLISH_TIMEOUT_S = 10.0
"""A holder needs milliseconds; after this long it is stopped or its disk hangs, and the caller drops its node."""

POLL_S = 0.005
"""How often a lock that is taken is asked for again; 0.06 ms each."""

_PATIENCE_S = 0.1
_IMPATIENT_S = POLL_S / 5
"""How often after waiting that long. Nobody queues for a lock that is polled: whoever asks next when it is free has it,
so whoever has waited asks more often than whoever has just come."""

# What flock answers on a file system without it, or on NFS without a lock daemon.
_NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@contextmanager
def publish_lock(layout: Layout, timeout: float = PUBLISH_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock under which manifests appear and anything disappears; raises LockTimeoutError."""
    with _held(layout, "publish", timeout):
        yield


@contextmanager
def gc_lock(layout: Layout) -> Iterator[bool]:
    """Try to become the one collector; False when there is one already."""
    with ExitStack() as stack:
        try:
            stack.enter_context(_held(layout, "gc", 0))
            mine = True
        except LockTimeoutError:
            mine = False
        # Outside of the try: that the publish lock was not to be had in time, inside, says nothing about this one.
        yield mine


@contextmanager
def _held(layout: Layout, name: str, timeout: float) -> Iterator[None]:
    path = layout.lock("publish" if name == "publish" else "gc")
    # The folder's own permissions, where filelock would follow the umask; and an error when the volume has vanished,
    # where filelock would make the folder anew. In a folder that its owner made read-only the system says so.
    mode = os.stat(path.parent).st_mode & 0o666 | 0o600
    lock = FileLock(path, mode=mode, poll_interval=POLL_S, fallback_to_soft=False, preserve_lock_file=True)
    try:
        _acquire(lock, timeout)
    except Timeout as error:
        raise LockTimeoutError(f"{path} is held by another process; stop it or try again") from error
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        raise UnavailableError(f"{path.parent} is on a file system without flock; use a local disk") from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: BaseFileLock, timeout: float) -> None:
    if timeout > _PATIENCE_S:
        with suppress(Timeout):
            lock.acquire(timeout=_PATIENCE_S)
            return
        lock.acquire(timeout=timeout - _PATIENCE_S, poll_interval=_IMPATIENT_S)
    else:
        lock.acquire(timeout=timeout)
