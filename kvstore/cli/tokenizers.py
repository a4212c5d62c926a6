"""The tokenizer of a model that is only known by its name: from folders of this machine, never from the network.

A namespace's label is the last part of what its model was loaded by: a folder, or a name on the Hugging Face hub, of
which downloads leave a snapshot in a cache with a known place and form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import KVStoreError

__all__ = ["tokenizer_of"]

_FILE = "tokenizer.json"
_NAME = re.compile(r"[\w.-]+")
"""What may be a model's name. The label is whatever somebody wrote into the directory."""


def tokenizer_of(label: str) -> Path:
    """The tokenizer.json of the model with this label.

    Raises KVStoreError when there is none on this machine, or several that differ.
    """
    found: dict[bytes, Path] = {}
    if _NAME.fullmatch(label) and label.strip("."):
        for path in (Path(label) / _FILE, *_snapshots(label)):
            try:
                found.setdefault(path.read_bytes(), path)
            except OSError:
                continue
    if not found:
        raise KVStoreError(
            f"no tokenizer of {label!r} is in this folder or among the downloads of the Hugging Face hub; "
            "name the model's folder with --model FOLDER"
        )
    if len(found) > 1:
        places = " and ".join(str(path.parent) for path in found.values())
        raise KVStoreError(f"there are different tokenizers of {label!r}, in {places}; name one with --model FOLDER")
    return next(iter(found.values()))


def _snapshots(name: str) -> Iterator[Path]:
    """The files of the newest snapshots of all models of that name, whoever's they are."""
    hub = _hub()
    try:
        folders = sorted(folder for folder in os.listdir(hub) if _is_of(folder, name))
    except OSError:
        return
    for folder in folders:
        try:
            commit = (hub / folder / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if _NAME.fullmatch(commit):
            yield hub / folder / "snapshots" / commit / _FILE


def _is_of(folder: str, name: str) -> bool:
    """Whether a folder is that of a model of this name: models--<owner>--<name>, or without an owner."""
    kind, _, rest = folder.partition("--")
    return kind == "models" and rest in {name, f"{rest.partition('--')[0]}--{name}"}


def _hub() -> Path:
    """Where the hub's downloads are, by the variables that its own library goes by."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(home).expanduser() / "hub"
