"""What a directory holds, at a glance: for the line in a server's log when it starts.

By names and sizes alone, no file is opened: a manifest that is damaged counts, and tokens that a tail and a longer
sibling both cover count twice. Made to run beside requests in a directory of a million nodes: nothing is kept, and the
caller is asked at each folder whether to rest. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.context import Context
from kvstore.layout import FANOUT, Layout, NodeName
from kvstore.scan import usage

__all__ = ["Glance", "glance"]


@dataclass(frozen=True)
class Glance:
    """used: allocated bytes of the whole directory. The others are of some namespaces; namespaces: their number."""

    used: int
    prefixes: int
    tokens: int
    namespaces: int


def glance(context: Context, namespaces: Iterable[str] | None, rest: Callable[[], None]) -> Glance:
    """Look at the directory; count the prefixes of these namespaces, or of all. Raises OSError and what rest raises."""
    context.fs.stat(context.layout.root)
    used = usage(context, rest)
    if namespaces is None:
        namespaces = filter(Layout.is_namespace_id, context.fs.list_dir(context.layout.nodes))
    known, prefixes, tokens = list(namespaces), 0, 0
    for namespace in known:
        for digits in FANOUT:
            counts = _tokens(context, namespace, digits)
            prefixes += len(counts)
            tokens += sum(counts)
            rest()
    return Glance(used, prefixes, tokens, len(known))


def _tokens(context: Context, namespace: str, digits: str) -> list[int]:
    """How many tokens each node of one folder covers."""
    try:
        names = context.fs.list_dir(context.layout.nodes / namespace / digits)
    except (FileNotFoundError, NotADirectoryError):
        return []
    ours = filter(NodeName.is_file_name, names)
    return [int(name[33 : name.index("-", 33)]) for name in ours if name.endswith(".kv") and name.startswith(digits)]
