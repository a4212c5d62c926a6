"""kvstore: a persistent KV cache for LLM engines that is nothing but files.

Everything public is named here. The store speaks tokens, tensor descriptions and plain buffers; what an engine's cache
looks like is the business of an adapter under ``integration/``.
"""

from kvstore._version import __version__
from kvstore.blocks import Span, TensorBuffer, TensorSpec
from kvstore.errors import (
    DamagedBlockError,
    DamagedError,
    DamagedManifestError,
    FormatVersionError,
    IntervalMismatchError,
    KVStoreError,
    LockTimeoutError,
    MissingParentError,
    NotACacheDirectoryError,
    PublishError,
    SizeError,
    TokenError,
    UnavailableError,
)
from kvstore.fs import Durability, FileSystem
from kvstore.keys import pack_tokens
from kvstore.lookup import Match
from kvstore.namespace import NamespaceInfo
from kvstore.publish import Published
from kvstore.restore import Restored
from kvstore.sizes import format_size, parse_size
from kvstore.states import State, StateTensor
from kvstore.store import DEFAULT_INTERVAL, Namespace, Store

__all__ = [
    "DEFAULT_INTERVAL",
    "DamagedBlockError",
    "DamagedError",
    "DamagedManifestError",
    "Durability",
    "FileSystem",
    "FormatVersionError",
    "IntervalMismatchError",
    "KVStoreError",
    "LockTimeoutError",
    "Match",
    "MissingParentError",
    "Namespace",
    "NamespaceInfo",
    "NotACacheDirectoryError",
    "PublishError",
    "Published",
    "Restored",
    "SizeError",
    "Span",
    "State",
    "StateTensor",
    "Store",
    "TensorBuffer",
    "TensorSpec",
    "TokenError",
    "UnavailableError",
    "__version__",
    "format_size",
    "pack_tokens",
    "parse_size",
]
