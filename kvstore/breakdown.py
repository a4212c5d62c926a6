"""What the bytes of a cache directory are: by namespace, and by kind of file. In bytes allocated on disk.

Every file is counted once, so the parts add up to what the whole directory takes (kvstore.scan). Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvstore.context import Context
from kvstore.marking import mark_folders
from kvstore.namespace import read_label
from kvstore.scan import Scan, scan

__all__ = ["Breakdown", "NamespaceBytes", "breakdown"]


@dataclass(frozen=True, slots=True)
class NamespaceBytes:
    """What one namespace takes. Without what it shares with another one, which only happens when bytes are equal."""

    namespace: str
    label: str
    nodes: int
    kv: int
    states: int
    manifests: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kv + self.states + self.manifests


@dataclass(frozen=True, slots=True)
class Breakdown:
    """total is everything in the directory, and the sum of all other numbers and of the namespaces' totals.

    shared: blocks that several namespaces name. unreferenced: blocks that no manifest names that can be read; damaged
    says how many cannot. other: folders, locks, descriptions, and foreign files that are not kvstore's.
    """

    namespaces: list[NamespaceBytes]
    shared: int
    unreferenced: int
    tokenizations: int
    tmp: int
    quarantine: int
    other: int
    total: int
    damaged: int
    foreign: int

    @property
    def kinds(self) -> dict[str, int]:
        """The same bytes by kind of file."""
        return {
            "kv blocks": sum(each.kv for each in self.namespaces) + self.shared,
            "state blocks": sum(each.states for each in self.namespaces),
            "manifests": sum(each.manifests for each in self.namespaces),
            "tokenizations": self.tokenizations,
            "tmp": self.tmp,
            "quarantine": self.quarantine,
            "unreferenced": self.unreferenced,
            "other": self.other,
        }


def breakdown(context: Context) -> Breakdown:
    """Add everything up. Raises OSError when part of the directory cannot be seen."""
    found = scan(context)
    owners, damaged = _owners(context, found)
    kv, states, manifests, nodes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for file in found.nodes:
        manifests[file.namespace] += file.allocated
        nodes[file.namespace] += file.kind == "kv"
    shared = 0
    for digest, (namespace, is_state) in owners.items():
        size = found.blocks[digest].allocated
        if namespace is None:
            shared += size
        else:
            (states if is_state else kv)[namespace] += size
    rows = [
        NamespaceBytes(
            name,
            read_label(context.fs, context.layout, name),
            nodes[name],
            kv[name],
            states[name],
            manifests[name],
        )
        for name in sorted(manifests)
    ]
    unreferenced = sum(block.allocated for digest, block in found.blocks.items() if digest not in owners)
    tokenizations = sum(file.allocated for file in found.tokenizations)
    tmp = sum(folder.allocated for folder in found.staging)
    quarantine = sum(file.allocated for file in found.quarantine)
    known = sum(row.total for row in rows) + shared + unreferenced + tokenizations + tmp + quarantine
    return Breakdown(
        rows,
        shared,
        unreferenced,
        tokenizations,
        tmp,
        quarantine,
        found.tally.allocated - known,
        found.tally.allocated,
        damaged,
        found.tally.foreign,
    )


def _owners(context: Context, found: Scan) -> tuple[dict[bytes, tuple[str | None, bool]], int]:
    """For each block that is named, its namespace (None: several) and whether it holds a boundary state; and how many
    manifests cannot be read.
    """
    owners: dict[bytes, tuple[str | None, bool]] = {}
    damaged = 0
    for marks in mark_folders(context, found.nodes):
        damaged += len(marks.unreadable)
        for node in marks.nodes:
            own = (node.file.namespace, node.file.kind == "state")
            for digest, _ in node.blocks:
                if digest in found.blocks:
                    namespace, is_state = owners.get(digest, own)
                    owners[digest] = (namespace if namespace == own[0] else None, is_state and own[1])
    return owners, damaged
