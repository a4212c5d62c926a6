"""The machine under a benchmark: what it is, what else it was doing, and whether it has room.

Figures without conditions are rumours, so every result carries what is gathered here.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvstore.sizes import format_size

__all__ = [
    "ROOT",
    "BenchError",
    "OtherWork",
    "PeakMemory",
    "conditions",
    "data_folder",
    "drop_all_caches",
    "drop_page_cache",
    "need_disk",
    "need_memory",
    "written_by_this_process",
]

ROOT = Path(__file__).resolve().parent.parent

_PACKAGES = ("kvstore-llm", "mlx", "mlx-lm", "numpy", "xxhash")
_SPARE_DISK = 1 << 30
_SPARE_MEMORY = 1 << 30


class BenchError(Exception):
    """A benchmark cannot be made; the message is one sentence for people."""


def conditions(folder: Path) -> dict[str, Any]:
    """Machine, versions, date, and the file system that folder lies on."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "file_system": _file_system(folder),
        "transparent_hugepages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": list(os.getloadavg()),
    }


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return f"{match[1] if match else platform.processor() or platform.machine()} ({platform.machine()})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit the code is of, marked when files differ from it."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _file_system(folder: Path) -> str | None:
    """Type of the file system, where /proc tells: the longest mount point above the folder."""
    best, kind = "", None
    for line in (_read("/proc/mounts") or "").splitlines():
        _, point, name, *_ = line.split()
        inside = folder.resolve().is_relative_to(point)
        if inside and len(point) > len(best):
            best, kind = point, name
    return kind


class OtherWork:
    """Cores that other processes used between two moments; what makes two runs differ most."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = self._foreign()

    @staticmethod
    def _foreign() -> float | None:
        """CPU seconds of everything but this process and the children it has waited for."""
        match = re.match(r"cpu\s+([\d ]+)", _read("/proc/stat") or "")
        if match is None:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, match[1].split())
        busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return busy - times.user - times.system - times.children_user - times.children_system

    def cores(self) -> float | None:
        """Mean number of cores since this was made; None where the system does not tell."""
        now = self._foreign()
        if now is None or self._before is None:
            return None
        return max(0.0, (now - self._before) / max(time.monotonic() - self._began, 1e-9))


def need_disk(folder: Path, size: int) -> None:
    """Refuse to begin what would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < size + _SPARE_DISK:
        raise BenchError(
            f"{folder} has {format_size(free)} free and this needs {format_size(size + _SPARE_DISK)}; "
            "free some space, choose another --dir, or measure fewer tokens"
        )


def need_memory(size: int) -> None:
    """Refuse to begin what would make the machine swap, where it is known how much memory is available."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    available = int(match[1]) * 1024 if match else None
    if available is not None and available < size + _SPARE_MEMORY:
        raise BenchError(
            f"{format_size(available)} of memory are available and this needs {format_size(size + _SPARE_MEMORY)}; "
            "measure fewer tokens or a smaller shape"
        )


@contextmanager
def data_folder(parent: Path, *, keep: bool) -> Iterator[Path]:
    """A folder of this run's own below parent, removed afterwards unless it is to be kept."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"run-{os.getpid()}-{time.monotonic_ns():x}"
    folder.mkdir()
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                parent.rmdir()


def drop_page_cache(paths: list[Path]) -> None:
    """Drop files from the page cache, where the system can: clean pages only, so they must have been synced.

    A virtual machine's host may still have them in its own.
    """
    if not hasattr(os, "posix_fadvise"):
        raise BenchError("this system has no posix_fadvise to drop files from its cache with; leave out --cold")
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def drop_all_caches() -> None:
    """Drop page cache, dentries and inodes. What is dirty is written first, because only clean pages go."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    except OSError as error:
        raise BenchError(
            f"the page cache cannot be dropped ({error.strerror}); be root, or leave out --cold"
        ) from error


def peak_memory() -> int:
    """The most resident memory this process has had so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class PeakMemory:
    """Peak of this process's resident memory over what it had when this was made.

    Linux can forget an earlier peak, so that an import's does not hide a benchmark's; elsewhere the growth of the peak
    is all that is known.
    """

    def __init__(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = _status("VmRSS") or peak_memory()

    def above(self, payload: int) -> int:
        """Peak over the beginning and over payload bytes that were meant to be filled."""
        return (_status("VmHWM") or peak_memory()) - self._before - payload


def _status(field: str) -> int | None:
    match = re.search(rf"^{field}:\s+(\d+) kB", _read("/proc/self/status") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def written_by_this_process() -> int | None:
    """Bytes that this process handed to the system so far; None where nothing tells."""
    try:
        match = re.search(r"^wchar: (\d+)$", Path("/proc/self/io").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None
