"""A file system that stops the process at any call, and what a disk then holds.

FileSystem is the one seam between kvstore and the operating system, so a process killed after its n-th call through it
is a process killed anywhere that matters. What a power cut leaves is rebuilt from what was synced until then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from core_support import files

from kvstore import Durability, FileSystem

SURVIVALS = ("all", "no unsynced data", "zeros for unsynced data", "no unsynced entries")
"""all: the process was killed, the machine goes on. The others: power was cut, and unsynced file data are gone, or
read as zeros (allocated, never written), or every folder is as it was when it was last synced."""


class KilledError(BaseException):
    """The process ends here. Not an Exception: nothing that cleans up after errors may see it and do more."""


@dataclass
class Disk:
    """A folder on a disk that forgets what was not synced. shadow keeps every file that ever had a name."""

    root: Path
    shadow: Path
    data: set[int] = field(default_factory=set)
    entries: dict[Path, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def settled(cls, root: Path, shadow: Path | None = None) -> Self:
        """On which everything in a folder is durable. shadow: beside it if nowhere else."""
        disk = cls(root, root.parent / "shadow" if shadow is None else shadow)
        disk.shadow.mkdir(exist_ok=True)
        for folder, _, names in os.walk(root):
            for name in names:
                disk.keep(Path(folder) / name)
                disk.data.add((Path(folder) / name).stat().st_ino)
            disk.sync_dir(Path(folder))
        return disk

    def keep(self, path: Path) -> None:
        link = self.shadow / str(path.stat().st_ino)
        if not link.exists():
            os.link(path, link)

    def sync_dir(self, path: Path) -> None:
        self.entries[path] = {entry.name: entry.inode() for entry in os.scandir(path)}

    def survive(self, how: str, target: Path) -> Path:
        """A copy of the folder as it is found at the next start."""
        if how == "no unsynced entries":
            for source, name in self._durable(self.root, Path()):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                if source is None:
                    (target / name).mkdir(exist_ok=True)
                else:
                    self._copy(source, target / name, "no unsynced data")
            target.mkdir(exist_ok=True)
            return target
        shutil.copytree(self.root, target, copy_function=lambda a, b: self._copy(Path(a), Path(b), how))
        return target

    def _durable(self, folder: Path, name: Path) -> Iterator[tuple[Path | None, Path]]:
        for child, inode in self.entries.get(folder, {}).items():
            file = self.shadow / str(inode)
            yield (file if file.exists() else None), name / child
            if not file.exists():
                yield from self._durable(folder / child, name / child)

    def _copy(self, source: Path, target: Path, how: str) -> None:
        data = source.read_bytes()
        if how != "all" and source.stat().st_ino not in self.data:
            data = bytes(len(data)) if how.startswith("zeros") else b""
        target.write_bytes(data)


@dataclass(frozen=True)
class CrashingFileSystem(FileSystem):
    """Does limit calls, then is killed before the next one (in the middle of it, for a write)."""

    disk: Disk = field(default_factory=lambda: Disk(Path(), Path()))
    limit: int = 1 << 30
    calls: list[str] = field(default_factory=list)

    @property
    def dead(self) -> bool:
        return len(self.calls) > self.limit

    @property
    def syncs(self) -> bool:
        return self.durability is not Durability.NONE

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if self.dead:
            raise KilledError(name)

    def make_dir(self, path):
        self._step(f"make_dir {path.name}")
        return super().make_dir(path)

    def create(self, path):
        self._step("create")
        fd = super().create(path)
        self.disk.keep(path)
        return fd

    def allocate(self, fd, size):
        self._step("allocate")
        super().allocate(fd, size)

    def write(self, fd, parts):
        data = b"".join(bytes(part) for part in parts)
        try:
            self._step("write")
        except KilledError:
            if len(self.calls) == self.limit + 1:
                os.write(fd, data[: len(data) // 2])
            raise
        self.disk.data.discard(os.fstat(fd).st_ino)
        return super().write(fd, [data])

    def sync_file(self, fd):
        self._step("sync_file")
        if self.syncs:
            self.disk.data.add(os.fstat(fd).st_ino)

    def sync_dir(self, path):
        self._step(f"sync_dir {where(path)}")
        if self.syncs:
            self.disk.sync_dir(path)

    def rename(self, source, target):
        self._step(f"rename {where(target.parent)}")
        super().rename(source, target)

    def unlink(self, path):
        self._step("unlink")
        super().unlink(path)

    def remove_dir(self, path):
        self._step("remove_dir")
        super().remove_dir(path)

    def touch(self, path, time_ns):
        self._step("touch")
        return super().touch(path, time_ns)


@dataclass(frozen=True)
class FaultyFileSystem(CrashingFileSystem):
    """Answers call number limit with an error; with lasting, every later one too that would take room."""

    code: int = 0
    lasting: bool = False

    def _step(self, name):
        self.calls.append(name)
        frees = name in ("unlink", "remove_dir")
        if len(self.calls) == self.limit or (self.lasting and len(self.calls) > self.limit and not frees):
            raise OSError(self.code, os.strerror(self.code))


def where(folder: Path) -> str:
    """The part of a cache directory that a folder belongs to."""
    inside = folder.parts[folder.parts.index("cache") + 1 :] if "cache" in folder.parts else ()
    return next((part for part in inside if part != "objects"), "top")


def copy(source: Path, folder: Path) -> Path:
    """A fresh copy, named as crashes expect it. Copied files are new to the clock, and so is what they need."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return Path(shutil.copytree(source, folder / "cache", symlinks=True))


def disks_after(
    run: Callable[[Path, int], CrashingFileSystem],
    source: Path,
    folder: Path,
    survivals: Sequence[str],
    record_property: Callable[[str, object], None],
) -> Iterator[Path]:
    """What a disk holds after a process was killed after each of its calls, every different content once; how many
    kills and disks that were goes into the report.

    run does the work in a fresh copy of source until it is killed after the given number of calls.
    """
    calls = len(run(copy(source, folder), 1 << 30).calls)
    record_property("points", calls)
    record_property("disks", calls * len(survivals))
    seen: set[int] = set()
    after = folder / "after"
    for limit in range(calls):
        fs = run(copy(source, folder), limit)
        assert fs.dead
        for how in survivals:
            shutil.rmtree(after, ignore_errors=True)
            fs.disk.survive(how, after)
            found = hash(tuple(files(after).items()))
            if found not in seen:
                seen.add(found)
                yield after
