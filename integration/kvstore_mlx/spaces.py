"""Which namespace a loaded model saves into, decided once a model and process.

A model that cannot be cached is served without the directory and told so in one line.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from kvstore.store import Namespace, Store
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.codec import unsupported
from kvstore_mlx.fingerprint import describe

__all__ = ["ModelSpace", "Spaces"]

log = logging.getLogger("kvstore")


@dataclass(frozen=True)
class ModelSpace:
    """A model's namespace and the number of caches its layers make."""

    namespace: Namespace
    layers: int


class Spaces:
    """Namespaces of the models a server has loaded, by mlx_lm.server's model key (path, adapter, draft model)."""

    def __init__(self, store: Store, provider: Any, versions: dict[str, str]) -> None:
        self._store = store
        self._provider = provider
        self._versions = versions
        self._known: dict[Any, ModelSpace | None] = {}
        self.phase = address_phase()

    def of(self, model_key: Any) -> ModelSpace | None:
        """The space of the model that is loaded now; None when it is served without the directory."""
        if model_key not in self._known:
            self._known[model_key] = self._make(model_key)
        return self._known[model_key]

    def _make(self, model_key: Any) -> ModelSpace | None:
        provider = self._provider
        started = time.perf_counter()
        try:
            caches = make_prompt_cache(provider.model)
            if provider.draft_model is not None:
                caches += make_prompt_cache(provider.draft_model)
            reason = self._reason(caches)
            if reason is None:
                model, adapter, draft = model_key
                info = describe(model, adapter, draft, caches, self._versions)
        except Exception as error:
            reason = f"its files could not be identified ({error})"
        if reason is not None:
            log.warning("kvstore: caching is off for %s: %s", model_key[0], reason)
            return None
        namespace = self._store.namespace(info)
        seconds = time.perf_counter() - started
        log.info("kvstore: %s uses namespace %s (identified in %.1f s)", info.label, namespace.id, seconds)
        return ModelSpace(namespace, len(caches))

    def _reason(self, caches: list[Any]) -> str | None:
        """Why this model cannot be cached, or None."""
        if self._provider.cli_args.kv_bits is not None:
            return "--kv-bits makes quantized caches, which cannot be saved yet"
        if classes := unsupported(caches):
            return f"it uses {classes}, which cannot be saved yet"
        return None
