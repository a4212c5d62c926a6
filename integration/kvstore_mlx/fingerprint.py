"""What a namespace is made of for mlx-lm: everything that changes the KV bytes of a given token sequence.

Content, not location: two models of one name never meet, and a renamed folder of one model still hits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from kvstore.namespace import NamespaceInfo
from kvstore_mlx.codec import LAYOUT
from kvstore_mlx.weights import Memory, weights_digest

__all__ = ["describe", "folder_of"]

# Keys of config.json that say where a model came from, and nothing about what it computes.
_IGNORED_CONFIG = {"_name_or_path", "transformers_version"}


def folder_of(path_or_repo: str) -> Path:
    """The local folder of a model that mlx-lm has just loaded: a path, or a snapshot in the hub's cache."""
    path = Path(path_or_repo)
    return path if path.exists() else Path(snapshot_download(path_or_repo, local_files_only=True))


def describe(
    model: str, adapter: str | None, draft: str | None, caches: Sequence[Any], versions: dict[str, str]
) -> NamespaceInfo:
    """The namespace of a loaded model.

    caches are what make_prompt_cache gives, the draft model's after the model's.
    """
    memory = Memory()
    return NamespaceInfo(
        {
            "engine": "mlx-lm",
            "layout": LAYOUT,
            "versions": versions,
            "model": _model(folder_of(model), memory),
            "adapter": weights_digest(Path(adapter), "adapter*", memory) if adapter else None,
            "draft": _model(folder_of(draft), memory) if draft else None,
            "caches": [type(cache).__name__ for cache in caches],
        },
        label=Path(model).name or model,
    )


def _model(folder: Path, memory: Memory) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    return {
        "weights": weights_digest(folder, "model*.safetensors", memory),
        "config": {key: value for key, value in sorted(config.items()) if key not in _IGNORED_CONFIG},
        # A model may bring its own code (trust_remote_code).
        "code": weights_digest(folder, str(config["model_file"]), memory) if config.get("model_file") else None,
    }
