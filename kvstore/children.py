"""The nodes that continue one node: their names, and which of them a prompt has most in common with.

All children of a node lie in one folder, so one listing finds them. There may be a thousand, as many as conversations
that part within one chunk, so names are compared as they are, and only the few that matter are parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.context import Space
from kvstore.keys import RUNGS, TOKEN_BYTES, Key, node_key, rungs
from kvstore.layout import NAME_KEY_BYTES, NodeName

__all__ = ["alike", "exact", "names", "sharing"]

_RUNGS = slice(-len(".kv") - 18, -len(".kv"))
_WIDTH = 18 // len(RUNGS)


def names(space: Space, parent: Key) -> list[str]:
    """File names of all nodes whose parent has this key, from one listing of the folder they share with others; none
    where it cannot be listed. What is no name of a node may be among them.
    """
    prefix = parent[:NAME_KEY_BYTES].hex()
    try:
        found = space.context.fs.list_dir(f"{space.nodes}/{prefix[:2]}")
    except OSError:
        return []
    return [name for name in found if name.startswith(prefix) and name.endswith(".kv")]


def _parsed(files: Iterable[str]) -> Iterator[NodeName]:
    for file in files:
        found = NodeName.parse(file)
        if found is not None:
            yield found[0]


def _order(name: str) -> tuple[int, str]:
    """Sorts children by their token counts, then keys: what precedes the counts is alike in all, as are the widths of
    all else.
    """
    return len(name), name


def exact(files: list[str], parent: Key, tokens: bytes) -> Iterator[NodeName]:
    """Of these names of a parent's children, those of nodes whose tokens are the first of the packed ones, the longest
    first. The rungs, zeros from where a node has no more tokens, say no for most without hashing 8 KB each.
    """
    count = len(tokens) // TOKEN_BYTES
    own = rungs(tokens, count)
    prefixes = {own[: level * _WIDTH].ljust(len(own), "0") for level in range(len(RUNGS) + 1)}
    keys: dict[int, str] = {}
    for name in _parsed(sorted((file for file in files if file[_RUNGS] in prefixes), key=_order, reverse=True)):
        if name.count <= count:
            first = tokens[: name.count * TOKEN_BYTES]
            if name.count not in keys:
                keys[name.count] = node_key(parent, first)[:NAME_KEY_BYTES].hex()
            if name.key == keys[name.count] and name.rungs == rungs(first, name.count):
                yield name


def sharing(files: list[str], tokens: bytes) -> Iterator[NodeName]:
    """Of these names, those of nodes that may begin with all of the packed tokens, the longest first."""
    level = _rungs_of(len(tokens) // TOKEN_BYTES)
    return (name for _, name in alike(files, tokens, level))


def alike(files: list[str], tokens: bytes, least: int = 1) -> Iterator[tuple[int, NodeName]]:
    """Of these names, those that share at least so many rungs with the packed tokens, and how many; most promising
    first.
    """
    count = len(tokens) // TOKEN_BYTES
    own = rungs(tokens, count)
    for level in range(_rungs_of(count), least - 1, -1):
        head = own[: level * _WIDTH]
        found = [file for file in files if file.startswith(head, _RUNGS.start)]
        yield from ((level, name) for name in _parsed(sorted(found, key=_order, reverse=True)))
        files = [file for file in files if not file.startswith(head, _RUNGS.start)]


def _rungs_of(count: int) -> int:
    """How many rungs so many tokens have."""
    return sum(rung <= count for rung in RUNGS)
