"""Read one manifest of a scan with every check that needs no block: for the commands that work on whole directories.

A lookup has a prompt to compare with and computes names from it (kvstore.lookup); here the name is what is known, and
the manifest must be the one that belongs there.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.context import Context
from kvstore.errors import DamagedManifestError
from kvstore.fs import NOT_A_FILE
from kvstore.keys import root_key
from kvstore.layout import NAME_KEY_BYTES
from kvstore.manifest import MAX_MANIFEST_BYTES, Manifest, decode
from kvstore.scan import NodeFile

__all__ = ["Stored", "load"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A manifest as it lay there. data: its bytes."""

    path: Path
    manifest: Manifest
    data: bytes
    status: os.stat_result


def load(context: Context, file: NodeFile) -> Stored | None:
    """The manifest of a file, or None when it is gone.

    Raises DamagedManifestError when it cannot be served from there, and OSError when it cannot be read.
    """
    path = file.path(context.layout)
    try:
        data, status = context.fs.read_file(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DamagedManifestError("it is larger than a manifest can be") from error
        if error.errno in NOT_A_FILE:
            raise DamagedManifestError(f"it cannot be a manifest: {error.strerror}") from error
        raise
    manifest = decode(data)
    if manifest.file_name != file.file:
        raise DamagedManifestError("it is the manifest of another prefix than its name says")
    if manifest.fingerprint[:NAME_KEY_BYTES].hex() != file.namespace:
        raise DamagedManifestError("it belongs to another namespace than its folder")
    if manifest.interval != context.interval:
        raise DamagedManifestError(f"its interval is {manifest.interval} tokens, not {context.interval}")
    if not manifest.first and manifest.parent != root_key(manifest.fingerprint, manifest.interval):
        raise DamagedManifestError("it begins at token 0 but does not continue the namespace's root")
    return Stored(path, manifest, data, status)
