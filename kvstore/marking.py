"""Read every manifest of a scan: which blocks each names, and which tails a longer sibling contains.

The "mark" of mark-and-sweep, and what `ls` counts with. Opens no block and changes nothing. 17 us a manifest.

Every failure to read is one of three, and they must not be mixed up. A manifest that vanished meanwhile is gone and
named nothing that its publisher did not make young first. One that is damaged, or of a newer version, is there but its
references are unknown. Anything else (EIO, EACCES, no descriptors) raises OSError: the directory could not be seen.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from kvstore.context import Context
from kvstore.errors import DamagedManifestError, FormatVersionError
from kvstore.keys import RUNGS, TOKEN_BYTES, node_key
from kvstore.layout import NAME_KEY_BYTES
from kvstore.manifest import MAX_MANIFEST_BYTES, References, decode_references
from kvstore.pacing import paced
from kvstore.scan import NodeFile

__all__ = ["Marked", "Marks", "Unreadable", "group_of", "level_of", "mark", "mark_folders"]

Unreadable = Literal["damaged", "newer"]

_RUNG_HEX = 6

_REST_EVERY = 16
"""Manifests between two chances to rest: a third of a millisecond of work."""

_TOLD_EVERY = 256
"""Manifests between two words to who waits: to say more would cost more than to read them."""


class Marked(NamedTuple):
    """One manifest file and what it refers to. blocks: digest and size of each; first: index of its first token.

    unreadable: why first and blocks are unknown, or None.
    """

    file: NodeFile
    first: int
    blocks: tuple[tuple[bytes, int], ...]
    unreadable: Unreadable | None = None


@dataclass(slots=True)
class Marks:
    """All manifests of a scan.

    named: how many manifests name each block. containers: for a tail, by its index in nodes, the longer siblings whose
    first tokens are all of its tokens, proven by computing its key from theirs. fresh: file names of manifests that
    appeared while the directory was scanned.
    """

    nodes: list[Marked] = field(default_factory=list)
    named: dict[bytes, int] = field(default_factory=dict)
    containers: dict[int, list[int]] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()

    @property
    def unreadable(self) -> list[Marked]:
        """Manifests whose references are unknown."""
        return [node for node in self.nodes if node.unreadable]


def mark(
    context: Context,
    files: Sequence[NodeFile],
    fresh: Sequence[NodeFile] = (),
    told: Callable[[int, int], None] = lambda _done, _total: None,
    rest: Callable[[], None] = lambda: None,
) -> Marks:
    """Read these manifests; told is called with how many were read, of how many, and rest every few of them. Raises
    OSError when one of them can neither be read nor is gone.
    """
    marks = Marks(fresh=frozenset(file.file for file in fresh))
    # By inode: neighbours on disk are read one after the other, which a cold cache repays many times over.
    files = sorted((*files, *fresh), key=attrgetter("inode"))
    tails = _Tails(paced(files, rest), context.interval)
    containers: list[tuple[str, int]] = []
    at: dict[str, int] = {}
    named = marks.named
    base = f"{context.layout.nodes}/"
    for done, file in enumerate(paced(files, rest, _REST_EVERY)):
        if not done % _TOLD_EVERY:
            told(done, len(files))
        found = _read(context, f"{base}{file.namespace}/{file.file[:2]}/{file.file}")
        if found is None:
            continue
        index = len(marks.nodes)
        if isinstance(found, str):
            marks.nodes.append(Marked(file, 0, (), found))
            continue
        marks.nodes.append(Marked(file, found.first, found.blocks))
        for digest in {digest for digest, _ in found.blocks}:
            named[digest] = named.get(digest, 0) + 1
        if tails.has_siblings(file):
            containers.extend((tail, index) for tail in tails.inside(file, found))
            at[file.place] = index
    told(len(files), len(files))
    for tail, index in containers:
        if tail in at:
            marks.containers.setdefault(at[tail], []).append(index)
    return marks


def mark_folders(context: Context, files: Iterable[NodeFile]) -> Iterator[Marks]:
    """Read manifests as a scan finds them, a folder at a time: for who adds up and need not have a million at once.

    All children of a parent lie in one folder, so each part knows its containers. Raises OSError as mark does.
    """
    for _, folder in groupby(files, key=lambda file: (file.namespace, file.file[:2])):
        yield mark(context, list(folder))


def _read(context: Context, path: str) -> References | Unreadable | None:
    """What one manifest refers to, why that is unknown, or None when it is gone."""
    try:
        data, _ = context.fs.read_file(path, MAX_MANIFEST_BYTES)
        return decode_references(data)
    except FileNotFoundError:
        return None
    except DamagedManifestError:
        return "damaged"
    except FormatVersionError:
        return "newer"
    except OSError as error:
        if error.errno == errno.EFBIG:
            return "damaged"
        raise


class _Tails:
    """The tails among some manifests, found by what a longer sibling's tokens let one compute.

    A parent may have thousands of tails, so a sibling is compared only with those whose rungs agree with its own, and
    computes one key for each distinct length among them: never more than an interval, one or two as a rule.
    """

    def __init__(self, files: Iterable[NodeFile], interval: int) -> None:
        self._interval = interval
        self._keys: set[str] = set()
        self._lengths: dict[str, set[int]] = {}
        self._parents: set[str] = set()
        for file in files:
            if file.kind == "kv" and file.tokens < interval:
                self._parents.add(file.parent)
                self._keys.add(file.place)
                self._lengths.setdefault(group_of(file, level_of(file.tokens)), set()).add(file.tokens)

    def has_siblings(self, file: NodeFile) -> bool:
        """Whether a kv manifest is one of these tails or a sibling of one."""
        return file.parent in self._parents and file.kind == "kv"

    def inside(self, file: NodeFile, found: References) -> Iterator[str]:
        """Namespace and key of each tail that this kv manifest's tokens begin with."""
        count = len(found.tokens) // TOKEN_BYTES
        if count != file.tokens:
            return
        for level in range(level_of(count) + 1):
            for length in self._lengths.get(group_of(file, level), ()):
                if length < count:
                    key = node_key(found.parent, found.tokens[: length * TOKEN_BYTES])
                    name = file.namespace + key[:NAME_KEY_BYTES].hex()
                    if name in self._keys:
                        yield name


def level_of(count: int) -> int:
    """How many rungs a node of count tokens has."""
    return sum(rung <= count for rung in RUNGS)


def group_of(file: NodeFile, level: int) -> str:
    """What all nodes have in common that share a parent and their first rungs."""
    return file.above + file.rungs[: level * _RUNG_HEX]
