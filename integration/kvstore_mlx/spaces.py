"""Which namespaces a loaded model saves into, decided once a model and process.

A model that cannot be cached is served without the directory and told so in one line.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvstore.errors import KVStoreError
from kvstore.store import Store
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.fingerprint import Quantization, describe, identity_of
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.live import ExtrasHook
from kvstore_mlx.loaded import loaded_digest
from kvstore_mlx.plan import Plan, unknown_classes
from kvstore_mlx.probe import Forward, probe, stretches_beyond

__all__ = ["Settings", "Spaces", "UnsupportedModelError", "make_caches", "make_space", "plans_of"]

log = logging.getLogger("kvstore")


class UnsupportedModelError(KVStoreError):
    """A model cannot be cached; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What of an engine's and kvstore's settings decides the namespace. window: --max-kv-size of the engine."""

    versions: Mapping[str, str]
    salt: bytes = field(default=b"", repr=False)
    quantization: Quantization | None = None
    prefill_step: int = 2048
    strict: bool = False
    window: int | None = None
    extras: ExtrasHook | None = None


class Spaces:
    """The models a server has loaded, by mlx_lm.server's model key (path, adapter, draft model).

    made: told of each that was loaded by its name, with its space, or with why it has none; on the generation thread.
    """

    def __init__(self, store: Store, provider: Any, settings: Settings) -> None:
        self._store = store
        self._provider = provider
        self._settings = settings
        self._known: dict[Any, ModelSpace | None] = {}
        self._loaded: dict[Any, weakref.ref[Any]] = {}
        self._off: dict[Any, str] = {}
        self.phase = address_phase()
        self.made: Callable[[str, ModelSpace | None, str], None] = lambda _label, _space, _why: None

    def of(self, model_key: Any) -> ModelSpace | None:
        """The space of the model that is loaded now; None when it is served without the directory.

        A model that was swapped out and loaded again is another object, and is looked at again.
        """
        loaded = self._loaded.get(model_key)
        if loaded is None or loaded() is not self._provider.model:
            self._loaded[model_key] = weakref.ref(self._provider.model)
            space = self._known[model_key] = self._make(model_key)
            self.made(_told_apart(model_key, list(self._known)), space, self._off.get(model_key, ""))
        return self._known[model_key]

    def models(self) -> dict[str, str]:
        """The models that were loaded, by name, each with why it is served without the directory, or with nothing.

        Whoever reaches the server may read it: no reason names a file.
        """
        found: dict[str, str] = {}
        for name, (model_key, space) in self._named().items():
            forms = [] if space is None else space.forms
            trouble = next((form.trouble for form in forms if form.trouble), "")
            found[name] = self._off.get(model_key, "") or trouble
        return found

    def spaces(self) -> dict[str, ModelSpace]:
        """The spaces of the models that were loaded and have one, by the same names."""
        return {name: space for name, (_, space) in self._named().items() if space is not None}

    def _named(self) -> dict[str, tuple[Any, ModelSpace | None]]:
        known = dict(self._known)  # Another thread loads models meanwhile.
        return {_told_apart(model_key, list(known)): (model_key, space) for model_key, space in known.items()}

    def _make(self, model_key: Any) -> ModelSpace | None:
        model, adapter, draft = model_key
        label = _name(model_key)
        self._off.pop(model_key, None)
        started = time.perf_counter()
        try:
            space = make_space(
                self._store,
                self._provider.model,
                self._provider.draft_model,
                identity=lambda: identity_of(model, adapter, draft),
                label=label,
                settings=self._settings,
            )
        except UnsupportedModelError as error:
            self._off[model_key] = str(error)
            log.warning("kvstore: caching is off for %s: %s", model, error)
            return None
        except Exception as error:
            self._off[model_key] = "its files could not be identified; the log says why"
            log.warning("kvstore: caching is off for %s: its files could not be identified (%s)", model, error)
            return None
        seconds = time.perf_counter() - started
        ids = " and ".join(form.namespace.id for form in space.forms)
        log.info("kvstore: %s uses namespace %s (identified in %.1f s)", label, ids, seconds)
        return space


def _name(model_key: Any) -> str:
    """What people call a model."""
    return Path(model_key[0]).name or str(model_key[0])


def _told_apart(model_key: Any, known: Sequence[Any]) -> str:
    """The same with what tells it from the others: folders above it, and what it is loaded with."""
    name = _ending(model_key[0], [key[0] for key in known])
    for place, word in ((1, "adapter"), (2, "draft")):
        given = [key[place] for key in known if key[0] == model_key[0]]
        if len(set(given)) > 1 and model_key[place] is not None:
            name += f" with {word} {_ending(model_key[place], [each for each in given if each is not None])}"
    return name


def _ending(path: str, known: Iterable[str]) -> str:
    """The last name of a path, or as many names as tell it from others."""
    parts, others = Path(path).parts, [Path(other).parts for other in known if other != path]
    count = next((n for n in range(1, len(parts) + 1) if all(other[-n:] != parts[-n:] for other in others)), 0)
    return str(Path(*parts[-count:])) if count else str(path)


def make_space(
    store: Store,
    model: Any,
    draft: Any,
    *,
    identity: Callable[[], Mapping[str, Any]],
    label: str,
    settings: Settings,
) -> ModelSpace:
    """The space of a loaded model; raises UnsupportedModelError when it cannot be cached."""
    if mx.distributed.init().size() > 1:
        # Each rank would find another prefix, and then wait for the others for ever.
        raise UnsupportedModelError("it is distributed over several processes")
    plans = plans_of(model, draft, settings)
    known = {**identity(), "loaded": [loaded_digest(each) for each in (model, draft) if each is not None]}
    forms = []
    for quantized, plan in plans:
        info = describe(
            known,
            plan,
            settings.versions,
            label=label,
            salt=settings.salt,
            quantization=settings.quantization,
            quantized=quantized,
            prefill_step=settings.prefill_step,
            strict=settings.strict,
            extras=None if settings.extras is None else settings.extras.name,
        )
        least = settings.quantization.start if settings.quantization is not None and quantized else 0
        form = Form(plan, store.namespace(info), least, settings.extras is not None, most=stretches_beyond(model))
        forms.append(form)
    return ModelSpace(tuple(forms), label)


def make_caches(model: Any, draft: Any, window: int | None) -> list[Any]:
    """Fresh caches as the engine makes them, the draft model's after the model's."""
    caches: list[Any] = make_prompt_cache(model, window)
    return caches if draft is None else caches + make_prompt_cache(draft)


def plans_of(model: Any, draft: Any, settings: Settings) -> list[tuple[bool, Plan]]:
    """The forms of a model's caches, plain before quantized; raises UnsupportedModelError.

    The plans do not keep the model alive: a server that swaps models has memory for one.
    """
    quantization, extras = settings.quantization, settings.extras
    loaded, drafting = weakref.ref(model), None if draft is None else weakref.ref(draft)

    def make() -> list[Any]:
        both = loaded(), None if drafting is None else drafting()
        if both[0] is None or (drafting is not None and both[1] is None):
            raise ValueError("the model is not loaded any more")
        return make_caches(*both, settings.window)

    def make_quantized() -> list[Any]:
        assert quantization is not None
        # As mlx_lm.generate.maybe_quantize_kv_cache does, which looks at whole entries only.
        return [
            cache.to_quantized(group_size=quantization.group_size, bits=quantization.bits)
            if type(cache) is KVCache
            else cache
            for cache in make()
        ]

    if unknown := unknown_classes(make()):
        raise UnsupportedModelError(f"it uses {unknown}, which cannot be saved yet")
    if draft is not None and quantization is not None:
        raise UnsupportedModelError("with a draft model the engine loses track of caches that --kv-bits quantizes")
    forward = _forward(model, draft, len(make_prompt_cache(model, settings.window)))
    if draft is not None and (stretches_beyond(model) or stretches_beyond(draft)):
        raise UnsupportedModelError("with a draft model, rows of a rope that stretches depend on what it guessed")
    try:
        plans = [(False, probe(make, forward, extras))]
        if draft is not None and plans[0][1].stateful:
            raise UnsupportedModelError("a draft model needs caches that can be cut at any token")
        if quantization is not None:
            plans.append((True, probe(make_quantized, forward, extras)))
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedModelError(str(error)) from error
    return plans


def _forward(model: Any, draft: Any, own: int) -> Forward:
    """Both models on their caches, of which the first own are the model's; the logits are the model's."""

    def forward(tokens: list[int], caches: Sequence[Any]) -> Any:
        if draft is not None:
            draft(mx.array([tokens]), cache=list(caches[own:]))
        return model(mx.array([tokens]), cache=list(caches[:own]))[0, -1]

    return forward
