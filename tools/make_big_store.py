"""Make a cache directory with many nodes and tiny blocks, to measure what depends on the number of files.

The files are written directly, as a publish would have named them, without locks and without syncing: a million nodes
take minutes rather than an hour. Everything is valid: `kvstore ls`, `gc` and `fsck` find nothing to complain about, and
a lookup of a conversation's prompt finds it whole.

Manifests have their real size (about 8.4 KB at an interval of 2,048), because reading them is what marking costs.
At that interval a node takes 12 KiB for its manifest and 4 KiB for its block on ext4: 16 GB for a million.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from kvstore import DEFAULT_INTERVAL, NamespaceInfo, Store
from kvstore.blocks import Span, TensorSpec, block_parts
from kvstore.context import Space
from kvstore.directory import MIN_INTERVAL
from kvstore.keys import block_digest, node_key, pack_tokens, rungs
from kvstore.layout import FANOUT, NodeName
from kvstore.manifest import MAX_INTERVAL, BlockRef, Manifest, encode

_SPEC = TensorSpec("k", "U8", 1, (1,))
_VOCABULARY = 100_000


def conversation_tokens(number: int, chunk: int, interval: int) -> bytes:
    """The packed tokens of one chunk of a conversation: cheap to make, and different from all others."""
    base = (number * 1_000_003 + chunk * 8191) % _VOCABULARY
    return pack_tokens([number, chunk, *range(base, base + interval - 2)])


def make(directory: Path, nodes: int, depth: int, interval: int, age_s: int, *, quiet: bool) -> None:
    """Write the directory. Conversations of depth chunks each, the last one shorter when nodes run out.

    Times lie age_s in the past and grow with the conversation's number, so that eviction has an order to follow.
    """
    with Store.open(directory, interval=interval) as store:
        context = store.context
        space = Space(context, NamespaceInfo({"model": "big"}, "made by make_big_store"))
        store.namespace(space.info)._describe()  # noqa: SLF001 - the one file that publish would have written beside
        layout = context.layout
        for folder in [layout.blocks, layout.nodes / space.id]:
            folder.mkdir(exist_ok=True)
            for name in FANOUT:
                (folder / name).mkdir(exist_ok=True)
        start = time.monotonic()
        created = time.time_ns() - age_s * 10**9
        for done in range(nodes):
            number, chunk = divmod(done, depth)
            if chunk == 0:
                parent = space.root
            tokens = conversation_tokens(number, chunk, interval)
            key = node_key(parent, tokens)
            first = chunk * interval
            payload = bytes(8) + done.to_bytes(8, "little") + bytes(interval - 16)
            parts, at = block_parts(Span(first, interval, (_SPEC,), [payload]))
            ref = BlockRef(block_digest(parts), at + interval, first, interval, at)
            manifest = Manifest(
                "kv", space.fingerprint, parent, key, first, interval, tokens, (ref,), created, context.writer
            )
            node = NodeName.of(parent, interval, key, rungs(tokens, interval))
            stamp = created + number * 1000
            _write(str(layout.block(ref.digest)), b"".join(parts), stamp)
            _write(str(layout.node(space.id, node)), encode(manifest), stamp)
            parent = key
            if not quiet and (done + 1) % 100_000 == 0:
                rate = (done + 1) / (time.monotonic() - start)
                print(f"{done + 1:>9,} nodes, {rate:,.0f} a second", file=sys.stderr)


def _write(path: str, data: bytes, stamp_ns: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
        os.utime(fd, ns=(stamp_ns, stamp_ns))
    finally:
        os.close(fd)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a new or empty folder")
    parser.add_argument("--nodes", type=int, default=100_000, help="how many nodes (default 100000)")
    parser.add_argument("--depth", type=int, default=64, help="chunks a conversation (default 64)")
    parser.add_argument("--interval", type=int, default=DEFAULT_INTERVAL, help="tokens a chunk (default 2048)")
    parser.add_argument("--age", type=int, default=7 * 86400, help="seconds since the oldest use (default a week)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = parser.parse_args()
    if options.nodes < 1 or options.depth < 1 or options.age < 0:
        parser.error("nodes and depth must be positive, and the age not negative")
    if not MIN_INTERVAL <= options.interval <= MAX_INTERVAL:
        parser.error(f"the interval must be from {MIN_INTERVAL} to {MAX_INTERVAL}")
    if options.directory.exists() and (not options.directory.is_dir() or any(options.directory.iterdir())):
        parser.error(f"{options.directory} is not an empty folder; name a new one")
    make(options.directory, options.nodes, options.depth, options.interval, options.age, quiet=options.quiet)


if __name__ == "__main__":
    main()
