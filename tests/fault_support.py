"""File systems that fail: at the n-th call through kvstore's seam, or at the n-th system call of a process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from kvstore import Durability, FileSystem

ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EACCES", "EROFS", "EMFILE", "ESTALE")


@dataclass
class Fault:
    """What goes wrong, and when. at: which call fails; lasting: all after it too. calls: what was called so far."""

    at: int | None = None
    error: int = errno.EIO
    lasting: bool = False
    calls: list[str] = field(default_factory=list)

    def call(self, name: str) -> None:
        """Count one call, and fail if it is its turn."""
        number = len(self.calls)
        self.calls.append(name)
        if self.at is not None and (number >= self.at if self.lasting else number == self.at):
            self.strike()

    def strike(self) -> None:
        raise OSError(self.error, os.strerror(self.error))


@dataclass
class Vanish(Fault):
    """From the n-th call on the directory is elsewhere: its volume was pulled out. empty: a mount point is left.

    So the directory is where the volume is mounted.
    """

    root: Path = Path()
    empty: bool = False
    gone: bool = False

    @property
    def away(self) -> Path:
        return self.root.with_name("away")

    def strike(self) -> None:
        if not self.gone:
            self.gone = True
            os.rename(self.root, self.away)
            if self.empty:
                os.mkdir(self.root)

    def back(self) -> None:
        """The volume is mounted again."""
        if self.gone:
            if self.empty:
                os.rmdir(self.root)
            os.rename(self.away, self.root)
            self.gone = False


@dataclass
class Emptied(Fault):
    """At the n-th call somebody removes all that is in the directory, but not the directory."""

    root: Path = Path()

    def strike(self) -> None:
        for entry in list(self.root.iterdir()):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@dataclass(frozen=True)
class FaultyFileSystem(FileSystem):
    """Every call through the seam may fail."""

    fault: Fault = field(default_factory=Fault)

    def mount_point(self, path):
        if not isinstance(self.fault, Vanish):
            return super().mount_point(path)
        return self.fault.root.parent if self.fault.gone else self.fault.root

    def make_dir(self, path):
        self.fault.call("make_dir")
        return super().make_dir(path)

    def create(self, path):
        self.fault.call("create")
        return super().create(path)

    def allocate(self, fd, size):
        self.fault.call("allocate")
        super().allocate(fd, size)

    def write(self, fd, parts):
        self.fault.call("write")
        return super().write(fd, parts)

    def sync_file(self, fd):
        self.fault.call("sync_file")
        super().sync_file(fd)

    def sync_dir(self, path):
        self.fault.call("sync_dir")
        super().sync_dir(path)

    def rename(self, source, target):
        self.fault.call("rename")
        super().rename(source, target)

    def unlink(self, path):
        self.fault.call("unlink")
        super().unlink(path)

    def remove_dir(self, path):
        self.fault.call("remove_dir")
        super().remove_dir(path)

    def touch(self, path, time_ns):
        try:
            self.fault.call("touch")
        except PermissionError:
            return False  # as the real one does for another user's file
        return super().touch(path, time_ns)

    def open_fd(self, path):
        self.fault.call("open_fd")
        return super().open_fd(path)


SYSTEM_CALLS = (
    "stat", "lstat", "fstat", "open", "close", "listdir", "scandir", "read", "pread", "preadv", "mkdir", "rmdir",
    "rename", "unlink", "utime", "writev", "fsync", "fdatasync", "posix_fallocate",
)  # fmt: skip


@contextmanager
def system_faults(fault: Fault) -> Iterator[None]:
    """Every system call that kvstore makes through os may fail, those outside of the seam too (stat, the lock)."""

    def failing(name, real):
        def call(*arguments, **named):
            if name == "close":
                real(*arguments)  # The descriptor is free whatever close says.
                return fault.call(name)
            fault.call(name)
            return real(*arguments, **named)

        return call

    with mock.patch.multiple(os, **{name: failing(name, getattr(os, name)) for name in SYSTEM_CALLS}):
        yield


def faulty(fault: Fault) -> FaultyFileSystem:
    """One with syncing, so that syncs fail too."""
    return FaultyFileSystem(durability=Durability.BARRIER, fault=fault)
