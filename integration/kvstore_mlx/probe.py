"""A short forward pass when a model is loaded: what its caches look like, and whether a restored one computes the same.

Three tokens are prefilled, copied out, put into fresh caches, and one more token is computed from both. A model whose
restored caches give other logits is served without the cache directory, whatever its classes are called. Whether the
padding of a batch reaches what it computes is looked at when a batch has some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from kvstore_mlx.live import Extras, ExtrasHook, Live
from kvstore_mlx.plan import Plan
from kvstore_mlx.restoring import Restoring

__all__ = ["Forward", "masks_left_padding", "masks_padding", "probe", "stretches_beyond"]

Forward: TypeAlias = Callable[[list[int], Sequence[Any]], Any]
"""Computes tokens onto caches and returns the logits ``[vocabulary]`` after the last one."""

_TOKENS = [1, 2, 3]
_OTHER = [1, 2, 7]
"""The same but for the last token, in the same shapes: no kernel has a reason to round the others' rows otherwise."""
_NEXT = 4

_LONG, _SHORT = list(range(1, 151)), list(range(2, 102))
"""Prompts of a batch: the shorter one is filled up by fifty tokens, no multiple of any block's size."""

_STRETCHING = {"DynamicNTKScalingRoPE"}
"""Modules that rotate keys by the length at which their piece of the prefill ends, once that is past a limit."""

_BY_PLACE = ("index_block_size",)
"""Attributes of modules that pick key blocks by their place in the buffer, which the padding of a batch moves.

Named, because it takes more tokens than a probe can spend: minimax_m3_vl sees all of its first 16 blocks of 128."""

_TOLERANCE = 1e-3
"""Largest difference of a logit, relative to the largest logit, that kernels may make of the same values in other
memory. None was seen; a row in a wrong place gives differences of the order of the logits themselves."""


def probe(make: Callable[[], list[Any]], forward: Forward, extras: ExtrasHook | None = None) -> Plan:
    """The plan of a model. ValueError with a reason when its caches cannot be saved and restored."""
    attached = _Attached(extras)
    caches = make()
    forward(_TOKENS, caches)
    attached.keep()
    plan = Plan.of(make, caches)
    restored = _copied(plan, Live(plan, caches, None, len(_TOKENS)))
    ours = forward([_NEXT], restored)
    attached.put_back()
    theirs = forward([_NEXT], caches)
    mx.eval(ours, theirs)
    attached.reset()
    alike, difference = _alike(ours, theirs)
    if not alike:
        raise ValueError(f"its restored caches compute other logits (by {difference:.3g})")
    other = make()
    forward(_OTHER, other)
    attached.reset()
    _refuse_what_looks_ahead(plan, caches, other)
    return plan.after(caches, theirs)


def _refuse_what_looks_ahead(plan: Plan, caches: Sequence[Any], other: Sequence[Any]) -> None:
    """ValueError when rows of two prompts that begin alike differ before the prompts do.

    A prefix that is cut out of such rows would know what followed it elsewhere. (phi3small in mlx-lm 0.32.2 adds its
    mask of truth values to the scores.)
    """
    for part, *both in zip(plan.parts, plan.arrays(caches), plan.arrays(other), strict=True):
        if part.stored and mx.issubdtype(both[0].dtype, mx.floating):
            alike, difference = _alike(*(array[:, :, : len(_TOKENS) - 1] for array in both))
            if not alike:
                raise ValueError(f"its rows depend on the tokens that follow them (by {difference:.3g})")


def stretches_beyond(model: Any) -> int | None:
    """The tokens up to which a row is the same in whatever piece of a prefill it is computed; None for most models.

    Where a piece ends beyond them, a rope of these rotates all of it otherwise.
    """
    limits = (module.max_position_embeddings for module in model.modules() if type(module).__name__ in _STRETCHING)
    return min(limits, default=None)


def masks_padding(model: Any) -> bool:
    """Whether a prompt that mlx-lm fills up to a longer one of its batch leaves the caches that it leaves alone."""
    try:
        together = PromptProcessingBatch(model, [0, 1], [make_prompt_cache(model) for _ in range(2)])
        together.prompt([list(_LONG), list(_SHORT)])
        padded, alone = together.extract_cache(1), _prefilled(model, _SHORT)
        ours, theirs = (model(mx.array([[_NEXT]]), cache=caches)[0, -1] for caches in (padded, alone))
        return _alike(ours, theirs)[0]
    except Exception:  # a family whose batches fail altogether
        return False


def masks_left_padding(model: Any) -> bool:
    """Whether a sequence computes the same beside a longer one, where it lies behind padding: a piece, then a token."""
    if any(hasattr(module, name) for module in model.modules() for name in _BY_PLACE):
        return False
    try:
        beside = PromptProcessingBatch(model, [0, 1], [_prefilled(model, each) for each in (_LONG, _SHORT)])
        alone = _prefilled(model, _SHORT)
        for piece in ([*_TOKENS, *_TOKENS], [_NEXT]):
            ours = model(mx.array([piece, piece]), cache=beside.prompt_cache)[1, -1]
            theirs = model(mx.array([piece]), cache=alone)[0, -1]
        return _alike(ours, theirs)[0]
    except Exception:  # as above
        return False


def _prefilled(model: Any, tokens: list[int]) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([tokens]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def _alike(ours: Any, theirs: Any) -> tuple[bool, float]:
    """Whether two rows of logits are equal but for rounding, and their largest difference."""
    # Some families forbid tokens by minus infinity, of which two have no difference.
    forbidden = (ours == theirs) & mx.isinf(theirs)
    ours, theirs = (mx.where(forbidden, 0, each) for each in (ours, theirs))
    difference, largest = (float(mx.abs(each).max().astype(mx.float32)) for each in (ours - theirs, theirs))
    return difference <= _TOLERANCE * max(largest, 1e-30), difference


class _Attached:
    """What an engine keeps beside its caches, put back before each of two passes that must be alike."""

    def __init__(self, hook: ExtrasHook | None) -> None:
        self._hook = hook
        self._kept = Extras()
        self.reset()

    def keep(self) -> None:
        if self._hook is not None:
            self._kept = self._hook.capture()

    def put_back(self) -> None:
        if self._hook is not None:
            self._hook.restore(self._kept)

    def reset(self) -> None:
        if self._hook is not None:
            self._hook.restore(None)


def _copied(plan: Plan, live: Live) -> list[Any]:
    """The same caches, by way of the bytes that would be written and read."""
    target = Restoring(plan, live.count)
    rows = live.rows
    if rows.specs:
        buffers = target.allocate(rows.specs, live.count)
        for spec, data in zip(rows.specs, rows.copy(0, live.count), strict=True):
            at = 0
            for run in buffers[spec.name].runs(spec, 0, live.count):
                run[:] = memoryview(data).cast("B")[at : at + run.nbytes]
                at += run.nbytes
    values = None
    if plan.stateful:
        state = live.state(decode=False)
        memory = target.allocate_state(state.tensors)
        for tensor, data in zip(state.tensors, state.data, strict=True):
            if tensor.nbytes:
                memory[tensor.name].cast("B")[:] = memoryview(data).cast("B")
        values = state.values
    caches, _, _ = target.caches(live.count, values)
    return caches
