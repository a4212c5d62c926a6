"""The tokenizations of whole requests, kept in the cache directory: a request seen before needs no tokenizer.

The key is over everything that the chat template is given: messages, tools, and its arguments (thinking settings too),
in their order. Messages are never tokenized apart and joined, which would give other tokens at the seams. A request
that goes on by a message is another request, and is tokenized.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import threading
import time
from array import array
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.keys import pack_tokens
from kvstore.store import Store
from kvstore.tokenizations import Tokenizations
from kvstore_mlx.guard import Failures

__all__ = ["BUDGET", "TokenizingCache"]

log = logging.getLogger("kvstore")

BUDGET = 16 << 20
"""Bytes that all tokenizations may take: 40 requests of 100,000 tokens."""

_MIN_CHARACTERS = 4096
"""Shorter requests are tokenized sooner than a file is read."""

_CLOCKS = ("strftime_now", "datetime", "now(")
"""A template that uses one of these gives other tokens tomorrow."""

_QUEUED = 8


class TokenizingCache:
    """The tokenizations of one server. get and put on the generation thread; files are written on one of its own.

    salt: that of the server's namespaces; one that has another neither finds these nor could tell by the time it takes.
    """

    def __init__(self, store: Store, budget: int = BUDGET, *, salt: bytes = b"") -> None:
        self._store = store
        self._budget = budget
        self._salt = salt
        self._latest: tuple[Any, Tokenizations | None] = (None, None)
        self._waiting: queue.Queue[tuple[Tokenizations, bytes, bytes] | None] = queue.Queue(_QUEUED)
        self._failures = Failures()
        self._thread = threading.Thread(target=self._write, name="kvstore-tokens", daemon=True)
        self._thread.start()

    def wrap(self, tokenizer: Any) -> Any:
        """The tokenizer, with apply_chat_template answered from the directory where that is safe."""
        if self._latest[0] is not tokenizer:
            scope = _scope(tokenizer, self._salt)
            self._latest = tokenizer, None if scope is None else self._store.tokenizations(scope)
        entries = self._latest[1]
        return tokenizer if entries is None else _Remembering(tokenizer, entries, self)

    def save(self, entries: Tokenizations, request: bytes, tokens: bytes) -> None:
        """Have a tokenization written, unless too many wait."""
        try:
            self._waiting.put_nowait((entries, request, tokens))
        except queue.Full:
            log.debug("kvstore: a tokenization was not saved: too many wait")

    def close(self, timeout: float) -> None:
        """Write what waits, and end the thread; what takes longer than timeout seconds is left."""
        deadline = time.monotonic() + timeout
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _write(self) -> None:
        while (job := self._waiting.get()) is not None:
            entries, request, tokens = job
            try:
                entries.put(request, tokens)
                entries.trim(self._budget)
            except (OSError, KVStoreError) as error:
                log.debug("kvstore: a tokenization was not saved: %s", error)
            except Exception as error:
                if self._failures.due(error):
                    log.exception("kvstore: a tokenization was not saved; this is a bug in kvstore, please report it")


class _Remembering:
    """A tokenizer whose chat template is applied once for each request."""

    def __init__(self, tokenizer: Any, entries: Tokenizations, cache: TokenizingCache) -> None:
        self._tokenizer = tokenizer
        self._entries = entries
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """As the tokenizer's own."""
        request = None if args else _request(messages, kwargs)
        if request is None:
            return self._tokenizer.apply_chat_template(messages, *args, **kwargs)
        if (known := self._entries.get(request)) is not None:
            return array("I", known).tolist()
        tokens = self._tokenizer.apply_chat_template(messages, **kwargs)
        if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
            self._cache.save(self._entries, request, pack_tokens(tokens))
        return tokens


def _request(messages: Any, kwargs: dict[str, Any]) -> bytes | None:
    """Everything the template is given, as bytes; None for what is not tokenized, is short, or is not plain data, and
    for a request with a template of its own, which may look at the clock.

    Order matters to a template that prints a dict, so it is kept.
    """
    if not kwargs.get("tokenize") or kwargs.get("chat_template") is not None:
        return None
    try:
        text = json.dumps([messages, kwargs], separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        return None
    return text.encode() if len(text) >= _MIN_CHARACTERS else None


def _scope(tokenizer: Any, salt: bytes) -> bytes | None:
    """Everything of a tokenizer that decides tokens, and the salt; None where it cannot be known, or changes with the
    clock.
    """
    try:
        inner = getattr(tokenizer, "_tokenizer", tokenizer)
        template = json.dumps(inner.chat_template)
        if any(word in template for word in _CLOCKS):
            log.info("kvstore: tokenizations are not kept: the chat template looks at the clock")
            return None
        parts = [
            inner.backend_tokenizer.to_str(),
            template,
            json.dumps(inner.init_kwargs, default=str, sort_keys=True),
            json.dumps(inner.special_tokens_map, default=str, sort_keys=True),
            *(f"{package} {version(package)}" for package in ("transformers", "tokenizers", "jinja2", "mlx-lm")),
        ]
    except Exception as error:
        log.info("kvstore: tokenizations are not kept: %s", error)
        return None
    scope = hashlib.sha256("\0".join(parts).encode()).digest()
    return hashlib.sha256(scope + salt).digest() if salt else scope
