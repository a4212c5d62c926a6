"""The places where mlx_lm.server computes, observed: the batch generator and the one-request generator.

Both are the engine's own, unchanged; these wrappers look at its buffers between its steps, on its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mlx_lm.generate import BatchGenerator

from kvstore_mlx.codec import batch_rows, sequence_rows
from kvstore_mlx.recording import Recording
from kvstore_mlx.tier import TieredPromptCache, guarded

__all__ = ["RecordingBatchGenerator", "recording_stream_generate"]


class RecordingBatchGenerator(BatchGenerator):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's BatchGenerator, with each sequence followed by its recording."""

    def __init__(self, *args: Any, tier: TieredPromptCache, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tier = tier
        self._recordings: dict[int, Recording] = {}
        self._due: set[int] = set()

    def insert_segments(self, segments: list[list[list[int]]], *args: Any, **kwargs: Any) -> list[int]:
        """As in mlx-lm; the server inserts one request right after fetching its cache."""
        uids: list[int] = super().insert_segments(segments, *args, **kwargs)
        recording = self._tier.take_recording()
        if recording is not None and len(uids) == 1:
            self._recordings[uids[0]] = recording
        return uids

    def remove(self, uids: list[int], *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm: a cancelled request keeps what was saved so far, and no more is."""
        for uid in uids:
            self._recordings.pop(uid, None)
        return super().remove(uids, *args, **kwargs)

    def next(self) -> Any:
        """One step of the engine between two looks at it.

        What a first token makes due is copied before the next step, when the token has been handed to its client.
        """
        if self._due:
            guarded(self._save_prompts)
        prompt_responses, generation_responses = super().next()
        if self._recordings:
            guarded(lambda: self._look(generation_responses))
        return prompt_responses, generation_responses

    def _look(self, generation_responses: list[Any]) -> None:
        batch = self._prompt_batch
        for index, uid in enumerate(batch.uids):
            recording = self._recordings.get(uid)
            if recording is not None and batch.prompt_cache:
                self._prefilled(recording, batch, index)
        for response in generation_responses:
            recording = self._recordings.get(response.uid)
            if recording is None:
                continue
            if response.finish_reason is not None:
                del self._recordings[response.uid]
                self._tier.expect(response.prompt_cache, recording)
            elif recording.prompt_due:
                self._due.add(response.uid)

    def _save_prompts(self) -> None:
        due, self._due = self._due, set()
        batch = self._generation_batch
        for index, uid in enumerate(batch.uids):
            recording = self._recordings.get(uid)
            if uid in due and recording is not None:
                recording.first_token(batch_rows(batch.prompt_cache, index, len(batch.tokens[index])))

    def _prefilled(self, recording: Recording, batch: Any, index: int) -> None:
        done = len(batch.tokens[index])
        if not recording.completes_chunk(done):
            return
        recording.prefilled(batch_rows(batch.prompt_cache, index, done))


def recording_stream_generate(generate: Callable[..., Any], tier: TieredPromptCache) -> Callable[..., Iterator[Any]]:
    """mlx-lm's stream_generate, with the request that was fetched last followed by its recording."""

    def wrapped(*args: Any, prompt_cache: list[Any], **kwargs: Any) -> Iterator[Any]:
        recording = tier.take_recording()
        if recording is None:
            yield from generate(*args, prompt_cache=prompt_cache, **kwargs)
            return
        report = kwargs.pop("prompt_progress_callback", None)
        before = prompt_cache[0].offset
        draft = kwargs.get("draft_model") is not None

        def progress(processed: int, total: int) -> None:
            if report is not None:
                report(processed, total)
            if 0 < processed < total and recording.completes_chunk(before + processed):
                guarded(lambda: recording.prefilled(sequence_rows(prompt_cache, before + processed)))

        tier.expect(prompt_cache, recording)
        responses = generate(*args, prompt_cache=prompt_cache, prompt_progress_callback=progress, **kwargs)
        for response in responses:
            yield response
            if recording.prompt_due:
                computed = None if draft else before + response.prompt_tokens + response.generation_tokens
                guarded(lambda: recording.first_token(sequence_rows(prompt_cache, computed)))  # noqa: B023 - called at once

    return wrapped
