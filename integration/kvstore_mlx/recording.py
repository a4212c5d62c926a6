"""What of one request is still to be saved, and when it is copied out of the engine.

A recording follows one prompt from its lookup to the end of its generation. It knows up to which token the store has
the prompt (or will, from what is queued), and at each boundary copies only what is new: full chunks while a long prompt
is being prefilled, the rest of the prompt when the first token is out, the generated tokens at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.blocks import Span
from kvstore.keys import pack_tokens
from kvstore.store import Namespace
from kvstore_mlx.codec import Rows
from kvstore_mlx.writer import Job, Writer

__all__ = ["MIN_TOKENS", "Recording"]

MIN_TOKENS = 64
"""Prompts shorter than this are cheaper to compute than to look up; they are neither saved nor restored."""


class Recording:
    """One request's way into the store.

    saved: tokens of the prompt that blocks in the store hold already. known: tokens whose KV was not made by this
    request's prefill (they came from memory or disk).
    """

    def __init__(
        self, namespace: Namespace, writer: Writer, prompt: Iterable[int], *, saved: int, known: int, phase: int
    ) -> None:
        self._namespace = namespace
        self._writer = writer
        self._phase = phase
        self._tokens = list(prompt)
        self._prompt_end = len(self._tokens) - 1
        self._known = known
        self._at = saved
        self._failed = False
        self._prompt_due = self._prompt_end > saved

    @property
    def saved(self) -> int:
        """Tokens that are in the store or queued for it."""
        return self._at

    def completes_chunk(self, done: int) -> bool:
        """Whether done computed tokens complete a chunk that is not saved yet; cheap, asked after every step."""
        interval = self._namespace.interval
        return not self._failed and done // interval * interval > self._at

    def prefilled(self, rows: Rows) -> None:
        """Called after a step of the prefill that completed a chunk: saves it, and what is missing before it."""
        interval = self._namespace.interval
        self._save(rows, rows.count // interval * interval)

    def first_token(self, rows: Rows) -> None:
        """Called when the first token is out, so that saving the rest of the prompt does not delay it."""
        if self._prompt_due:
            self._prompt_due = False
            self._save(rows, min(rows.count, self._prompt_end))

    @property
    def prompt_due(self) -> bool:
        """Whether first_token still has something to do."""
        return self._prompt_due

    def finished(self, rows: Rows, tokens: Iterable[int]) -> None:
        """Called at the end of generation with every token that was generated; saves those that were forwarded."""
        self._tokens = list(tokens)
        self.first_token(rows)
        self._save(rows, min(rows.count, len(self._tokens)))

    def _save(self, rows: Rows, end: int) -> None:
        """Copy tokens up to end that are not saved yet and queue them; a full queue leaves them for the next time."""
        if end <= self._at or self._failed or end < MIN_TOKENS:
            return
        specs = rows.specs()
        spans = []
        for first, last in self._cuts(self._at, end):
            # What another request computed may have been decoded; only this prefill is known to be one.
            decode = first < self._known or last > self._prompt_end
            spans.append(Span(first, last - first, specs, rows.copy(first, last), decode, self._phase))
        job = Job(self._namespace, pack_tokens(self._tokens[:end]), spans, self._on_failure)
        if self._writer.offer(job):
            self._at = end

    def _cuts(self, first: int, end: int) -> Iterable[tuple[int, int]]:
        """The spans between two tokens: cut at chunk borders, and where prefilled tokens end and decoded ones begin."""
        interval = self._namespace.interval
        while first < end:
            border = min((first // interval + 1) * interval, end)
            for cut in (self._known, self._prompt_end):
                if first < cut < border:
                    border = cut
            yield first, border
            first = border

    def _on_failure(self) -> None:
        """The store now lacks what this recording believes saved: stop, and let the next request's lookup tell."""
        self._failed = True
