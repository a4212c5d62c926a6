"""Operations that mlx-lm has only as Metal kernels, written in MLX's own operations for a CPU.

Two families need them: bitnet (a product with packed ternary weights) and muse_spark (six fused kernels). Each
stand-in computes what its kernel does in float32; on a Mac nothing is replaced.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx

__all__ = ["install"]


def install(name: str, module: ModuleType) -> None:
    """Replace what a family's module cannot run here; nothing for most families and wherever Metal is."""
    if mx.metal.is_available():
        return
    if name == "bitnet":
        module.BitLinear.execute_matmul_kernel = _ternary_product
    if name == "muse_spark":
        for stand_in in (_norm_add_norm, _qk_norm, _qk_norm_rope, _routing, _combine, _norm_gate):
            setattr(module, _NAMES[stand_in.__name__], stand_in)


_NAMES = {
    "_norm_add_norm": "norm_add_norm",
    "_qk_norm": "qk_norm",
    "_qk_norm_rope": "qk_norm_rope",
    "_routing": "expert_routing",
    "_combine": "post_expert_norm_combine",
    "_norm_gate": "rms_norm_sigmoid_gate",
}


def _ternary_product(layer: Any, x: mx.array, packed: mx.array) -> mx.array:
    """Product with weights of -1, 0 and 1, of which row r of quarter q lies in bits 2q of byte row r."""
    rows = [((packed >> (2 * quarter)) & 3).astype(mx.float32) - 1 for quarter in range(4)]
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    product: mx.array = (x @ mx.concatenate(rows).T) * scale
    return product


def _norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)


def _norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    scaled = branch if post_weight is None else branch * post_weight
    stream = alpha * stream + beta * _norm(scaled, None, post_eps)
    return stream, None if next_norm is None else _norm(stream, next_norm.weight, next_norm.eps)


def _qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(*qkvg.shape[:-1], -1, head_dim)
    heads = _norm(heads, None, eps)
    return [heads[..., :n_heads, :] * query_scale, heads[..., n_heads:, :]]


def _qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **norm: Any) -> list[mx.array]:
    return [
        mx.fast.rope(
            part.transpose(0, 2, 1, 3), part.shape[-1], traditional=True, base=rope_base, scale=1.0, offset=offset
        ).transpose(0, 2, 1, 3)
        for part in _qk_norm(qkvg, **norm)
    ]


def _routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale]


def _combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    return (_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(axis=-2)


def _norm_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    batch, _, length, _ = x.shape
    return _norm(x, None, eps).transpose(0, 2, 1, 3).reshape(batch, length, -1) * mx.sigmoid(gate)
