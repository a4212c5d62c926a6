"""Where a cache directory lies when nobody says so, and what speaks against a place somebody named.

Looks at paths and at the table of mounts only: nothing is created, opened or locked. What a mount really keeps of the
promises that the store needs is for tools/verify_filesystem.py to find out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

import platformdirs

__all__ = ["VARIABLE", "Mount", "Place", "mount_of", "place_of", "warnings_for"]

VARIABLE = "KVSTORE_DIR"
"""The environment variable that names a directory for whoever names none."""


class Place(NamedTuple):
    """Where to look for a cache directory, and who said so: the command line, the environment, or nobody."""

    path: Path
    source: Literal["given", "environment", "default"]

    @property
    def why(self) -> str:
        """Why there, to follow the word "because"."""
        return {
            "given": "the command line names it",
            "environment": f"{VARIABLE} names it",
            "default": f"it is the default, and neither the command line nor {VARIABLE} names another",
        }[self.source]


class Mount(NamedTuple):
    """One mounted file system. kind: as the system calls it, such as ext4, nfs4 or fuse.sshfs."""

    point: str
    kind: str


_MOUNTS_LINUX = Path("/proc/self/mounts")
_MOUNT_MACOS = "/sbin/mount"

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afpfs|webdav|davfs\d?|ncpfs|afs|9p|ceph|glusterfs|lustre|beegfs|gpfs|ocfs2|"
    r"fuse\.(sshfs|rclone|s3fs|goofys|gcsfuse|mount-s3|davfs2?|curlftpfs|smbnetfs|glusterfs|ceph.*|juicefs)"
)
_MEMORY = {"tmpfs", "ramfs"}

# The folder that a service gives itself, and what people call the service. macOS mounts them all in one place, too.
_SYNCED = (
    (re.compile(r"Mobile Documents|iCloud ?Drive.*"), "iCloud Drive"),
    (re.compile(r"Dropbox( .*|-.*)?"), "Dropbox"),
    (re.compile(r"OneDrive( .*|-.*)?"), "OneDrive"),
    (re.compile(r"Google ?Drive( .*|-.*)?"), "Google Drive"),
    (re.compile(r"Nextcloud( .*|\d*)?"), "Nextcloud"),
)
_MACOS_SYNCED = ("Library", "CloudStorage")

_TEMPORARY = ("/tmp", "/var/tmp", "/private/tmp", "/private/var/tmp", "/private/var/folders", "/var/folders")  # noqa: S108 - named to be refused, not used


def place_of(given: str | os.PathLike[str] | None = None) -> Place:
    """The directory that is given, else ``$KVSTORE_DIR``, else the default: this user's own among the user's caches.

    (``~/.cache/kvstore/kv``, on macOS ``~/Library/Caches/kvstore/kv``. A folder of its own below kvstore's: adapters
    keep small files there, and a cache directory holds nothing else.)
    """
    if given is not None:
        return Place(_absolute(given), "given")
    if named := os.environ.get(VARIABLE, "").strip():
        return Place(_absolute(named), "environment")
    return Place(platformdirs.user_cache_path("kvstore", appauthor=False) / "kv", "default")


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def warnings_for(path: str | os.PathLike[str]) -> list[str]:
    """What speaks against keeping a cache directory there, one sentence each; the path need not exist yet."""
    given = _absolute(path)
    real = Path(os.path.realpath(given))
    found = []
    if (service := _synced_by(real) or _synced_by(given)) is not None:
        found.append(
            f"{given} is synchronised by {service}, which would upload every gigabyte of the cache and may replace its "
            "files by placeholders; choose a folder that is only on this disk"
        )
    mount = mount_of(real)
    if mount is not None and _NETWORK.fullmatch(mount.kind):
        found.append(
            f"{given} is on a network file system ({mount.kind}), where locks, times and speed may not be what the "
            "store needs; try tools/verify_filesystem.py there, or choose a local disk"
        )
    if mount is not None and mount.kind in _MEMORY:
        found.append(f"{given} is in memory ({mount.kind}) and gone after a restart; choose a folder on a disk")
    elif _is_temporary(real) or _is_temporary(given):
        found.append(f"{given} is a temporary folder, which the system cleans; choose one that stays")
    return found


def mount_of(path: Path) -> Mount | None:
    """The file system that a path lies on, or None when the system does not tell."""
    best = None
    for mount in _mounts():
        # Later lines lie over earlier ones at the same point.
        if path.is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _synced_by(path: PurePath) -> str | None:
    for folder in _dropbox_folders():
        if path.is_relative_to(folder):
            return "Dropbox"
    for part in path.parts:
        for name, service in _SYNCED:
            if name.fullmatch(part):
                return service
    if any(pair == _MACOS_SYNCED for pair in zip(path.parts, path.parts[1:], strict=False)):
        return "a cloud service"
    return None


def _dropbox_folders() -> Iterator[str]:
    """Where Dropbox says that its folders are: people move them."""
    with suppress(OSError, ValueError, RuntimeError, AttributeError):
        document = json.loads((Path.home() / ".dropbox" / "info.json").read_text())
        for account in document.values():
            if isinstance(account, dict) and isinstance(folder := account.get("path"), str) and folder:
                yield folder


def _is_temporary(path: PurePath) -> bool:
    folders = {*_TEMPORARY, tempfile.gettempdir(), os.path.realpath(tempfile.gettempdir())}
    return any(path.is_relative_to(folder) for folder in folders)


def _mounts() -> Iterator[Mount]:
    """What is mounted, in the order it was; nothing when it cannot be known."""
    with suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":  # pragma: no cover - exercised on macOS only
            listed = subprocess.run([_MOUNT_MACOS], capture_output=True, text=True, timeout=5, check=True)  # noqa: S603 - a constant path
            yield from parse_macos_mounts(listed.stdout)
        else:
            yield from parse_linux_mounts(_MOUNTS_LINUX.read_text(errors="surrogateescape"))


def parse_linux_mounts(text: str) -> Iterator[Mount]:
    """Lines of /proc/mounts; blanks in names are written as octal numbers."""
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) > 2:
            yield Mount(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1]), fields[2])


def parse_macos_mounts(text: str) -> Iterator[Mount]:
    """Lines of mount(8): ``//me@nas/share on /Volumes/share (smbfs, nodev, mounted by me)``."""
    for line in text.splitlines():
        if match := re.fullmatch(r".* on (/.*) \(([^,)]+)[^()]*\)", line):
            yield Mount(match[1], match[2])
