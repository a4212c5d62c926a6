"""The places where mlx_lm.server computes, observed: the batch generator and the one-request generator.

Both are the engine's own; these wrappers look at its buffers between its steps, on its thread. Where a model can only
be resumed at boundary states, they also make the engine stop at them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from kvstore_mlx.boundaries import cut_segments
from kvstore_mlx.fingerprint import Quantization
from kvstore_mlx.prefill import pieces, prefill, with_prefix
from kvstore_mlx.probe import masks_padding
from kvstore_mlx.recording import Recording
from kvstore_mlx.tier import TieredPromptCache, guarded

__all__ = ["RecordingBatchGenerator", "recording_stream_generate"]

log = logging.getLogger("kvstore")


class RecordingBatchGenerator(BatchGenerator):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's BatchGenerator, with each sequence followed by its recording."""

    _masked: tuple[weakref.ref[Any] | None, bool] = (None, False)
    """The model that was looked at last, and whether it masks the padding of a batch."""

    def __init__(self, *args: Any, tier: TieredPromptCache, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tier = tier
        self._recordings: dict[int, Recording] = {}
        self._due: set[int] = set()
        self._added: dict[int, set[int]] = {}
        self._done: dict[int, int] = {}
        self._padded: set[int] = set()
        self._caching = False

    def insert_segments(self, segments: list[list[list[int]]], *args: Any, **kwargs: Any) -> list[int]:
        """As in mlx-lm; the server inserts one request right after fetching its cache."""
        recording = self._tier.take_recording()
        added: set[int] = set()
        if recording is not None and len(segments) == 1 and recording.boundaries:
            pieces, ends = cut_segments(segments[0], recording.known, recording.boundaries)
            segments, added = [pieces], {end - recording.known for end in ends}
        uids: list[int] = super().insert_segments(segments, *args, **kwargs)
        self._caching = self._caching or recording is not None
        if recording is not None and len(uids) == 1:
            self._recordings[uids[0]] = recording
            if added:
                self._added[uids[0]] = added
        return uids

    def remove(self, uids: list[int], *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm: a cancelled request keeps what was saved so far, and no more is."""
        for uid in uids:
            self._forget(uid)
        return super().remove(uids, *args, **kwargs)

    def extract_cache(self, uids: list[int]) -> Any:
        """As in mlx-lm; the server keeps these caches in memory."""
        extracted = super().extract_cache(uids)
        for uid in self._padded & set(extracted):
            self._tier.distrust(extracted[uid][0])
        return extracted

    def next(self) -> Any:
        """One step of the engine between two looks at it.

        What a first token makes due is copied before the next step, when the token has been handed to its client.
        """
        if self._due:
            guarded(self._save_prompts)
        prompt_responses, generation_responses = super().next()
        for response in prompt_responses:
            # The server keeps a cache in memory for each of its own segments, and counts them.
            if response.progress[0] in self._added.get(response.uid, ()) and not response.end_of_prompt:
                response.end_of_segment = False
        if self._caching:
            guarded(lambda: self._leave_out_padded(prompt_responses))
            guarded(lambda: self._look(generation_responses))
        return prompt_responses, generation_responses

    def _leave_out_padded(self, prompt_responses: list[Any]) -> None:
        """Keep nothing of sequences that were filled up to a longer one, where the model takes the filling for tokens.

        mlx-lm pads on the right while prompts of unequal lengths are computed together, and a dozen of its families do
        not mask that in every layer. What such a batch answers is mlx-lm's; it must not be found again later.
        """
        steps = {}
        for response in prompt_responses:
            if response.end_of_prompt:
                self._done.pop(response.uid, None)
                continue
            steps[response.uid] = response.progress[0] - self._done.get(response.uid, 0)
            self._done[response.uid] = response.progress[0]
        padded = {uid for uid, step in steps.items() if step < max(steps.values())} - self._padded
        if padded and not self._padding_is_masked():
            log.info("kvstore: %d prompts of a batch are not kept: this model does not mask padding", len(padded))
            self._padded |= padded
            for uid in padded:
                self._recordings.pop(uid, None)

    def _padding_is_masked(self) -> bool:
        known, masked = RecordingBatchGenerator._masked
        if known is None or known() is not self.model:
            with mx.stream(self.stream):
                masked = masks_padding(self.model)
            RecordingBatchGenerator._masked = weakref.ref(self.model), masked
        return masked

    def _forget(self, uid: int) -> Recording | None:
        self._added.pop(uid, None)
        self._done.pop(uid, None)
        self._padded.discard(uid)
        return self._recordings.pop(uid, None)

    def _look(self, generation_responses: list[Any]) -> None:
        batch = self._prompt_batch
        for index, uid in enumerate(batch.uids):
            recording = self._recordings.get(uid)
            done = len(batch.tokens[index])
            if recording is not None and batch.prompt_cache and recording.wants(done):
                recording.reached(batch.prompt_cache, index, done)
        for response in generation_responses:
            recording = self._recordings.get(response.uid)
            if recording is None:
                if response.finish_reason is not None:
                    if response.uid in self._padded:
                        self._tier.distrust(response.prompt_cache)
                    self._forget(response.uid)
                continue
            recording.answered()
            if response.finish_reason is not None:
                self._forget(response.uid)
                self._tier.expect(response.prompt_cache, recording)
            elif recording.prompt_due:
                self._due.add(response.uid)

    def _save_prompts(self) -> None:
        due, self._due = self._due, set()
        batch = self._generation_batch
        for index, uid in enumerate(batch.uids):
            recording = self._recordings.get(uid)
            if uid in due and recording is not None:
                recording.first_token(batch.prompt_cache, index, len(batch.tokens[index]))


def recording_stream_generate(
    generate: Callable[..., Any], tier: TieredPromptCache, quantization: Quantization | None
) -> Callable[..., Iterator[Any]]:
    """mlx-lm's stream_generate, with the request that was fetched last followed by its recording."""

    def wrapped(*args: Any, **kwargs: Any) -> Iterator[Any]:
        recording = tier.take_recording()
        if recording is None:
            return generate(*args, **kwargs)  # type: ignore[no-any-return]  # mlx-lm ships no types
        tier.expect(kwargs["prompt_cache"], recording)
        return _Single(recording, quantization).responses(generate, *args, **kwargs)

    return wrapped


class _Single:
    """One request that mlx-lm serves alone."""

    def __init__(self, recording: Recording, quantization: Quantization | None) -> None:
        self._recording = recording
        self._quantization = quantization

    def responses(
        self, generate: Callable[..., Any], *args: Any, prompt: list[int], prompt_cache: list[Any], **kwargs: Any
    ) -> Iterator[Any]:
        """What generate yields for the rest of a prompt, of which a part may be computed here."""
        recording, total = self._recording, len(prompt)
        tokens = recording.prompt
        reused = len(tokens) - total
        report = kwargs.pop("prompt_progress_callback", None) or (lambda *_: None)
        first = self._prefill(prompt_cache, reused, lambda done: report(done - reused, total), kwargs)

        def progress(processed: int, _total: int) -> None:
            if processed or first == reused:
                report(first - reused + processed, total)
            if processed:
                self._reached(prompt_cache, first + processed)

        if processors := kwargs.pop("logits_processors", None):
            # The engine shows them what it computes itself; they are made for the whole prompt.
            kwargs["logits_processors"] = [with_prefix(processor, tokens[:first]) for processor in processors]
        draft = kwargs.get("draft_model") is not None
        for response in generate(
            *args, prompt=tokens[first:], prompt_cache=prompt_cache, prompt_progress_callback=progress, **kwargs
        ):
            count = None if draft else first + response.prompt_tokens + response.generation_tokens
            recording.answered()
            yield replace(response, prompt_tokens=total)
            if recording.prompt_due:
                guarded(lambda: recording.first_token(prompt_cache, None, count))  # noqa: B023 - called at once

    def _prefill(
        self, caches: list[Any], reused: int, report: Callable[[int], None], settings: Mapping[str, Any]
    ) -> int:
        """Compute up to the last boundary before the end, stopping at each; tokens that the caches hold then.

        (The engine itself would stop only every prefill_step_size tokens.)
        """
        tokens, cuts = self._recording.prompt, self._recording.boundaries
        last = max((cut for cut in cuts if reused < cut < len(tokens) - 1), default=reused)
        if last == reused:
            return reused

        def after(done: int) -> None:
            report(done)
            self._reached(caches, done)

        report(reused)
        parts = pieces(reused, last, settings.get("prefill_step_size", 2048), cuts)
        with mx.stream(settings["stream"]):
            prefill(settings["model"], caches, tokens, parts, after=after, quantization=self._quantization)
        return last

    def _reached(self, caches: list[Any], done: int) -> None:
        recording = self._recording
        if done < len(recording.prompt) and recording.wants(done):
            guarded(lambda: recording.reached(caches, None, done))
