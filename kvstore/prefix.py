"""One saved prefix with everything that is known of it: the nodes it is made of, their blocks and boundary states.

For people. Finds a node by the beginning of its key and walks up to its first chunk; reads manifests, opens no block.
Changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.context import Context
from kvstore.errors import DamagedManifestError, KVStoreError
from kvstore.fs import allocated_bytes
from kvstore.keys import unpack_tokens
from kvstore.manifest import BlockRef
from kvstore.namespace import read_label
from kvstore.scan import NodeFile, nodes
from kvstore.stored import Stored, load
from kvstore.walk import Tally

__all__ = ["Part", "Prefix", "Span", "StateInfo", "find_prefix"]

_HEX = frozenset("0123456789abcdef")
_NAME_DIGITS = 32

BlockState = Literal["there", "missing", "size differs"]


@dataclass(frozen=True, slots=True)
class Span:
    """A block of a node: tokens first .. first + count of the prompt. size is its file's, whatever is there now."""

    digest: str
    first: int
    count: int
    size: int
    decode: bool
    block: BlockState


@dataclass(frozen=True, slots=True)
class StateInfo:
    """A boundary state at the end of a node. fault: why its manifest cannot be used, or empty."""

    size: int
    created_ns: int
    used_ns: int
    writer: str
    block: BlockState
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One node of the path. fault: why its manifest cannot be used, or empty; its spans and times are unknown then."""

    key: str
    first: int
    count: int
    spans: tuple[Span, ...]
    state: StateInfo | None
    created_ns: int
    used_ns: int
    writer: str
    manifest_size: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A path of nodes from the first chunk, if it is there, to the node that was asked for.

    tokens: the prompt, from the first part that follows without a hole. complete: nothing before the last node is
    missing, damaged, or without one of its blocks. size: bytes of all blocks as files; allocated: what is there of them
    takes on disk, manifests included.
    """

    namespace: str
    label: str
    key: str
    parts: tuple[Part, ...]
    tokens: Sequence[int]
    complete: bool
    size: int
    allocated: int

    @property
    def end(self) -> int:
        """Length of the prefix in tokens."""
        return self.parts[-1].first + self.parts[-1].count


def find_prefix(context: Context, abbreviation: str) -> Prefix:
    """The prefix whose node's key begins so. Raises KVStoreError when there is none, or several, and OSError."""
    wanted = abbreviation.lower()[:_NAME_DIGITS]
    if not wanted or not _HEX.issuperset(abbreviation.lower()):
        raise KVStoreError(f"{abbreviation!r} is not a key; write the beginning of one that `kvstore ls` shows")
    full: dict[str, NodeFile] = {}
    found: dict[str, dict[str, NodeFile]] = {}
    for file in nodes(context.layout, Tally()):
        if file.kind == "kv" and file.tokens == context.interval:
            full[file.namespace + file.key] = file
        if file.key.startswith(wanted):
            found.setdefault(file.namespace + file.key, {})[file.kind] = file
    if not found:
        raise KVStoreError(f"no key begins with {abbreviation!r}; `kvstore ls` shows what there is")
    if len(found) > 1:
        raise KVStoreError(f"{len(found)} keys begin with {abbreviation!r}; write more of the one you mean")
    (files,) = found.values()
    return _Walk(context, full).up(files)


class _Walk:
    """From a node to its first chunk."""

    def __init__(self, context: Context, full: dict[str, NodeFile]) -> None:
        self._context = context
        self._full = full
        self._allocated = 0

    def up(self, files: dict[str, NodeFile]) -> Prefix:
        """The path of a node, which has a file of KV, of a state, or both."""
        last = files.get("kv") or files["state"]
        path: list[tuple[NodeFile, Stored | None, str]] = []
        file: NodeFile | None = last
        seen: set[str] = set()
        while file is not None and file.key not in seen:  # a cycle can be forged, in names
            seen.add(file.key)
            stored, fault = self._load(file)
            if file.kind == "state":
                fault = "its KV is missing"
            path.append((file, stored, fault))
            file = None if stored is not None and not stored.manifest.first else self._full.get(_above(file))
        path.reverse()
        parts: list[Part] = []
        tokens: list[int] = []
        for file, stored, fault in path:
            first = stored.manifest.first if stored else parts[-1].first + parts[-1].count if parts else 0
            parts.append(self._part(file, stored, fault, first, files.get("state") if file is last else None))
            if stored is None:
                tokens = []
            else:
                tokens.extend(unpack_tokens(stored.manifest.tokens))
        complete = not parts[0].first and all(
            not part.fault and all(span.block == "there" for span in part.spans) for part in parts
        )
        size = sum(span.size for part in parts for span in part.spans)
        size += sum(part.state.size for part in parts if part.state is not None)
        label = read_label(self._context.fs, self._context.layout, last.namespace)
        return Prefix(
            last.namespace,
            label,
            last.key,
            tuple(parts),
            tokens,
            complete,
            size,
            self._allocated,
        )

    def _load(self, file: NodeFile) -> tuple[Stored | None, str]:
        try:
            stored = load(self._context, file)
        except DamagedManifestError as error:
            return None, str(error)
        return stored, "" if stored is not None else "it is gone"

    def _part(self, file: NodeFile, stored: Stored | None, fault: str, first: int, state: NodeFile | None) -> Part:
        name = file.name
        if file.kind == "kv":
            self._allocated += file.allocated
        if state is None and file.kind == "kv":
            state = self._beside(file)
        spans: tuple[Span, ...] = ()
        if stored is not None and file.kind == "kv":
            spans = tuple(
                Span(ref.digest.hex(), ref.first, ref.count, ref.size, ref.decode, self._block(ref))
                for ref in stored.manifest.blocks
            )
        return Part(
            file.key,
            first,
            name.count,
            spans,
            None if state is None else self._state(state),
            stored.manifest.created_ns if stored else 0,
            file.mtime_ns,
            stored.manifest.writer if stored else "",
            file.size,
            fault,
        )

    def _beside(self, file: NodeFile) -> NodeFile | None:
        """The state's manifest beside a KV manifest, as a scan would show it."""
        path = self._context.layout.node(file.namespace, file.name, "state")
        try:
            status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        return NodeFile(file.namespace, path.name, status.st_size, allocated_bytes(status), *times)

    def _state(self, file: NodeFile) -> StateInfo:
        self._allocated += file.allocated
        stored, fault = self._load(file)
        if stored is None:
            return StateInfo(0, 0, file.mtime_ns, "", "missing", fault)
        (ref,) = stored.manifest.blocks
        manifest = stored.manifest
        return StateInfo(ref.size, manifest.created_ns, file.mtime_ns, manifest.writer, self._block(ref))

    def _block(self, ref: BlockRef) -> BlockState:
        try:
            status = os.stat(self._context.layout.block(ref.digest), follow_symlinks=False)
        except FileNotFoundError:
            return "missing"
        self._allocated += allocated_bytes(status)
        return "there" if status.st_size == ref.size else "size differs"


def _above(file: NodeFile) -> str:
    return file.namespace + file.parent
