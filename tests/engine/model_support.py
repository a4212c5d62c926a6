"""Folders of tiny models of any family, which a server loads like any other model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from conftest import SPECIAL, make_tokenizer
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

from families import arguments, module_of
from family_arguments import SPECIAL_WEIGHTS
from family_weights import randomize

_VOCABULARIES = {"vocab_size", "num_vocab", "embedding_size", "vocab_size_per_layer_input"}


def make_family(
    folder: Path, family: str, template: str | None = None, special: tuple[str, ...] = (), **more: Any
) -> Path:
    """A model folder of a family of tools/families.py with seeded random weights and a byte tokenizer.

    special: further tokens, such as those around a thinking block. more goes into the configuration; for a family
    whose language model is a part, into that.
    """
    folder.mkdir(parents=True)
    vocabulary = make_tokenizer(folder)
    if special:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary += tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        tokenizer.save(str(folder / "tokenizer.json"))
    config = arguments(family)
    text = config.get("text_config")
    (config if text is None else text).update(more)
    for part in (config, text or {}):
        part.update(dict.fromkeys(_VOCABULARIES & set(part), vocabulary))
        part["eos_token_id"] = SPECIAL.index("<|im_end|>")
    module = importlib.import_module(f"mlx_lm.models.{module_of(family)}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    randomize(model, 0, SPECIAL_WEIGHTS.get(module_of(family), {}))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    if template is not None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder
