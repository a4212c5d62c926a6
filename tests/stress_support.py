"""What the stress tests share: a check of a whole directory that uses nothing of fsck's, and a quick place to test."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import xxhash

from kvstore.layout import NodeName
from kvstore.manifest import decode

__all__ = ["examine", "quick_place", "staged"]


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
