"""Choose what leaves when the budget is passed: leaf-first, least recently used first.

It looks at a scan and its marks, and at what this process used since, and returns a plan; nothing is touched.

The order has four rules.
1. A node goes after all of its children, and its boundary state before its KV, so that no moment of a sweep leaves a
   child without its parent or a state without its KV.
2. Among what may go, the least recently used goes first. A prompt's beginning stays as long as one of its continuations
   does, whatever its own time (a publish touches no more than the node that it continues), so a budget smaller than one
   prompt keeps the beginning.
3. Before all that, tails that a longer sibling contains: a restore takes the sibling's first tokens instead, so losing
   them costs nothing. The sibling must be whole, used no less recently and found by a lookup (kvstore.crowds), and the
   tail must have no boundary state (that is a resume point which the sibling does not have).
4. Never what was written or looked up just now, what the caller protects, what is too warm for what it would make room
   for, and what cannot be read: see young, Policy and _Families.allowed.

A server knows of uses that the files' times do not show (Policy.warmth); then the least warm goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.admission import Warmth
from kvstore.context import FUTURE_NS, Context
from kvstore.crowds import Crowds
from kvstore.layout import NodeName
from kvstore.marking import Marks
from kvstore.pacing import paced
from kvstore.scan import HashedFile, NodeFile

__all__ = [
    "FUTURE_NS",
    "GRACE_NS",
    "PROTECT_NS",
    "Plan",
    "Policy",
    "choose",
    "clock_was_ahead",
    "is_protected",
    "young",
]

PROTECT_NS = 60 * 10**9
"""What was written or looked up this recently is never evicted. A publish takes seconds from its first block to its
manifest, and a request that found a prefix reads it within seconds. Longer would let a busy server run past its budget
by all that it writes meanwhile."""

GRACE_NS = 24 * 3600 * 10**9
"""How long a block that no manifest names is kept. A publisher needs seconds from block to manifest, but a copy of
another cache directory brings all blocks before the first manifest (rsync goes by name), and may take a night."""


@dataclass(frozen=True)
class Policy:
    """What a collection is asked to do. Without any limit it removes garbage only.

    size: bytes that the directory may take on disk, or with namespace, that this namespace's files may. min_free: bytes
    that should stay free on its file system. older_than_ns: nodes not used for that long go whatever the room.
    namespace: only this one's nodes may go. quotas: bytes on disk that namespaces may take; one that takes more loses
    nodes of its own only. protect: manifest paths that must stay (any object with ``in``).
    spare: bytes to free beyond size once the directory takes more, a tenth of it by default. protect_ns: what was
    written or looked up this recently stays. warmth: what the caller knows of the nodes' uses; without it their files'
    times tell. warm_ns: for size and min_free nothing of this warmth or more goes, but for tails that cost nothing.
    """

    size: int | None = None
    min_free: int | None = None
    older_than_ns: int | None = None
    namespace: str | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    dry_run: bool = False
    protect: Container[Path] = frozenset()
    spare: int | None = None
    protect_ns: int = PROTECT_NS
    warmth: Warmth | None = None
    warm_ns: int | None = None


@dataclass(slots=True)
class Plan:
    """victims: indices into the marks' nodes, in the order they must go. freed: bytes on disk this gives back; of one
    namespace's, what it takes no more.

    horizon_ns: what was last used before this is among the victims, as far as its rules let it. coldest_ns: no leaf
    that stays is colder than this, but for what the caller protects; None when no other leaf stays.
    """

    victims: list[int] = field(default_factory=list)
    freed: int = 0
    horizon_ns: int = 0
    coldest_ns: int | None = None


def young(mtime_ns: int, ctime_ns: int, now_ns: int, window_ns: int) -> bool:
    """Whether a file was made or touched within the window: by the later of its times, because a copy keeps old mtimes.

    now_ns is when the collection began, so what changed since is a little in the future, and young. A time far in the
    future says nothing (a copy from a machine with a wrong clock must not live for ever) as long as the other one does.
    When neither does, nothing is known to be old.
    """
    if clock_was_ahead(mtime_ns, ctime_ns, now_ns):
        return True
    return now_ns - max(time for time in (mtime_ns, ctime_ns) if time <= now_ns + FUTURE_NS) < window_ns


def clock_was_ahead(mtime_ns: int, ctime_ns: int, now_ns: int) -> bool:
    """Whether neither time of a file says anything: it was made before this machine's clock was set back. Nothing tells
    how old it is until the clock is where it was, or somebody sets its times (fsck --repair), so it stays until then.
    """
    return min(mtime_ns, ctime_ns) > now_ns + FUTURE_NS


def choose(
    context: Context,
    marks: Marks,
    blocks: Mapping[bytes, HashedFile],
    policy: Policy,
    *,
    need: int,
    now_ns: int,
    over: Mapping[str, int] | None = None,
    rest: Callable[[], None] = lambda: None,
) -> Plan:
    """Victims that are too old, then those of namespaces that take so many bytes too much, then as many more as free
    need bytes on disk, if there are enough. now_ns: when the collection began. rest is called every few nodes.
    """
    parsed = ((NodeName.parse(path.rpartition("/")[2]), used) for path, used in list(context.recent.items()))
    latest = context.clock() + FUTURE_NS
    recent = {found[0].key: used for found, used in parsed if found and used <= latest}
    every = _Part(range(len(marks.nodes)), tuple(marks.containers), marks.named)
    families = _Families(context, marks, blocks, policy, now_ns, part=every, recent=recent, rest=rest)
    plan = families.plan
    if policy.older_than_ns is not None:
        families.take_older(now_ns - policy.older_than_ns)
    parts = _parts(marks, over, rest) if over else {}
    for namespace, size in (over or {}).items():
        rules, part = replace(policy, namespace=namespace, warm_ns=None), parts[namespace]
        own = _Families(context, marks, blocks, rules, now_ns, part=part, recent=recent, rest=rest)
        own.take_contained(size)
        own.take(size)
        families.take_these(own.plan.victims)
    if plan.freed < need:
        families.take_contained(need)
        families.take(need)
    plan.coldest_ns = families.coldest()
    return plan


@dataclass(frozen=True, slots=True)
class _Part:
    """The nodes of one namespace or of all, and which of them are contained tails: indices into the marks' nodes.

    named: how many of these nodes name each block.
    """

    nodes: Sequence[int]
    tails: Sequence[int]
    named: Mapping[bytes, int]


def _parts(marks: Marks, namespaces: Iterable[str], rest: Callable[[], None]) -> dict[str, _Part]:
    """The nodes of each of these namespaces, in one pass: with many quotas a pass for each would take hours."""
    parts: dict[str, tuple[list[int], list[int], Counter[bytes]]]
    parts = {namespace: ([], [], Counter()) for namespace in namespaces}
    for index, node in enumerate(paced(marks.nodes, rest)):
        if found := parts.get(node.file.namespace):
            found[0].append(index)
            found[2].update({digest for digest, _ in node.blocks})
    for tail in paced(marks.containers, rest):
        if found := parts.get(marks.nodes[tail].file.namespace):
            found[1].append(tail)
    return {namespace: _Part(*found) for namespace, found in parts.items()}


class _Families:
    """The nodes of a part as trees, while victims are picked off their leaves.

    A node is called by namespace and key, so no tree is in two namespaces. waiting counts the files that must go before
    a node may: its children's. recent: when this process used a node, by its key.
    """

    def __init__(
        self,
        context: Context,
        marks: Marks,
        blocks: Mapping[bytes, HashedFile],
        policy: Policy,
        now_ns: int,
        *,
        part: _Part,
        recent: Mapping[str, int],
        rest: Callable[[], None],
    ) -> None:
        self._context = context
        self._marks = marks
        self._blocks = blocks
        self._policy = policy
        self._now = now_ns
        self._part = part
        self._recent = recent
        self._rest = rest
        self.plan = Plan()
        self._taken: set[int] = set()
        self._held: int | None = None
        self._dropped: Counter[bytes] = Counter()
        self._waiting: Counter[str] = Counter()
        self._kv: dict[str, int] = {}
        self._state: dict[str, int] = {}
        self._used: dict[str, int] = {}
        # A damaged manifest may name any block of its chunk, and those are its siblings': they stay until it is gone.
        self._unsure: set[str] = set()
        for index in paced(part.nodes, rest):
            node = marks.nodes[index]
            file, name = node.file, node.file.place
            (self._kv if file.kind == "kv" else self._state)[name] = index
            self._waiting[file.above] += 1
            self._used[name] = max(self._used.get(name, 0), self._last_use(file))
            if node.unreadable:
                self._unsure.add(file.above + file.kind)
        self._heap = [entry for name in paced(self._used, rest) if (entry := self._ready(name))]
        heapq.heapify(self._heap)

    def take_older(self, limit_ns: int) -> None:
        """Take what was last used before a time."""
        self.plan.horizon_ns = limit_ns
        while self._heap and self._heap[0][0] < limit_ns:
            self._take(heapq.heappop(self._heap)[1])

    def take_these(self, victims: Iterable[int]) -> None:
        """Take what another choice among the same marks has chosen, in its order."""
        for index in victims:
            self._take(index)

    def take_contained(self, need: int) -> None:
        """Take tails that a sibling contains, least recently used first, until need bytes are freed."""
        nodes = self._marks.nodes
        tails = [tail for tail in self._part.tails if self._is_contained(tail)]
        if not tails:
            return
        left = (nodes[index] for index in paced(self._part.nodes, self._rest) if index not in self._taken)
        crowds = Crowds(left, [nodes[tail] for tail in tails])
        for tail in paced(sorted(tails, key=lambda tail: self._used[nodes[tail].file.place]), self._rest):
            if self.plan.freed >= need:
                return
            crowds.remove(nodes[tail])
            if crowds.finds_longer(nodes[tail]):
                self._take(tail)
            if tail not in self._taken:
                crowds.add(nodes[tail])

    def take(self, need: int) -> None:
        """Take leaves, least recently used first, until need bytes are freed or only warm ones are left."""
        warm = self._policy.warm_ns
        while self._heap and self.plan.freed < need and (warm is None or self._heap[0][0] < warm):
            used, index = heapq.heappop(self._heap)
            self.plan.horizon_ns = max(self.plan.horizon_ns, used)
            self._take(index)

    def coldest(self) -> int | None:
        """How warm the coldest leaf is that was not taken; at least, because some may have been taken since."""
        left = [] if self._held is None else [self._held]
        while self._heap and self._is_callers(self._heap[0][1]):
            heapq.heappop(self._heap)
        if self._heap:
            left.append(self._heap[0][0])
        return min(left, default=None)

    def _last_use(self, file: NodeFile) -> int:
        """The mtime, or what this process or the caller know better, because a lookup touches a file once an hour.

        A time far in the future counts as the time the file came here.
        """
        used = file.mtime_ns if file.mtime_ns <= self._now + FUTURE_NS else min(file.ctime_ns, self._now)
        used = max(used, self._recent.get(file.key, 0))
        return used if self._policy.warmth is None else self._policy.warmth.of(file.key, used)

    def _ready(self, name: str) -> tuple[int, int] | None:
        """The manifest of a node that may go next: its state before its KV, and none while anything is below it."""
        if self._waiting[name]:
            return None
        for index in (self._state.get(name), self._kv.get(name)):
            if index is not None and index not in self._taken:
                return self._used[name], index
        return None

    def _take(self, index: int) -> None:
        """Plan to remove a manifest, and let what waited for it be taken. What must stay keeps its ancestors too."""
        if index in self._taken:
            return
        self._rest()
        node = self._marks.nodes[index]
        if not self._allowed(index):
            if not self._is_callers(index):
                used = self._used[node.file.place]
                self._held = used if self._held is None else min(self._held, used)
            return
        self._taken.add(index)
        self.plan.victims.append(index)
        self.plan.freed += node.file.allocated
        for digest in {digest for digest, _ in node.blocks}:
            self._dropped[digest] += 1
            block = self._blocks.get(digest)
            if block is not None and self._dropped[digest] == self._part.named[digest] and self._goes(block):
                self.plan.freed += block.allocated
        self._waiting[node.file.above] -= 1
        for name in (node.file.above, node.file.place):
            if entry := self._ready(name):
                heapq.heappush(self._heap, entry)

    def _goes(self, block: HashedFile) -> bool:
        """Whether a block that no node of the part names any more counts as freed: on disk when it may be removed, in a
        namespace at once, whoever else names it or has touched it.
        """
        return self._part.named is not self._marks.named or not young(
            block.mtime_ns, block.ctime_ns, self._now, self._policy.protect_ns
        )

    def _allowed(self, index: int) -> bool:
        node, now = self._marks.nodes[index], self._now
        file = node.file
        if self._policy.namespace not in (None, file.namespace):
            return False
        # What appeared during the scan was looked at too late for the sweep to notice that it gained a child.
        if node.unreadable == "newer" or file.file in self._marks.fresh:
            return False
        if node.unreadable == "damaged":
            # Served by nobody, so it costs nothing; but a copy that writes in place may still be at it.
            if young(file.mtime_ns, file.ctime_ns, now, GRACE_NS):
                return False
        elif file.above + file.kind in self._unsure:
            return False
        # A lookup refreshes the KV's manifest only; the state beside it was used as much.
        used = [file]
        if file.kind == "state" and (beside := self._kv.get(file.place)) is not None:
            used.append(self._marks.nodes[beside].file)
        return not any(
            young(each.mtime_ns, each.ctime_ns, now, self._policy.protect_ns)
            or is_protected(self._context, self._policy, each.path(self._context.layout), now)
            for each in used
        )

    def _is_callers(self, index: int) -> bool:
        """Whether the caller protects a manifest."""
        return self._marks.nodes[index].file.path(self._context.layout) in self._policy.protect

    def _is_contained(self, tail: int) -> bool:
        """Whether losing a tail costs nothing; see rule 3 of this module."""
        name = self._marks.nodes[tail].file.place
        if name in self._state:
            return False
        return any(
            longer not in self._taken
            and self._used[self._marks.nodes[longer].file.place] >= self._used[name]
            and bool(self._marks.nodes[longer].blocks) >= bool(self._marks.nodes[tail].blocks)
            and all(self._is_whole(digest, size) for digest, size in self._marks.nodes[longer].blocks)
            for longer in self._marks.containers[tail]
        )

    def _is_whole(self, digest: bytes, size: int) -> bool:
        block = self._blocks.get(digest)
        return (
            block is not None and block.size == size and self._context.layout.block(digest) not in self._context.damaged
        )


def is_protected(context: Context, policy: Policy, path: Path, began_ns: int) -> bool:
    """Whether the caller protects a manifest, or this process reads it, or looked it up or published it since the
    collection began, which may be hours ago beside an engine at work, or just before.

    That beside the file's own times, because a restore refreshes those at most once an hour.
    """
    now = context.clock()
    used = context.last_use(path, now)
    just_used = used > 0 and min(began_ns, now) - used < policy.protect_ns
    return just_used or path in policy.protect or context.is_read(path)
