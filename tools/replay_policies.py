"""Caches of whole chunks with one policy each, for tools/replay_trace.py. Chunks are numbers; times are nanoseconds.

A chunk can be hit only when all before it are there, so only leaves are evicted, and a chunk is written only behind its
parent. A request's own path is never evicted for it, and writing stops at the first chunk that is not admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.admission import JUST_USED_NS, Warmth

__all__ = ["POLICIES", "Request", "Result", "replay"]

SECOND = 10**9
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of so many tokens at a time, and the ids of its whole chunks, from the first on."""

    now: int
    tokens: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """hit: tokens in leading chunks found, of all input tokens. written: chunks."""

    hit: float
    written: int


class Policy(Protocol):
    """What goes first and what comes in."""

    def request(self, index: int, request: Request) -> None:
        """The next request, before anything is done about it."""

    def rank(self, chunk: int) -> int:
        """How much a chunk in the cache is worth keeping; the leaf of the lowest rank goes."""

    def keeps(self, chunk: int) -> bool:
        """Whether a chunk must stay whatever its rank."""

    def admits(self, chunk: int, parent: int | None, lowest: int) -> bool:
        """Whether a chunk of the current request is worth the place of the leaf with the lowest rank."""


class Recent:
    """Least recently used goes; a new chunk comes in when that was not used for so long."""

    def __init__(self, gate: int) -> None:
        self._gate = gate
        self._used: dict[int, int] = {}
        self._now = 0

    def request(self, index: int, request: Request) -> None:
        """As in Policy."""
        del index
        self._now = request.now
        self._used.update(dict.fromkeys(request.path, request.now))

    def rank(self, chunk: int) -> int:
        """When it was used."""
        return self._used[chunk]

    def keeps(self, chunk: int) -> bool:
        """As in Policy."""
        del chunk
        return False

    def admits(self, chunk: int, parent: int | None, lowest: int) -> bool:
        """As in Policy."""
        del chunk, parent
        return self._now - lowest >= self._gate


class Adaptive:
    """kvstore.admission as kvstore_mlx.housekeeping uses it."""

    def __init__(self) -> None:
        self._warmth = Warmth()
        self._now = 0
        self._used: dict[int, int] = {}

    def request(self, index: int, request: Request) -> None:
        """As in Policy."""
        del index
        self._now = request.now
        self._warmth.used([f"{chunk}" for chunk in request.path], request.now)
        self._used.update(dict.fromkeys(request.path, request.now))

    def rank(self, chunk: int) -> int:
        """Its warmth."""
        return self._warmth.of(f"{chunk}", self._used[chunk])

    def keeps(self, chunk: int) -> bool:
        """As in Policy."""
        return self._now - self._used[chunk] < JUST_USED_NS

    def admits(self, chunk: int, parent: int | None, lowest: int) -> bool:
        """As in Policy."""
        warmth = self._warmth.wanted(f"{chunk}", None if parent is None else f"{parent}", self._now)
        return lowest < warmth - self._warmth.margin_ns


class Optimum:
    """Knows the future: what is wanted again last goes, and only for what is wanted before it."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._following: list[list[int]] = [[]] * len(requests)
        seen: dict[int, int] = {}
        for index in range(len(requests) - 1, -1, -1):
            path = requests[index].path
            self._following[index] = [seen.get(chunk, _NEVER) for chunk in path]
            seen.update(dict.fromkeys(path, index))
        self._next: dict[int, int] = {}

    def request(self, index: int, request: Request) -> None:
        """As in Policy."""
        self._next.update(zip(request.path, self._following[index], strict=True))

    def rank(self, chunk: int) -> int:
        """The sooner it is wanted, the higher."""
        return -self._next[chunk]

    def keeps(self, chunk: int) -> bool:
        """As in Policy."""
        del chunk
        return False

    def admits(self, chunk: int, parent: int | None, lowest: int) -> bool:
        """As in Policy."""
        del parent
        return -self._next[chunk] > lowest


POLICIES: dict[str, Callable[[Sequence[Request]], Policy]] = {
    "least recently used": lambda _: Recent(0),
    "30 s gate": lambda _: Recent(30 * SECOND),
    "60 s gate": lambda _: Recent(60 * SECOND),
    "adaptive": lambda _: Adaptive(),
    "optimum": Optimum,
}
"""By name, made for one replay of these requests."""


def replay(requests: Sequence[Request], capacity: int, policy: Policy, interval: int) -> Result:
    """Run requests through an empty cache of so many chunks of interval tokens."""
    cache = _Cache(capacity, policy)
    hit = 0
    for index, request in enumerate(requests):
        policy.request(index, request)
        hit += cache.serve(request.path) * interval
    return Result(hit / max(1, sum(request.tokens for request in requests)), cache.written)


class _Cache:
    """The chunks that are there, as trees, and a heap of leaves by rank.

    Ranks change without the heap's knowledge: an entry that is not what its chunk's rank is now is put right when it
    comes to the top, and a leaf whose rank may have fallen gets a new one.
    """

    def __init__(self, capacity: int, policy: Policy) -> None:
        self._capacity = capacity
        self._policy = policy
        self._children: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._heap: list[tuple[int, int]] = []
        self.written = 0

    def serve(self, path: Sequence[int]) -> int:
        """The number of leading chunks that were there; what follows them is written as far as it is admitted."""
        there = self._parent
        found = next((depth for depth, chunk in enumerate(path) if chunk not in there), len(path))
        if found:
            self._note_leaf(path[found - 1])
        own = set(path)
        for depth in range(found, len(path)):
            parent = path[depth - 1] if depth else None
            if len(there) >= self._capacity and not self._make_room(path[depth], parent, own):
                break
            there[path[depth]] = parent
            self._children[path[depth]] = 0
            if parent is not None:
                self._children[parent] += 1
            self._note_leaf(path[depth])
            self.written += 1
        return found

    def _note_leaf(self, chunk: int) -> None:
        if not self._children[chunk]:
            heapq.heappush(self._heap, (self._policy.rank(chunk), chunk))

    def _make_room(self, chunk: int, parent: int | None, own: set[int]) -> bool:
        """Evict a leaf for a chunk, if there is one that may go for it."""
        aside = []
        victim = None
        while self._heap and victim is None:
            rank, leaf = heapq.heappop(self._heap)
            if self._children.get(leaf, 1):
                continue
            if (now := self._policy.rank(leaf)) != rank:
                heapq.heappush(self._heap, (now, leaf))
            elif leaf in own or self._policy.keeps(leaf):
                aside.append((rank, leaf))
            elif self._policy.admits(chunk, parent, rank):
                victim = leaf
            else:
                aside.append((rank, leaf))
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        if victim is None:
            return False
        above = self._parent.pop(victim)
        del self._children[victim]
        if above is not None:
            self._children[above] -= 1
            self._note_leaf(above)
        return True
