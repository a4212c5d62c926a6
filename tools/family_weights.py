"""Seeded random weights under which a tiny model remembers its whole prompt and does not repeat itself.

Weights at their initial values make a test pass for nothing: state space models forget within a few tokens, zeroed
parts let nothing through, and a model whose layers add little repeats its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

__all__ = ["randomize"]

GAIN = 1.6
"""Standard deviation of a matrix row times the square root of its length: layers change what they are given."""


_NAMED = {
    "A_log": (-4.0, 0.5),
    "dt_bias": (-1.0, 0.3),
    "scales": (0.03, 0.005),
    "biases": (-0.045, 0.005),
    "weight_scale": (0.2, 0.0),
}
"""Mean and deviation of what sets how long a state space model remembers, and of what belongs to packed weights."""


def randomize(model: Any, seed: int, special: Mapping[str, tuple[float, float]]) -> None:
    """Set every parameter of a model, by its name and its place alone: the same in every process.

    special: mean and deviation of parameters whose name ends so, where a family needs other ones.
    """
    parameters = tree_flatten(model.parameters())
    made = []
    for place, (name, old) in enumerate(parameters):
        key = mx.random.key(seed * 10_000 + place)
        made.append((name, _value(name, old, key, special)))
    model.update(tree_unflatten(made))
    mx.eval(model.parameters())


def _value(name: str, old: mx.array, key: mx.array, special: Mapping[str, tuple[float, float]]) -> mx.array:
    if not mx.issubdtype(old.dtype, mx.floating):
        return _packed(old, key)
    noise = mx.random.normal(old.shape, key=key)
    last = name.rsplit(".", 1)[-1]
    if last == "signs":
        return mx.where(noise > 0, 1.0, -1.0).astype(old.dtype)
    named = {**_NAMED, **special}
    suffix = next((suffix for suffix in reversed(named) if name.endswith(suffix)), None)
    if suffix is not None:
        mean, spread = named[suffix]
    elif old.ndim < 2 or (max(old.shape) == old.size and last != "weight"):
        # A vector: the weight of a norm, or something that is added.
        mean, spread = float(last == "weight"), 0.1
    elif "embed" in name or "wte" in name:
        mean, spread = 0.0, 0.1
    else:
        inputs = old.size // old.shape[0] if "conv" in name else old.shape[-1]
        mean, spread = 0.0, GAIN / inputs**0.5
    value: mx.array = (mean + spread * noise).astype(old.dtype)
    return value


def _packed(old: mx.array, key: mx.array) -> mx.array:
    """Packed weights: any bits are good ones for two-bit affine weights; ternary ones have no fourth value."""
    if old.dtype == mx.uint8:
        quarters = mx.random.randint(0, 3, (4, *old.shape), key=key).astype(mx.uint8)
        return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    if old.dtype == mx.uint32:
        halves = mx.random.randint(0, 1 << 16, (2, *old.shape), key=key).astype(mx.uint32)
        return halves[0] | halves[1] << 16
    return old
