"""A batch of unequal prompts through mlx-lm's BatchGenerator and the server's second tier, cold and then restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from family_runs import ROUNDING, STEP, Uninterrupted, forward, pieces, tokens_of
from family_scenarios import ANSWER, INTERVAL, PROMPT, SHORT, Outcome, cuts_of, open_directory, stateful_of
from kvstore.fs import Durability
from kvstore.store import Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.engine import RecordingBatchGenerator
from kvstore_mlx.forms import ModelSpace
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.spaces import Settings, make_space
from kvstore_mlx.tier import TieredPromptCache
from kvstore_mlx.versions import check_versions
from kvstore_mlx.writer import Writer

__all__ = ["FAILS", "KEY", "LEFT_OUT", "PROMPTS", "batch", "batchable", "kept", "run_batch", "tier_of"]

PROMPTS = [PROMPT, SHORT, tokens_of(21, 211), [*PROMPT[:128], *tokens_of(22, 60)]]
BESIDE = [tokens_of(23, 150), SHORT]
"""The second joins while the first is answered, and is answered behind padding."""
FAILS = "mlx-lm's own batch fails"
LEFT_OUT = "not kept, because padding reaches it: what is computed "
KEY = ("tiny", None, None)


class _Spaces:
    """What TieredPromptCache asks of kvstore_mlx.spaces.Spaces, for a model that is no file."""

    def __init__(self, space: ModelSpace) -> None:
        self._space = space
        self.phase = address_phase()

    def of(self, model_key: Any) -> ModelSpace:
        """The one model's."""
        del model_key
        return self._space


def batchable(model: Any) -> bool:
    """As mlx_lm.server decides it."""
    return all(hasattr(cache, "merge") for cache in make_prompt_cache(model))


def batch(row: str, model: Any, directory: Path) -> Outcome:
    """Tokens of four prompts together: with everything saved, and with everything restored, as of each prompt alone."""
    outcome = Outcome()
    stateful = stateful_of(model, row)
    alone = [
        Uninterrupted(model).prefill(prompt, cuts_of(stateful, prompt)).answer(ANSWER).tokens for prompt in PROMPTS
    ]
    try:
        plain = run_batch(
            BatchGenerator(model, prefill_step_size=STEP), [_segments(stateful, prompt) for prompt in PROMPTS]
        )
    except Exception as error:
        outcome.notes.append(f"{FAILS} ({type(error).__name__})")
        return outcome
    if plain != alone:
        outcome.notes.append("mlx-lm's own batch of unequal prompts gives other tokens than each prompt alone")
        return outcome
    with Store.open(directory, interval=INTERVAL, durability=Durability.NONE) as store:
        for name in ("batch, first write", "batch, restored"):
            tier, writer = tier_of(store, row, model)
            generator = RecordingBatchGenerator(model, prefill_step_size=STEP, tier=tier)
            reused: list[int] = []
            tokens = run_batch(generator, [[prompt] for prompt in PROMPTS], tier, reused)
            outcome.checks[name] = "" if tokens == plain else "other tokens than plain mlx-lm's"
            if name == "batch, restored" and min(reused) < INTERVAL // 2:
                outcome.checks[name] = f"{reused} tokens were restored"
            writer.close(60.0)
    return outcome


