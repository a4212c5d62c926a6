"""What a node that is about to be published is called, and what it stands on.

A collection that makes room for a node must not take from under it what its publish refers to: its parent, and the
shorter tails of its chunk, whose blocks it names again. Reads one folder's names; opens and changes nothing.

Nor need it make room for what is there already, which a publish does not write again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.children import exact, names
from kvstore.commit import node_path
from kvstore.context import Space
from kvstore.errors import PublishError
from kvstore.layout import NAME_KEY_BYTES, Kind
from kvstore.lookup import chunks, has_manifest

__all__ = ["Standing", "chunk_names", "has_node", "standing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """A node before its publish, named as NodeFile.key and kvstore.admission have it. stands_on: manifests."""

    name: str
    parent: str | None
    stands_on: frozenset[Path]


def chunk_names(space: Space, packed: bytes) -> list[str]:
    """What the nodes of a prompt are called, from the root on, whether they are there or not: its full chunks only."""
    interval = space.context.interval
    return [_name(chunk.key) for chunk in chunks(space, packed) if chunk.count == interval]


def standing(space: Space, packed: bytes) -> Standing:
    """Where the node at the end of these tokens will stand. Raises PublishError when there are none."""
    if not packed:
        raise PublishError("there is nothing to publish")
    *before, last = chunks(space, packed)
    stands_on = {node_path(space, chunk) for chunk in before[-1:]}
    for name in exact(names(space, last.parent), last.parent, last.tokens):
        if name.count < last.count:
            stands_on.add(space.context.layout.node(space.id, name))
    return Standing(_name(last.key), _name(before[-1].key) if before else None, frozenset(stands_on))


def has_node(space: Space, packed: bytes, kind: Kind = "kv") -> bool:
    """Whether the manifest of the node at the end of these tokens, or of its state, is there: one stat. Not where this
    process has found it damaged, or cannot tell.

    A publish also looks at its blocks, and writes those again that it misses. That much can be written without room,
    once, as the node is whole then; who keeps a budget is told, and makes room before the next one.
    """
    if not packed:
        return False
    *_, last = chunks(space, packed)
    return has_manifest(space, str(node_path(space, last, kind)))


def _name(key: bytes) -> str:
    return key[:NAME_KEY_BYTES].hex()
