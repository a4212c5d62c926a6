"""Find the longest saved prefix of a prompt: one ``stat`` a full chunk, one folder listing at the end.

Everything in a full chunk's file name can be computed from the prompt, so the walk asks for names and lists nothing.
At the first miss, one listing of the parent's folder finds the longest exact tail (by comparing keys) and the child
that shares most tokens with the prompt although it differs later (by its rungs, opening only the few best).

A lookup reads no KV and changes nothing in the directory. It holds no index: nothing to rebuild, nothing to go stale.
What it found counts as used from then on (Context.note_use), so that no collection of this process takes it away before
it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from kvstore.children import alike, exact, names
from kvstore.context import Space
from kvstore.errors import DamagedManifestError
from kvstore.fs import is_damage, out_of_files
from kvstore.keys import TOKEN_BYTES, Key, node_key, rungs
from kvstore.layout import NAME_KEY_BYTES, NodeName
from kvstore.manifest import Manifest, decode, max_manifest_bytes

__all__ = [
    "Chunk",
    "Match",
    "Step",
    "chunks",
    "common_tokens",
    "find",
    "has_manifest",
    "has_state",
    "load_manifest",
    "read_manifest",
]

MAX_OPENED = 8
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


class Step(NamedTuple):
    """One node on the way from the root: its first token, the length of the prefix it completes, where it lies.

    A tuple, and name and path made on demand, because a lookup makes one a chunk and has a microsecond for it.
    """

    first: int
    end: int
    where: str
    mtime_ns: int

    @property
    def path(self) -> Path:
        """The manifest."""
        return Path(self.where)

    @property
    def name(self) -> NodeName:
        """The node's name, as its file has it."""
        found = NodeName.parse(self.where.rpartition("/")[2])
        assert found is not None
        return found[0]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest saved prefix of a prompt.

    count tokens can be reused; when the last step's node goes on differently from the prompt, count ends inside it and
    exact is False. border is the last token up to which whole blocks hold the prompt: a publish goes on from there.
    beyond: tokens after count that lie in its last block, which are read with it.
    Nothing was opened yet but for the candidates at the end: reading may still find less.
    """

    space: Space
    tokens: bytes
    steps: tuple[Step, ...]
    count: int
    border: int
    exact: bool = True
    beyond: int = 0


def chunks(space: Space, packed: bytes) -> Iterator[Chunk]:
    """The chunks of a prompt in order, the last one possibly a shorter tail; keys chain from the namespace's root."""
    parent = space.root
    size = space.context.interval * TOKEN_BYTES
    for at in range(0, len(packed), size):
        tokens = packed[at : at + size]
        key = node_key(parent, tokens)
        yield Chunk(at // TOKEN_BYTES, len(tokens) // TOKEN_BYTES, parent, key, tokens)
        parent = key


@dataclass(frozen=True, slots=True)
class _Rest:
    """What follows the full chunks that were found: at most a chunk's tokens, from token first on."""

    parent: Key
    first: int
    tokens: bytes

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES


def find(space: Space, packed: bytes, *, trimmable: bool = True) -> Match:
    """The longest prefix of packed tokens that an engine can continue from.

    trimmable caches can be cut at any token. The others (recurrent state, rotating windows) can only go on from a node
    with a boundary state: the match is then exact, and its last step has one. Errors of the file system make a match
    shorter; they are never raised (rule 3).
    """
    counters = space.context.counters
    counters.add(lookups=1)
    steps, rest = _walk(space, packed)
    if not rest.tokens:
        match = _whole(space, packed, steps if trimmable else _up_to_state(space, steps))
    elif trimmable:
        match = _tail(space, packed, steps, rest)
    else:
        match = _state_tail(space, packed, steps, rest)
    if match.count:
        counters.add(hits=1)
        space.context.note_use([step.where for step in match.steps])
    return match


def _walk(space: Space, packed: bytes) -> tuple[list[Step], _Rest]:
    """The full chunks that are there, one after the other, and what follows them.

    What a lookup's time goes to (docs/scale.md), so nothing is made here that the next line does not need: half of it
    is SHA-256 over the tokens.
    """
    context = space.context
    interval, damaged, stat = context.interval, context.damaged, context.fs.stat
    size = interval * TOKEN_BYTES
    nodes, parent = space.nodes, space.root
    above = parent[:NAME_KEY_BYTES].hex()
    steps: list[Step] = []
    for at in range(0, len(packed) - size + 1, size):
        tokens = packed[at : at + size]
        key = node_key(parent, tokens)
        name = key[:NAME_KEY_BYTES].hex()
        where = f"{nodes}/{above[:2]}/{above}-{interval}-{name}-{rungs(tokens, interval)}.kv"
        try:
            mtime_ns = stat(where).st_mtime_ns
        except OSError:
            break
        if damaged and Path(where) in damaged:
            break
        steps.append(Step(len(steps) * interval, (len(steps) + 1) * interval, where, mtime_ns))
        parent, above = key, name
    at = len(steps) * size
    return steps, _Rest(parent, at // TOKEN_BYTES, packed[at : at + size])


def _whole(space: Space, packed: bytes, steps: list[Step]) -> Match:
    end = steps[-1].end if steps else 0
    return Match(space, packed, tuple(steps), end, end)


def _state_tail(space: Space, packed: bytes, steps: list[Step], rest: _Rest) -> Match:
    """The longest exact tail with a boundary state, or the last full chunk that has one."""
    for name in exact(names(space, rest.parent), rest.parent, rest.tokens):
        step = _step(space, rest.first, name)
        if step is not None and has_state(space, step):
            return _whole(space, packed, [*steps, step])
    return _whole(space, packed, _up_to_state(space, steps))


def _up_to_state(space: Space, steps: list[Step]) -> list[Step]:
    while steps and not has_state(space, steps[-1]):
        steps = steps[:-1]
    return steps


def has_state(space: Space, step: Step) -> bool:
    """Whether a boundary state lies at this node: one stat."""
    return has_manifest(space, step.where.removesuffix("kv") + "state")


def has_manifest(space: Space, where: str) -> bool:
    """Whether a manifest is there that this process has not found damaged: one stat. Not where that cannot be told."""
    try:
        mode = space.context.fs.stat(where).st_mode
    except OSError:
        return False
    return S_ISREG(mode) and Path(where) not in space.context.damaged


def _tail(space: Space, packed: bytes, steps: list[Step], rest: _Rest) -> Match:
    """The best child of the last full chunk that was found, for tokens that are not there as a chunk.

    An exact tail wins over a longer overlap only when it is at least as long: both restore by reading, and the overlap
    reuses more. Of equal overlaps the exact one is taken, because what follows can be published onto it.
    """
    best = Match(space, packed, tuple(steps), rest.first, rest.first)
    found = names(space, rest.parent)
    for name in exact(found, rest.parent, rest.tokens):
        step = _step(space, rest.first, name)
        if step is not None:
            best = Match(space, packed, (*steps, step), step.end, step.end)
            break
    for _, name in islice(alike(found, rest.tokens), MAX_OPENED):
        step = _step(space, rest.first, name)
        manifest = load_manifest(space, step.path) if step is not None else None
        if step is None or manifest is None:
            continue
        shared = rest.first + common_tokens(manifest.tokens, rest.tokens)
        if shared > best.count:
            borders = [ref.first + ref.count for ref in manifest.blocks]
            border = max((end for end in borders if end <= shared), default=rest.first)
            read = min((end for end in borders if end >= shared), default=shared)
            best = Match(space, packed, (*steps, step), shared, border, shared == step.end, read - shared)
    return best


def _step(space: Space, first: int, name: NodeName) -> Step | None:
    """A node that is there and that this process has not found damaged: one stat."""
    where = f"{space.nodes}/{name.parent[:2]}/{name.file('kv')}"
    try:
        mtime_ns = space.context.fs.stat(where).st_mtime_ns
    except OSError:
        return None
    if space.context.damaged and Path(where) in space.context.damaged:
        return None
    return Step(first, first + name.count, where, mtime_ns)


def load_manifest(space: Space, path: Path) -> Manifest | None:
    """As read_manifest, for who can do without: one that cannot be read now is as good as none (counted as missing)."""
    try:
        return read_manifest(space, path)
    except OSError as error:
        if not out_of_files(error):
            space.context.counters.add(missing=1)
        return None


def read_manifest(space: Space, path: Path) -> Manifest | None:
    """The checked manifest of a node; None when it is gone or damaged (counted, and remembered as damaged).

    Raises OSError when it cannot be read: it may be whole.
    """
    context = space.context
    try:
        data, _ = context.fs.read_file(path, max_manifest_bytes(context.interval))
        manifest = decode(data)
        if manifest.file_name != path.name or manifest.fingerprint != space.fingerprint:
            raise DamagedManifestError("manifest lies under another name")
        # The interval is in the root key, so no name that a prompt leads to here can be one of another interval's.
        if manifest.interval != context.interval:
            raise DamagedManifestError(f"its interval is {manifest.interval} tokens, not {context.interval}")
    except FileNotFoundError:
        context.counters.add(missing=1)
        return None
    except (OSError, DamagedManifestError) as error:
        if not is_damage(error):
            raise
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
