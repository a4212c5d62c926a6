"""Where a prompt is cut so that it can be resumed there, for models that cannot be cut at any token.

A prefill of such a model stops at each boundary for its state to be copied. The same boundaries are used whether or not
a directory is written, so that a prefix is always computed in the same pieces: some CPU kernels round differently in
pieces of other lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["MIN_TOKENS", "Saving", "boundaries", "cut_segments", "stable_end"]

MIN_TOKENS = 64
"""Prompts shorter than this are cheaper to compute than to look up; they are neither saved nor restored."""


@dataclass(frozen=True)
class Saving:
    """How states are thinned, and what is taken from disk. every: chunk borders a state, 0 for none at them.
    min_tokens: the shortest prefix worth saving or restoring, None for what is measured (kvstore_mlx.breakeven).
    """

    every: int = 1
    prefill_only: bool = False
    min_tokens: int | None = None


def boundaries(prompt: int, interval: int, every: int, stable: Iterable[int] = ()) -> tuple[int, ...]:
    """Token counts at which a state of a prompt of this length is saved, in order.

    Every every-th chunk border (none at all when every is 0), the ends of its stable parts (system text, all but the
    last message), and the last token but one: the engine computes at least one token to answer.
    """
    found = {end for end in stable if MIN_TOKENS <= end < prompt}
    if every:
        found.update(range(interval * every, prompt, interval * every))
    if prompt - 1 >= MIN_TOKENS:
        found.add(prompt - 1)
    return tuple(sorted(found))


def cut_segments(segments: Sequence[list[int]], reused: int, wanted: Iterable[int]) -> tuple[list[list[int]], set[int]]:
    """Segments of what is left of a prompt after reused tokens, also cut at the wanted token counts.

    The second result has the token counts at which a segment ends now and did not before. The cut before the last
    token is left to the engine, which makes it itself.
    """
    ends = []
    at = reused
    for segment in segments:
        at += len(segment)
        ends.append(at)
    if not ends:
        return [list(segment) for segment in segments], set()
    added = {end for end in wanted if reused < end < ends[-1] - 1} - set(ends)
    pieces = []
    at = reused
    for segment, end in zip(segments, ends, strict=True):
        cuts = [at, *sorted(cut for cut in added if at < cut < end), end]
        pieces += [segment[a - at : b - at] for a, b in pairwise(cuts)]
        at = end
    return pieces, added


def stable_end(tokenizer: Any, messages: Sequence[Any], prompt: Sequence[int], **template: Any) -> int | None:
    """Tokens of a chat prompt before its last message: what stays when that one is rendered anew or goes on.

    Only text is rendered a second time. What differs is tokenized alone and must be what the prompt ends with; where a
    template does not allow that, there is no such boundary.
    """
    if len(messages) < 2:
        return None
    template = {**template, "tokenize": False}
    try:
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template)
        before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=False, **template)
    except Exception:  # templates raise what they like, for instance when roles do not alternate
        return None
    tail = tokenizer.encode(whole[_common(whole, before) :], add_special_tokens=False)
    end = len(prompt) - len(tail)
    return end if tail and end > 0 and list(prompt[end:]) == list(tail) else None


def _common(a: str, b: str) -> int:
    """Characters that two texts begin with alike, by halving: each step compares at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
