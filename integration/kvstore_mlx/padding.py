"""Which sequences of a batch hold other rows than they would alone, because of the padding that a batch gives them.

mlx-lm fills prompts of unequal lengths up on the right while they are computed together, and sequences of unequal
lengths lie behind padding on the left from then on. A dozen of its families do not mask the one in every layer, and one
that picks blocks of keys by their place minds the other. What such a batch answers is mlx-lm's; it must not be found
again later, in memory or on disk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from kvstore_mlx.codecs import codec_of
from kvstore_mlx.plan import leaves_of
from kvstore_mlx.probe import masks_left_padding, masks_padding

__all__ = ["Padding"]


class Padding:
    """What the padding of one batch generator has reached; asked after each of its steps, on its thread."""

    _looked_at: ClassVar[tuple[weakref.ref[Any] | None, dict[str, bool]]] = (None, {})
    """The model that was looked at last, and what was found: each takes a prefill of a few hundred tokens."""

    def __init__(self, model: Any, stream: Any) -> None:
        self._model = model
        self._stream = stream
        self._done: dict[int, int] = {}
        self._reached: set[int] = set()
        self._lost = False

    def __contains__(self, uid: int) -> bool:
        return self._lost or uid in self._reached

    def give_up(self) -> None:
        """It could not be told of one step: whatever this generator holds may be reached from then on."""
        self._lost = True

    def look(self, prompt_responses: Sequence[Any], *batches: Any) -> set[int]:
        """Sequences that a step has just reached for the first time; batches are the generator's, after that step."""
        steps = {}
        for response in prompt_responses:
            if response.end_of_prompt:
                self._done.pop(response.uid, None)
                continue
            steps[response.uid] = response.progress[0] - self._done.get(response.uid, 0)
            self._done[response.uid] = response.progress[0]
        filled = {uid for uid, step in steps.items() if step < max(steps.values())} - self._reached
        if filled and self._masks("on the right", masks_padding):
            filled = set()
        for batch in batches:
            # A batch of one has no padding: mlx-lm takes away what all of its sequences have.
            if len(batch.uids) > 1 and not self._masks("on the left", masks_left_padding):
                filled |= {uid for index, uid in enumerate(batch.uids) if _start(batch.prompt_cache, index) > 0}
        new = filled - self._reached
        self._reached |= new
        return new

    def forget(self, uid: int) -> None:
        """A sequence has left the generator."""
        self._done.pop(uid, None)
        self._reached.discard(uid)

    def _masks(self, side: str, look: Callable[[Any], bool]) -> bool:
        known, found = Padding._looked_at
        if known is None or known() is not self._model:
            found = {}
            Padding._looked_at = weakref.ref(self._model), found
        if side not in found:
            with mx.stream(self._stream):
                found[side] = look(self._model)
        return found[side]


def _start(caches: Sequence[Any], index: int) -> int:
    """Rows of padding before a sequence's first token, the most that a cache has."""
    extents = [codec.extent(leaf, index) for _, leaf in leaves_of(caches) if (codec := codec_of(leaf)) is not None]
    return max((extent[0] for extent in extents if extent is not None), default=0)
