"""Every model family of mlx-lm, tiny and with seeded random weights, so that each can be restored and compared."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from collections.abc import Mapping
from typing import Any

import mlx_lm.models

from family_arguments import COMMON, FAMILIES, SEEDS, SPECIAL_WEIGHTS, UNBUILDABLE, VARIANTS
from family_kernels import install
from family_weights import randomize

__all__ = ["UNBUILDABLE", "arguments", "build", "module_of", "modules", "rows"]


def modules() -> list[str]:
    """Modules of mlx_lm.models with an arguments class: the families. The others are parts of families."""
    names = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [name for name in names if hasattr(_import(name), "ModelArgs")]


def rows() -> list[str]:
    """What the table has a row for: every family, and variants of a few that have layers of several kinds."""
    return sorted([*modules(), *VARIANTS])


def module_of(row: str) -> str:
    """The family's module name, for a row that may be a variant."""
    return VARIANTS[row][0] if row in VARIANTS else row


def arguments(row: str) -> dict[str, Any]:
    """The configuration of a tiny model, as its config.json would hold it."""
    name = module_of(row)
    own: Mapping[str, Any] = VARIANTS[row][1] if row in VARIANTS else FAMILIES.get(name, {})
    config = {**COMMON, "model_type": name, **own}
    if "text_config" in own:
        config["text_config"] = {**COMMON, "model_type": name, **own["text_config"]}
    return config


def build(row: str, seed: int | None = None) -> Any:
    """A family's model with float32 weights that depend on the row and the seed alone: the same in every process."""
    module = _import(module_of(row))
    install(module_of(row), module)
    model = module.Model(module.ModelArgs.from_dict(arguments(row)))
    model.eval()
    randomize(model, SEEDS.get(row, 1) if seed is None else seed, SPECIAL_WEIGHTS.get(module_of(row), {}))
    return model


def _import(name: str) -> Any:
    # olmo leaves the process when this package is missing, though it uses nothing of it.
    sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
    return importlib.import_module(f"mlx_lm.models.{name}")
