"""The part of a match that a prefill computed, for callers that do not take what came out of decoding.

KV that a decode step computed can differ in its last bits from what a prefill of the same tokens gives (3.5e-6 were seen
with multi-head latent attention), so manifests record which it was. What follows a decoded block was computed from it,
and is left out as well.
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.context import Space
from kvstore.lookup import Match, Step, has_state, load_manifest

__all__ = ["prefill_part"]


def prefill_part(match: Match, *, trimmable: bool) -> Match:
    """The longest beginning of a match without anything decoded; opens every manifest on the way."""
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
        return replace(match, steps=tuple(kept), count=count, border=border, exact=bool(kept) and kept[-1].end == count)
    while kept and not (kept[-1].end <= count and _prefilled_state(match.space, kept[-1])):
        kept.pop()
    end = kept[-1].end if kept else 0
    return replace(match, steps=tuple(kept), count=end, border=end, exact=True)


def _prefilled_state(space: Space, step: Step) -> bool:
    """Whether the state at a node is there and came out of a prefill."""
    if not has_state(space, step):
        return False
    manifest = load_manifest(space, step.path.with_suffix(".state"))
    return manifest is not None and not any(ref.decode for ref in manifest.blocks)
