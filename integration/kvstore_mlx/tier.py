"""The cache directory as the second tier below mlx-lm's in-memory prompt cache.

mlx_lm.server asks its prompt cache for the nearest prefix when a request comes and hands it the cache when a generation
ends. This class answers from memory first, from disk when that reaches further, and starts the recording that saves
what is new. All of it happens on the generation thread, and nothing of it may fail a request.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from kvstore.errors import KVStoreError, TokenError
from kvstore.keys import TOKEN_BYTES, pack_tokens
from kvstore.nearest import Nearest
from kvstore.sizes import format_size
from kvstore_mlx.boundaries import Saving, boundaries
from kvstore_mlx.codecs import codec_of
from kvstore_mlx.explain import Explainer, clause, nearest_of
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.gate import Gate
from kvstore_mlx.guard import Failures
from kvstore_mlx.metrics import Fetched, Tier, Wrote
from kvstore_mlx.plan import leaves_of
from kvstore_mlx.recording import Recording
from kvstore_mlx.restoring import Found, find, longest, restore
from kvstore_mlx.spaces import Spaces
from kvstore_mlx.trouble import in_words
from kvstore_mlx.writer import Writer

__all__ = ["TieredPromptCache"]

log = logging.getLogger("kvstore")


class TieredPromptCache(LRUPromptCache):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's prompt cache with a cache directory below it."""

    def __init__(self, max_size: int, spaces: Spaces, writer: Writer, saving: Saving) -> None:
        super().__init__(max_size)
        self._spaces = spaces
        self._writer = writer
        self._saving = saving
        self._pending: Recording | None = None
        self._fetched: tuple[Sequence[int], int] = ((), 0)
        self._finishing: dict[int, tuple[Any, Recording]] = {}
        self._distrusted: dict[int, Any] = {}
        self._announced: tuple[list[int], tuple[int, ...]] = ([], ())
        self._gates: dict[tuple[str, ...], Gate] = {}
        self._keys: dict[Any, Any] = {}
        self._gate: Gate | None = None
        self.has_directory = False
        """Whether the model that was asked for last is served with the directory."""
        self.explainer: Explainer | None = None
        self.observe: Callable[[Fetched], Wrote | None] = lambda _: None
        self.failures = Failures()

    def announce(self, prompt: list[int], stable: Sequence[int]) -> None:
        """Told where the stable parts of a prompt end, before it is fetched."""
        self._announced = (prompt, tuple(stable))

    def needs_boundaries(self, model_key: Any) -> bool:
        """Whether it is worth finding out where the stable parts of a prompt end."""
        space = self._spaces.of(model_key)
        return space is not None and space.stateful

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The longest prefix that memory or disk has, and the tokens that remain: always at least one.

        (mlx_lm.server's generation thread ends when a fetched cache leaves nothing to compute.)
        """
        started = time.perf_counter()
        caches, rest = self._from_memory(model, tokens)
        return self.extend(model, tokens, caches, len(tokens) - len(rest), started)

    def extend(
        self, model: Any, tokens: list[int], caches: list[Any] | None, in_memory: int, started: float | None = None
    ) -> tuple[list[Any] | None, list[int]]:
        """What the directory has beyond the caches in memory, which hold the first in_memory tokens of a prompt.

        started is when the search began (time.perf_counter), for the log.
        """
        caches, rest = self._extended(model, tokens, caches, in_memory, started)
        self._fetched = tokens, len(tokens) - len(rest)
        return caches, rest

    def _extended(
        self, model: Any, tokens: list[int], caches: list[Any] | None, in_memory: int, started: float | None
    ) -> tuple[list[Any] | None, list[int]]:
        started = time.perf_counter() if started is None else started
        self._pending = None
        self._finishing.clear()
        self._distrusted.clear()
        space = self._spaces.of(model)
        self.has_directory = space is not None
        self._gate = None
        if space is not None and caches is not None and not self._holds(space, caches, in_memory):
            # mlx-lm trims caches to where they cannot go on from, and says nothing.
            caches, in_memory = None, 0
        rest = list(tokens[in_memory:])
        told = Fetched(
            len(tokens), in_memory, "memory" if in_memory else "none", lookup_s=time.perf_counter() - started
        )
        if space is None:
            self._tell(told)
            return caches, rest
        try:
            return self._from_disk(space, tokens, caches, in_memory, started)
        except TokenError:
            log.info("kvstore: this prompt has images; served without the cache directory")
        except (KVStoreError, MemoryError, OSError) as error:
            if self.failures.due(error, "lookup"):
                log.warning("kvstore: lookup failed, computing instead: %s", in_words(error))
        except Exception as error:
            if self.failures.due(error, "lookup"):
                log.exception("kvstore: lookup failed, computing instead; this is a bug in kvstore, please report it")
        self._tell(told)
        return caches, rest

    def _holds(self, space: ModelSpace, caches: list[Any], tokens: int) -> bool:
        """Whether caches from memory are what an uninterrupted run would have after exactly these tokens."""
        try:
            form, _ = space.look(caches, None, tokens)
            form.plan.starts(caches, None, tokens)
        except ValueError as error:
            if self.failures.due(error, "memory"):
                log.warning("kvstore: a cache in memory was left out: %s", error)
            return False
        return True

    def _from_memory(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        space = self._spaces.of(model)
        key = self._keys[model] = _key(model, space)
        if space is not None and space.most is not None:
            found = self._trie.search(key, tokens)
            if len(found.exact or found.longer or []) > space.most:
                return self._whole_from_memory(key, tokens)
        caches, rest = super().fetch_nearest_cache(key, tokens)
        if rest or caches is None:
            return caches, list(rest)
        if len(tokens) > 1 and can_trim_prompt_cache(caches):
            trim_prompt_cache(caches, 1)
            if _cut_to(caches, len(tokens) - 1):
                return caches, list(tokens[-1:])
        # Not trimmable: the nearest strictly shorter entry will do.
        shorter = tokens[:-1]
        caches, rest = super().fetch_nearest_cache(key, shorter) if shorter else (None, [])
        if caches is None or not _cut_to(caches, len(shorter) - len(rest)):
            return None, list(tokens)
        return caches, [*rest, tokens[-1]]

    def _whole_from_memory(self, key: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The longest entry that is a prefix as it stands: of a longer one this model cannot use a part."""
        found = self._trie.search(key, tokens[:-1])
        prefix = found.exact if found.exact is not None else found.shorter
        if not prefix:
            return None, list(tokens)
        entry = self._trie.get(key, prefix)
        return copy.deepcopy(entry.prompt_cache), list(tokens[len(prefix) :])

    def _from_disk(
        self, space: ModelSpace, tokens: list[int], caches: list[Any] | None, in_memory: int, started: float
    ) -> tuple[list[Any] | None, list[int]]:
        """Restore when the directory reaches further than memory, start the recording, and log the one line."""
        prompt, prefill_only = pack_tokens(tokens), self._saving.prefill_only
        gate = self._gate = self._gate_of(space)
        found = [find(form, prompt[:-TOKEN_BYTES], prefill_only=prefill_only) for form in space.usable]
        lookup_s = time.perf_counter() - started
        saved = {one.form: one.match.border for one in found}
        self._writer.prefilling()
        for one in found:
            self._writer.asked(one.form, one.match)
        tier: Tier = "memory" if in_memory else "none"
        reused, size, restore_s = in_memory, 0, 0.0
        best = longest(found)
        tried = best is not None and gate.worth_restoring(best, in_memory)
        if best is not None and tried:
            restored = restore(best, len(tokens), prefill_only=prefill_only)
            saved[best.form] = restored.saved if restored is not None else 0
            if restored is not None and restored.tokens > in_memory:
                caches, reused, tier = restored.caches, restored.tokens, "disk"
                size, restore_s = restored.size, restored.seconds
                gate.restored(restored)
        if saved and gate.worth_saving(len(tokens)):
            self._pending = self._record(space, tokens, saved, reused)
            self._pending.prepare()
        milliseconds = (time.perf_counter() - started) * 1e3
        near = self._nearest(found, prompt, reused)
        matched, differs = (None, False) if near is None else (near.matched, near.end == "differs")
        told = Fetched(len(tokens), reused, tier, size, lookup_s, restore_s, matched, differs)
        stateful = any(one.form.stateful for one in found)
        _log(told, milliseconds, clause(near, reused, tried=tried, stateful=stateful, prefill_only=prefill_only))
        explainer = self.explainer
        if explainer is not None:
            self.failures.guarded(lambda: explainer.explain(near))
        self._tell(told)
        return caches, list(tokens[reused:])

    def _nearest(self, found: Sequence[Found], prompt: bytes, reused: int) -> Nearest | None:
        """What is saved nearest to a prompt of which less than all was reused."""
        if reused >= len(prompt) // TOKEN_BYTES - 1:
            return None
        try:
            quick = self.explainer is None
            return nearest_of(found, prompt, prefill_only=self._saving.prefill_only, quick=quick)
        except Exception as error:
            if self.failures.due(error, "nearest"):
                log.exception("kvstore: cannot say why no more was reused; this is a bug in kvstore, please report it")
            return None

    def _tell(self, fetched: Fetched) -> None:
        """Tell whoever counts, and the recording whom to tell what is written."""
        recording = self._pending

        def tell() -> None:
            wrote = self.observe(fetched)
            if recording is not None:
                recording.on_written = wrote

        self.failures.guarded(tell)

    def _gate_of(self, space: ModelSpace) -> Gate:
        """What was measured of this model, also before it was swapped out and loaded again."""
        if space.ids not in self._gates:
            self._gates[space.ids] = Gate(space, self._saving.min_tokens)
        return self._gates[space.ids]

    def prefilling(self) -> None:
        """Told before a step of the engine that will compute a part of a prompt."""
        self._writer.prefilling()

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Told how long the engine computed so many tokens of prompts for the model that was asked for last."""
        if self._gate is not None:
            self._gate.prefilled(tokens, seconds)

    def stepped(self) -> None:
        """Told of each token that the engine made, for whatever request: nothing else says of one that saves nothing
        that the engine is at work for it.
        """
        self._writer.stepped()

    @property
    def restoring(self) -> dict[str, str]:
        """From where on restoring pays, in words, by model; from any thread."""
        gates = dict(self._gates)
        return {name: gates[space.ids].text for name, space in self._spaces.spaces().items() if space.ids in gates}

    def _record(self, space: ModelSpace, tokens: list[int], saved: dict[Form, int], reused: int) -> Recording:
        prompt, stable = self._announced
        ends: tuple[int, ...] = ()
        if space.stateful:
            interval = space.forms[0].interval
            ends = boundaries(len(tokens), interval, self._saving.every, stable if prompt == tokens else ())
        return Recording(
            space,
            self._writer,
            tokens,
            saved=saved,
            known=reused,
            # With prefill_only memory has nothing that was decoded, either (insert_cache).
            decoded=reused > 0 and not self._saving.prefill_only,
            boundaries=ends,
            prefill_only=self._saving.prefill_only,
            phase=self._spaces.phase,
        )

    @property
    def reused(self) -> list[int]:
        """The tokens of the request that was fetched last that need not be computed; none if images are among them."""
        tokens, count = self._fetched
        found = list(tokens[:count])
        return found if min(found, default=0) >= 0 else []

    def take_recording(self) -> Recording | None:
        """The recording of the request that was fetched last; asked for once, right after the fetch."""
        recording, self._pending = self._pending, None
        return recording

    def expect(self, caches: Any, recording: Recording) -> None:
        """Announce that insert_cache will be called with this very list at the end of the recorded generation."""
        self._finishing[id(caches)] = (caches, recording)

    def give_up(self, caches: Any) -> None:
        """Announce that it will not be called with this very list: the generation failed."""
        self._finishing.pop(id(caches), None)
        self.ended()

    def ended(self) -> None:
        """Told that a request ended: the writer goes at full speed, unless another one makes itself known."""
        if self.has_directory:
            self._writer.idle()

    def distrust(self, caches: Any) -> None:
        """Announce that insert_cache will be called with this very list, which holds another request's padding."""
        self._distrusted[id(caches)] = caches

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **kwargs: Any) -> None:
        """As in mlx-lm; at the end of a generation also saves what is new of it.

        With prefill_only memory keeps, like the directory, what a prefill computed: the answer is cut off.
        """
        whole = kwargs.get("cache_type", "assistant") == "assistant"  # The other kinds are parts of prompts.
        if whole:
            self.ended()
        if self._distrusted.pop(id(prompt_cache), None) is not None:
            return
        if model[2] is not None:
            tokens = _align(tokens, prompt_cache)
            if not tokens:
                return
        _, recording = self._finishing.pop(id(prompt_cache), (None, None))
        if recording is not None:
            held = tokens
            self.failures.guarded(lambda: recording.finished(prompt_cache, len(held), held))
        if self._saving.prefill_only and whole:
            if recording is None or not can_trim_prompt_cache(prompt_cache):
                return
            trim_prompt_cache(prompt_cache, len(tokens) - recording.prompt_end)
            tokens = tokens[: recording.prompt_end]
        # As it was fetched; another model may be loaded by now.
        key = self._keys[model] if model in self._keys else _key(model, self._spaces.of(model))
        super().insert_cache(key, tokens, prompt_cache, **kwargs)


