"""What tools/verify_filesystem.py asks of a file system with one process: renames, times, syncs, open files.

Each check does what kvstore does, in a folder of its own, and says in one sentence what its answer means for kvstore.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["CHECKS", "Check", "Status", "Verdict", "fail", "ok", "put", "warn"]

Status: TypeAlias = Literal["ok", "warn", "FAIL"]

SECOND = 10**9
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """ok: as kvstore needs it. warn: kvstore is right there, but slower or less durable. FAIL: do not use it."""

    status: Status
    sentence: str


Check: TypeAlias = Callable[[Path], Verdict]
"""Given an empty folder on the mount. An OSError that it lets out is a FAIL of its own."""


def ok(sentence: str) -> Verdict:
    """As kvstore needs it."""
    return Verdict("ok", sentence)


def warn(sentence: str) -> Verdict:
    """Right, but slower, less durable or less private."""
    return Verdict("warn", sentence)


def fail(sentence: str) -> Verdict:
    """Not to be used."""
    return Verdict("FAIL", sentence)


def put(path: Path, data: bytes = b"x") -> Path:
    """A file with this content."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    return path


def rename_over(folder: Path) -> Verdict:
    """A manifest appears, or takes the place of another one, in one moment."""
    target = put(folder / "target", b"0" * 4096)
    seen: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                data = target.read_bytes()
            except FileNotFoundError:
                seen.append("missing")
                continue
            if len(data) != 4096 or len(set(data)) != 1:
                seen.append(f"{len(data)} bytes of two files")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(200):
            os.rename(put(folder / "staged", bytes([48 + number % 10]) * 4096), target)
    finally:
        done.set()
        watcher.join()
    if (folder / "staged").exists() or target.read_bytes() != b"9" * 4096:
        return fail("rename over a file does not replace it; kvstore could not commit anything")
    if seen:
        return fail(f"while a file is replaced it is seen as {seen[0]}; kvstore's one commit point would not be one")
    return ok("200 renames over a file that was read all the time; it was whole every time")


def rename_across(folder: Path) -> Verdict:
    """From staging into another folder of the same tree."""
    (folder / "deep").mkdir()
    source = put(folder / "staged")
    inode = os.stat(source).st_ino
    os.rename(source, folder / "deep" / "file")
    if os.stat(folder / "deep" / "file").st_ino != inode:
        return warn("a file gets another inode number when it is renamed; fsck may take it for replaced and skip it")
    return ok("works between folders and keeps the inode number")


def exclusive_create(folder: Path) -> Verdict:
    """Two processes never write one staged file."""
    path = folder / "file"
    for expected in (True, False):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            if expected:
                raise
        else:
            if not expected:
                return fail("O_EXCL creates a file that exists; two writers could mix their bytes")
    return ok("the second creation of a file is refused")


def mtime_settable(folder: Path) -> Verdict:
    """The clock of eviction is the mtime that a use sets."""
    path = put(folder / "file")
    wanted = time.time_ns() // SECOND * SECOND - 86_400 * SECOND + 123_456_789
    os.utime(path, ns=(wanted, wanted))
    off = abs(os.stat(path).st_mtime_ns - wanted)
    if off > 2 * SECOND:
        return fail(f"an mtime that was set reads {off / SECOND:.0f} s off; eviction would remove what is in use")
    if off >= SECOND // 1000:
        return warn(
            f"times are {off / SECOND:.3f} s coarse; a use right after a collection looked may go unnoticed, and be "
            "computed again"
        )
    return ok(f"set to the nanosecond, read {off} ns off")


def mtime_kept(folder: Path) -> Verdict:
    """A last use survives what happens to the file afterwards."""
    path = put(folder / "file")
    wanted = time.time_ns() // SECOND * SECOND - 1000 * SECOND
    os.utime(path, ns=(wanted, wanted))
    path.read_bytes()
    os.rename(path, folder / "renamed")
    fd = os.open(folder / "renamed", os.O_RDONLY)
    os.close(fd)
    off = abs(os.stat(folder / "renamed").st_mtime_ns - wanted)
    if off > 2 * SECOND:
        return fail("reading or renaming a file changes its mtime; eviction would not know what was used last")
    return ok("reading and renaming leave it")


def ctime_moves(folder: Path) -> Verdict:
    """What rsync brings with an old mtime is still young by its ctime."""
    path = put(folder / "file")
    before = os.stat(path).st_ctime_ns
    time.sleep(0.05)
    old = time.time_ns() - 86_400 * SECOND
    os.utime(path, ns=(old, old))
    after = os.stat(path).st_ctime_ns
    if after <= before:
        return warn(
            "setting times does not move the ctime; a copy that keeps times (rsync -t) may lose blocks to a collection "
            "that runs meanwhile"
        )
    return ok("moves when a file is touched")


def clock(folder: Path) -> Verdict:
    """The file system's clock is this machine's."""
    status = os.stat(put(folder / "file"))
    off = (status.st_mtime_ns - time.time_ns()) / SECOND
    if abs(off) > 30:
        return fail(f"its clock is {off:+.0f} s off this machine's; what was just written would not count as young")
    if abs(off) > 2:
        return warn(f"its clock is {off:+.1f} s off this machine's; ages will be that wrong")
    return ok(f"{off:+.3f} s off this machine's")


