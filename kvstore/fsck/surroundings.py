"""Check what lies around the objects: folders, tag, modes, staging, quarantine; small files: kvstore.fsck.small."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from kvstore.context import Owner
from kvstore.directory import CACHEDIR_TAG
from kvstore.eviction import PROTECT_NS, young
from kvstore.fsck.findings import Counts, Problem
from kvstore.fsck.judging import Judge
from kvstore.fsck.tree import WIDE, Misfits, entries
from kvstore.fsck.values import seen_of
from kvstore.layout import Layout

__all__ = ["STAGED", "check_modes", "check_staging", "check_top", "count_quarantine", "newest"]

STAGED = re.compile(r"[0-9a-f]{1,16}")
"""What a process calls a file in its staging folder."""

TAG_SIGNATURE = CACHEDIR_TAG.partition(b"\n")[0]
_TAG_LIMIT = 1 << 16


def check_top(judge: Judge, misfits: Misfits) -> None:
    """Folders that must be there, and the tag that keeps backups away."""
    layout = judge.layout
    for folder in layout.folders:
        try:
            mode = os.lstat(folder).st_mode
        except FileNotFoundError:
            judge.problems.append(Problem("error", "folder-missing", folder, "This folder is not there.", "folder"))
            continue
        except OSError as error:
            judge.unreadable(folder, error)
            continue
        if not stat.S_ISDIR(mode):
            misfits.blocked.append(folder)
    try:
        data, status = judge.context.fs.read_file(layout.tag, _TAG_LIMIT)
    except FileNotFoundError:
        sentence = "It is not there, so backup programs will copy what can be computed again."
        judge.problems.append(Problem("note", "tag-missing", layout.tag, sentence, "tag"))
    except OSError as error:
        judge.problems.append(Problem("note", "tag-wrong", layout.tag, f"It cannot be read: {error.strerror}."))
    else:
        if not data.startswith(TAG_SIGNATURE):
            sentence = "It does not begin with the signature of bford.info/cachedir, so backup programs ignore it."
            judge.problems.append(Problem("note", "tag-wrong", layout.tag, sentence, "tag", seen_of(status)))
    objects = layout.nodes.parent
    ours = {folder.name for folder in layout.folders} | {layout.tag.name, layout.config.name, layout.stats.name}
    for above in (layout.root, objects):
        misfits.foreign += sum(entry.name not in ours for entry in entries(above, misfits))


def check_modes(judge: Judge, misfits: Misfits) -> None:
    """Who may read what is no object: descriptions, quotas, counters, locks, and what is staged or was set aside.

    (Objects are looked at where they are read.)
    """
    layout = judge.layout
    for path in (layout.config, layout.tag, *_beside_objects(layout, misfits)):
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and mode & WIDE:
            judge.wide_files(path, 1)


def _beside_objects(layout: Layout, misfits: Misfits) -> Iterator[Path]:
    """Files of ours, most of them small, that lie nowhere below objects/."""
    locks = layout.lock("publish"), layout.lock("gc")
    yield from (path for path in _paths(locks[0].parent, misfits) if path in locks)
    yield from (path for path in _paths(layout.namespaces, misfits) if Layout.describes_namespace(path.name))
    yield from (path for path in _paths(layout.stats, misfits) if Layout.is_stats_name(path.name))
    yield from (path for path in _paths(layout.quarantine, misfits) if Layout.was_set_aside(path.name))
    for folder in _paths(layout.tmp, misfits):
        if Owner.parse(folder.name) is not None and not folder.is_symlink():
            inside = Misfits()  # another process's, which may go at any time
            yield from (path for path in _paths(folder, inside) if STAGED.fullmatch(path.name))
            misfits.wide += inside.wide


def _paths(folder: Path, misfits: Misfits) -> list[Path]:
    return [folder / entry.name for entry in entries(folder, misfits)]


def check_staging(judge: Judge, counts: Counts, misfits: Misfits) -> None:
    """Folders that killed processes left behind. As for gc, one must have rested: process numbers may be reused."""
    layout = judge.layout
    for entry in entries(layout.tmp, misfits):
        owner = Owner.parse(entry.name)
        if owner is None or not entry.is_dir(follow_symlinks=False):
            misfits.foreign += 1
            continue
        counts.staging += 1
        path = layout.tmp / entry.name
        if owner.surely_gone() and not young(newest(path), 0, judge.now_ns, PROTECT_NS):
            sentence = f"Process {owner.pid} that wrote here is gone."
            judge.problems.append(Problem("note", "staging-stale", path, sentence, "staging"))


def newest(folder: Path) -> int:
    """The latest time of a folder and what is in it."""
    times = [0]
    for path in (folder, *_inside(folder)):
        try:
            status = os.lstat(path)
        except OSError:
            continue
        times += [status.st_mtime_ns, status.st_ctime_ns]
    return max(times)


def _inside(folder: Path) -> Iterator[Path]:
    for entry in entries(folder, Misfits()):
        yield folder / entry.name


def count_quarantine(judge: Judge, counts: Counts, misfits: Misfits) -> None:
    """What lies in quarantine is not examined; how much it is may be worth knowing."""
    for entry in entries(judge.layout.quarantine, misfits):
        try:
            size = entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
        counts.quarantined += 1
        counts.quarantined_bytes += size
