"""One pass over a cache directory: every manifest and block with its times, and what the whole directory takes on disk.

For the commands that work on a whole directory (gc, ls, fsck); a lookup or a publish never comes here. Made for a
million nodes (kvstore.walk), so files come out as plain tuples.

Reads only, opens no file, follows no link. What kvstore did not write (.DS_Store, ._x, .nfs*, rsync temporaries,
conflicted copies) is counted and otherwise left alone; so is a manifest or block in a folder where no lookup would
find it. OSError is raised for anything but a file that vanished meanwhile: a collector that could not see part of the
directory must know it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from kvstore.context import Context, Owner
from kvstore.folding import is_hidden, known_as
from kvstore.layout import FANOUT, Kind, Layout, NodeName
from kvstore.pacing import paced
from kvstore.walk import File, Tally, count_foreign, entries, files, tree

__all__ = [
    "HashedFile",
    "NodeFile",
    "Scan",
    "SetAside",
    "StagingFolder",
    "appeared",
    "free_bytes",
    "nodes",
    "scan",
    "usage",
]

_FANOUT = frozenset(FANOUT)
_KEY_END = 1 + 18  # what follows the key in a manifest's name before its suffix: "-<rungs>"
_PARENT = slice(0, 32)
_new = tuple.__new__  # what a named tuple's _make calls, too: a Python call less for each of a million files


class NodeFile(NamedTuple):
    """One manifest file. Its name is kept as one string and cut when asked: a million parsed names are too many."""

    namespace: str
    file: str
    size: int
    allocated: int
    mtime_ns: int
    ctime_ns: int
    inode: int = 0

    @property
    def kind(self) -> Kind:
        """Which of a node's files it is."""
        return cast("Kind", self.file.rpartition(".")[2])

    @property
    def parent(self) -> str:
        """The parent's key as names carry it."""
        return self.file[_PARENT]

    @property
    def key(self) -> str:
        """The node's key as names carry it."""
        end = self.file.rindex(".") - _KEY_END
        return self.file[end - 32 : end]

    @property
    def place(self) -> str:
        """The node's place in the directory: namespace and key."""
        return self.namespace + self.key

    @property
    def above(self) -> str:
        """The place of what it continues."""
        return self.namespace + self.parent

    @property
    def tokens(self) -> int:
        """Number of tokens the node covers."""
        return int(self.file[33 : self.file.index("-", 33)])

    @property
    def rungs(self) -> str:
        """Short hashes of the node's first tokens."""
        end = self.file.rindex(".")
        return self.file[end - 18 : end]

    @property
    def name(self) -> NodeName:
        """The parsed name."""
        found = NodeName.parse(self.file)
        assert found is not None
        return found[0]

    def path(self, layout: Layout) -> Path:
        """Where the manifest lies."""
        return layout.manifest(self.namespace, self.file)


class HashedFile(NamedTuple):
    """One file with a hash for its name: a block (by its digest) or a tokenization (by its key)."""

    digest: bytes
    size: int
    allocated: int
    mtime_ns: int
    ctime_ns: int
    inode: int = 0

    @property
    def name(self) -> str:
        """The file's name."""
        return self.digest.hex()


class StagingFolder(NamedTuple):
    """One process's folder below tmp/. newest_ns: the latest mtime or ctime of it and of anything in it."""

    path: Path
    owner: Owner
    allocated: int
    newest_ns: int


class SetAside(NamedTuple):
    """One file of ours in quarantine/."""

    path: Path
    allocated: int
    mtime_ns: int
    ctime_ns: int


@dataclass(slots=True)
class Scan:
    """A cache directory at one moment, in bytes allocated on disk."""

    blocks: dict[bytes, HashedFile]
    nodes: list[NodeFile]
    tokenizations: list[HashedFile]
    staging: list[StagingFolder]
    quarantine: list[SetAside]
    tally: Tally = field(default_factory=Tally)


def scan(
    context: Context, told: Callable[[int], None] = lambda _: None, rest: Callable[[], None] = lambda: None
) -> Scan:
    """Everything in the directory; told is called with the number of files so far, and rest every few of them. Raises
    OSError when a part of it cannot be seen.

    Blocks come before manifests: a block whose manifest appears during the scan is then a referenced one, not an
    orphan.
    """
    layout, tally = context.layout, Tally(told=told, rest=rest)
    for folder in layout.folders:
        # Behind it may be another store, whose files would be taken for this one's rubbish.
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "is a link where a folder belongs", str(folder))
    _count_rest(layout, tally)
    return Scan(
        {block.digest: block for block in blocks(layout, tally)},
        list(nodes(layout, tally)),
        list(tokenizations(layout, tally)),
        list(_staging(layout, tally)),
        list(_quarantine(layout, tally)),
        tally,
    )


def usage(context: Context, rest: Callable[[], None] | None = None) -> int:
    """Bytes on disk of all in the directory that this user may look at; rest is called at each folder.

    Without one it keeps the directory's pace. Raises OSError.
    """
    return tree(context.layout.root, context.pace.resting() if rest is None else rest)


def free_bytes(context: Context) -> int:
    """Bytes that this user can still write to the directory's file system. Raises OSError."""
    status = os.statvfs(context.layout.root)
    return status.f_bavail * status.f_frsize


def blocks(layout: Layout, tally: Tally) -> Iterator[HashedFile]:
    """All blocks."""
    return _hashed(layout.blocks, tally)