def sync_file(folder: Path) -> Verdict:
    """Data are durable before the name is."""
    fd = os.open(put(folder / "file"), os.O_WRONLY)
    try:
        getattr(os, "fdatasync", os.fsync)(fd)
        os.fsync(fd)
    except OSError as error:
        if error.errno in {errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY}:
            return warn(
                "files cannot be synced; a power cut may cost what was published last (a miss, never wrong bytes)"
            )
        return fail(f"syncing a file fails ({error.strerror}); every publish would fail")
    finally:
        os.close(fd)
    return ok("fsync and fdatasync work")


def sync_folder(folder: Path) -> Verdict:
    """A new name is durable."""
    put(folder / "file")
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in {errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY}:
            return warn("folders cannot be synced; a power cut may cost what was published last")
        return fail(f"syncing a folder fails ({error.strerror}); every publish would fail")
    finally:
        os.close(fd)
    return ok("fsync of a folder works")


def reserve(folder: Path) -> Verdict:
    """A full disk is noticed before anything is written."""
    if not hasattr(os, "posix_fallocate"):
        return ok("this system has no posix_fallocate; a full disk is noticed while writing")
    fd = os.open(put(folder / "file"), os.O_WRONLY)
    try:
        os.posix_fallocate(fd, 0, MIB)
    except OSError as error:
        if error.errno in {errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.ENOTTY}:
            return ok("not supported; a full disk is noticed while writing")
        return fail(f"fails ({error.strerror}); every publish would fail")
    finally:
        os.close(fd)
    if os.stat(folder / "file").st_size != MIB:
        return fail("does not make the file as long as asked for; every block would be taken for damaged")
    return ok("reserves room before a block is written")


def private_modes(folder: Path) -> Verdict:
    """KV is as sensitive as the prompt it came from."""
    os.close(os.open(folder / "file", os.O_WRONLY | os.O_CREAT, 0o600))
    mode = os.stat(folder / "file").st_mode & 0o777
    if mode & 0o077:
        return warn(f"a file made with mode 0600 has {mode:04o}: others may read what was prompted here")
    return ok("a file made with mode 0600 is this user's alone")


def unlinked_open(folder: Path) -> Verdict:
    """A collection takes the names of files that a restore is reading."""
    path = put(folder / "file", b"still here")
    fd = os.open(path, os.O_RDONLY)
    try:
        os.unlink(path)
        if os.read(fd, 100) != b"still here":
            return fail("an open file loses its bytes with its name; a collection would spoil running restores")
    except OSError as error:
        return fail(f"an open file cannot be removed and read on ({error.strerror}); a collection would spoil restores")
    finally:
        os.close(fd)
    left = os.listdir(folder)
    return ok(f"keeps its bytes (and leaves {left[0]} until it is closed)" if left else "keeps its bytes")


def scatter_gather(folder: Path) -> Verdict:
    """Blocks are written from many buffers and read into many."""
    if not hasattr(os, "preadv") or not hasattr(os, "writev"):
        return fail("this Python has no preadv and writev, which kvstore reads and writes with")
    parts = [bytes([number]) * (1000 + number) for number in range(64)]
    total = sum(map(len, parts))
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        written = os.writev(fd, parts)
        found = [bytearray(len(part)) for part in parts]
        got = os.preadv(fd, found, 0)
    finally:
        os.close(fd)
    if (written, got) != (total, total) or [bytes(each) for each in found] != parts:
        return fail("preadv does not return what writev wrote")
    return ok(f"{len(parts)} buffers in one call")


def allocated(folder: Path) -> Verdict:
    """The budget counts allocated blocks."""
    path = put(folder / "file", os.urandom(MIB))
    fd = os.open(path, os.O_WRONLY)
    with suppress(OSError):
        os.fsync(fd)
    os.close(fd)
    counted = os.stat(path).st_blocks * 512
    small = os.stat(put(folder / "small")).st_blocks * 512
    if counted < MIB // 2:
        return fail(f"1 MiB of random bytes counts as {counted} bytes; a budget could not be kept")
    if counted > 2 * MIB or small > 65_536:
        return warn(
            f"1 MiB takes {counted:,} bytes and 1 byte takes {small:,}: manifests (9 KB) waste much of the budget"
        )
    return ok(f"1 MiB takes {counted:,} bytes, 1 byte takes {small:,}")


CHECKS: dict[str, Check] = {
    "rename over a file": rename_over,
    "rename between folders": rename_across,
    "exclusive creation": exclusive_create,
    "mtime can be set": mtime_settable,
    "mtime is kept": mtime_kept,
    "ctime moves": ctime_moves,
    "clock": clock,
    "fsync of files": sync_file,
    "fsync of folders": sync_folder,
    "posix_fallocate": reserve,
    "private modes": private_modes,
    "open file, unlinked": unlinked_open,
    "preadv and writev": scatter_gather,
    "allocated blocks": allocated,
}
