"""What `bench break-even` holds times against: a plain read of the same bytes, and the engine alone."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_child import run_child
from bench_machine import drop_all_caches

__all__ = ["child", "engine_alone", "likeliest", "raw_read", "raw_read_into_new", "sums"]

_SPECIAL = 17
"""Token ids from here on end no answer."""


def likeliest(logprobs: Any) -> Any:
    """The best token that ends no answer."""
    import mlx.core as mx  # noqa: PLC0415

    return mx.argmax(logprobs[..., _SPECIAL:], axis=-1) + _SPECIAL


def engine_alone(engine: tuple[Any, Any], session: Any, tokens: Sequence[int], count: int) -> float:
    """Seconds to mlx-lm's first response to the last of the tokens, of count, with the KV of the others in its memory.

    engine: the model and its tokenizer. session: where that KV comes from.
    """
    from mlx_lm import stream_generate  # noqa: PLC0415 - imports the engine

    restored = session.restore(tokens)
    if restored.tokens != len(tokens) - 1:
        raise AssertionError(f"{restored.tokens} of {len(tokens) - 1} tokens were restored")
    started = time.perf_counter()
    answer = stream_generate(
        *engine, list(tokens[-1:]), max_tokens=count, prompt_cache=restored.caches, sampler=likeliest
    )
    next(iter(answer))
    seconds = time.perf_counter() - started
    for _ in answer:
        pass
    return seconds


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """A read into memory that nobody touched: what a process that just began has."""
    return {"seconds": raw_read(Path(job["store"]), job["size"], cold=job["cold"], new=True)}


def raw_read_into_new(job: Mapping[str, Any], size: int) -> float:
    """The same, from outside of that process."""
    seconds: float = run_child("bench_floors", {"store": job["store"], "size": size, "cold": job["cold"]})["seconds"]
    return seconds


def sums(one: Mapping[str, list[float]], two: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Floors of the parts that were measured in the same process, by length."""
    return {at: [a + b for a, b in zip(values, two[at], strict=True)] for at, values in one.items()}


def raw_read(store: Path, size: int, *, cold: bool, new: bool = False) -> float:
    """Seconds to read so many bytes of blocks with plain preadv, once the memory for them has been touched.

    new: into memory that nobody has touched. Whatever is restored right after a start goes there, and the first touch
    of memory costs more than the copy.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    seconds = 0.0
    for _ in range(1 if new else 2):
        if cold:
            drop_all_caches()
        at = 0
        seconds = 0.0
        for path in sorted((store / "objects" / "blocks").rglob("*"), key=lambda path: -path.stat().st_size):
            if at == size or not path.is_file():
                continue
            started = time.perf_counter()
            fd = os.open(path, os.O_RDONLY)
            view = memoryview(memory)[at:]
            offset = 0
            while view.nbytes and (got := os.preadv(fd, [view], offset)):
                view, offset, at = view[got:], offset + got, at + got
            os.close(fd)
            seconds += time.perf_counter() - started
    return seconds
