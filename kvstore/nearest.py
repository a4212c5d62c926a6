"""Why a prompt was not reused further: where it parts from the saved prompt that has most in common with it.

Starts from a lookup's answer and goes no further than it must: the children of the deepest node that the prompt
matches, of which the most promising few are opened. Below a millisecond, so that a server can ask it of every request.
Reads manifests only, changes nothing, and raises nothing: what cannot be read is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from kvstore.children import alike, names
from kvstore.context import Context, Space
from kvstore.errors import DamagedManifestError
from kvstore.keys import TOKEN_BYTES, Key, unpack_tokens
from kvstore.layout import FANOUT, Layout, NodeName
from kvstore.lookup import Match, Step, common_tokens, find, load_manifest
from kvstore.manifest import Manifest, decode, max_manifest_bytes
from kvstore.namespace import NamespaceInfo, read_label, read_namespace_file

__all__ = ["End", "Nearest", "nearest", "nearest_of_all", "quickly", "saved_spaces"]

MAX_STATS = 64
"""Children whose last use is asked for when their names do not tell them apart: 2 us each."""

MAX_OPENED = 8
"""Children opened: about 25 us each."""

MAX_QUICK = 500
"""Names in a folder beyond which quickly gives up: about a millisecond to choose among them."""

_FINGERPRINT_BYTES = 32

End: TypeAlias = Literal["whole", "ended", "differs", "empty"]
"""whole: all of the prompt is saved. ended: the saved prompt ends where the match does. differs: it goes on with other
tokens. empty: nothing is saved."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """A prompt beside the saved one that has most in common with it.

    matched: tokens at the beginning of both. reusable: tokens that a cache which can be cut anywhere could restore
    (the lookup's answer: less than 64 beyond a chunk are not worth opening a file for). key: of the last node looked
    at, empty when nothing is saved. saved: packed tokens with which the saved prompt goes on, as far as that node
    holds them. used_ns: its last use.
    """

    space: Space
    tokens: bytes
    matched: int
    reusable: int
    key: str = ""
    saved: bytes = b""
    used_ns: int = 0

    @property
    def count(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> End:
        """Why the match ends."""
        if self.matched == self.count:
            return "whole"
        if not self.key:
            return "empty"
        return "differs" if self.saved else "ended"

    def windows(self, before: int, after: int) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Tokens before the place where the two part, and those after it: of the saved prompt, of this one."""
        at = self.matched * TOKEN_BYTES
        left = self.tokens[max(0, at - before * TOKEN_BYTES) : at]
        right = self.tokens[at : at + after * TOKEN_BYTES]
        return unpack_tokens(left), unpack_tokens(self.saved[: after * TOKEN_BYTES]), unpack_tokens(right)


@dataclass(frozen=True, slots=True)
class _Child:
    """A saved node that follows what matched. used_ns is its mtime."""

    step: Step
    manifest: Manifest
    shared: int

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The most in common; then one that goes on, which says more than one that ends; then the last used."""
        return self.shared, self.manifest.count > self.shared, self.step.mtime_ns


def nearest(match: Match, tokens: bytes | None = None, *, further: int = 0) -> Nearest:
    """Compare a prompt with what is saved nearest to it. match is a lookup's answer for caches that can be cut.

    tokens: the whole packed prompt, when the lookup was asked for less of it. further: tokens of the saved prompt that
    are wanted after the difference; one more folder is listed when the node that differs has fewer.
    """
    space, tokens = match.space, match.tokens if tokens is None else tokens
    walked = _full(match)
    first = walked[-1].end if walked else 0
    if first * TOKEN_BYTES == len(tokens):
        return Nearest(space, tokens, first, match.count, walked[-1].name.key if walked else "")
    interval = space.context.interval
    rest = tokens[first * TOKEN_BYTES : (first + interval) * TOKEN_BYTES]
    parent = bytes.fromhex(walked[-1].name.key) if walked else space.root
    known = match.steps[len(walked) :]
    best = max(_opened(space, parent, first, rest, known), key=lambda child: child.rank, default=None)
    if best is None:
        last = walked[-1] if walked else None
        return Nearest(
            space,
            tokens,
            first,
            match.count,
            last.name.key if last is not None else "",
            used_ns=last.mtime_ns if last is not None else 0,
        )
    saved = best.manifest.tokens[best.shared * TOKEN_BYTES :]
    if saved and len(saved) < further * TOKEN_BYTES and best.manifest.count == interval:
        after = max(_opened(space, best.manifest.key, best.step.end, b"", ()), key=lambda each: each.rank, default=None)
        saved += b"" if after is None else after.manifest.tokens
    return Nearest(
        space,
        tokens,
        first + best.shared,
        match.count,
        best.step.name.key,
        saved,
        best.step.mtime_ns,
    )


def quickly(match: Match, tokens: bytes) -> Nearest | None:
    """As nearest, for whoever has a millisecond: None when there are more children than that allows to look at.

    Where the prompt parts from a node inside of it, the lookup has chosen that node, and one manifest is read again.
    """
    space = match.space
    if match.exact:
        walked = _full(match)
        prefix = walked[-1].name.key[:2] if walked else space.root[:1].hex()
        try:
            names = space.context.fs.list_dir(f"{space.nodes}/{prefix}")
        except OSError:
            names = []
        return nearest(match, tokens) if len(names) <= MAX_QUICK else None
    step = match.steps[-1]
    manifest = load_manifest(space, step.path)
    if manifest is None:
        return None
    shared = common_tokens(manifest.tokens, tokens[step.first * TOKEN_BYTES :])
    saved = manifest.tokens[shared * TOKEN_BYTES :]
    return Nearest(space, tokens, step.first + shared, match.count, step.name.key, saved, step.mtime_ns)


def _full(match: Match) -> list[Step]:
    """The full chunks of a match that hold exactly the prompt's tokens."""
    interval = match.space.context.interval
    steps = match.steps if match.exact else match.steps[:-1]
    return [step for step in steps if step.end - step.first == interval]


def _opened(space: Space, parent: Key, first: int, rest: bytes, known: Sequence[Step]) -> Iterator[_Child]:
    """Saved nodes after parent, the most promising ones: what the lookup chose, and others."""
    seen = {step.where for step in known}
    steps = [*known, *(step for step in _candidates(space, parent, first, rest) if step.where not in seen)]
    for step in steps[:MAX_OPENED]:
        manifest = load_manifest(space, step.path)
        if manifest is not None:
            yield _Child(step, manifest, common_tokens(manifest.tokens, rest))


def _candidates(space: Space, parent: Key, first: int, rest: bytes) -> list[Step]:
    """Children of a node, the likeliest first: by the rungs they share with the rest, then by their last use."""
    found: list[tuple[int, int, Step]] = []
    for shared, name in islice(alike(names(space, parent), rest, 0), MAX_STATS):
        where = f"{space.nodes}/{name.parent[:2]}/{name.file('kv')}"
        with suppress(OSError):
            mtime_ns = space.context.fs.stat(where).st_mtime_ns
            found.append((shared, mtime_ns, Step(first, first + name.count, where, mtime_ns)))
    return [step for *_, step in sorted(found, reverse=True)]


# Without an engine: every namespace that is there.


@dataclass(frozen=True)
class _Saved(NamespaceInfo):
    """A namespace known by its fingerprint alone."""

    known: bytes = b""

    @property
    def fingerprint(self) -> bytes:
        return self.known


def saved_spaces(context: Context, prefix: str = "") -> list[Space]:
    """The namespaces whose id begins with prefix and whose fingerprint can be read. Raises OSError."""
    spaces = []
    for name in sorted(os.listdir(context.layout.nodes)):
        if not Layout.is_namespace_id(name) or not name.startswith(prefix.lower()):
            continue
        fingerprint = _fingerprint(context, name)
        if fingerprint is not None:
            label = read_label(context.fs, context.layout, name)
            spaces.append(Space(context, _Saved({}, label, known=fingerprint)))
    return spaces


def _fingerprint(context: Context, namespace: str) -> bytes | None:
    """The whole fingerprint, of which a namespace's name is the half: as its description says, or else a manifest."""
    document = read_namespace_file(context.fs, context.layout.namespace_file(namespace))
    with suppress(TypeError, ValueError):
        described = bytes.fromhex(document.get("fingerprint", ""))
        if len(described) == _FINGERPRINT_BYTES and described.hex().startswith(namespace):
            return described
    for folder in sorted((context.layout.nodes / namespace).iterdir()):
        for name in sorted(os.listdir(folder)) if folder.name in FANOUT else ():
            if NodeName.is_file_name(name):
                with suppress(OSError, DamagedManifestError):
                    manifest = decode(context.fs.read_file(folder / name, max_manifest_bytes(context.interval))[0])
                    if manifest.fingerprint.hex().startswith(namespace):
                        return manifest.fingerprint
    return None


def nearest_of_all(spaces: Sequence[Space], packed: bytes, *, further: int = 0) -> Nearest | None:
    """The nearest saved prompt of several namespaces: the most in common, then the last used; None of none."""
    found = (nearest(find(space, packed), further=further) for space in spaces)
    return max(found, key=lambda each: (each.matched, bool(each.key), each.used_ns), default=None)
