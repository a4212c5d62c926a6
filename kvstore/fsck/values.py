"""What examining a file needs, and what comes of it: the values that the modules which read files share."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.context import Context
from kvstore.eviction import FUTURE_NS
from kvstore.fs import NOT_A_FILE, FileSystem
from kvstore.fsck.findings import Seen
from kvstore.keys import Key
from kvstore.layout import Kind
from kvstore.manifest import BlockRef, newer_format

__all__ = ["Fault", "Inspected", "Node", "Reader", "is_future", "newer", "seen_of", "unopened"]


@dataclass(frozen=True, slots=True)
class Reader:
    """What examining a file needs of a Context, and can be sent to another process.

    nodes, blocks, tokens: their folders as strings, because putting together a Path costs as much as opening a file.
    """

    fs: FileSystem
    interval: int
    now_ns: int
    nodes: str
    blocks: str
    tokens: str

    @staticmethod
    def of(context: Context, now_ns: int) -> Reader:
        """The reader of a directory."""
        layout = context.layout
        return Reader(context.fs, context.interval, now_ns, str(layout.nodes), str(layout.blocks), str(layout.tokens))

    def block(self, digest: bytes) -> str:
        """A block's path."""
        name = digest.hex()
        return f"{self.blocks}/{name[:2]}/{name}"


UNLIKE = b"unlike"
"""In place of a hash: the blocks of a node do not all hold the same tensors."""


class Node(NamedTuple):
    """A manifest that is whole. digests: of its blocks, joined: a million of these have to fit.

    tensors: a hash of those that its blocks hold; empty when it has none, or is of a state.
    """

    namespace: str
    file: str
    first: int
    parent: Key
    key: Key
    digests: bytes
    tensors: bytes = b""

    @property
    def kind(self) -> Kind:
        """Which of a node's files it is."""
        return "kv" if self.file.endswith(".kv") else "state"


class Fault(NamedTuple):
    """What is wrong with a file."""

    code: str
    sentence: str


class Inspected(NamedTuple):
    """One file. fault: what is wrong with it. node: the manifest that it is, when that is whole; refs: its blocks, of
    which those in missing and wrong cannot be used.
    """

    seen: Seen
    mode: int
    fault: Fault | None = None
    node: Node | None = None
    refs: tuple[BlockRef, ...] = ()
    missing: tuple[BlockRef, ...] = ()
    wrong: tuple[tuple[BlockRef, str], ...] = ()


def is_future(mtime_ns: int, now_ns: int) -> bool:
    """Whether a file claims to have been used after now, by so much that no collection takes it at its word: a repair
    must end what gc cannot judge. That a FAT volume keeps local time is no reason to allow more: what comes on one from
    a zone to the east has times as wrong as any.
    """
    return mtime_ns > now_ns + FUTURE_NS


def seen_of(status: os.stat_result) -> Seen:
    """What tells whether a file is still the one that was examined."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def unopened(path: str, error: OSError, code: str) -> Inspected | None:
    """A file that does not open as one; raises what is the disk's or the user's trouble rather than the file's."""
    if error.errno not in NOT_A_FILE:
        raise error
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        code = "not-a-file"
    fault = Fault(code, f"It cannot be what its name says: {error.strerror}.")
    return Inspected(seen_of(status), status.st_mode, fault)


def newer(data: bytes, magic: bytes, code: str) -> Fault | None:
    """Whether a file is whole and of a newer format."""
    version = newer_format(data, magic)
    if version is None:
        return None
    return Fault(code, f"It has format {version}, which a newer kvstore wrote; check it with that one.")
