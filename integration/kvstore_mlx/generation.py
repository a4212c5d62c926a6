"""Decode after a prefill of kvstore's, as mlx_lm.stream_generate does, from logits that may have been saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse, generate_step

from kvstore_mlx.fingerprint import Quantization
from kvstore_mlx.prefill import with_prefix
from kvstore_mlx.recording import Recording

__all__ = ["Run", "answer", "check_limit", "tokens_of"]


@dataclass
class Run:
    """One prompt on its way: its caches, the logits ``[vocabulary]`` after its last token, and what was reused.

    seconds: from the lookup to these logits.
    """

    tokens: list[int]
    caches: list[Any]
    logits: Any
    cached_tokens: int
    restored_bytes: int
    recording: Recording | None
    seconds: float = 0.0


def tokens_of(tokenizer: Any, prompt: Any) -> list[int]:
    """A prompt (a text, tokens, or an array of them) as mlx_lm.stream_generate tokenizes it."""
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=special))
    tokens: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
    return [int(token) for token in tokens]


def check_limit(max_tokens: int) -> None:
    """ValueError for a number of tokens that is none; as in mlx-lm, -1 is no limit and 0 is a mistake."""
    if max_tokens < 1 and max_tokens != -1:
        raise ValueError(f"max_tokens must be at least 1, or -1 for no limit, not {max_tokens}")


def answer(
    model: Any,
    tokenizer: Any,
    run: Run,
    max_tokens: int,
    *,
    sampler: Callable[[Any], Any] | None,
    processors: Sequence[Callable[[Any, Any], Any]],
    quantization: Quantization | None,
    finish: Callable[[Run, list[int]], None],
) -> Iterator[GenerationResponse]:
    """Responses token by token; finish is called with what was forwarded, whether all responses are taken or not.

    But not when something fails between two of them (an interrupt, a logits processor): some layers may have seen a
    token then that others have not, and recurrent ones cannot tell.
    """
    generated: list[int] = []
    whole = False
    detokenizer = tokenizer.detokenizer
    started = time.perf_counter()

    def response(token: int, logprobs: Any, reason: str | None) -> GenerationResponse:
        return GenerationResponse(
            text=detokenizer.last_segment,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=len(run.tokens),
            prompt_tps=len(run.tokens) / max(run.seconds, 1e-9),
            generation_tokens=len(generated),
            generation_tps=len(generated) / max(time.perf_counter() - started, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
        )

    try:
        for token, logprobs in _tokens(
            model, run, max_tokens, sampler=sampler, processors=processors, quantization=quantization
        ):
            generated.append(token)
            reason = None
            if token in tokenizer.eos_token_ids:
                reason = "stop"
            else:
                detokenizer.add_token(token)
                reason = "length" if len(generated) == max_tokens else None
            if reason is not None:
                detokenizer.finalize()
            each = response(token, logprobs, reason)
            # The engine has forwarded a token when it hands it over; but the first one came out of the prefill.
            whole = len(generated) > 1
            yield each
            if reason is not None:
                return
            whole = False
    finally:
        if whole:
            finish(run, [*run.tokens, *generated])


def _tokens(
    model: Any,
    run: Run,
    max_tokens: int,
    *,
    sampler: Callable[[Any], Any] | None,
    processors: Sequence[Callable[[Any, Any], Any]],
    quantization: Quantization | None,
) -> Iterator[tuple[int, Any]]:
    """Tokens and log-probabilities ``[vocabulary]``: the first from the prefill's logits, the others the engine's."""
    choose: Callable[[Any], Any] = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))
    logits = run.logits[None]
    for processor in processors:
        logits = processor(mx.array(run.tokens), logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    first: int = choose(logprobs).item()
    yield first, logprobs[0]
    if max_tokens == 1:
        return
    settings: dict[str, Any] = {}
    if quantization is not None:
        settings = {
            "kv_bits": quantization.bits,
            "kv_group_size": quantization.group_size,
            "quantized_kv_start": quantization.start,
        }
    yield from generate_step(
        mx.array([first]),
        model,
        max_tokens=-1 if max_tokens == -1 else max_tokens - 1,
        sampler=sampler,
        logits_processors=[with_prefix(processor, run.tokens) for processor in processors],
        prompt_cache=run.caches,
        **settings,
    )
