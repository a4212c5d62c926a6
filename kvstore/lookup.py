"""Find the longest saved prefix of a prompt: one ``stat`` a full chunk, one folder listing at the end.

Everything in a full chunk's file name can be computed from the prompt, so the walk asks for names and lists nothing.
At the first miss, one listing of the parent's folder finds the longest exact tail (by comparing keys) and the child
that shares most tokens with the prompt although it differs later (by its rungs, opening only the few best).

A lookup reads no KV and changes nothing. It holds no index: nothing to rebuild, nothing to go stale.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.context import Space
from kvstore.errors import DamagedManifestError
from kvstore.fs import out_of_files
from kvstore.keys import RUNGS, TOKEN_BYTES, Key, node_key, rungs
from kvstore.layout import NAME_KEY_BYTES, NodeName
from kvstore.manifest import Manifest, decode, max_manifest_bytes

__all__ = ["Chunk", "Match", "Step", "chunks", "common_tokens", "find", "has_state", "load_manifest", "siblings"]

_MAX_OPENED = 8
"""Candidates opened at the first miss: each costs about 20 us, and the rungs have put the best first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk or tail of a prompt with the keys around it. first counts tokens from the prompt's beginning."""

    first: int
    count: int
    parent: Key
    key: Key
    tokens: bytes

    @property
    def name(self) -> NodeName:
        """The name of the node that holds exactly this prefix."""
        return NodeName.of(self.parent, self.count, self.key, rungs(self.tokens, self.count))


@dataclass(frozen=True, slots=True)
class Step:
    """One node on the way from the root, and where its manifest lies."""

    first: int
    name: NodeName
    where: str
    mtime_ns: int

    @property
    def path(self) -> Path:
        """The manifest; made on demand, because joining Paths would be most of a lookup's time."""
        return Path(self.where)

    @property
    def end(self) -> int:
        """Length of the prefix this node completes."""
        return self.first + self.name.count


@dataclass(frozen=True, slots=True)
class Match:
    """The longest saved prefix of a prompt.

    count tokens can be reused; when the last step's node goes on differently from the prompt, count ends inside it and
    exact is False. border is the last token up to which whole blocks hold the prompt: a publish goes on from there.
    Nothing was opened yet but for the candidates at the end: reading may still find less.
    """

    space: Space
    tokens: bytes
    steps: tuple[Step, ...]
    count: int
    border: int
    exact: bool = True


