"""tools/verify_filesystem.py: an ordinary disk keeps every promise, and each one that is broken is found.

A broken file system is a real one behind os functions that lie, which is all that a check can see of one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import verify_checks
import verify_filesystem
import verify_limits
import verify_processes

ROOT = Path(__file__).resolve().parents[2]
REAL = {name: getattr(os, name) for name in ("rename", "open", "stat", "utime", "read", "write", "listdir", "unlink")}


def verdict(name: str, tmp_path: Path) -> verify_filesystem.Result:
    (result,) = verify_filesystem.run(tmp_path, [(name, verify_filesystem.ALL[name])])
    return result


def test_an_ordinary_disk_keeps_every_promise(tmp_path, capsys):
    assert verify_filesystem.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line[:4].strip() for line in lines[:-2]} <= {"ok", "warn"}
    assert len(lines) == len(verify_filesystem.ALL) + 2
    assert lines[-1].startswith("kvstore can use it")
    # Where tests run is a temporary folder, which is worth a warning; a busy machine may be slow, or full.
    warned = {line.split("  ")[1].strip() for line in lines if line.startswith("warn")}
    assert warned <= {
        *("location", "speed", "room", "flock of a killed process", "clock", "ctime moves"),
        *("rename, seen by another process", "replacement, seen by another process"),
    }
    assert list(tmp_path.iterdir()) == []


def test_as_a_command_with_json(tmp_path):
    tool = ROOT / "tools" / "verify_filesystem.py"
    done = subprocess.run([sys.executable, tool, tmp_path, "--json"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["directory"] == str(tmp_path.resolve())
    assert document["usable"] is True
    assert [check["name"] for check in document["checks"]] == list(verify_filesystem.ALL)
    assert {"name", "status", "sentence", "seconds"} == set(document["checks"][0])


def test_a_folder_that_is_not_there_is_a_wrong_command_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        verify_filesystem.main([str(tmp_path / "none")])
    assert stop.value.code == 2
    assert "not a folder" in capsys.readouterr().err


def test_one_failure_is_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify_filesystem, "ALL", {"broken": lambda _: verify_checks.fail("of course")})
    assert verify_filesystem.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("FAIL  broken  of course\n")
    assert "Not for kvstore: 1 of 1" in out
    assert verify_filesystem.main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["usable"] is False


def test_an_error_nobody_expected_is_a_failure_and_the_folder_goes(tmp_path):
    def broken(folder):
        (folder / "left").mkdir()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (result,) = verify_filesystem.run(tmp_path, [("broken", broken)])
    assert result.status == "FAIL"
    assert result.sentence.startswith("Input/output error")
    assert list(tmp_path.iterdir()) == []


# What is broken, and the check that must see it.


def copying_rename(source, target):
    """Not atomic: the target is there with nothing in it for a moment."""
    data = Path(source).read_bytes()
    fd = REAL["open"](target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    time.sleep(0.0005)
    os.write(fd, data)
    os.close(fd)
    REAL["unlink"](source)


def rename_refusing(source, target):
    if os.path.exists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    REAL["rename"](source, target)


def rename_doing_nothing(_source, _target):
    pass


def create_over(path, flags, mode=0o777, **kwargs):
    return REAL["open"](path, flags & ~os.O_EXCL, mode, **kwargs)


class Status:
    """A stat with other values."""

    def __init__(self, status, **other) -> None:
        self._status, self.__dict__ = status, {"_status": status, **other}

    def __getattr__(self, name):
        return getattr(self._status, name)


def stat_with(**other):
    def lying(path, **kwargs):
        status = REAL["stat"](path, **kwargs)
        return Status(status, **{name: change(getattr(status, name)) for name, change in other.items()})

    return lying


def utime_ignored(path, times=None, *, ns=None, **kwargs):
    pass


def rename_touching(source, target):
    REAL["rename"](source, target)
    REAL["utime"](target)


def raising(code):
    def fails(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    return fails


def listing_upper(path="."):
    return [name.upper() for name in REAL["listdir"](path)]


def open_short_names(path, flags, mode=0o777, **kwargs):
    if len(os.path.basename(os.fspath(path))) > 64:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return REAL["open"](path, flags, mode, **kwargs)


def open_short_paths(path, flags, mode=0o777, **kwargs):
    if "objects" in os.fspath(path):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return REAL["open"](path, flags, mode, **kwargs)


def half_written(fd, parts):
    return os.write(fd, b"".join(parts)[:1000])


def open_for_all(path, flags, mode=0o777, **kwargs):
    fd = REAL["open"](path, flags, mode, **kwargs)
    if flags & os.O_CREAT:
        os.fchmod(fd, 0o777)
    return fd


def read_stale(fd, count):
    """Only of the check's own file: starting a process reads, too."""
    return raising(errno.ESTALE)() if count == 100 else REAL["read"](fd, count)


