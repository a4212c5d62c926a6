"""``kvstore generate`` and ``kvstore chat``: mlx-lm's commands of the same names, with a cache directory below them.

Without ``--kv-cache-dir`` mlx-lm's own main runs and nothing of it is replaced but the parser's flag list. With it, the
``stream_generate`` that the command calls first restores what is saved of its prompt, and saves what is new.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.store import Store
from kvstore_mlx.flags import CacheArguments
from kvstore_mlx.parsers import parser
from kvstore_mlx.wrapping import CommandRefused, leave, open_store, run_engine, settings_of

__all__ = ["chat", "generate", "parser"]

log = logging.getLogger("kvstore")

DRAIN_S = 60.0
"""How long the end of a command waits for the disk."""


def generate(argv: Sequence[str]) -> int:
    """mlx_lm.generate, with a cache directory when --kv-cache-dir is given; returns the exit code of the process."""
    return _command("generate", argv)


def chat(argv: Sequence[str]) -> int:
    """mlx_lm.chat, with a cache directory when --kv-cache-dir is given; returns the exit code of the process."""
    return _command("chat", argv)


def _command(name: str, argv: Sequence[str]) -> int:
    try:
        module = importlib.import_module(f"mlx_lm.{name}")
    except ImportError as error:
        raise CommandRefused(
            name, f"mlx-lm cannot be imported ({error}); install it with: pip install 'kvstore-llm[mlx]'"
        ) from None
    opened: list[Cached] = []

    def prepared(arguments: argparse.Namespace, cache: CacheArguments) -> None:
        if cache.directory is not None:
            opened.append(_open(name, module, arguments, cache))

    original = vars(module)["stream_generate"]

    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        return opened[0].responses(original, *args, **kwargs) if opened else original(*args, **kwargs)

    try:
        code = run_engine(name, module, argv, prepared, stream_generate=stream_generate)
    finally:
        for cached in opened:
            cached.close()
    if opened:
        leave(code)
    return code


def _open(name: str, module: ModuleType, arguments: argparse.Namespace, cache: CacheArguments) -> Cached:
    """The cache of one command; CommandRefused with one sentence when there can be none."""
    model = arguments.model or vars(module)["DEFAULT_MODEL"]
    if model.startswith(("/", ".", "~")) and not Path(model).exists():
        raise CommandRefused(name, f"cannot load the model {model}: there is no such folder")
    if sys.stderr.isatty() or cache.explain:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        settings = settings_of(arguments, cache)
        store = open_store(cache)
    except KVStoreError as error:
        raise CommandRefused(name, error) from None
    draft = getattr(arguments, "draft_model", None)
    return Cached(store, (model, arguments.adapter_path, draft), settings, cache)


class Cached:
    """What one command restores and saves."""

    def __init__(
        self, store: Store, model_key: tuple[str, str | None, str | None], settings: Any, cache: CacheArguments
    ) -> None:
        from kvstore_mlx.housekeeping import Housekeeping  # noqa: PLC0415 - imports the engine
        from kvstore_mlx.metrics import Metrics  # noqa: PLC0415 - as above
        from kvstore_mlx.spaces import Spaces  # noqa: PLC0415 - as above
        from kvstore_mlx.tier import TieredPromptCache  # noqa: PLC0415 - as above
        from kvstore_mlx.writer import Writer  # noqa: PLC0415 - as above

        self._store = store
        self._key = model_key
        self._settings = settings
        self._loaded = SimpleNamespace(model=None, draft_model=None)
        self._writer = Writer(Housekeeping(store, cache.size, cache.write_limit))
        # Nothing is kept in memory: a command has one conversation, and its caches are the engine's.
        self._tier = TieredPromptCache(0, Spaces(store, self._loaded, settings), self._writer, cache.saving)
        self._metrics = Metrics(store)
        self._tier.observe = self._metrics.fetched
        self._history: tuple[Any, list[int]] = (None, [])
        self._explain = cache.explain
        self._exact = cache.exact

    def responses(
        self,
        original: Callable[..., Any],
        model: Any,
        tokenizer: Any,
        prompt: Any,
        *args: Any,
        prompt_cache: list[Any] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """As mlx_lm.stream_generate, of which original is the one that is replaced."""
        from mlx_lm.generate import generation_stream  # noqa: PLC0415 - imports the engine

        from kvstore_mlx.engine import recording_stream_generate  # noqa: PLC0415 - as above
        from kvstore_mlx.explain import Explainer  # noqa: PLC0415 - as above
        from kvstore_mlx.generation import tokens_of  # noqa: PLC0415 - as above
        from kvstore_mlx.metrics import Served  # noqa: PLC0415 - as above

        draft = kwargs.get("draft_model")
        caches, history = prompt_cache, self._history[1] if prompt_cache is self._history[0] else []
        known = history or caches is None or all(cache.empty() for cache in caches)
        if kwargs.get("input_embeddings") is not None or not known or args:
            # Images, or caches from elsewhere: nobody knows which tokens they hold.
            log.info("kvstore: served without the cache directory")
            yield from original(model, tokenizer, prompt, *args, prompt_cache=prompt_cache, **kwargs)
            return
        if caches is None:
            caches = self._fresh(model, draft, kwargs.get("max_kv_size"))
        self._loaded.model, self._loaded.draft_model = model, draft
        if self._explain:
            self._tier.explainer = Explainer(lambda: lambda ids: str(tokenizer.decode(ids)))
        tokens = [*history, *tokens_of(tokenizer, prompt)]
        served = Served()
        self._metrics.begin(served)
        # What the last answer left was decoded; with --kv-cache-exact nothing is computed upon it.
        going_on = bool(history) and not self._exact
        found, rest = self._tier.extend(
            self._key, tokens, caches if going_on else None, len(history) if going_on else 0
        )
        if found is not None or history:
            # In place: a chat holds on to its list. What was in it is of no use when neither can go on from it.
            caches[:] = found if found is not None else self._fresh(model, draft, kwargs.get("max_kv_size"))
        stream = recording_stream_generate(original, self._tier, self._settings.quantization)
        generated: list[int] = []
        # What fails within the engine may leave a token in some layers and not in others: nobody knows such caches.
        self._history, whole = (None, []), False
        try:
            responses = stream(
                model=model, tokenizer=tokenizer, prompt=rest, prompt_cache=caches, stream=generation_stream, **kwargs
            )
            for response in self._metrics.watched(served, responses):
                generated.append(response.token)
                whole = True
                yield response
                whole = False
            whole = True
        finally:
            if generated and whole:
                held = [*tokens, *generated]
                self._tier.insert_cache(self._key, held, caches)
                self._history = (prompt_cache, held)

    def _fresh(self, model: Any, draft: Any, window: int | None) -> list[Any]:
        """Empty caches as the engine makes them; it knows no window with a draft model."""
        from kvstore_mlx.spaces import make_caches  # noqa: PLC0415 - imports the engine

        return make_caches(model, draft, None if draft is not None else window)

    def close(self) -> None:
        """Write what is queued, and let the directory go."""
        self._writer.close(DRAIN_S)
        self._metrics.close()
        self._store.close()
