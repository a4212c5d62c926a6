"""The seam to the operating system: modes, durability, partial transfers, and what must not block a reader."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from kvstore import Durability, FileSystem, Store
from kvstore import fs as fs_module
from kvstore.fs import allocated_bytes, preadv_full

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="names the system calls of Linux")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_folders_and_files_are_private_whatever_the_umask(tmp_path, no_umask):
    fs = FileSystem()
    fs.make_dir(tmp_path / "folder")
    os.close(fs.create(tmp_path / "file"))
    assert (mode(tmp_path / "folder"), mode(tmp_path / "file")) == (0o700, 0o600)


def test_a_shared_directory_follows_the_umask(tmp_path, no_umask):
    fs = FileSystem(private=False)
    os.umask(0o007)
    fs.make_dir(tmp_path / "folder")
    os.close(fs.create(tmp_path / "file"))
    assert (mode(tmp_path / "folder"), mode(tmp_path / "file")) == (0o770, 0o660)


def test_making_a_folder_says_whether_it_was_new(tmp_path):
    assert FileSystem().make_dir(tmp_path / "folder") is True
    assert FileSystem().make_dir(tmp_path / "folder") is False


def test_creating_never_opens_what_is_there(tmp_path):
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            FileSystem().create(tmp_path / name)
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert not (tmp_path / "elsewhere").exists()


@pytest.fixture
def syncs(monkeypatch):
    """The syncing system calls that were made."""
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda fd, name=name, real=real: (calls.append(name), real(fd))[1])
    return calls


def sync_both(fs: FileSystem, folder: Path) -> None:
    fd = fs.create(folder / "file")
    try:
        fs.sync_file(fd)
    finally:
        os.close(fd)
    fs.sync_dir(folder)


def test_durability_none_syncs_nothing(tmp_path, syncs):
    sync_both(FileSystem(Durability.NONE), tmp_path)
    FileSystem(Durability.NONE).make_dir(tmp_path / "folder")
    assert syncs == []


@linux_only
@pytest.mark.parametrize("durability", [Durability.BARRIER, Durability.FULL])
def test_barrier_and_full_sync_data_and_entries(tmp_path, syncs, durability):
    sync_both(FileSystem(durability), tmp_path)
    assert syncs == ["fdatasync", "fsync"]


@linux_only
@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize(
    ("durability", "expected"),
    [(Durability.BARRIER, ["barrier", "fsync"]), (Durability.FULL, ["full", "full"])],
)
def test_which_calls_macos_gets(tmp_path, monkeypatch, syncs, durability, expected, supported):
    """Shown here by pretending; what the calls do there was never tried."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fs_module.fcntl, "F_FULLFSYNC", 51, raising=False)

    def control(fd: int, command: int) -> int:
        if not supported:
            raise OSError(errno.ENOTSUP, "not supported")
        syncs.append({51: "full", 85: "barrier"}[command])
        return 0

    monkeypatch.setattr(fs_module.fcntl, "fcntl", control)
    sync_both(FileSystem(durability), tmp_path)
    assert syncs == (expected if supported else ["fsync", "fsync"])


@linux_only
def test_a_new_folder_is_synced_into_its_parent(tmp_path, syncs):
    FileSystem().make_dir(tmp_path / "folder")
    assert syncs == ["fsync"]


@linux_only
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_let_be(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", fail_with(code))
    FileSystem().sync_dir(tmp_path)


@linux_only
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS])
def test_a_file_system_without_fdatasync_gets_fsync(tmp_path, monkeypatch, syncs, code):
    monkeypatch.setattr(os, "fdatasync", fail_with(code))
    sync_both(FileSystem(), tmp_path)
    assert syncs == ["fsync", "fsync"]


@linux_only
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS])
def test_a_directory_where_nothing_can_be_synced_is_created_and_written(tmp_path, monkeypatch, code):
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, fail_with(code))
    with Store.open(tmp_path / "store") as store:
        store.check_writable()


@linux_only
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failing_disk_is_not_let_be(tmp_path, monkeypatch, code):
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, fail_with(code))
    with pytest.raises(OSError, match=os.strerror(code)):
        FileSystem().sync_dir(tmp_path)
    with pytest.raises(OSError, match=os.strerror(code)):
        sync_both(FileSystem(), tmp_path)


def fail_with(code: int):
    def fail(*_args, **_named):
        raise OSError(code, os.strerror(code))

    return fail


@linux_only
def test_room_is_reserved_before_anything_is_written(tmp_path):
    fd = FileSystem().create(tmp_path / "file")
    FileSystem().allocate(fd, 1 << 20)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_size == 1 << 20
    assert allocated_bytes(status) >= 1 << 20


@linux_only
def test_a_full_disk_is_noticed_when_room_is_reserved(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        FileSystem().allocate(0, 1)


@linux_only
def test_a_file_system_that_cannot_reserve_is_written_without(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EOPNOTSUPP))
    FileSystem().allocate(0, 1)


def write_all(path: Path, parts) -> bytes:
    fd = FileSystem().create(path)
    written = FileSystem().write(fd, parts)
    os.close(fd)
    assert written == path.stat().st_size
    return path.read_bytes()


def test_parts_are_written_one_after_the_other(tmp_path):
    parts = [b"ab", b"", bytearray(b"c"), memoryview(b"defg")[1:3], memoryview(b"hijk").cast("B", (2, 2))]
    assert write_all(tmp_path / "file", parts) == b"abcefhijk"


