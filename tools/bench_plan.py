"""The benchmarks' KV as the adapter sees it: plain attention, a KVCache a layer."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache

from bench_kv import Shape
from kvstore_mlx.codecs import codec_of
from kvstore_mlx.plan import Leaf, Part, Plan

__all__ = ["plain_plan"]


def plain_plan(shape: Shape) -> Plan:
    """The plan of a model whose blocks have this shape."""

    def make() -> list[Any]:
        return [KVCache() for _ in range(shape.layers)]

    codec = codec_of(KVCache())
    assert codec is not None
    leaves = tuple(Leaf(str(layer), "KVCache", codec, {}) for layer in range(shape.layers))
    return Plan(make, leaves, tuple(Part(spec.name, spec.dtype, spec.outer, spec.inner) for spec in shape.specs))
