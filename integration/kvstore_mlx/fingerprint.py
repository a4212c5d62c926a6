"""What a namespace is made of for mlx-lm: everything that changes the KV bytes of a given token sequence.

Content, not location: two models of one name never meet, and a renamed folder of one model still hits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from kvstore.namespace import NamespaceInfo
from kvstore.sizes import format_size
from kvstore_mlx.codec import LAYOUT

__all__ = ["describe", "folder_of", "weights_digest"]

log = logging.getLogger("kvstore")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_READ = 1 << 22
_THREADS = 2
# Keys of config.json that say nothing about the computation.
_IGNORED_CONFIG = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"}


def folder_of(path_or_repo: str) -> Path:
    """The local folder of a model that mlx-lm has just loaded: a path, or a snapshot in the hub's cache."""
    path = Path(path_or_repo)
    return path if path.exists() else Path(snapshot_download(path_or_repo, local_files_only=True))


def describe(
    model: str, adapter: str | None, draft: str | None, caches: Sequence[Any], versions: dict[str, str]
) -> NamespaceInfo:
    """The namespace of a loaded model. caches are what make_prompt_cache gives, the draft model's after the model's."""
    return NamespaceInfo(
        {
            "engine": "mlx-lm",
            "layout": LAYOUT,
            "versions": versions,
            "model": _model(folder_of(model)),
            "adapter": weights_digest(Path(adapter), "adapter*") if adapter else None,
            "draft": _model(folder_of(draft)) if draft else None,
            "caches": [type(cache).__name__ for cache in caches],
        },
        label=Path(model).name or model,
    )


def _model(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    return {
        "weights": weights_digest(folder, "model*.safetensors"),
        "config": {key: value for key, value in sorted(config.items()) if key not in _IGNORED_CONFIG},
    }


def weights_digest(folder: Path, pattern: str) -> str:
    """SHA-256 over the names and contents of the weight files that mlx-lm loads from a folder.

    In a hub snapshot the files are links to blobs named by their SHA-256, which then costs nothing; otherwise the files
    are read once, at 1 to 2 GB/s.
    """
    files = sorted(folder.glob(pattern))
    total = sum(file.stat().st_size for file in files if _blob_name(file) is None)
    if total > 1 << 30:
        log.info("kvstore: reading %s of weights once to tell this model from others", format_size(total))
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_file_digest, files))
    text = json.dumps([[file.name, digest] for file, digest in zip(files, digests, strict=True)])
    return hashlib.sha256(text.encode()).hexdigest()


def _blob_name(file: Path) -> str | None:
    name = file.resolve().name
    return name if file.is_symlink() and _SHA256.fullmatch(name) else None


def _file_digest(file: Path) -> str:
    if (name := _blob_name(file)) is not None:
        return name
    state = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_READ):
            state.update(chunk)
    return state.hexdigest()
