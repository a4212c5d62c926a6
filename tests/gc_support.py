"""What the tests of whole-directory commands share: stores that are looked at later, and what must hold afterwards.

A file's ctime cannot be set, so nothing is made old here; the collector's clock runs ahead instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from core_support import FAST, INFO, SPECS, open_store, prompt, restore, span, spans

from kvstore import FileSystem, Namespace, NamespaceInfo, State, StateTensor, Store
from kvstore.gc import GcReport, Policy, collect
from kvstore.keys import block_digest, checksum
from kvstore.layout import Layout, NodeName
from kvstore.manifest import decode

INTERVAL = 16
SECOND = 10**9
HOUR = 3600 * SECOND
DAY = 24 * HOUR
TENANT = NamespaceInfo({"model": "test", "dtype": "f16"}, label="another")

__all__ = ["SPECS", "prompt", "restore", "span", "spans"]


def ahead(path: Path, by: int = HOUR, fs: FileSystem = FAST) -> Store:
    """A store of which the clock runs ahead, so that everything written so far is that old."""
    return open_store(path, None, fs, clock=lambda: time.time_ns() + by)


def publish(space: Namespace, tokens: Sequence[int], *borders: int) -> None:
    """Publish a prompt as spans between borders (by default its chunks)."""
    borders = borders or (*range(0, len(tokens), INTERVAL), len(tokens))
    space.publish(tokens, spans(tokens, *borders))


def state(seed: int = 0) -> State:
    """A small boundary state."""
    return State((StateTensor("s", "U8", (3,)),), [bytes([seed, 1, 2])], {"n": seed})


def manifests(root: Path) -> list[Path]:
    """All manifests."""
    return sorted(path for path in Layout(root).nodes.rglob("*") if NodeName.is_file_name(path.name))


def blocks(root: Path) -> list[Path]:
    """All blocks."""
    return sorted(path for path in Layout(root).blocks.rglob("*") if Layout.is_block_name(path.name))


def set_used(store: Store, space: Namespace, tokens: Sequence[int], seconds_ago: float) -> None:
    """Let all nodes of a prompt have been used that long before now (the real now)."""
    match = space.lookup(tokens)
    assert match.steps
    stamp = time.time_ns() - int(seconds_ago * SECOND)
    for step in match.steps:
        for path in (step.path, step.path.with_suffix(".state")):
            if path.exists():
                os.utime(path, ns=(stamp, stamp))


def as_newer(path: Path) -> None:
    """Make a manifest one of a format to come, whole in itself."""
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    path.write_bytes(bytes(data[:-16]) + checksum(bytes(data[:-16])))


def forge_circle(root: Path) -> Path:
    """Two manifests whose names say that each continues the other; the real one whose content they have."""
    good = manifests(root)[0]
    a, b = "a" * 32, "b" * 32
    for parent, key in ((a, b), (b, a)):
        folder = good.parent.parent / parent[:2]
        folder.mkdir(exist_ok=True)
        (folder / f"{parent}-9-{key}-{'0' * 18}.kv").write_bytes(good.read_bytes())
    return good


def check_valid(root: Path, *, parents: bool = True) -> None:
    """What must hold of a cache directory at every moment: blocks that are whole, parents, and KV beside states.

    parents: False after a power cut, which may undo the removal of a child after that of its parent became durable.
    """
    layout = Layout(root)
    found = [(path, decode(path.read_bytes())) for path in manifests(root)]
    keys = {(manifest.fingerprint, manifest.key) for _, manifest in found if manifest.kind == "kv"}
    for path, manifest in found:
        assert path == layout.node(manifest.fingerprint[:16].hex(), manifest.name, manifest.kind)
        if manifest.kind == "state" and parents:
            assert (manifest.fingerprint, manifest.key) in keys, f"{path} has lost its KV"
        if manifest.first and parents:
            assert (manifest.fingerprint, manifest.parent) in keys, f"{path} has lost its parent"
        for ref in manifest.blocks:
            data = layout.block(ref.digest).read_bytes()
            assert block_digest([data]) == ref.digest
            assert len(data) == ref.size


def named(root: Path) -> set[str]:
    """Names of all blocks that manifests name."""
    return {ref.digest.hex() for path in manifests(root) for ref in decode(path.read_bytes()).blocks}


def space_of(store: Store, info: NamespaceInfo = INFO) -> Namespace:
    """A namespace of a store."""
    return store.namespace(info)


def gc(path: Path, by: int = HOUR, fs: FileSystem = FAST, **policy) -> GcReport:
    """Collect with a clock that runs ahead."""
    with ahead(path, by, fs) as later:
        return collect(later.context, Policy(**policy))


def fill(store, conversations=4, tokens=40):
    space = space_of(store)
    for seed in range(conversations):
        publish(space, prompt(tokens, seed))
        set_used(store, space, prompt(tokens, seed), 1000 - seed)
    return space
