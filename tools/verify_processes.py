"""What tools/verify_filesystem.py asks of a file system with two processes: what one does, the other sees.

The other process is a Python that reads commands and answers each with a line; its code is small enough to be an
argument.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verify_checks import Check, Verdict, fail, ok, put, warn

__all__ = ["PROCESS_CHECKS"]

_PATIENCE_S = 5.0

_HELPER = """
import fcntl, os, sys
held = []
for line in sys.stdin:
    command, path = line.rstrip("\\n").split(" ", 1)
    try:
        if command == "stat":
            print(os.stat(path).st_size, flush=True)
        elif command == "read":
            print(open(path, "rb").read().decode(), flush=True)
        elif command == "lock":
            fd = os.open(path, os.O_RDWR)
            held.append(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print("locked", flush=True)
        elif command == "unlink":
            os.unlink(path)
            print("unlinked", flush=True)
    except OSError as error:
        print("error", error.errno, error.strerror, flush=True)
"""


class _Other:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, command: str, path: Path) -> str:
        """Its answer to one command."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {path}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")


@contextmanager
def _other() -> Iterator[_Other]:
    other = _Other()
    try:
        yield other
    finally:
        other.process.kill()
        other.process.communicate()


def rename_visible(folder: Path) -> Verdict:
    """Another server finds a node as soon as it is published, although it asked for it before."""
    path = folder / "node"
    with _other() as other:
        if not other.ask("stat", path).startswith(f"error {errno.ENOENT}"):
            return fail("another process sees a file that is not there")
        os.rename(put(folder / "staged", b"found"), path)
        started = time.monotonic()
        while (answer := other.ask("stat", path)) != "5":
            if time.monotonic() - started > _PATIENCE_S:
                return fail(f"another process does not see a renamed file within {_PATIENCE_S:.0f} s ({answer})")
            time.sleep(0.005)
        waited = time.monotonic() - started
        if other.ask("read", path) != "found":
            return fail("another process reads other bytes than were written before the rename")
    if waited > 0.1:
        return warn(
            f"another process sees a rename {waited:.1f} s late: servers share what they publish that much later"
        )
    return ok("another process sees it at once, with its bytes")


def replaced_visible(folder: Path) -> Verdict:
    """A rename over a file is seen by others, too."""
    path = put(folder / "node", b"before")
    with _other() as other:
        if other.ask("read", path) != "before":
            return fail("another process does not read what was written")
        os.rename(put(folder / "staged", b"after!"), path)
        started = time.monotonic()
        while other.ask("read", path) != "after!":
            if time.monotonic() - started > _PATIENCE_S:
                return fail(f"another process reads the old file {_PATIENCE_S:.0f} s after it was replaced")
            time.sleep(0.005)
        waited = time.monotonic() - started
    return ok("seen at once") if waited < 0.1 else warn(f"seen {waited:.1f} s late")


def lock_excludes(folder: Path) -> Verdict:
    """The publish lock is one."""
    path = put(folder / "lock")
    fd = os.open(path, os.O_RDWR)
    try:
        with _other() as other:
            if (answer := other.ask("lock", path)) != "locked":
                return fail(f"flock does not work ({answer}); kvstore refuses to publish without it")
            if _try_lock(fd):
                return fail("two processes hold one lock; a collection could remove what is just being published")
    finally:
        os.close(fd)
    return ok("one process at a time")


def lock_released(folder: Path) -> Verdict:
    """A killed server leaves no lock behind."""
    path = put(folder / "lock")
    fd = os.open(path, os.O_RDWR)
    try:
        with _other() as other:
            if (answer := other.ask("lock", path)) != "locked":
                return fail(f"flock does not work ({answer}); kvstore refuses to publish without it")
            other.process.kill()
            other.process.wait()
            started = time.monotonic()
            while not _try_lock(fd):
                if time.monotonic() - started > _PATIENCE_S:
                    return fail(
                        f"a killed process holds its lock for {_PATIENCE_S:.0f} s and more: publishing would stop"
                    )
                time.sleep(0.005)
            waited = time.monotonic() - started
    finally:
        os.close(fd)
    return ok("free at once") if waited < 0.5 else warn(f"free after {waited:.1f} s; publishing waits that long")


def lock_within(folder: Path) -> Verdict:
    """Two threads of one server exclude each other by the same lock, opened twice."""
    path = put(folder / "lock")
    one, two = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        if not _try_lock(one):
            return fail("flock does not work; kvstore refuses to publish without it")
        if _try_lock(two):
            return fail("one process gets a lock twice (flock is emulated by POSIX locks); threads would not exclude")
        fcntl.flock(one, fcntl.LOCK_UN)
        if not _try_lock(two):
            return fail("a lock that was released stays taken")
    except OSError as error:
        return fail(f"flock does not work ({error.strerror}); kvstore refuses to publish without it")
    finally:
        os.close(one)
        os.close(two)
    return ok("a file opened twice is locked once")


def unlinked_by_other(folder: Path) -> Verdict:
    """Another process collects what this one is reading."""
    path = put(folder / "file", b"still here")
    fd = os.open(path, os.O_RDONLY)
    try:
        with _other() as other:
            if (answer := other.ask("unlink", path)) != "unlinked":
                return fail(f"a file that another process reads cannot be removed ({answer}); collections would stop")
        if os.read(fd, 100) != b"still here":
            return fail("an open file loses its bytes when another process removes it; restores would end early")
    except OSError as error:
        return fail(f"a file removed by another process cannot be read on ({error.strerror}); restores would end early")
    finally:
        os.close(fd)
    return ok("keeps its bytes")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


PROCESS_CHECKS: dict[str, Check] = {
    "rename, seen by another process": rename_visible,
    "replacement, seen by another process": replaced_visible,
    "flock between processes": lock_excludes,
    "flock of a killed process": lock_released,
    "flock between threads": lock_within,
    "open file, unlinked by another process": unlinked_by_other,
}
