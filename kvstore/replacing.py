"""Put manifests over those that name other blocks for the same tokens: docs/format.md section 7.1.

The one way in which a published name gets another content. Which blocks, is the business of kvstore.repack.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.commit import freshen, intact
from kvstore.context import Context
from kvstore.holds import ShortHolds
from kvstore.locks import publish_lock
from kvstore.manifest import BlockRef
from kvstore.staged import stage
from kvstore.takeover import same_file

__all__ = ["Replacement", "replace_manifests"]


@dataclass(frozen=True, slots=True)
class Replacement:
    """A manifest to take the place of another. seen: that one's stat. old, new: the blocks in which the two differ."""

    path: Path
    manifest: bytes
    seen: os.stat_result
    old: Sequence[BlockRef]
    new: Sequence[BlockRef]


def replace_manifests(context: Context, replacements: Sequence[Replacement]) -> int:
    """Put manifests that share blocks over the old ones; how many it were.

    None of them when one changed since it was seen (it was used, removed or replaced). Ten thousand siblings take
    seconds, so the lock is let go in between, and one that changes in this time, or loses a new block, is left as it
    is: it keeps the old blocks until it is repacked in its turn, which makes the same new ones. A kill leaves the same.

    The old blocks are made young, so that whoever read an old manifest finds them for the whole grace time (those of
    another user may go sooner: a shorter restore); the times of the manifests, which are their last use, stay.
    """
    staged: dict[Path, Replacement] = {}
    young: set[bytes] = set()
    folders: set[Path] = set()
    count = 0
    try:
        for each in replacements:
            staged[path := stage(context, [each.manifest])] = each
            context.fs.touch(path, each.seen.st_mtime_ns)
        if not all(map(_is_as_seen, replacements)):
            return 0
        holds = ShortHolds(context.fs, lambda: publish_lock(context.layout))
        with holds.over(list(staged.items()), lambda item: (item[1].path,)) as held:
            for path, each in held:
                if _is_as_seen(each) and all(intact(context, ref) for ref in each.new):
                    # Each time for what each one is to stand on, as a collector may look in between; once for the rest.
                    freshen(context, [*each.new, *(ref for ref in each.old if ref.digest not in young)])
                    young.update(ref.digest for ref in each.old)
                    context.fs.rename(path, each.path)
                    del staged[path]
                    folders.add(each.path.parent)
                    count += 1
    finally:
        for path in staged:
            context.staging.discard(path)
    for folder in folders:
        context.fs.sync_dir(folder)
    return count


def _is_as_seen(each: Replacement) -> bool:
    try:
        return same_file(os.stat(each.path, follow_symlinks=False), each.seen)
    except FileNotFoundError:
        return False
