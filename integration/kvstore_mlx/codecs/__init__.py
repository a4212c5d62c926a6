"""How each cache class of the engine becomes rows of tokens and a boundary state, and back.

A new class is one small module with a codec, one line in the table below, and a test. Classes are named, not imported:
a model may bring one of its own, and importing a hundred models to know their classes would take seconds.
"""

from __future__ import annotations

from typing import Any

from kvstore_mlx.codecs.arrays import Arrays
from kvstore_mlx.codecs.base import Codec, Snapshot
from kvstore_mlx.codecs.chunked import Chunked
from kvstore_mlx.codecs.compressed import Compressed
from kvstore_mlx.codecs.plain import Concatenated, Plain
from kvstore_mlx.codecs.quantized import Quantized
from kvstore_mlx.codecs.rotating import Rotating

__all__ = ["Codec", "Snapshot", "codec_of", "register"]

_CACHE = "mlx_lm.models.cache"

# One codec for a class and for what a batch makes of it: that is how a plan knows them again.
_PLAIN, _ROTATING = Plain(), Rotating()

_CODECS: dict[str, Codec] = {
    f"{_CACHE}.KVCache": _PLAIN,
    f"{_CACHE}.BatchKVCache": _PLAIN,
    f"{_CACHE}.ConcatenateKVCache": Concatenated(),
    f"{_CACHE}.QuantizedKVCache": Quantized(),
    f"{_CACHE}.RotatingKVCache": _ROTATING,
    f"{_CACHE}.BatchRotatingKVCache": _ROTATING,
    f"{_CACHE}.ArraysCache": Arrays(),
    f"{_CACHE}.ChunkedKVCache": Chunked(),
    "mlx_lm.models.deepseek_v41.LayerCache": Compressed(),
}


def codec_of(cache: Any) -> Codec | None:
    """The codec of exactly this class; a subclass may keep what its parent does not, so it needs one of its own."""
    return _CODECS.get(name_of(type(cache)))


def register(cache_class: type, codec: Codec) -> None:
    """Add the codec of a class that kvstore does not know; raises ValueError when it knows it."""
    name = name_of(cache_class)
    if name in _CODECS:
        raise ValueError(f"{name} has a codec")
    _CODECS[name] = codec


def name_of(cache_class: type) -> str:
    """How the table names a class."""
    return f"{cache_class.__module__}.{cache_class.__qualname__}"