HOUR = 3600 * 10**9

BROKEN = [
    ("rename over a file", {"rename": copying_rename}, "FAIL", "while a file is replaced"),
    ("rename over a file", {"rename": rename_refusing}, "FAIL", "File exists"),
    ("rename over a file", {"rename": rename_doing_nothing}, "FAIL", "does not replace"),
    ("rename between folders", {"rename": raising(errno.EXDEV)}, "FAIL", "cross-device"),
    ("rename between folders", {"rename": copying_rename}, "warn", "inode"),
    ("exclusive creation", {"open": create_over}, "FAIL", "O_EXCL"),
    ("mtime can be set", {"utime": utime_ignored}, "FAIL", "eviction"),
    ("mtime can be set", {"utime": raising(errno.EPERM)}, "FAIL", "not permitted"),
    ("mtime can be set", {"stat": stat_with(st_mtime_ns=lambda ns: ns // 10**9 * 10**9)}, "warn", "coarse"),
    ("mtime is kept", {"rename": rename_touching}, "FAIL", "changes its mtime"),
    ("ctime moves", {"stat": stat_with(st_ctime_ns=lambda _: 5)}, "warn", "rsync"),
    ("clock", {"stat": stat_with(st_mtime_ns=lambda ns: ns - HOUR)}, "FAIL", "-3600 s"),
    ("clock", {"stat": stat_with(st_mtime_ns=lambda ns: ns + 55 * 10**8)}, "warn", "+5"),
    ("fsync of files", {"fsync": raising(errno.EIO)}, "FAIL", "every publish would fail"),
    ("fsync of files", {"fdatasync": raising(errno.ENOTSUP)}, "warn", "power cut"),
    ("fsync of folders", {"fsync": raising(errno.EIO)}, "FAIL", "every publish would fail"),
    ("fsync of folders", {"fsync": raising(errno.EINVAL)}, "warn", "power cut"),
    ("posix_fallocate", {"posix_fallocate": raising(errno.EIO)}, "FAIL", "every publish would fail"),
    ("posix_fallocate", {"posix_fallocate": lambda *_: None}, "FAIL", "as long as asked for"),
    ("posix_fallocate", {"posix_fallocate": raising(errno.EOPNOTSUPP)}, "ok", "while writing"),
    ("case of names", {"listdir": listing_upper}, "FAIL", "ABCDEF.KV"),
    ("case of names", {"listdir": lambda _: ["abcdef.kv"]}, "ok", "folds case: harmless"),
    ("unicode in names", {"listdir": lambda _: ["cafe\u0301"]}, "ok", "normalised: harmless"),
    ("unicode in names", {"open": raising(errno.EILSEQ)}, "warn", "ASCII"),
    ("length of names", {"open": open_short_names}, "FAIL", "100 characters"),
    ("length of paths", {"open": open_short_paths}, "FAIL", "too long"),
    ("hard links", {"link": raising(errno.EPERM)}, "ok", "none: harmless"),
    ("private modes", {"open": open_for_all}, "warn", "others may read"),
    ("open file, unlinked", {"read": lambda _fd, _count: b""}, "FAIL", "restores"),
    ("open file, unlinked", {"unlink": raising(errno.EBUSY)}, "FAIL", "restores"),
    ("open file, unlinked", {"read": read_stale}, "FAIL", "restores"),
    ("preadv and writev", {"writev": half_written}, "FAIL", "does not return"),
    ("allocated blocks", {"stat": stat_with(st_blocks=lambda _: 0)}, "FAIL", "budget could not be kept"),
    ("allocated blocks", {"stat": stat_with(st_blocks=lambda n: n + 4096)}, "warn", "waste"),
    ("sparse files", {"stat": stat_with(st_blocks=lambda _: 32768)}, "ok", "holes take room"),
    ("a small store", {"posix_fallocate": raising(errno.EIO)}, "FAIL", "cannot use the cache directory"),
    ("rename, seen by another process", {"rename": rename_doing_nothing}, "FAIL", "does not see"),
    ("replacement, seen by another process", {"rename": rename_doing_nothing}, "FAIL", "the old file"),
    ("open file, unlinked by another process", {"read": read_stale}, "FAIL", "restores"),
]


@pytest.mark.parametrize(
    ("name", "lies", "status", "said"), BROKEN, ids=[f"{name} {'+'.join(lies)} {s}" for name, lies, s, _ in BROKEN]
)
def test_a_broken_promise_is_found(tmp_path, monkeypatch, name, lies, status, said):
    monkeypatch.setattr(verify_processes, "_PATIENCE_S", 0.2)
    with monkeypatch.context() as lying:
        for function, lie in lies.items():
            lying.setattr(os, function, lie)
        check = verify_filesystem.ALL[name]
        folder = tmp_path / "check"
        folder.mkdir()
        found = verify_filesystem._one(check, folder / "0")
    assert found.status == status, found
    assert said in found.sentence


def test_a_python_without_scatter_reads(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    assert verify_checks.scatter_gather(tmp_path).status == "FAIL"


LOCKS = [
    ("flock between processes", lambda *_: None, "FAIL", "two processes hold one lock"),
    ("flock of a killed process", raising(errno.EWOULDBLOCK), "FAIL", "holds its lock"),
    ("flock between threads", lambda *_: None, "FAIL", "twice"),
    ("flock between threads", raising(errno.ENOLCK), "FAIL", "refuses to publish"),
    ("flock between threads", raising(errno.EWOULDBLOCK), "FAIL", "does not work"),
]


@pytest.mark.parametrize(("name", "lie", "status", "said"), LOCKS)
def test_broken_locks_are_found(tmp_path, monkeypatch, name, lie, status, said):
    monkeypatch.setattr(verify_processes, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(fcntl, "flock", lie)
    result = verdict(name, tmp_path)
    assert (result.status, said in result.sentence) == (status, True), result


@pytest.mark.parametrize("name", ["flock between processes", "flock of a killed process"])
def test_locks_that_another_process_cannot_take(tmp_path, monkeypatch, name):
    broken = verify_processes._HELPER.replace("fcntl.flock(fd", "raise OSError(37, 'No locks'); (fd")
    monkeypatch.setattr(verify_processes, "_HELPER", broken)
    result = verdict(name, tmp_path)
    assert result.status == "FAIL"
    assert "No locks" in result.sentence


def test_a_file_that_another_process_cannot_remove(tmp_path, monkeypatch):
    broken = verify_processes._HELPER.replace("os.unlink(path)", "raise OSError(16, 'busy')")
    monkeypatch.setattr(verify_processes, "_HELPER", broken)
    assert verdict("open file, unlinked by another process", tmp_path).status == "FAIL"


def test_what_is_seen_late_is_a_warning(tmp_path, monkeypatch):
    late = verify_processes._HELPER.replace(
        'if command == "stat":',
        'import time\n        if command in ("stat", "read"):\n            time.sleep(0.12)\n'
        '        if command == "stat":',
    )
    monkeypatch.setattr(verify_processes, "_HELPER", late)
    assert verdict("rename, seen by another process", tmp_path).status == "warn"


def test_little_room_is_a_warning(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], 10, *real[5:])))
    assert verdict("room", tmp_path).status == "warn"


def test_a_slow_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_limits, "_median", lambda times, call: (call(), 0.6)[1])
    result = verdict("speed", tmp_path)
    assert result.status == "warn"
    assert "2,048 tokens" in result.sentence


def test_every_promise_has_been_broken_here():
    tested = {name for name, *_ in (*BROKEN, *LOCKS)} | {"location", "room", "speed", "open file, unlinked"}
    assert tested == set(verify_filesystem.ALL)


def test_the_place_is_judged_by_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_limits, "warnings_for", lambda path: [f"{path} is bad"])
    result = verdict("location", tmp_path)
    assert result.status == "warn"
    assert result.sentence.endswith(f"{tmp_path} is bad")