def test_more_parts_than_one_call_takes_are_written(tmp_path):
    parts = [bytes([i % 251]) for i in range(3000)]
    assert write_all(tmp_path / "file", parts) == b"".join(parts)


def test_a_part_larger_than_one_call_takes_is_cut(tmp_path, monkeypatch):
    sizes = []
    real = os.writev
    monkeypatch.setattr(fs_module, "_MAX_TRANSFER", 10)
    monkeypatch.setattr(os, "writev", lambda fd, views: (sizes.append(sum(map(len, views))), real(fd, views))[1])
    assert write_all(tmp_path / "file", [b"0123456", bytes(range(25)), b"z"]) == b"0123456" + bytes(range(25)) + b"z"
    assert sizes == [10, 10, 10, 3]


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_short_writes_are_continued_where_they_stopped(tmp_path, monkeypatch, most):
    real = os.writev

    def short(fd, views):
        joined = b"".join(views)[:most]
        return real(fd, [joined])

    monkeypatch.setattr(os, "writev", short)
    assert write_all(tmp_path / "file", [b"abc", b"defgh", b"i"]) == b"abcdefghi"


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_short_reads_are_continued_where_they_stopped(tmp_path, monkeypatch, most):
    data = bytes(range(50))
    (tmp_path / "file").write_bytes(data)
    real = os.preadv

    def short(fd, views, offset):
        first = views[0][:most]
        return real(fd, [first], offset)

    monkeypatch.setattr(os, "preadv", short)
    into = [memoryview(bytearray(4)), memoryview(bytearray(1)), memoryview(bytearray(20))]
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    preadv_full(fd, into, 10)
    os.close(fd)
    assert b"".join(into) == data[10:35]


def test_more_views_than_one_call_takes_are_filled(tmp_path):
    data = os.urandom(3000)
    (tmp_path / "file").write_bytes(data)
    memory = bytearray(3000)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    preadv_full(fd, [memoryview(memory)[i : i + 1] for i in range(3000)], 0)
    os.close(fd)
    assert memory == data


def test_a_file_that_ends_early_is_not_read_forever(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(EOFError, match="5 bytes early"):
        preadv_full(fd, [memoryview(bytearray(8))], 7)
    os.close(fd)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "dangling", "device"])
def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path, kind):
    path = tmp_path / "odd"
    (tmp_path / "file").write_bytes(b"secret")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to(tmp_path / ("file" if kind == "link" else "nothing"))
    before = open_files()
    with pytest.raises(OSError), FileSystem().open_read(path):
        pass
    with pytest.raises(OSError):
        FileSystem().read_file(path, 100)
    assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_small_file_is_read_whole_up_to_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    data, status = FileSystem().read_file(tmp_path / "file", 100)
    assert (data, status.st_size) == (b"x" * 100, 100)
    with pytest.raises(OSError, match="larger") as caught:
        FileSystem().read_file(tmp_path / "file", 99)
    assert caught.value.errno == errno.EFBIG


def test_a_file_read_in_pieces_comes_out_whole(tmp_path, monkeypatch):
    data = os.urandom(1000)
    (tmp_path / "file").write_bytes(data)
    real = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: real(fd, min(size, 7)))
    assert FileSystem().read_file(tmp_path / "file", 4096)[0] == data


def test_a_touched_file_has_both_times(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    FileSystem().touch(tmp_path / "file", 1_600_000_000_123_456_789)
    status = (tmp_path / "file").stat()
    assert abs(status.st_mtime_ns - 1_600_000_000_123_456_789) < 1000
    assert status.st_atime_ns == status.st_mtime_ns


def test_touching_does_not_follow_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    before = (tmp_path / "file").stat().st_mtime_ns
    (tmp_path / "link").symlink_to(tmp_path / "file")
    FileSystem().touch(tmp_path / "link", 1_600_000_000_000_000_000)
    assert (tmp_path / "file").stat().st_mtime_ns == before


@pytest.mark.parametrize("may", ["anything", "set to now", "nothing"])
def test_a_touch_says_whether_the_times_were_set(tmp_path, monkeypatch, may):
    real = os.utime

    def utime(path, *, ns=None, follow_symlinks=True):
        if may == "nothing" or (ns is not None and may == "set to now"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        real(path, **({} if ns is None else {"ns": ns}), follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "utime", utime)
    before = time.time_ns()
    assert FileSystem().touch(tmp_path, 1) is (may != "nothing")
    assert (tmp_path.stat().st_mtime_ns == 1) is (may == "anything")
    if may == "set to now":
        assert tmp_path.stat().st_mtime_ns > before - 10**9


def test_a_touch_of_nothing_and_on_a_read_only_disk_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        FileSystem().touch(tmp_path / "file", 1)
    monkeypatch.setattr(os, "utime", fail_with(errno.EROFS))
    with pytest.raises(OSError, match="Read-only"):
        FileSystem().touch(tmp_path, 1)


def test_open_readers_keep_the_bytes_of_an_unlinked_file(tmp_path):
    (tmp_path / "file").write_bytes(b"kept")
    with FileSystem().open_read(tmp_path / "file") as (fd, status):
        FileSystem().unlink(tmp_path / "file")
        assert os.pread(fd, status.st_size, 0) == b"kept"
    assert os.listdir(tmp_path) == []
