"""What the stress tests share: a check of a whole directory that uses nothing of fsck's, and a quick place to test."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvstore import FileSystem, Store
from kvstore.layout import NodeName
from kvstore.manifest import decode

__all__ = ["Hesitant", "examine", "lacks", "quick_place", "staged"]


def quick_place() -> tempfile.TemporaryDirectory:
    """An empty folder, in memory where there is such a place: these tests are about calls, not about a disk."""
    return tempfile.TemporaryDirectory(
        prefix="kvstore-stress-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )


def examine(root: Path) -> dict[str, int]:
    """Fail unless every manifest decodes, continues one that is there, and names blocks that are there, bit for bit.

    Blocks that no manifest names are counted: a killed publish leaves them, and the collector removes them.
    """
    found = {path: path.read_bytes() for path in (root / "objects" / "nodes").rglob("*") if NodeName.parse(path.name)}
    manifests = {path: decode(data) for path, data in found.items()}
    keys = {(each.fingerprint, each.key) for each in manifests.values() if each.kind == "kv"}
    named: set[str] = set()
    for path, manifest in manifests.items():
        assert path.name == manifest.name.file(manifest.kind), path
        assert path.parent.parent.name == manifest.fingerprint[:16].hex(), path
        if manifest.first:
            assert (manifest.fingerprint, manifest.parent) in keys, f"{path} has no parent"
        if manifest.kind == "state":
            assert (manifest.fingerprint, manifest.key) in keys, f"{path} has no KV beside it"
        for ref in manifest.blocks:
            digest = ref.digest.hex()
            if digest not in named:
                block = (root / "objects" / "blocks" / digest[:2] / digest).read_bytes()
                assert len(block) == ref.size, f"block {digest} of {path}"
                assert xxhash.xxh3_128_hexdigest(block) == digest, f"block {digest} of {path}"
            named.add(digest)
    blocks = {path.name for path in (root / "objects" / "blocks").rglob("*") if path.is_file()}
    assert named <= blocks
    return {"manifests": len(manifests), "blocks": len(blocks), "unnamed": len(blocks - named)}


def staged(root: Path) -> list[Path]:
    """Whatever lies in tmp/."""
    return sorted((root / "tmp").rglob("*"))


def lacks(store: Store, path: Path) -> list[str]:
    """What a manifest needs and is not there. It is the same file before and after the look: so it was without."""
    parsed = NodeName.parse(path.name)
    try:
        if parsed is None or not (seen := identity(path)):
            return []
        manifest = decode(path.read_bytes())
    except FileNotFoundError:
        return []
    needs = [store.context.layout.block(ref.digest) for ref in manifest.blocks]
    lost = [str(need) for need in needs if not need.exists()]
    if manifest.first and not has(path.parent.parent.iterdir(), parsed[0].parent):
        lost.append("its parent")
    if parsed[1] == "state" and not has([path.parent], parsed[0].key):
        lost.append("its KV")
    return lost if identity(path) == seen else []


def has(folders: Iterable[Path], key: str) -> bool:
    """Whether the KV manifest of a key is in one of these folders."""
    return any(f"-{key}-" in name and name.endswith(".kv") for folder in folders for name in os.listdir(folder))


def identity(path: Path) -> tuple[int, int] | None:
    """Which file it is; its inode number alone may be another one's a moment later."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_ctime_ns


@dataclass(frozen=True)
class Hesitant(FileSystem):
    """Waits now and then before a call, so that others come between any two of them, not only where a disk is slow."""

    choose: random.Random = field(default_factory=random.Random)
    often: float = 0.2

    def _wait(self) -> None:
        if self.choose.random() < self.often:
            time.sleep(self.choose.random() * 0.02)

    def create(self, path: Path) -> int:
        self._wait()
        return super().create(path)

    def rename(self, source: Path, target: Path) -> None:
        self._wait()
        super().rename(source, target)

    def touch(self, path: Path, time_ns: int) -> bool:
        self._wait()
        return super().touch(path, time_ns)

    def unlink(self, path: Path) -> None:
        # A collection has thousands of these.
        if self.choose.random() < 0.1:
            self._wait()
        super().unlink(path)

    def sync_dir(self, path: Path) -> None:
        self._wait()
        super().sync_dir(path)

    def pause(self, _where: str) -> None:
        """At the named points of gc and fsck."""
        if self.choose.random() < self.often:
            time.sleep(self.choose.random() * 0.1)