def tokenizations(layout: Layout, tally: Tally) -> Iterator[HashedFile]:
    """All tokenizations."""
    return _hashed(layout.tokens, tally)


def _hashed(above: Path, tally: Tally) -> Iterator[HashedFile]:
    from_hex = bytes.fromhex
    for folder in _fanout(above, tally, links_are_errors=False):
        ours = _ours(folder, tally, Layout.are_block_names, Layout.is_block_name)
        yield from [_new(HashedFile, (from_hex(file[0]), *file[1:])) for file in ours]


def nodes(layout: Layout, tally: Tally) -> Iterator[NodeFile]:
    """All manifests, namespace after namespace.

    A link in place of one of our folders raises: a lookup would follow it, so the blocks of what lies behind it must
    not be taken for unreferenced, and deleting behind it could reach another store.
    """
    for entry in entries(layout.nodes, tally):
        namespace = known_as(entry, layout.nodes, Layout.is_namespace_id)
        if namespace is None or not _is_folder(entry, layout.nodes):
            count_foreign(entry, layout.nodes, tally)
            tally.hidden += is_hidden(entry, Layout.is_namespace_id)
            continue
        head = (namespace,)
        for folder in _fanout(layout.nodes / namespace, tally, links_are_errors=True):
            yield from [_new(NodeFile, head + file) for file in _manifests(folder, tally)]


def appeared(layout: Layout, known: Sequence[NodeFile], rest: Callable[[], None] = lambda: None) -> list[NodeFile]:
    """Manifests that are there and not among those known: names are listed again, and only new ones looked at."""
    names: dict[str, set[str]] = {}
    for file in paced(known, rest):
        names.setdefault(file.namespace, set()).add(file.file)
    found = []
    for entry in entries(layout.nodes, Tally()):
        namespace = known_as(entry, layout.nodes, Layout.is_namespace_id)
        if namespace is None or not _is_folder(entry, layout.nodes):
            continue
        old = names.get(namespace, set())
        for folder in paced(_fanout(layout.nodes / namespace, Tally(), links_are_errors=True), rest, 1):
            if not old.issuperset(os.listdir(folder)):
                new = [file for file in _manifests(folder, Tally()) if file[0] not in old]
                found += [NodeFile(namespace, *file) for file in new]
    return found


def _fanout(above: Path, tally: Tally, *, links_are_errors: bool) -> Iterator[Path]:
    """The two-digit folders below a folder; links_are_errors for those of manifests."""
    for entry in entries(above, tally):
        name = known_as(entry, above, _FANOUT.__contains__)
        if name is None or not _is_folder(entry, above, links_are_errors=links_are_errors):
            count_foreign(entry, above, tally)
            tally.hidden += links_are_errors and is_hidden(entry, _FANOUT.__contains__)
        else:
            yield above / name


def _is_folder(entry: os.DirEntry[str], above: Path, *, links_are_errors: bool = True) -> bool:
    if links_are_errors and entry.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link where a folder belongs", str(above / entry.name))
    return entry.is_dir(follow_symlinks=False)


def _manifests(folder: Path, tally: Tally) -> list[File]:
    return _ours(folder, tally, NodeName.are_file_names, NodeName.is_file_name)


def _ours(
    folder: Path, tally: Tally, are_ours: Callable[[Iterable[str], str], bool], is_ours: Callable[[str], bool]
) -> list[File]:
    """The files of a fan-out folder whose names are ours, and of this folder. Anything else is foreign."""
    found = files(folder, tally)
    if are_ours([file[0] for file in found], folder.name):
        return found
    ours = [file for file in found if is_ours(file[0]) and file[0].startswith(folder.name)]
    tally.foreign += len(found) - len(ours)
    return ours


def _count_rest(layout: Layout, tally: Tally) -> None:
    """Count what lies beside the folders that are looked at one by one."""
    objects = layout.blocks.parent
    known = {folder.name for folder in layout.folders} | {layout.config.name, layout.tag.name, layout.stats.name}
    for above, alone in (
        (layout.root, {objects, layout.tmp, layout.quarantine}),
        (objects, {layout.blocks, layout.nodes, layout.tokens}),
    ):
        for entry in entries(above, tally):
            if above / entry.name not in alone:
                count_foreign(entry, above, tally)
                tally.foreign -= entry.name in known
    for entry in entries(layout.namespaces, Tally()):
        tally.foreign += not Layout.describes_namespace(entry.name)


def _staging(layout: Layout, tally: Tally) -> Iterator[StagingFolder]:
    for entry in entries(layout.tmp, tally):
        owner = Owner.parse(entry.name)
        if owner is None or not entry.is_dir(follow_symlinks=False):
            count_foreign(entry, layout.tmp, tally)
            continue
        path = layout.tmp / entry.name
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        inside = Tally()
        for _, _, _, mtime_ns, ctime_ns, _ in files(path, inside):
            newest = max(newest, mtime_ns, ctime_ns)
        tally.allocated += inside.allocated
        tally.foreign += inside.foreign
        yield StagingFolder(path, owner, inside.allocated, newest)


def _quarantine(layout: Layout, tally: Tally) -> Iterator[SetAside]:
    for name, _, allocated, mtime_ns, ctime_ns, _ in files(layout.quarantine, tally):
        if Layout.was_set_aside(name):
            yield SetAside(layout.quarantine / name, allocated, mtime_ns, ctime_ns)
        else:
            tally.foreign += 1
