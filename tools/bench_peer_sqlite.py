"""The published starting design, as a peer to measure against: an SQLite index over safetensors files.

Each publish serialises every block of the prompt again, the ones that are there too, and replaces their rows. It is
small and honest rather than complete: no eviction, no concurrency; what it leaves out would only cost it more.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kvstore import pack_tokens

__all__ = ["SqliteBlocks"]

_SCHEMA = """
create table if not exists blocks (
    key text primary key, file text not null, first integer, count integer, bytes integer, used real
)
"""


class SqliteBlocks:
    """Blocks of block_tokens tokens by the hash of all tokens up to their end; names are those of the tensors."""

    def __init__(self, folder: Path, names: Sequence[str], block_tokens: int = 2048) -> None:
        self._folder = folder
        self._names = list(names)
        self._block_tokens = block_tokens

    def publish(self, tokens: Sequence[int], arrays: Sequence[Any]) -> None:
        """Save the KV ``[1, heads, tokens, dim]`` of a prompt, one array a tensor."""
        import mlx.core as mx  # noqa: PLC0415

        rows = []
        for key, first, end in self._blocks(tokens):
            path = self._folder / f"{key}.safetensors"
            staged = self._folder / f"staged-{key}.safetensors"
            parts = {name: array[..., first:end, :] for name, array in zip(self._names, arrays, strict=True)}
            mx.save_safetensors(str(staged), parts)
            os.replace(staged, path)
            rows.append((key, path.name, first, end - first, path.stat().st_size, time.time()))
        with closing(self._open()) as base, base:
            base.executemany("insert or replace into blocks values (?, ?, ?, ?, ?, ?)", rows)

    def load(self, tokens: Sequence[int]) -> list[Any]:
        """The arrays of a prompt that was published, in one piece each, evaluated. KeyError when a block is not there.

        ``[1, heads, tokens, dim]``, a tensor at a time, so that no more than one of them is in memory twice.
        """
        import mlx.core as mx  # noqa: PLC0415

        with closing(self._open()) as base:
            files = []
            for key, _, _ in self._blocks(tokens):
                found = base.execute("select file from blocks where key = ?", (key,)).fetchone()
                if found is None:
                    raise KeyError(key)
                files.append(self._folder / found[0])
        blocks: list[Any] = [mx.load(str(file)) for file in files]
        arrays = []
        for name in self._names:
            parts = [block.pop(name) for block in blocks]
            array = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
            mx.eval(array)
            arrays.append(array)
        return arrays

    def _blocks(self, tokens: Sequence[int]) -> list[tuple[str, int, int]]:
        """Key, first token and end of each block of a prompt; the last one may be shorter."""
        made = []
        hashed = hashlib.sha256()
        for first in range(0, len(tokens), self._block_tokens):
            end = min(first + self._block_tokens, len(tokens))
            hashed.update(pack_tokens(tokens[first:end]))
            made.append((hashed.hexdigest(), first, end))
        return made

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(self._folder / "index.sqlite")
        base.execute("pragma journal_mode = wal")
        base.execute("pragma synchronous = normal")
        base.execute(_SCHEMA)
        return base
