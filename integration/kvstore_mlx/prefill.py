"""Compute a prompt in pieces, as mlx_lm's generate_step does, with a look at the caches after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from kvstore_mlx.fingerprint import Quantization

__all__ = ["pieces", "prefill", "with_prefix"]


def pieces(first: int, end: int, step: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The pieces of tokens first .. end, none longer than step, that also end at these token counts."""
    found = []
    for last in sorted({cut for cut in cuts if first < cut < end} | {end}):
        while first < last:
            found.append((first, min(first + step, last)))
            first = found[-1][1]
    return found


def prefill(
    model: Any,
    caches: list[Any],
    tokens: Sequence[int],
    parts: Sequence[tuple[int, int]],
    *,
    after: Callable[[int], None],
    quantization: Quantization | None = None,
) -> Any:
    """Forward the parts of tokens onto caches; after is called with the number of tokens that the caches hold then.

    Quantizes caches in place as the engine does. The logits ``[vocabulary]`` after the last token, None for no parts.
    """
    logits = None
    for first, end in parts:
        logits = model(mx.array(list(tokens[first:end]))[None], cache=caches)[0, -1]
        if quantization is not None:
            maybe_quantize_kv_cache(caches, quantization.start, quantization.group_size, quantization.bits)
        # Logits of one token are what is waited for; of more, most are for nobody.
        single = end - first == 1
        mx.eval([cache.state for cache in caches], logits if single else [])
        after(end)
        if not single:
            mx.clear_cache()
    return logits


def with_prefix(processor: Callable[[Any, Any], Any], tokens: list[int]) -> Callable[[Any, Any], Any]:
    """A logits processor that sees these tokens before those that the engine shows it."""
    if not tokens:
        return processor
    prefix = mx.array(tokens)

    def processed(seen: Any, logits: Any) -> Any:
        return processor(mx.concatenate([prefix.astype(seen.dtype), seen]), logits)

    return processed
