"""kvstore for mlx-lm: ``kvstore serve``, ``generate`` and ``chat``, and ``kvstore_mlx.open`` for Python programs.

Nothing of MLX is imported before it is needed: the commands parse their flags first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_mlx.live import Extras, ExtrasHook
    from kvstore_mlx.opening import open_session as open  # noqa: A004 - kvstore_mlx.open is what it is called by
    from kvstore_mlx.session import Session
    from kvstore_mlx.spaces import UnsupportedModelError

__all__ = ["Extras", "ExtrasHook", "Session", "UnsupportedModelError", "open"]

_WHERE = {
    "Extras": ("live", "Extras"),
    "ExtrasHook": ("live", "ExtrasHook"),
    "Session": ("session", "Session"),
    "UnsupportedModelError": ("spaces", "UnsupportedModelError"),
    "open": ("opening", "open_session"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - beside its only use

    module, attribute = _WHERE[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
