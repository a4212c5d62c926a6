"""The part of a match that a prefill computed, for callers that do not take what came out of decoding.

KV that a decode step computed can differ in its last bits from what a prefill of the same tokens gives (3.5e-6 were
seen with multi-head latent attention), so manifests record which it was. What follows a decoded block was computed from
it, and is left out as well.
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.context import Space
from kvstore.keys import TOKEN_BYTES
from kvstore.lookup import Match, Step, find, has_state, load_manifest

__all__ = ["find_prefilled"]

_TRIES = 4
"""Tails of one chunk that are looked at before an earlier chunk's state is taken."""


def find_prefilled(space: Space, packed: bytes, *, trimmable: bool) -> Match:
    """As find, for what a prefill computed alone. See Namespace.lookup."""
    match = find(space, packed, trimmable=trimmable)
    best, rows = _prefill_part(match, trimmable=trimmable)
    for _ in range(0 if trimmable else _TRIES):
        # The longest tail ends in what was decoded; a shorter one beside it may end with a prefill's state.
        limit = min(rows, match.count - 1)
        if limit <= best.count:
            break
        match = find(space, packed[: limit * TOKEN_BYTES], trimmable=False)
        part, rows = _prefill_part(match, trimmable=False)
        best = max(best, part, key=lambda one: one.count)
    return best


def _prefill_part(match: Match, *, trimmable: bool) -> tuple[Match, int]:
    """The longest beginning of a match without anything decoded, and how many of its tokens have only prefilled KV.

    Opens every manifest on the way.
    """
    kept: list[Step] = []
    count = border = 0
    whole = True
    for step in match.steps:
        manifest = load_manifest(match.space, step.path)
        if manifest is None:
            break
        kept.append(step)
        for ref in manifest.blocks:
            whole = whole and not ref.decode
            if whole:
                count = min(ref.first + ref.count, match.count)
                border = count if count == ref.first + ref.count else border
        if whole and not manifest.blocks:
            count = border = min(step.end, match.count)
        if not whole:
            break
    if trimmable:
        kept = [step for step in kept if step.first < count]
        exact = bool(kept) and kept[-1].end == count
        beyond = match.beyond if count == match.count else 0
        return replace(match, steps=tuple(kept), count=count, border=border, exact=exact, beyond=beyond), count
    while kept and not (kept[-1].end <= count and _prefilled_state(match.space, kept[-1])):
        kept.pop()
    end = kept[-1].end if kept else 0
    return replace(match, steps=tuple(kept), count=end, border=end, exact=True), count


def _prefilled_state(space: Space, step: Step) -> bool:
    """Whether the state at a node is there and came out of a prefill."""
    if not has_state(space, step):
        return False
    manifest = load_manifest(space, step.path.with_suffix(".state"))
    return manifest is not None and not any(ref.decode for ref in manifest.blocks)
