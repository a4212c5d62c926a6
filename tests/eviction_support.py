"""What the tests of eviction share: what a collection would choose, and the names of a prompt's nodes."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import Namespace, Store
from kvstore.eviction import Plan, Policy, choose
from kvstore.layout import Kind
from kvstore.lookup import chunks
from kvstore.marking import mark
from kvstore.scan import scan

EVERYTHING = 1 << 60


def plan_of(store: Store, policy: Policy, need: int = EVERYTHING) -> tuple[Plan, list[str]]:
    """What would be chosen, and the victims' file names in order."""
    found = scan(store.context)
    marks = mark(store.context, found.nodes)
    plan = choose(store.context, marks, found.blocks, policy, need=need, now_ns=store.context.clock())
    assert len(plan.victims) == len(set(plan.victims))
    return plan, [marks.nodes[index].file.file for index in plan.victims]


def victims(store: Store, need: int = EVERYTHING, policy: Policy | None = None) -> list[str]:
    """File names of the victims, in order."""
    return plan_of(store, policy or Policy(), need)[1]


def names(space: Namespace, tokens: Sequence[int], kind: Kind = "kv") -> list[str]:
    """File names of a prompt's nodes, root first."""
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return [chunk.name.file(kind) for chunk in chunks(space._space, packed)]
