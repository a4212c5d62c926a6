"""What the core's tests share: prompts whose KV is a function of their tokens, memory to restore into, stores.

The KV of a token depends on every token before it, as in a model: equal tokens after different prefixes have different
bytes, so a block served for the wrong prefix cannot go unnoticed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128
from itertools import pairwise
from pathlib import Path

from kvstore import (
    Durability,
    FileSystem,
    Match,
    Namespace,
    NamespaceInfo,
    Restored,
    Span,
    Store,
    TensorBuffer,
    TensorSpec,
)

INFO = NamespaceInfo({"model": "test", "dtype": "bf16"}, label="a test")

SPECS = (
    TensorSpec("0.keys", "BF16", 2, (4,)),
    TensorSpec("0.values", "U8", 3, (5,)),
    TensorSpec("1.keys", "F32", 1, (2, 2)),
)
"""Odd on purpose: dtypes, heads and inner shapes all differ, so that mixed-up strides show."""

FILL = 0xAA
"""What memory holds before a restore; no restored row may still be made of it."""

FAST = FileSystem(durability=Durability.NONE)
"""For tests about something else than durability."""


@lru_cache(maxsize=256)
def _states(tokens: tuple[int, ...]) -> list[bytes]:
    """For each token a digest of the prefix that it ends."""
    states = [b""]
    for token in tokens:
        states.append(shake_128(states[-1] + token.to_bytes(4, "little")).digest(16))
    return states[1:]


@lru_cache(maxsize=1 << 14)
def _row(state: bytes, name: str, head: int, size: int) -> bytes:
    return shake_128(b"%s %s %d" % (state, name.encode(), head)).digest(size)


def kv(tokens: Sequence[int], first: int, end: int, specs: Sequence[TensorSpec] = SPECS) -> list[bytes]:
    """The KV of tokens first .. end as a model would make it: one buffer a tensor, ``[outer][token][inner]``."""
    states = _states(tuple(tokens[:end]))[first:]
    return [
        b"".join(_row(state, spec.name, head, spec.row_bytes) for head in range(spec.outer) for state in states)
        for spec in specs
    ]


def span(tokens: Sequence[int], first: int, end: int, *, decode: bool = False, phase: int = 0) -> Span:
    """The span of tokens first .. end, ready to publish."""
    return Span(first, end - first, SPECS, kv(tokens, first, end), decode, phase)


def spans(tokens: Sequence[int], *borders: int) -> list[Span]:
    """Consecutive spans between borders."""
    return [span(tokens, first, end) for first, end in pairwise(borders)]


class Memory:
    """An engine's buffers. Calling it is the allocate of a read; there is room for some tokens more than asked for."""

    def __init__(self, spare: int = 3) -> None:
        self.spare = spare
        self.calls = 0
        self.specs: tuple[TensorSpec, ...] = ()
        self.capacity = 0
        self.data: dict[str, bytearray] = {}

    def __call__(self, specs: tuple[TensorSpec, ...], tokens: int) -> dict[str, TensorBuffer]:
        self.calls += 1
        self.specs, self.capacity = specs, tokens + self.spare
        self.data = {spec.name: bytearray([FILL]) * spec.span_bytes(self.capacity) for spec in specs}
        return {name: TensorBuffer(memoryview(data), self.capacity) for name, data in self.data.items()}

    def rows(self, spec: TensorSpec, first: int, end: int) -> bytes:
        """Tokens first .. end of one tensor as ``[outer][token][inner]``, gathered from the strided buffer."""
        row = spec.row_bytes
        starts = [head * self.capacity * row for head in range(spec.outer)]
        return b"".join(bytes(self.data[spec.name][at + first * row : at + end * row]) for at in starts)


def restore(space: Namespace, tokens: Sequence[int], *, threads: int = 2) -> Restored:
    """Look a prompt up, read it, and fail unless every restored byte is the one the model would compute."""
    return read_checked(space, space.lookup(tokens), tokens, threads=threads)


def read_checked(space: Namespace, match: Match, tokens: Sequence[int], *, threads: int = 2) -> Restored:
    """Read a match of tokens; see restore."""
    memory = Memory()
    restored = space.read(match, memory, threads)
    assert restored.tokens <= match.count <= len(tokens)
    assert restored.border <= restored.tokens
    if restored.tokens:
        assert memory.specs == SPECS
        for spec, expected in zip(SPECS, kv(tokens, 0, restored.tokens), strict=True):
            assert memory.rows(spec, 0, restored.tokens) == expected, f"wrong bytes in {spec.name}"
    return restored


def prompt(count: int, seed: int = 0) -> list[int]:
    """Some tokens, the same every time: prompts of different seeds differ from the first token on."""
    digest = shake_128(b"prompt %d" % seed).digest(4 * count)
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 4 * count, 4)]


def open_store(path: Path, interval: int | None = 16, fs: FileSystem = FAST, **kwargs) -> Store:
    """A store in path without syncing, interval 16 unless it exists with another."""
    return Store.open(path, interval=interval, fs=fs, **kwargs)


def files(root: Path) -> dict[str, bytes]:
    """Every regular file below root with its content, locks and staging left out."""
    return {
        name: path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and (name := str(path.relative_to(root))).split("/")[0] not in {"locks", "tmp"}
    }


def node_files(root: Path) -> list[Path]:
    """Manifests, shortest node first within each parent."""
    return sorted(
        (root / "objects" / "nodes").rglob("*.kv"), key=lambda path: (int(path.name.split("-")[1]), path.name)
    )


def block_files(root: Path) -> list[Path]:
    """Blocks, by name."""
    return sorted(path for path in (root / "objects" / "blocks").rglob("*") if path.is_file())


def clone(source: Path, target: Path) -> Path:
    """A copy of a cache directory, mtimes kept, as rsync would make it."""
    return Path(shutil.copytree(source, target, symlinks=True))
