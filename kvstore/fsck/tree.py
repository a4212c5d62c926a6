"""The folders of a cache directory and the names in them, sorted into what belongs there and what does not.

Beside kvstore.scan, which counts what does not belong as foreign and is done with it: here a manifest in the wrong
folder, or a link in place of a block, is what is looked for. Lists names only; a file's stat is the examiner's.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from kvstore.folding import is_hidden, known_as
from kvstore.layout import FANOUT, Layout, NodeName

__all__ = ["WIDE", "Folder", "Misfits", "ObjectKind", "entries", "folders"]

ObjectKind: TypeAlias = Literal["blocks", "tokens", "nodes"]

_FANOUT = frozenset(FANOUT)
WIDE = 0o077
"""Mode bits that let somebody else in."""


class Folder(NamedTuple):
    """One fan-out folder and the names of the files that belong into it. namespace is empty but for nodes."""

    kind: ObjectKind
    path: str
    namespace: str
    names: list[str]


@dataclass(slots=True)
class Misfits:
    """What a walk came across on its way.

    strays: files with a name of ours in a folder where no reader looks. odd: links, folders and the like with a name of
    ours in the right folder. blocked: files and links where a folder belongs. failed: folders that could not be listed.
    wide: folders that others may enter. hidden: folders that no reader finds, because their names are in capitals.
    """

    strays: list[Path] = field(default_factory=list)
    odd: list[Path] = field(default_factory=list)
    blocked: list[Path] = field(default_factory=list)
    failed: list[tuple[Path, OSError]] = field(default_factory=list)
    wide: list[Path] = field(default_factory=list)
    hidden: list[Path] = field(default_factory=list)
    foreign: int = 0


def folders(layout: Layout, kind: ObjectKind, misfits: Misfits) -> Iterator[Folder]:
    """All fan-out folders of one kind that are there, with the names in them."""
    above = {"blocks": layout.blocks, "tokens": layout.tokens, "nodes": layout.nodes}[kind]
    if kind != "nodes":
        yield from _fanout(kind, above, "", misfits)
        return
    for entry in entries(above, misfits):
        namespace = _name(entry, above, Layout.is_namespace_id, misfits)
        if namespace is not None and _is_folder(entry, above, misfits):
            yield from _fanout(kind, above / namespace, namespace, misfits)


def _fanout(kind: ObjectKind, above: Path, namespace: str, misfits: Misfits) -> Iterator[Folder]:
    ours = NodeName.is_file_name if kind == "nodes" else Layout.is_block_name
    for entry in entries(above, misfits):
        start = _name(entry, above, _FANOUT.__contains__, misfits)
        if start is None or not _is_folder(entry, above, misfits):
            continue
        folder, names = above / start, []
        for file in entries(folder, misfits):
            name = file.name
            if not ours(name):
                misfits.foreign += 1
            elif not name.startswith(start):
                misfits.strays.append(folder / name)
            elif file.is_file(follow_symlinks=False):
                names.append(name)
            else:
                misfits.odd.append(folder / name)
        yield Folder(kind, str(folder), namespace, names)


def _name(entry: os.DirEntry[str], above: Path, is_ours: Callable[[str], bool], misfits: Misfits) -> str | None:
    """The name by which readers find a folder of ours; None for what is not ours, or hidden from them."""
    name = known_as(entry, above, is_ours)
    if name is None and is_hidden(entry, is_ours):
        misfits.hidden.append(above / entry.name)
    elif name is None:
        misfits.foreign += 1
    return name


def _is_folder(entry: os.DirEntry[str], above: Path, misfits: Misfits) -> bool:
    """A link in place of a folder is not followed: what lies behind it may be another store."""
    if entry.is_dir(follow_symlinks=False):
        return True
    misfits.blocked.append(above / entry.name)
    return False


def entries(folder: Path, misfits: Misfits) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder, relative to its descriptor; none when it is not there."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_mode & WIDE:
                misfits.wide.append(folder)
            with os.scandir(fd) as found:
                yield from found
        finally:
            os.close(fd)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            misfits.blocked.append(folder)
        else:
            misfits.failed.append((folder, error))
