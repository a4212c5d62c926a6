"""What a namespace is made of for mlx-lm: everything that changes the KV bytes of a given token sequence.

Content, not location: two models of one name never meet, and a renamed folder of one model still hits.
docs/fingerprint.md says what is in, what is not, and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download

from kvstore.namespace import NamespaceInfo
from kvstore_mlx.plan import Plan
from kvstore_mlx.weights import Memory, weights_digest

__all__ = ["LAYOUT", "Quantization", "describe", "folder_of", "identity_of"]

LAYOUT = 2
"""Version of what the codecs write; part of the namespace, so that a change never meets old bytes."""

# Keys of config.json that say where a model came from, and nothing about what it computes.
_IGNORED_CONFIG = {"_name_or_path", "transformers_version"}


@dataclass(frozen=True)
class Quantization:
    """How the engine quantizes its caches: bits a number, numbers a scale, and the length at which it begins."""

    bits: int
    group_size: int
    start: int


def folder_of(path_or_repo: str) -> Path:
    """The local folder of a model that mlx-lm has just loaded: a path, or a snapshot in the hub's cache."""
    path = Path(path_or_repo)
    return path if path.exists() else Path(snapshot_download(path_or_repo, local_files_only=True))


def identity_of(model: str, adapter: str | None, draft: str | None) -> dict[str, Any]:
    """What the files of a loaded model are, by content."""
    memory = Memory()
    return {
        "model": _model(folder_of(model), memory),
        "adapter": weights_digest(Path(adapter), "adapter*", memory) if adapter else None,
        "draft": _model(folder_of(draft), memory) if draft else None,
    }


def describe(
    identity: Mapping[str, Any],
    plan: Plan,
    versions: Mapping[str, str],
    *,
    label: str,
    salt: bytes = b"",
    quantization: Quantization | None = None,
    quantized: bool = False,
    prefill_step: int = 2048,
    strict: bool = False,
    extras: str | None = None,
) -> NamespaceInfo:
    """The namespace of one form of a model's caches.

    prefill_step counts where caches are quantized, and always with strict (--kv-cache-strict); with that, the kind of
    device goes with it. extras names what an engine attaches to its boundaries.
    """
    description: dict[str, Any] = {"engine": "mlx-lm", "layout": LAYOUT, "versions": dict(versions), **identity}
    description |= plan.describe()
    if quantization is not None:
        description["quantization"] = {
            "bits": quantization.bits,
            "group_size": quantization.group_size,
            "start": quantization.start,
            "reached": quantized,
            # Within a piece of the prefill nothing is quantized yet: which tokens see rounded keys depends on it.
            "prefill_step": prefill_step,
        }
    if strict:
        description["strict"] = {"device": mx.default_device().type.name, "prefill_step": prefill_step}
    if extras is not None:
        description["extras"] = extras
    return NamespaceInfo(description, label=label, salt=salt)


def _model(folder: Path, memory: Memory) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    return {
        "weights": weights_digest(folder, "model*.safetensors", memory),
        "config": {key: value for key, value in sorted(config.items()) if key not in _IGNORED_CONFIG},
        # A model may bring its own code (trust_remote_code).
        "code": weights_digest(folder, str(config["model_file"]), memory) if config.get("model_file") else None,
    }