def chunks(space: Space, packed: bytes) -> Iterator[Chunk]:
    """The chunks of a prompt in order, the last one possibly a shorter tail; keys chain from the namespace's root."""
    parent = space.root
    size = space.context.interval * TOKEN_BYTES
    for at in range(0, len(packed), size):
        tokens = packed[at : at + size]
        key = node_key(parent, tokens)
        yield Chunk(at // TOKEN_BYTES, len(tokens) // TOKEN_BYTES, parent, key, tokens)
        parent = key


def find(space: Space, packed: bytes, *, trimmable: bool = True) -> Match:
    """The longest prefix of packed tokens that an engine can continue from.

    trimmable caches can be cut at any token. The others (recurrent state, rotating windows) can only go on from a node
    with a boundary state: the match is then exact, and its last step has one. Errors of the file system make a match
    shorter; they are never raised (rule 3).
    """
    context = space.context
    context.counters.add(lookups=1)
    steps: list[Step] = []
    parent = space.root
    for chunk in chunks(space, packed):
        if chunk.count == context.interval and (step := _step(space, chunk.first, chunk.name)) is not None:
            steps.append(step)
            parent = chunk.key
            continue
        match = (
            _tail(space, packed, steps, parent, chunk)
            if trimmable
            else _state_tail(space, packed, steps, parent, chunk)
        )
        break
    else:
        if not trimmable:
            steps = _up_to_state(space, steps)
        match = _whole(space, packed, steps)
    if match.count:
        context.counters.add(hits=1)
    return match


def _whole(space: Space, packed: bytes, steps: list[Step]) -> Match:
    end = steps[-1].end if steps else 0
    return Match(space, packed, tuple(steps), end, end)


def _state_tail(space: Space, packed: bytes, steps: list[Step], parent: Key, chunk: Chunk) -> Match:
    """The longest exact tail with a boundary state, or the last full chunk that has one."""
    tails = [name for name in siblings(space, parent) if name.count <= chunk.count and _is_prefix(name, parent, chunk)]
    for name in sorted(tails, key=lambda name: name.count, reverse=True):
        step = _step(space, chunk.first, name)
        if step is not None and has_state(space, step):
            return _whole(space, packed, [*steps, step])
    return _whole(space, packed, _up_to_state(space, steps))


def _up_to_state(space: Space, steps: list[Step]) -> list[Step]:
    while steps and not has_state(space, steps[-1]):
        steps = steps[:-1]
    return steps


def has_state(space: Space, step: Step) -> bool:
    """Whether a boundary state lies at this node: one stat."""
    path = step.path.with_suffix(".state")
    try:
        return path not in space.context.damaged and path.is_file()
    except OSError:
        return False


def _tail(space: Space, packed: bytes, steps: list[Step], parent: Key, chunk: Chunk) -> Match:
    """The best child of parent for a chunk that is not there as a whole.

    An exact tail wins over a longer overlap only when it is at least as long: both restore by reading, and the overlap
    reuses more. Of equal overlaps the exact one is taken, because what follows can be published onto it.
    """
    best = Match(space, packed, tuple(steps), chunk.first, chunk.first)
    found = siblings(space, parent)
    for name in sorted(found, key=lambda name: name.count, reverse=True):
        if name.count <= chunk.count and _is_prefix(name, parent, chunk):
            step = _step(space, chunk.first, name)
            if step is not None:
                best = Match(space, packed, (*steps, step), step.end, step.end)
                break
    for name in _nearest(found, chunk)[:_MAX_OPENED]:
        step = _step(space, chunk.first, name)
        manifest = load_manifest(space, step.path) if step is not None else None
        if step is None or manifest is None:
            continue
        shared = chunk.first + common_tokens(manifest.tokens, chunk.tokens)
        if shared > best.count:
            borders = [ref.first + ref.count for ref in manifest.blocks]
            border = max((end for end in borders if end <= shared), default=chunk.first)
            best = Match(space, packed, (*steps, step), shared, border, exact=shared == step.end)
    return best


def siblings(space: Space, parent: Key) -> list[NodeName]:
    """Names of all nodes whose parent has this key, from one listing of the folder they share with others."""
    prefix = parent[:NAME_KEY_BYTES].hex()
    try:
        names = os.listdir(space.context.layout.node_folder(space.id, prefix))
    except OSError:
        return []
    parsed = (NodeName.parse(name) for name in names if name.startswith(prefix))
    return [found[0] for found in parsed if found is not None and found[1] == "kv"]


def _is_prefix(name: NodeName, parent: Key, chunk: Chunk) -> bool:
    """Whether a node's tokens are the chunk's first ones. The rungs say no for most without hashing 8 KB each."""
    tokens = chunk.tokens[: name.count * TOKEN_BYTES]
    return rungs(tokens, name.count) == name.rungs and node_key(parent, tokens)[:NAME_KEY_BYTES].hex() == name.key


def _nearest(found: list[NodeName], chunk: Chunk) -> list[NodeName]:
    """Candidates that share at least the first rung with the chunk, most promising first."""
    own = rungs(chunk.tokens, chunk.count)
    width = len(own) // len(RUNGS)

    def shared(name: NodeName) -> int:
        level = 0
        for i, rung in enumerate(RUNGS):
            if (
                rung > min(name.count, chunk.count)
                or own[i * width : (i + 1) * width] != name.rungs[i * width :][:width]
            ):
                break
            level += 1
        return level

    ranked = sorted(((shared(name), name.count, name.key, name) for name in found), reverse=True)
    return [name for level, *_, name in ranked if level]


def _step(space: Space, first: int, name: NodeName) -> Step | None:
    """A node that is there and that this process has not found damaged: one stat."""
    where = f"{space.nodes}/{name.parent[:2]}/{name.file('kv')}"
    try:
        mtime_ns = os.stat(where, follow_symlinks=False).st_mtime_ns
    except OSError:
        return None
    if space.context.damaged and Path(where) in space.context.damaged:
        return None
    return Step(first, name, where, mtime_ns)


def load_manifest(space: Space, path: Path) -> Manifest | None:
    """The checked manifest of a node; None when it is gone or damaged (counted, and remembered as damaged)."""
    context = space.context
    try:
        data, _ = context.fs.read_file(path, max_manifest_bytes(context.interval))
        manifest = decode(data)
        if manifest.name.file(manifest.kind) != path.name or manifest.fingerprint != space.fingerprint:
            raise DamagedManifestError("manifest lies under another name")
    except FileNotFoundError:
        context.counters.add(missing=1)
        return None
    except (OSError, DamagedManifestError) as error:
        if not out_of_files(error):
            context.counters.add(damaged=1)
            context.damaged.add(path)
        return None
    return manifest


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of equal tokens at the beginning of two packed sequences, by halving: each step is one memcmp."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * TOKEN_BYTES : middle * TOKEN_BYTES] == b[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
