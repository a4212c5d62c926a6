"""The places where mlx_lm.server computes, observed: the batch generator and the one-request generator.

Both are the engine's own; these wrappers look at its buffers between its steps, on its thread. Where a model can only
be resumed at boundary states, they also make the engine stop at them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from kvstore_mlx.boundaries import cut_segments
from kvstore_mlx.fingerprint import Quantization
from kvstore_mlx.padding import Padding
from kvstore_mlx.prefill import pieces, prefill, with_prefix
from kvstore_mlx.recording import Recording
from kvstore_mlx.tier import TieredPromptCache

__all__ = ["RecordingBatchGenerator", "recording_stream_generate"]

log = logging.getLogger("kvstore")


class RecordingBatchGenerator(BatchGenerator):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's BatchGenerator, with each sequence followed by its recording."""

    def __init__(self, *args: Any, tier: TieredPromptCache, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tier = tier
        self._failures = tier.failures
        self._recordings: dict[int, Recording] = {}
        self._due: set[int] = set()
        self._added: dict[int, set[int]] = {}
        self._padding = Padding(self.model, self.stream)
        self._caching = False
        self._measured = (0, 0.0)

    def insert_segments(self, segments: list[list[list[int]]], *args: Any, **kwargs: Any) -> list[int]:
        """As in mlx-lm; the server inserts one request right after fetching its cache."""
        recording = self._tier.take_recording()
        added: set[int] = set()
        if recording is not None and len(segments) == 1 and recording.boundaries:
            pieces, ends = cut_segments(segments[0], recording.known, recording.boundaries)
            segments, added = [pieces], {end - recording.known for end in ends}
        uids: list[int] = super().insert_segments(segments, *args, **kwargs)
        # Without a recording, too: what is in memory now may be recorded with the next turn.
        self._caching = self._caching or self._tier.has_directory
        if recording is not None and len(uids) == 1:
            self._recordings[uids[0]] = recording
            if added:
                self._added[uids[0]] = added
        return uids

    def remove(self, uids: list[int], *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm: a cancelled request keeps what was saved so far, and no more is."""
        for uid in uids:
            self._forget(uid)
        self._tier.ended()
        return super().remove(uids, *args, **kwargs)

    def extract_cache(self, uids: list[int]) -> Any:
        """As in mlx-lm; the server keeps these caches in memory."""
        extracted = super().extract_cache(uids)
        for uid in extracted:
            if uid in self._padding:
                self._tier.distrust(extracted[uid][0])
        return extracted

    def next(self) -> Any:
        """One step of the engine between two looks at it.

        What a first token makes due is copied before the next step, when the token has been handed to its client.
        """
        if self._due:
            due, self._due = self._due, set()
            self._save_prompts(due)
        if self._caching and (len(self._prompt_batch) or self._unprocessed_sequences):
            # Before the step, which may take seconds: the end of another request may just have said that all is idle.
            self._tier.prefilling()
        prompt_responses, generation_responses = super().next()
        if generation_responses:
            self._failures.guarded(self._tier.stepped)
        for response in prompt_responses:
            # The server keeps a cache in memory for each of its own segments, and counts them.
            if response.progress[0] in self._added.get(response.uid, ()) and not response.end_of_prompt:
                response.end_of_segment = False
        if self._caching:
            if any(response.end_of_prompt for response in prompt_responses):
                self._failures.guarded(self._measure)
            self._leave_out_padded(prompt_responses)
            self._look(generation_responses)
        return prompt_responses, generation_responses

    def _measure(self) -> None:
        """Tell what prompts cost since the last one ended, by the engine's own clock.

        From its lookup to its first token a request also waits for others, and shares its steps with them.
        """
        done = self._counters.prompt_tokens, self._counters.prompt_time
        before, self._measured = self._measured, done
        self._tier.prefilled(done[0] - before[0], done[1] - before[1])

    def _leave_out_padded(self, prompt_responses: list[Any]) -> None:
        """Keep nothing that the padding of a batch has reached, where the model takes it for tokens; see Padding."""
        try:
            padded = self._padding.look(prompt_responses, self._prompt_batch, self._generation_batch)
        except Exception as error:
            if self._failures.due(error, "padding"):
                log.exception("kvstore: what is under way is not kept; this is a bug in kvstore, please report it")
            # Not in memory either: the next turn would be recorded upon it.
            self._padding.give_up()
            self._recordings.clear()
            return
        if padded:
            # Padding that begins with the answer has not reached the prompt.
            self._save_prompts(padded)
            log.info("kvstore: %d sequences of a batch are not kept: this model does not mask padding", len(padded))
            for uid in padded:
                self._recordings.pop(uid, None)

    def _forget(self, uid: int) -> Recording | None:
        self._added.pop(uid, None)
        self._padding.forget(uid)
        return self._recordings.pop(uid, None)

    def _look(self, generation_responses: list[Any]) -> None:
        """Save what a step made due. Each sequence by itself: what fails of one takes nothing from the others."""
        batch = self._prompt_batch
        for index, uid in enumerate(batch.uids):
            if (recording := self._recordings.get(uid)) is not None and batch.prompt_cache:
                done = len(batch.tokens[index])
                self._failures.guarded(partial(_reached, recording, batch.prompt_cache, index, done))
        for response in generation_responses:
            recording = self._recordings.get(response.uid)
            if response.finish_reason is not None:
                if response.uid in self._padding:
                    self._tier.distrust(response.prompt_cache)
                elif recording is not None:
                    self._tier.expect(response.prompt_cache, recording)
                self._forget(response.uid)
            elif recording is not None and recording.prompt_due:
                self._due.add(response.uid)

    def _save_prompts(self, due: set[int]) -> None:
        batch = self._generation_batch
        for index, uid in enumerate(batch.uids):
            recording = self._recordings.get(uid)
            if uid in due and recording is not None:
                count = len(batch.tokens[index])
                self._failures.guarded(partial(recording.first_token, batch.prompt_cache, index, count))


def _reached(recording: Recording, caches: list[Any], index: int | None, done: int) -> None:
    if recording.wants(done):
        recording.reached(caches, index, done)


def recording_stream_generate(
    generate: Callable[..., Any], tier: TieredPromptCache, quantization: Quantization | None
) -> Callable[..., Iterator[Any]]:
    """mlx-lm's stream_generate, with the request that was fetched last followed by its recording, if it has one.

    Logits processors are made for the whole prompt, and the engine shows them what it computes itself.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Iterator[Any]:
        recording, caches = tier.take_recording(), kwargs["prompt_cache"]
        if recording is None:
            if kwargs.get("logits_processors"):
                _show(kwargs, tier.reused)
            responses = generate(*args, **kwargs)
        else:
            tier.expect(caches, recording)
            responses = _Single(recording, quantization, tier).responses(generate, *args, **kwargs)
        return _told(responses, partial(tier.failures.guarded, tier.stepped), lambda: tier.give_up(caches))

    return wrapped


def _told(responses: Iterator[Any], stepped: Callable[[], None], failed: Callable[[], None]) -> Iterator[Any]:
    """The same responses; stepped is called with each, and failed when there are no more because of an error."""
    try:
        for response in responses:
            stepped()
            yield response
    except Exception:
        failed()
        raise


def _show(settings: dict[str, Any], prefix: list[int]) -> None:
    """Let the logits processors of a request see these tokens before those that the engine computes itself."""
    if processors := settings.get("logits_processors"):
        settings["logits_processors"] = [with_prefix(each, prefix) for each in processors]


class _Single:
    """One request that mlx-lm serves alone. The tier is told of its tokens, and the seconds to its first response."""

    def __init__(self, recording: Recording, quantization: Quantization | None, tier: TieredPromptCache) -> None:
        self._recording = recording
        self._quantization = quantization
        self._tier = tier
        self._guarded = tier.failures.guarded

    def responses(
        self, generate: Callable[..., Any], *args: Any, prompt: list[int], prompt_cache: list[Any], **kwargs: Any
    ) -> Iterator[Any]:
        """What generate yields for the rest of a prompt, of which a part may be computed here."""
        recording, total, started = self._recording, len(prompt), time.perf_counter()
        first_response = True
        tokens = recording.prompt
        reused = len(tokens) - total
        report = kwargs.pop("prompt_progress_callback", None) or (lambda *_: None)
        first = self._prefill(prompt_cache, reused, lambda done: report(done - reused, total), kwargs)

        def progress(processed: int, _total: int) -> None:
            if processed or first == reused:
                report(first - reused + processed, total)
            if processed:
                self._reached(prompt_cache, first + processed)

        _show(kwargs, tokens[:first])
        draft = kwargs.get("draft_model") is not None
        for response in generate(
            *args, prompt=tokens[first:], prompt_cache=prompt_cache, prompt_progress_callback=progress, **kwargs
        ):
            count = None if draft else first + response.prompt_tokens + response.generation_tokens
            if first_response:
                seconds = time.perf_counter() - started
                self._guarded(lambda: self._tier.prefilled(total, seconds))  # noqa: B023 - called at once
                first_response = False
            yield replace(response, prompt_tokens=total)
            if recording.prompt_due:
                self._guarded(lambda: recording.first_token(prompt_cache, None, count))  # noqa: B023 - called at once

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
        if done < len(recording.prompt):
            self._guarded(lambda: _reached(recording, caches, None, done))
