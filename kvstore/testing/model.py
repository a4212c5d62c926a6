"""The plain dict that a store is compared with: which prefixes were saved, and what a lookup must and may find.

A store may always find less after damage or a collection, so the model knows two things of a prefix: that it was saved
once (then it may be found, in part or whole), and that it is surely there (then it must be).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.keys import RUNGS, TOKEN_BYTES
from kvstore.lookup import common_tokens

__all__ = ["Model", "Saved"]

_MAX_CANDIDATES = 8
"""A lookup looks into this many nodes that differ from the prompt inside the chunk where the exact match ends."""


@dataclass(slots=True)
class Saved:
    """One saved prefix. borders: where its last chunk is surely cut into blocks. sure: it is surely there.

    since, by: for handles opened from this number on, and for these. (A handle that met damage remembers it, although
    another one healed it.) state: the boundary state at its end is surely there too.
    """

    borders: frozenset[int]
    sure: bool = True
    since: int = 0
    by: frozenset[int] = frozenset()
    state: bool = False

    def sure_for(self, handle: int) -> bool:
        """Whether the handle of this number must find it."""
        return self.sure and (handle >= self.since or handle in self.by)


@dataclass(slots=True)
class Model:
    """Prefixes of one namespace, as packed tokens, each the end of a node: a full chunk, or a tail.

    overlaps: promise matches inside a chunk (docs/format.md section 2.2), not only whole nodes.
    """

    interval: int
    overlaps: bool = True
    saved: dict[bytes, Saved] = field(default_factory=dict)
    ever: set[bytes] = field(default_factory=set)
    states_ever: set[bytes] = field(default_factory=set)

    def chunk_start(self, end: int) -> int:
        """Where the chunk that holds the last of end tokens begins."""
        return (end - 1) // self.interval * self.interval

    def add(self, prefix: bytes, borders: frozenset[int], since: int, by: frozenset[int]) -> None:
        """A node was saved, or found to be there already: its borders are then those it has."""
        self.ever.add(prefix)
        known = self.saved.get(prefix)
        if known is None:
            self.saved[prefix] = Saved(borders, since=since, by=by)
        elif not known.sure:
            self.saved[prefix] = Saved(borders & known.borders, since=since, by=by)
        elif by:
            known.by |= by

    def doubt_all(self, *, harmed: bool = False) -> None:
        """Nothing is surely there any more. harmed: nor cut as it was, because who replaces it cuts as he likes."""
        for prefix, each in self.saved.items():
            each.sure = each.state = False
            if harmed:
                each.borders &= {len(prefix) // TOKEN_BYTES}

    def keep_only(self, prefixes: set[bytes]) -> None:
        """Forget what was saved but for these; they may come back with other borders."""
        self.saved = {prefix: each for prefix, each in self.saved.items() if prefix in prefixes}

    def most(self, tokens: bytes) -> int:
        """No lookup of these tokens may find more than this."""
        return max((common_tokens(tokens, each) for each in self.ever), default=0)

    def promise(self, tokens: bytes, handle: int) -> int:
        """Every lookup of these tokens through this handle must find at least this much."""
        best = chunk = self._chain(tokens, handle)
        for prefix, each in self.saved.items():
            end = len(prefix) // TOKEN_BYTES
            if end > best and self.chunk_start(end) == chunk and each.sure_for(handle) and tokens.startswith(prefix):
                best = end
        return max(best, self._overlap(tokens, chunk, handle)) if self.overlaps else best

    def state_promise(self, tokens: bytes, handle: int) -> int:
        """As promise, for a lookup that must end at a boundary state: of a full chunk, or of a tail after the last."""
        chunk = self._chain(tokens, handle)
        ends = [
            len(prefix) // TOKEN_BYTES
            for prefix, each in self.saved.items()
            if each.state and each.sure_for(handle) and tokens.startswith(prefix)
        ]
        found = [end for end in ends if end <= chunk and end % self.interval == 0]
        # A chunk that is there in part is gone through, and then nobody looks for the tails beside it.
        if tokens[: (chunk + self.interval) * TOKEN_BYTES] not in self.ever:
            found += [end for end in ends if end > chunk]
        return max(found, default=0)

    def ends(self, tokens: bytes, handle: int) -> list[int]:
        """Lengths of the prefixes of these tokens that are surely there, with all before them."""
        chunk = self._chain(tokens, handle)
        found = (
            len(prefix) // TOKEN_BYTES
            for prefix, each in self.saved.items()
            if each.sure_for(handle) and tokens.startswith(prefix)
        )
        return sorted(end for end in found if self.chunk_start(end) <= chunk)

    def borders(self, tokens: bytes, handle: int) -> list[int]:
        """Where a publish of these tokens must be able to begin: 0, ends of chunks, and borders inside the next one."""
        chunk = self._chain(tokens, handle)
        found = set(range(0, chunk + 1, self.interval))
        for prefix, each in self._children(tokens, chunk):
            if each.sure_for(handle):
                shared = common_tokens(prefix, tokens)
                found.update(border for border in each.borders if border <= shared)
        return sorted(found)

    def _chain(self, tokens: bytes, handle: int) -> int:
        """Length of the full chunks of these tokens that are surely there, one after the other."""
        end = 0
        while (end + self.interval) * TOKEN_BYTES <= len(tokens):
            each = self.saved.get(tokens[: (end + self.interval) * TOKEN_BYTES])
            if each is None or not each.sure_for(handle):
                break
            end += self.interval
        return end

    def _children(self, tokens: bytes, chunk: int) -> Iterator[tuple[bytes, Saved]]:
        """What was saved for the chunk that begins there, after the same tokens as these."""
        before = tokens[: chunk * TOKEN_BYTES]
        for prefix, each in self.saved.items():
            if prefix.startswith(before) and self.chunk_start(len(prefix) // TOKEN_BYTES) == chunk:
                yield prefix, each

    def _overlap(self, tokens: bytes, chunk: int, handle: int) -> int:
        """What a node must contribute that goes on differently inside the chunk: see RUNGS."""
        before = tokens[: chunk * TOKEN_BYTES]
        candidates = {
            prefix: common
            for prefix in self.ever
            if prefix.startswith(before)
            and self.chunk_start(len(prefix) // TOKEN_BYTES) == chunk
            and (common := common_tokens(prefix, tokens) - chunk) >= RUNGS[0]
        }
        sure = [common for prefix, common in candidates.items() if self._is_sure(prefix, handle)]
        if sure and len(candidates) <= _MAX_CANDIDATES:
            return chunk + max(sure)
        if sure and len(candidates) == len(sure):
            return chunk + max(rung for rung in RUNGS if rung <= max(sure))
        return 0

    def _is_sure(self, prefix: bytes, handle: int) -> bool:
        return prefix in self.saved and self.saved[prefix].sure_for(handle)
