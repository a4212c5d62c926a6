"""Sessions on tiny models, in this process: prompts, greedy answers with their logits, and how near two of them are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

import kvstore_mlx
from families import build
from family_arguments import VOCABULARY
from kvstore import Durability
from kvstore_mlx.boundaries import MIN_TOKENS
from kvstore_mlx.opening import open_session
from kvstore_mlx.session import Session

INTERVAL = 64

PROMPT = "explain why a cache must never lie. " * 12


@cache
def model_of(family: str) -> Any:
    """A tiny model with seeded random weights that looks at its whole prompt."""
    return build(family)


def session_of(directory: Path | None, family: str, **more: Any) -> Session:
    """A session that cuts its prefill at short intervals, and restores whether that pays or not."""
    settings = {"interval": INTERVAL, "prefill_step": INTERVAL, "durability": Durability.NONE, "min_tokens": MIN_TOKENS}
    settings |= more
    return open_session(directory, model_of(family), identity={"family": family}, **settings)


def opener(loaded: tuple[Any, Any], model: Path, folder: Path, **settings: Any) -> Callable[..., Session]:
    """What opens sessions of a loaded model as users do, on one directory; more settings come before these."""

    def start(**more: Any) -> Session:
        every = {"min_tokens": MIN_TOKENS, **settings, **more}
        return kvstore_mlx.open(folder / "cache", *loaded, path=str(model), **every)

    return start


def prompt_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, VOCABULARY) for _ in range(count)]


def array_of(logits: Any) -> np.ndarray:
    return np.array(logits.astype(mx.float32))


def decode(session: Session, run: Any, count: int) -> tuple[list[int], list[np.ndarray]]:
    """Greedy tokens after a prefill, and the log-probabilities each was chosen from; see forwarded."""
    first = int(mx.argmax(run.logits).item())
    tokens, logits = [first], [array_of(run.logits)]
    settings = {}
    if session._quantization is not None:
        quantization = session._quantization
        settings = {
            "kv_bits": quantization.bits,
            "kv_group_size": quantization.group_size,
            "quantized_kv_start": quantization.start,
        }
    steps = generate_step(mx.array([first]), session._model, max_tokens=count - 1, prompt_cache=run.caches, **settings)
    for token, logprobs in steps if count > 1 else ():
        tokens.append(token)
        logits.append(array_of(logprobs))
    return tokens, logits


def forwarded(prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """What the caches hold after decode: generate_step computes one token ahead, but a first token it never saw."""
    return [*prompt, *(answer if len(answer) > 1 else ())]


def assert_same(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], tolerance: float = 0.0) -> None:
    """Logits that differ by no more than this part of the largest; 0 for every bit."""
    assert len(ours) == len(theirs)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        difference = float(np.abs(a - b).max())
        assert difference <= tolerance * float(np.abs(b).max()), (step, difference)
