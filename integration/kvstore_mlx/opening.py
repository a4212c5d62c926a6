"""kvstore_mlx.open: a session from a model in memory and a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.fs import Durability
from kvstore.sizes import parse_size
from kvstore.store import DEFAULT_INTERVAL, Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.fingerprint import Quantization, identity_of
from kvstore_mlx.live import ExtrasHook
from kvstore_mlx.session import Session
from kvstore_mlx.spaces import Settings, make_space, plans_of
from kvstore_mlx.versions import check_versions
from kvstore_mlx.weights import parameters_digest

__all__ = ["open_session"]


def open_session(
    directory: str | os.PathLike[str] | None,
    model: Any,
    tokenizer: Any = None,
    *,
    path: str | None = None,
    adapter: str | None = None,
    identity: Mapping[str, Any] | None = None,
    size: str | int = "20GiB",
    interval: int | None = None,
    durability: Durability = Durability.BARRIER,
    prefill_step: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    states: int = 1,
    min_tokens: int | None = None,
    write_limit: str | int | None = None,
    exact: bool = False,
    strict: bool = False,
    salt: bytes = b"",
    extras: ExtrasHook | None = None,
) -> Session:
    """Open a cache directory for a loaded model. None keeps nothing, and computes in the same pieces.

    path (as given to mlx_lm.load) or identity (any mapping that JSON can hold) says which weights these are; without
    either all parameters in memory are hashed. Settings and a sample of the parameters in memory count in any case, so
    that a path is enough with an adapter, too; but if you change a few numbers within a tensor, pass an identity, or
    neither of both. min_tokens is the shortest prefix that is restored or saved; None, as ``auto`` on the command line,
    measures as the session runs from where on reading is quicker than computing. The other arguments are those of
    ``kvstore serve``. Raises UnsupportedModelError when the model cannot be cached, and whatever Store.open raises.
    """
    budget = parse_size(size) if isinstance(size, str) else size
    limit = parse_size(write_limit) if isinstance(write_limit, str) else write_limit
    quantization = None if kv_bits is None else Quantization(kv_bits, kv_group_size, quantized_kv_start)
    settings = Settings(
        check_versions(),
        salt=salt,
        quantization=quantization,
        prefill_step=prefill_step,
        strict=strict,
        extras=extras,
    )

    def identified() -> Mapping[str, Any]:
        if identity is not None:
            return {"identity": dict(identity)}
        return identity_of(path, adapter, None) if path is not None else {"parameters": parameters_digest(model)}

    store, space = None, None
    if directory is None:
        plan = plans_of(model, None, settings)[0][1]
    else:
        store = Store.open(Path(directory).expanduser(), interval=interval, durability=durability)
        try:
            label = Path(path or "model").name
            space = make_space(store, model, None, identity=identified, label=label, settings=settings)
            plan = space.forms[0].plan
        except BaseException:
            store.close()
            raise
    return Session(
        model,
        tokenizer,
        plan=plan,
        store=store,
        space=space,
        budget=budget,
        step=prefill_step,
        interval=store.interval if store is not None else interval or DEFAULT_INTERVAL,
        saving=Saving(states, exact, min_tokens),
        write_limit=limit,
        quantization=quantization,
        extras=extras,
    )
