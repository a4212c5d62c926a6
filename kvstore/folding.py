"""Folders whose names are ours but in capitals, as some copiers to FAT volumes leave them.

Where the file system folds case, a lookup finds them by their names in small letters, so they are ours. Where it does
not, they are hidden from every lookup, and so are the names of the blocks that their manifests hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["is_hidden", "known_as"]


def known_as(entry: os.DirEntry[str], above: Path, is_ours: Callable[[str], bool]) -> str | None:
    """The name by which a lookup finds an entry: its own, or the same in small letters where these are one; or None."""
    if is_ours(entry.name):
        return entry.name
    if is_hidden(entry, is_ours):
        lower = entry.name.lower()
        with suppress(OSError):
            if os.path.samestat(os.stat(above / lower, follow_symlinks=False), entry.stat(follow_symlinks=False)):
                return lower
    return None


def is_hidden(entry: os.DirEntry[str], is_ours: Callable[[str], bool]) -> bool:
    """Whether an entry is a folder that would be one of ours, if its name were in small letters."""
    return entry.name != entry.name.lower() and is_ours(entry.name.lower()) and entry.is_dir(follow_symlinks=False)