def kept(row: str, model: Any, directory: Path) -> Outcome:
    """What of a batch memory and disk know later goes on as each prompt alone, whatever the batch itself answered."""
    outcome = Outcome()
    for name, prompts, apart in (("with longer ones", PROMPTS, 0), ("beside a longer one", BESIDE, 4)):
        folder = directory / name.partition(" ")[0]
        with Store.open(folder, interval=INTERVAL, durability=Durability.NONE) as store:
            tier, writer = tier_of(store, row, model)
            generator = RecordingBatchGenerator(model, prefill_step_size=STEP, tier=tier)
            answers = run_batch(generator, [[prompt] for prompt in prompts], tier, apart=apart)
            writer.close(60.0)
        whole = True
        with open_directory(folder, model, row, None) as session:
            for prompt, answer in zip(prompts, answers, strict=True):
                held = len(prompt) + len(answer)
                tokens = [*prompt, *answer, *tokens_of(24, 3)]
                alone = Uninterrupted(model).prefill(prompt, cuts_of(session.stateful, prompt))
                for token in answer:
                    forward(model, alone.caches, [token])
                expected = _go_on(model, alone.caches, tokens, held)
                run = session.prefill(tokens)
                found = [("disk", run.cached_tokens, run.logits)]
                caches, rest = tier._from_memory(KEY, tokens)  # noqa: SLF001 - without the directory
                if caches is not None:
                    found.append(
                        ("memory", len(tokens) - len(rest), _go_on(model, caches, tokens, len(tokens) - len(rest)))
                    )
                for place, known, logits in found:
                    far = _far(logits, expected)
                    if far > ROUNDING:
                        outcome.checks[f"kept, {name}"] = f"{far:.1e} off from {place} ({known} of {held} tokens)"
                whole = whole and min(known for _, known, _ in found) == held and len(found) == 2
        outcome.checks.setdefault(f"kept, {name}", "")
        if not whole:
            outcome.notes.append(f"{LEFT_OUT}{name}")
    return outcome


def _go_on(model: Any, caches: list[Any], tokens: Sequence[int], count: int) -> Any:
    """The logits after tokens of which caches hold so many, in a session's pieces: plamo3's mask is one row wider than
    its window, which makes a difference of whether the last token is one.
    """
    for first, last in pieces(count, len(tokens), []):
        logits = forward(model, caches, tokens[first:last])
    return logits


def _far(ours: Any, theirs: Any) -> float:
    """The largest difference of a logit, over the largest; a batch rounds otherwise."""
    ours, theirs = (np.array(each.astype(mx.float32)) for each in (ours, theirs))
    finite = np.isfinite(theirs)
    return float(np.abs(ours - theirs)[finite].max() / np.abs(theirs[finite]).max())


def tier_of(store: Store, row: str, model: Any) -> tuple[Any, Writer]:
    """A server's second tier with nothing in its memory, and its writer."""
    identity = {"identity": {"row": row}}
    space = make_space(store, model, None, identity=lambda: identity, label=row, settings=Settings(check_versions()))
    writer = Writer(Housekeeping(store, 1 << 40))
    return TieredPromptCache(10, _Spaces(space), writer, Saving()), writer  # type: ignore[arg-type]  # a stand-in


def _segments(stateful: bool, prompt: list[int]) -> list[list[int]]:
    """A prompt in the pieces between the cuts that kvstore makes."""
    ends = [*cuts_of(stateful, prompt), len(prompt)]
    return [prompt[first:last] for first, last in pairwise([0, *ends])]


def run_batch(
    generator: Any,
    prompts: Sequence[list[list[int]]],
    tier: Any | None = None,
    reused: list[int] | None = None,
    *,
    apart: int = 0,
) -> list[list[int]]:
    """The tokens of every prompt, given in segments; with a tier as mlx_lm.server uses its prompt cache.

    apart: a prompt joins when the one before has so many tokens of its answer.
    """
    answers: dict[int, list[int]] = {}
    waiting = deque(prompts)
    left = len(prompts)
    while left:
        while waiting and all(len(answer) >= apart for answer in answers.values()):
            segments = waiting.popleft()
            if tier is None:
                (uid,) = generator.insert_segments([segments], [ANSWER])
            else:
                (prompt,) = segments
                caches, rest = tier.fetch_nearest_cache(KEY, prompt)
                known = len(prompt) - len(rest)
                if reused is not None:
                    reused.append(known)
                (uid,) = generator.insert_segments([[list(rest)]], [ANSWER], [caches], [prompt[:known]])
            answers[uid] = []
        for response in generator.next()[1]:
            answers[response.uid].append(int(response.token))
            if response.finish_reason is not None:
                left -= 1
                if tier is not None:
                    tier.insert_cache(KEY, response.all_tokens[:], response.prompt_cache, cache_type="assistant")
    return list(answers.values())