def _log(told: Fetched, milliseconds: float, why: str) -> None:
    """The one line of a request; why no more was reused, as a clause."""
    source = "nothing" if told.tier == "none" else told.tier
    log.info(
        "kvstore: reused %d of %d tokens from %s in %.1f ms (%s read)%s",
        *(told.reused, told.tokens, source, milliseconds, format_size(told.restored_bytes), why),
    )


def _key(model: Any, space: ModelSpace | None) -> Any:
    """What memory knows a model's prompts by.

    mlx-lm knows it by its path alone, and goes on with the KV of weights that were replaced before it was loaded again.
    """
    return model if space is None else (model, space.ids)


def _align(tokens: list[int], caches: list[Any]) -> list[int]:
    """The tokens that a model and its draft model were both shown, with both of their caches cut to them.

    After speculative decoding the last tokens were not forwarded by one or the other. mlx_lm.server 0.32.2 keeps such
    caches under all the tokens and later cuts both by the same number, which leaves every token at a wrong position:
    the next turn of a conversation then gets another answer than without its cache. None at all when they cannot be
    cut: mlx-lm would not decode with such caches either.
    """
    leaves = [leaf for _, leaf in leaves_of(caches)]
    try:
        counts = [count for count in _counts(caches) if count is not None]
    except ValueError:
        return []
    if len(counts) < len(leaves) or not can_trim_prompt_cache(caches):
        return []
    both = min([len(tokens), *counts])
    for leaf, count in zip(leaves, counts, strict=True):
        leaf.trim(count - both)
    return tokens[:both] if _cut_to(caches, both) else []


def _cut_to(caches: Sequence[Any], tokens: int) -> bool:
    """Whether mlx-lm's trim did what it says: a ConcatenateKVCache keeps its rows, a ChunkedKVCache may lack some."""
    try:
        return set(_counts(caches)) <= {tokens, None}
    except ValueError:
        return False


def _counts(caches: Sequence[Any]) -> list[int | None]:
    """Tokens that each cache holds, None for those that do not count them, or that no codec knows; ValueError for one
    that cannot go on.
    """
    counts: list[int | None] = []
    for _, leaf in leaves_of(caches):
        codec = codec_of(leaf)
        extent = None if codec is None else codec.extent(leaf, None)
        counts.append(None if extent is None else extent[1])
    return counts
