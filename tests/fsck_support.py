"""What the tests of fsck share: a store with one of everything, ways to look at it later, and hand-made files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from core_support import FAST, open_store
from gc_support import DAY, TENANT, prompt, publish, space_of, state

from kvstore import FileSystem, Namespace
from kvstore.fsck import Finding, Report, check
from kvstore.keys import node_key
from kvstore.layout import Layout
from kvstore.lookup import Match
from kvstore.manifest import BlockRef, Manifest, decode, encode

LONG = prompt(40)
"""Two chunks and a tail; GROWN goes on from its first chunk, and its tail was published twice."""
GROWN = [*LONG[:16], *prompt(14, 7)]
OTHER = prompt(20, 3)
PROMPTS = [LONG, GROWN, OTHER]

LATER = 2 * DAY


def make(root: Path, fs: FileSystem = FAST) -> Path:
    """A store with one of everything that fsck looks at, and nothing wrong with it."""
    with open_store(root, fs=fs) as store:
        space = space_of(store)
        publish(space, LONG)
        publish(space, GROWN[:25])
        publish(space, GROWN, 25, 30)
        publish(space, OTHER)
        space.publish_state(LONG[:32], state(1))
        space.publish_state(LONG, state(2))
        publish(space_of(store, TENANT), LONG)
        store.tokenizations(b"scope").put(b"request", bytes(range(64)))
    return root


def run(root: Path, *, late: int = LATER, fs: FileSystem = FAST, **options) -> Report:
    """Check a store that was made this long ago."""
    with open_store(root, None, fs, create=False, clock=lambda: time.time_ns() + late) as store:
        return check(store.context, settle_s=0, **options)


def codes(report: Report) -> list[tuple[str, str]]:
    """Severity and code of all findings, sorted."""
    return sorted((finding.severity, finding.code) for finding in report.findings)


def errors(findings: Iterable[Finding]) -> dict[str, str]:
    """The code of every error, by its path."""
    return {finding.path: finding.code for finding in findings if finding.severity == "error"}


def match_of(root: Path, tokens: list[int], info=None) -> Match:
    """Where a prompt's manifests lie."""
    with open_store(root, None, create=False) as store:
        return (space_of(store) if info is None else space_of(store, info)).lookup(tokens)


def node(root: Path, tokens: list[int], kind: str = "kv", info=None) -> Path:
    """The manifest that ends with the last of these tokens."""
    match = match_of(root, tokens, info)
    assert match.count == len(tokens)
    return match.steps[-1].path.with_suffix(f".{kind}")


def refs(path: Path) -> tuple[BlockRef, ...]:
    """The blocks that a manifest names."""
    return decode(path.read_bytes()).blocks


def block(root: Path, path: Path, number: int = 0) -> Path:
    """A block that a manifest names."""
    return Layout(root).block(refs(path)[number].digest)


def rewrite(root: Path, path: Path, **changes) -> Path:
    """A manifest with other content under the name and the key that go with that; the file at path stays."""
    manifest = replace(decode(path.read_bytes()), **changes)
    return put(root, replace(manifest, key=node_key(manifest.parent, manifest.tokens)))


def put(root: Path, manifest: Manifest, namespace: str | None = None) -> Path:
    """Write a manifest where it belongs."""
    layout = Layout(root)
    path = layout.node(namespace or manifest.fingerprint[:16].hex(), manifest.name, manifest.kind)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(encode(manifest))
    path.chmod(0o600)
    return path


def flip(path: Path, offset: int = -1) -> None:
    """Change one bit of a file, and nothing else about it."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def snapshot(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below a folder, to tell whether anything was changed. Reading a FIFO would wait, so only files are."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        if path.name not in ("publish.lock", "locks"):
            found[str(path.relative_to(root))] = (status.st_ino, status.st_mode, status.st_mtime_ns, data)
    return found


def restored(space: Namespace, tokens: list[int]) -> int:
    """How many tokens come back, every byte compared."""
    from core_support import restore

    return restore(space, tokens).tokens
