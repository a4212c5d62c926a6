"""What a model is as it lies in memory, beside the files it came from.

A program may load a model with settings of its own (``load(path, model_config=…)``), fuse or forget an adapter, or
change weights, and the files say nothing of it. So the settings that the model object holds, the names, types and
shapes of all parameters, and the corners of each one are part of the namespace. A sample, in milliseconds where all of
an 8B model takes a second: it sees every change of a whole tensor, and not one of a few numbers inside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kvstore_mlx.buffers import copy_whole

__all__ = ["loaded_digest"]

_CORNER = {1: 256, 2: 16}
"""Elements of each axis at the beginning and as many at the end, by the number of axes; of three and more, 4."""


def loaded_digest(model: Any) -> str:
    """SHA-256 of a loaded model's settings and of a sample of each of its parameters."""
    digest = hashlib.sha256()
    args = getattr(model, "args", None)
    settings = dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else {}
    # By its type where JSON knows no better: an address would be another one in each process.
    digest.update(json.dumps(settings, sort_keys=True, default=lambda value: type(value).__name__).encode())
    corners = []
    for name, array in sorted(tree_flatten(model.parameters())):
        digest.update(f"\n{name} {array.dtype} {array.shape}".encode())
        size = _CORNER.get(array.ndim, 4)
        corners += [
            mx.contiguous(array[(slice(size),) * array.ndim]),
            mx.contiguous(array[(slice(-size, None),) * array.ndim]),
        ]
    mx.eval(corners)
    for corner in corners:
        digest.update(copy_whole(corner))
    return digest.hexdigest()
