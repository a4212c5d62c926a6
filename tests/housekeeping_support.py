"""A server's requests without a server: what is written to a directory that has room for some nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from core_support import FAST, open_store, prompt
from gc_support import SECOND, blocks, check_valid, manifests

from kvstore import NamespaceInfo, Span, TensorSpec
from kvstore.gc import usage
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.refusals import Refusal

INTERVAL = 16
NODE = 16384
"""Bytes on disk of one node of these: a block of two pages and a header, and a manifest."""

SPECS = (TensorSpec("k", "U8", 1, (512,)),)


class Server:
    """The requests of a server with room for some nodes, whose time can be put forward, and its clock set back."""

    def __init__(self, path, nodes: float | None = None, write_limit: int | None = None) -> None:
        self.ahead = self.back = 0.0
        self.store = open_store(
            path, INTERVAL, FAST, clock=lambda: time.time_ns() + int((self.ahead - self.back) * SECOND)
        )
        self.space = self.store.namespace(NamespaceInfo({"model": "fake"}))
        self.publish(prompt(INTERVAL, 999))
        for number in range(256):  # so that what a node takes is always the same
            for above in (self.store.context.layout.blocks, self.store.context.layout.nodes / self.space.id):
                (above / f"{number:02x}").mkdir(exist_ok=True)
        for file in (*manifests(self.store.path), *blocks(self.store.path)):
            file.unlink()
        budget = 1 << 40 if nodes is None else usage(self.store.context) + int(nodes * NODE)
        self.house = Housekeeping(self.store, budget, write_limit, lambda: time.monotonic() + self.ahead)

    def publish(self, tokens, first: int = 0) -> int:
        end = len(tokens)
        data = bytes(token % 256 for token in tokens[first:end] for _ in range(512))
        return self.space.publish(tokens, [Span(first, end - first, SPECS, [data])]).written

    def request(self, tokens, *, at_once: bool = False) -> Refusal | None:
        """Look up, and save what is missing up to the first refusal; at_once: as one job."""
        match = self.space.lookup(tokens)
        self.house.asked(self.space, match)
        at = match.border
        while at < len(tokens):
            end = min((at // INTERVAL + 1) * INTERVAL, len(tokens))
            packed = b"".join(token.to_bytes(4, "little") for token in tokens[:end])
            following = (len(tokens) - end) // INTERVAL if at_once else 0
            refusal = self.house.make_room(NODE, self.space, packed, following * NODE)
            if refusal is not None:
                return refusal
            # As on disk: a file takes whole pages, which a server's blocks of megabytes do not show.
            self.publish(tokens[:end], at)
            self.house.wrote(NODE, end - at)
            at = end
        return None

    def saved(self, tokens) -> int:
        return self.space.lookup(tokens).count


@contextmanager
def servers(folder: Path) -> Iterator[Callable[..., Server]]:
    """What makes servers; their directories are valid afterwards, and no larger than they may be."""
    made: list[Server] = []

    def make(*args, **kwargs) -> Server:
        made.append(Server(folder / f"{len(made)}", *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        check_valid(each.store.path)
        assert usage(each.store.context) <= each.house.budget
        each.store.close()
