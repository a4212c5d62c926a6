"""The cache directory as the second tier below mlx-lm's in-memory prompt cache.

mlx_lm.server asks its prompt cache for the nearest prefix when a request comes and hands it the cache when a generation
ends. This class answers from memory first, from disk when that reaches further, and starts the recording that saves
what is new. All of it happens on the generation thread, and nothing of it may fail a request.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from kvstore.errors import TokenError
from kvstore.keys import pack_tokens
from kvstore.lookup import Match
from kvstore.sizes import format_size
from kvstore_mlx.codec import Restoring, sequence_rows
from kvstore_mlx.recording import MIN_TOKENS, Recording
from kvstore_mlx.spaces import ModelSpace, Spaces
from kvstore_mlx.writer import Writer

__all__ = ["TieredPromptCache"]

log = logging.getLogger("kvstore")


class TieredPromptCache(LRUPromptCache):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's prompt cache with a cache directory below it."""

    def __init__(self, max_size: int, spaces: Spaces, writer: Writer) -> None:
        super().__init__(max_size)
        self._spaces = spaces
        self._writer = writer
        self._pending: Recording | None = None
        self._finishing: dict[int, tuple[Any, Recording]] = {}

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The longest prefix that memory or disk has, and the tokens that remain: always at least one.

        (mlx_lm.server's generation thread ends when a fetched cache leaves nothing to compute.)
        """
        started = time.perf_counter()
        self._pending = None
        self._finishing.clear()
        caches, rest = self._from_memory(model, tokens)
        space = self._spaces.of(model)
        if space is None:
            return caches, rest
        in_memory = len(tokens) - len(rest)
        try:
            return self._from_disk(space, tokens, caches, in_memory, started)
        except TokenError:
            log.info("kvstore: this prompt has images; served without the cache directory")
        except Exception:
            log.exception("kvstore: lookup failed, computing instead; this is a bug in kvstore, please report it")
        return caches, rest

    def _from_memory(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        caches, rest = super().fetch_nearest_cache(model, tokens)
        if rest or caches is None:
            return caches, list(rest)
        if len(tokens) > 1 and can_trim_prompt_cache(caches):
            trim_prompt_cache(caches, 1)
            return caches, list(tokens[-1:])
        # Not trimmable: the nearest strictly shorter entry will do.
        shorter = tokens[:-1]
        caches, rest = super().fetch_nearest_cache(model, shorter) if shorter else (None, [])
        return (None, list(tokens)) if caches is None else (caches, [*rest, tokens[-1]])

    def _from_disk(
        self, space: ModelSpace, tokens: list[int], caches: list[Any] | None, in_memory: int, started: float
    ) -> tuple[list[Any] | None, list[int]]:
        """Restore when the directory reaches further than memory, start the recording, and log the one line."""
        packed = pack_tokens(tokens)
        match = space.namespace.lookup(packed[: (len(tokens) - 1) * 4])
        reused, saved, source, size = in_memory, match.border, "memory" if in_memory else "nothing", 0
        if match.count >= max(in_memory + MIN_TOKENS, MIN_TOKENS):
            restored, caches_read, size, saved = _restore(space, match, len(tokens))
            if restored > in_memory:
                caches, reused, source = caches_read, restored, "disk"
        self._pending = Recording(
            space.namespace, self._writer, tokens, saved=saved, known=reused, phase=self._spaces.phase
        )
        log.info(
            "kvstore: reused %d of %d tokens from %s in %.1f ms (%s read)",
            reused,
            len(tokens),
            source,
            (time.perf_counter() - started) * 1e3,
            format_size(size),
        )
        return caches, list(tokens[reused:])

    def take_recording(self) -> Recording | None:
        """The recording of the request that was fetched last; asked for once, right after the fetch."""
        recording, self._pending = self._pending, None
        return recording

    def expect(self, caches: Any, recording: Recording) -> None:
        """Announce that insert_cache will be called with this very list at the end of the recorded generation."""
        self._finishing[id(caches)] = (caches, recording)

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **kwargs: Any) -> None:
        """As in mlx-lm; at the end of a generation also saves what is new of it."""
        if model[2] is not None:
            tokens = _align(tokens, prompt_cache)
        super().insert_cache(model, tokens, prompt_cache, **kwargs)
        _, recording = self._finishing.pop(id(prompt_cache), (None, None))
        if recording is not None:
            guarded(lambda: recording.finished(sequence_rows(prompt_cache, len(tokens)), tokens))


def _align(tokens: list[int], caches: list[Any]) -> list[int]:
    """The tokens that a model and its draft model were both shown, with both of their caches cut to them.

    After speculative decoding the last tokens were not forwarded by one or the other. mlx_lm.server 0.32.2 keeps such
    caches under all the tokens and later cuts both by the same number, which leaves every token at a wrong position:
    the next turn of a conversation then gets another answer than without its cache.
    """
    both = min(len(tokens), *(cache.offset for cache in caches))
    for cache in caches:
        cache.trim(cache.offset - both)
    return tokens[:both]


def _restore(space: ModelSpace, match: Match, prompt: int) -> tuple[int, list[Any], int, int]:
    """Tokens restored, their caches, bytes read, and up to where the store holds the prompt in whole blocks."""
    target = Restoring(space.layers, prompt + 256)
    restored = space.namespace.read(match, target.allocate)
    if not restored.tokens:
        return 0, [], 0, 0
    caches = target.caches(restored.tokens)
    offsets = {cache.offset for cache in caches}
    if offsets != {restored.tokens}:
        raise AssertionError(f"layers were restored to {sorted(offsets)} tokens instead of {restored.tokens}")
    return restored.tokens, caches, restored.size, restored.border


def guarded(save: Any) -> None:
    """Run a step of saving; whatever goes wrong is logged and never fails the request."""
    try:
        save()
    except ValueError as error:
        log.warning("kvstore: not saved: %s", error)
    except Exception:
        log.exception("kvstore: not saved, and this is a bug in kvstore; please report it")
