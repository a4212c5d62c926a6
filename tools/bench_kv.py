"""KV of a given shape to benchmark with: random bytes that no file system compresses, laid out as an engine's.

Imports neither MLX nor an engine, so that a measurement which needs none is not charged for it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Durability, FileSystem, Match, Namespace, NamespaceInfo, Span, Store, TensorSpec
from kvstore.lookup import load_manifest

__all__ = [
    "DTYPES",
    "INFO",
    "Payload",
    "Shape",
    "add_shape",
    "block_paths",
    "fill_store",
    "open_match",
    "prompt",
    "shape_named",
    "shape_of",
]

DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
INFO = NamespaceInfo({"model": "bench"}, "made by tools/bench")

_DISTINCT = 4
"""Tensors with contents of their own; the others are copies, which takes a fraction of the time to make."""

_NEVER_ALL_ONES = 0xBFFF
"""Clears one bit of the exponent of every bf16, f16 and f32, so that none is NaN or infinite."""


@dataclass(frozen=True)
class Shape:
    """The attention KV of a model; the default is that of an 8B model: 144 KiB a token."""

    layers: int = 36
    heads: int = 8
    dim: int = 128
    dtype: str = "bf16"

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of a span, as kvstore_mlx names them."""
        return tuple(
            TensorSpec(f"{layer}.{part}", DTYPES[self.dtype], self.heads, (self.dim,))
            for layer in range(self.layers)
            for part in ("keys", "values")
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token."""
        return sum(spec.span_bytes(1) for spec in self.specs)

    def fields(self) -> dict[str, Any]:
        """What makes it, as a child is told."""
        return dataclasses.asdict(self)

    def document(self) -> dict[str, Any]:
        """As it goes into a JSON file."""
        return {**self.fields(), "token_bytes": self.token_bytes}

    def text(self) -> str:
        """As it goes into a title."""
        kib = self.token_bytes / 1024
        return f"{self.layers} layers, {self.heads} heads, {self.dim}, {self.dtype}: {kib:g} KiB a token"


def add_shape(parser: argparse.ArgumentParser, default: Shape) -> None:
    """Options that choose a shape."""
    for name in ("layers", "heads", "dim"):
        number = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=number, help=f"(default: {number})")
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help=f"(default: {default.dtype})")


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that was chosen."""
    return Shape(options.layers, options.heads, options.dim, options.dtype)


def shape_named(document: Mapping[str, Any]) -> Shape:
    """The shape that a JSON file names."""
    return Shape(**{field.name: document[field.name] for field in dataclasses.fields(Shape)})


class Payload:
    """The KV of count tokens, one buffer a tensor, whose content changes at each call of renew."""

    def __init__(self, shape: Shape, count: int, seed: int = 0) -> None:
        self.shape = shape
        self.count = count
        rng = np.random.default_rng(seed)
        tensor_bytes = shape.specs[0].span_bytes(count)
        words = [
            rng.integers(0, 1 << 16, tensor_bytes // 2, dtype=np.uint16) & _NEVER_ALL_ONES for _ in range(_DISTINCT)
        ]
        self._arrays: list[Any] = [words[index % _DISTINCT].copy() for index in range(len(shape.specs))]
        self._renewed = 0

    @property
    def data(self) -> list[memoryview]:
        """The bytes, in payload order."""
        return [memoryview(array).cast("B") for array in self._arrays]

    def renew(self) -> None:
        """Change a few bytes, so that the block of these data is one that no store has yet."""
        self._renewed += 1
        self._arrays[0][:2] = (self._renewed & 0x3FFF, self._renewed >> 14 & 0x3FFF)

    def span(self, first: int, phase: int = 0) -> Span:
        """The data as tokens first and following."""
        return Span(first, self.count, self.shape.specs, self.data, phase=phase)


def prompt(tokens: int) -> list[int]:
    """The prompt that a store is filled with."""
    return list(range(tokens))


def fill_store(
    path: Path, shape: Shape, tokens: int, phase: int, span: int, *, durable: bool, interval: int | None = None
) -> None:
    """Publish the KV of one prompt into a new cache directory, in blocks of span tokens (0: whole chunks)."""
    durability = Durability.BARRIER if durable else Durability.NONE
    with Store.open(path, interval=interval, fs=FileSystem(durability=durability)) as store:
        space = store.namespace(INFO)
        text = prompt(tokens)
        payload: Payload | None = None
        for first, count in _spans(tokens, store.interval, span or store.interval):
            if payload is None or payload.count != count:
                payload = Payload(shape, count, seed=first)
            payload.renew()
            space.publish(text[: first + count], [payload.span(first, phase)])


def _spans(tokens: int, interval: int, span: int) -> Iterator[tuple[int, int]]:
    """First token and count of each block; none crosses the end of a chunk."""
    first = 0
    while first < tokens:
        count = min(span, interval - first % interval, tokens - first)
        yield first, count
        first += count


def open_match(path: Path, tokens: int) -> tuple[Namespace, Match]:
    """The prompt of a filled store, looked up."""
    store = Store.open(path, create=False)
    space = store.namespace(INFO)
    match = space.lookup(prompt(tokens))
    if match.count != tokens:
        raise AssertionError(f"the store holds {match.count} of {tokens} tokens")
    return space, match


def block_paths(match: Match) -> list[Path]:
    """The block files of a match, in the order of their tokens."""
    context = match.space.context
    manifests = [load_manifest(match.space, step.path) for step in match.steps]
    return [context.layout.block(ref.digest) for manifest in manifests if manifest for ref in manifest.blocks]
