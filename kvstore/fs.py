"""The one seam between kvstore and the operating system.

Every system call that changes the directory goes through a FileSystem, so that a test can stop the process after each
one of them, drop what was not synced, or answer ENOSPC, and so that durability is decided in one place. Reads that the
read path needs are here too, because they share one worry: a hostile or half-copied directory may hold a FIFO, a
symbolic link or a folder where a file should be, and opening it must neither block nor follow.

Nothing here knows what a node or a block is.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstore import macos
from kvstore.keys import Buffer, flat

__all__ = [
    "NOT_A_FILE",
    "Durability",
    "FileSystem",
    "allocated_bytes",
    "is_damage",
    "is_lost",
    "mostly_holes",
    "out_of_files",
    "preadv_full",
    "status_of",
]

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
# Linux moves at most this many bytes in one call (0x7ffff000); macOS refuses more than INT_MAX with EINVAL.
_MAX_TRANSFER = 1 << 30
_F_BARRIERFSYNC = 85  # macOS <sys/fcntl.h>; Python's fcntl module has no name for it.
# What a file system answers when it has no such operation: not a failure to keep the data.
_NOT_SUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}

# A file of this size or more with less than a sixty-fourth of it on disk is a forged size and no KV.
_HOLES = 64
_HOLES_FROM = 64 << 20

NOT_A_FILE = {errno.EFBIG, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO}
"""What open_read and read_file answer for something that cannot be a file of ours, whatever its bytes."""


class Durability(StrEnum):
    """How hard a publish tries to survive power loss. A killed process loses nothing published under any of them.

    none: the operating system writes when it likes; after power loss a block may be short or zero, which its digest
    catches. barrier: data before the name that makes it visible (fdatasync; F_BARRIERFSYNC on macOS). full: on the
    medium before the publish returns (F_FULLFSYNC on macOS; the same as barrier on Linux).
    """

    NONE = "none"
    BARRIER = "barrier"
    FULL = "full"


@dataclass(frozen=True)
class FileSystem:
    """System calls with kvstore's modes and durability; stateless, so safe to share between threads.

    durability may be given as a word. Raises ValueError for another one. private: create 0700 folders and 0600 files
    whatever the umask says, because KV is as sensitive as the prompt it came from. False follows the umask, for
    directories that several users share on purpose.
    """

    durability: Durability = Durability.BARRIER
    private: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "durability", Durability(self.durability))

    def make_dir(self, path: Path) -> bool:
        """Create a folder; False when it was there. The parent's entry is synced, so the folder survives."""
        try:
            os.mkdir(path, 0o700 if self.private else 0o777)
        except FileExistsError:
            return False
        self.sync_dir(path.parent)
        return True

    def create(self, path: Path) -> int:
        """Create a new file for writing and return its descriptor; FileExistsError when there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600 if self.private else 0o666)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve room, so that a full disk is noticed before anything is written and extents stay together."""
        if size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise

    def write(self, fd: int, parts: Iterable[Buffer]) -> int:
        """Write all parts one after the other, gathering them into few calls; returns the bytes written."""
        total = 0
        for batch in _batches(parts):
            total += _write_batch(fd, batch)
        return total

    def sync_file(self, fd: int) -> None:
        """Make a file's data durable before the rename that publishes it."""
        if self.durability is Durability.NONE:
            return
        if sys.platform == "darwin":
            command = fcntl.F_FULLFSYNC if self.durability is Durability.FULL else _F_BARRIERFSYNC
            _sync(fd, lambda fd: fcntl.fcntl(fd, command), os.fsync)
        else:
            _sync(fd, os.fdatasync, os.fsync)

    def sync_dir(self, path: Path) -> None:
        """Make a folder's entries durable."""
        if self.durability is Durability.NONE:
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if sys.platform == "darwin" and self.durability is Durability.FULL:
                # fsync there leaves a name in the drive's cache, and a full publish has promised the medium.
                _sync(fd, lambda fd: fcntl.fcntl(fd, fcntl.F_FULLFSYNC), os.fsync)
            else:
                _sync(fd, os.fsync)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Atomically give source the name target."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name; open readers keep the bytes."""
        os.unlink(path)

    def remove_dir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def touch(self, path: Path, time_ns: int) -> bool:
        """Set both times of a file. One of another user gets the present time, if this user may write to it at all;
        False when nobody but its owner can touch it.
        """
        try:
            os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
        except PermissionError:
            try:
                os.utime(path, follow_symlinks=False)
            except PermissionError:
                return False
        return True

    def stat(self, path: Path | str) -> os.stat_result:
        """What a name stands for; a link is not followed."""
        return os.lstat(path)

    def list_dir(self, path: Path | str) -> list[str]:
        """All names in a folder."""
        return os.listdir(path)

    def mount_point(self, path: Path) -> Path:
        """Where the volume that a path lies on is mounted."""
        folder = Path(os.path.realpath(path))
        while folder != folder.parent and not os.path.ismount(folder):
            folder = folder.parent
        return folder

    def exclude_from_backup(self, path: Path) -> None:
        """Ask Time Machine to pass a folder over. Other systems' backups go by CACHEDIR.TAG."""
        if sys.platform == "darwin":
            macos.exclude_from_backup(path)

    @contextmanager
    def open_read(self, path: Path) -> Iterator[tuple[int, os.stat_result]]:
        """A regular file's descriptor and stat. Links, FIFOs, devices and folders raise OSError without blocking."""
        fd, status = self.open_fd(path)
        try:
            yield fd, status
        finally:
            close_read(fd)

    def open_fd(self, path: Path | str) -> tuple[int, os.stat_result]:
        """As open_read, for a caller that keeps the descriptor and closes it."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
        except BaseException:
            os.close(fd)
            raise
        return fd, status

    def close(self, fd: int) -> None:
        """Close a descriptor of open_fd. The space of a file without a name is only now given back, which takes time:
        60 ms for 288 MiB on ext4, where unlinking the open file took 0.03 ms.
        """
        os.close(fd)

    def read_file(self, path: Path | str, limit: int) -> tuple[bytes, os.stat_result]:
        """A whole small file; OSError(EFBIG) when it is larger than limit, so that damage cannot eat the memory."""
        fd, status = self.open_fd(path)
        try:
            if status.st_size > limit:
                raise OSError(errno.EFBIG, "larger than its kind can be", str(path))
            # By its size, not by the limit: 4 MiB would be mapped and unmapped for every manifest of 9 KB.
            data = os.read(fd, status.st_size + 1)
            while len(data) < status.st_size and (more := os.read(fd, status.st_size - len(data))):
                data += more
            return data, status
        finally:
            close_read(fd)


def close_read(fd: int) -> None:
    """Close what was only read. Whatever this answers the descriptor is free (another try might close another's), and
    what was read does not change by it.
    """
    with suppress(OSError):
        os.close(fd)


def _sync(fd: int, *ways: Callable[[int], object]) -> None:
    """The first of these that the file system has. One that has none (network, FUSE and FAT volumes lack the first or
    all of them) offers no better than to be written to, and is let be.
    """
    for way in ways:
        try:
            way(fd)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return


def allocated_bytes(status: os.stat_result) -> int:
    """Bytes a file takes on disk: allocated blocks, which POSIX counts in units of 512."""
    return status.st_blocks * 512


def mostly_holes(fd: int, status: os.stat_result) -> bool:
    """Whether a large file is little more than a size: whoever made it wrote a header, and memory would be asked for
    terabytes. By the blocks that it takes, and as some file systems miscount those, by where its first hole is, too.

    Reading goes on at the beginning afterwards.
    """
    if status.st_size < _HOLES_FROM or allocated_bytes(status) * _HOLES > status.st_size:
        return False
    try:
        first = os.lseek(fd, 0, os.SEEK_HOLE)
        os.lseek(fd, 0, os.SEEK_SET)
    except (OSError, AttributeError):
        return False
    return first * _HOLES < status.st_size


def status_of(path: Path) -> os.stat_result | None:
    """What a name stands for, or None when nothing has it. Raises OSError when that cannot be told."""
    try:
        return os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_damage(error: Exception) -> bool:
    """Whether what opening or reading a file raised says that the file is not what its name promises.

    Any other OSError (no permission, no descriptors, a stale handle, a disk that does not answer) says nothing about
    the file: it may be whole, and may not be replaced for that.
    """
    return not isinstance(error, OSError) or error.errno in NOT_A_FILE


def is_lost(error: Exception) -> bool:
    """Whether the disk itself says that it cannot give the bytes. It may give them the next time; but whoever holds the
    bytes of a block loses nothing by putting them in its place, and if nobody does, it is read in vain for ever.
    """
    return isinstance(error, OSError) and error.errno == errno.EIO


def out_of_files(error: BaseException) -> bool:
    """Whether an error says that no more files can be open just now: nothing about the file that was to be opened."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _batches(parts: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Group parts so that no group is over what one writev takes, cutting parts that alone are over it."""
    batch: list[memoryview] = []
    size = 0
    for part in parts:
        view = flat(part)
        while view.nbytes:
            piece, view = view[: _MAX_TRANSFER - size], view[_MAX_TRANSFER - size :]
            batch.append(piece)
            size += piece.nbytes
            if size >= _MAX_TRANSFER or len(batch) >= _IOV_MAX:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _write_batch(fd: int, batch: list[memoryview]) -> int:
    total = sum(view.nbytes for view in batch)
    written = os.writev(fd, batch)
    while written < total:
        written += os.writev(fd, _after(batch, written))
    return total


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """The views less their first done bytes."""
    rest = []
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
        else:
            rest.append(view[done:])
            done = 0
    return rest


def preadv_full(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill all views from consecutive bytes of a file at offset; EOFError when the file ends before they are full.

    The views must be C-contiguous bytes: preadv into a strided view writes over what lies between (seen in MLX).
    """
    for start in range(0, len(views), _IOV_MAX):
        batch = list(views[start : start + _IOV_MAX])
        wanted = sum(view.nbytes for view in batch)
        done = 0
        while done < wanted:
            got = os.preadv(fd, _after(batch, done) if done else batch, offset + done)
            if got == 0:
                raise EOFError(f"file ended {wanted - done} bytes early")
            done += got
        offset += wanted
