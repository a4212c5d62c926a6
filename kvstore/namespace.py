"""What a namespace is: everything that must be equal for KV bytes to be interchangeable, and its file for people.

The store only hashes the description; which facts belong in it is an engine adapter's knowledge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.fs import FileSystem
from kvstore.keys import namespace_fingerprint
from kvstore.layout import Layout
from kvstore.untrusted import parse

__all__ = ["MAX_NAMESPACE_BYTES", "NamespaceInfo", "namespace_document", "read_label", "read_namespace_file"]

MAX_NAMESPACE_BYTES = 1 << 20
_ID_BYTES = 16


@dataclass(frozen=True)
class NamespaceInfo:
    """A namespace to be used.

    description is hashed; label (a model's name or path, say) is only shown, and what of it UTF-8 cannot hold (a path
    may have such bytes) is shown as "?". salt separates tenants and is never written.
    """

    description: Mapping[str, Any]
    label: str = ""
    salt: bytes = field(default=b"", repr=False)

    @property
    def fingerprint(self) -> bytes:
        """All 32 bytes of the fingerprint. Raises KVStoreError for a description that is no JSON, or no UTF-8."""
        try:
            return namespace_fingerprint(self.description, self.salt)
        except (TypeError, ValueError, RecursionError) as error:
            raise KVStoreError(f"describe a namespace by JSON values that UTF-8 can hold: {error!r:.200}") from error

    @property
    def id(self) -> str:
        """The fingerprint as file names carry it: 32 hex digits."""
        return self.fingerprint[:_ID_BYTES].hex()

    def document(self, created: float) -> bytes:
        """The content of ``namespaces/<ns>.json``."""
        content = {
            "format": 1,
            "fingerprint": self.fingerprint.hex(),
            "label": _shown(str(self.label)),
            "salted": bool(self.salt),
            "created": created,
            "description": self.description,
        }
        return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def read_namespace_file(fs: FileSystem, path: Path) -> dict[str, Any]:
    """The document of a namespace; empty when it is missing or unreadable, because people's text is never needed."""
    try:
        data, _ = fs.read_file(path, MAX_NAMESPACE_BYTES)
    except OSError:
        return {}
    return namespace_document(data)


def namespace_document(data: bytes) -> dict[str, Any]:
    """The document in a namespace's file; empty when there is none in it."""
    try:
        content = parse(data)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_label(fs: FileSystem, layout: Layout, namespace: str) -> str:
    """What a namespace's document calls it; empty when nothing can be read there."""
    label = read_namespace_file(fs, layout.namespace_file(namespace)).get("label")
    # JSON may hold half of a surrogate pair, which no output could encode.
    return _shown(label) if isinstance(label, str) else ""


def _shown(text: str) -> str:
    return text.encode(errors="replace").decode()
