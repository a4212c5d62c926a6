"""One wrong digit in kvstore.json makes everything unreachable: then that file is damaged, and not all the others.

Every manifest records the interval it was made with. When none in the directory has the interval of kvstore.json and
all have the same other one, the repair is to put that back; but never one that no directory can have, and that makes
kvstore refuse it.

When some have the interval of kvstore.json, the digit may have been wrong for a while, with a prompt saved meanwhile.
Which of the two is right only a person can say. So manifests of another interval that a directory can have are no
damage: they are reported, and stay where they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from kvstore.commit import put_file
from kvstore.context import Context
from kvstore.directory import MIN_INTERVAL
from kvstore.errors import DamagedManifestError
from kvstore.fsck.findings import Problem
from kvstore.fsck.values import seen_of
from kvstore.manifest import MAX_INTERVAL, MAX_MANIFEST_BYTES, Manifest, decode

__all__ = ["judge_interval", "restore_interval"]

_CODES = {"manifest-interval", "manifest-damaged"}
"""What manifests of a longer interval look like: too long to be read as one of this."""


def judge_interval(context: Context, problems: list[Problem], whole: int) -> set[bytes]:
    """Replace the problems of all manifests by one of kvstore.json, when that is what is wrong; else leave whole
    manifests of another interval alone.

    whole: manifests and states that are of the directory's interval. Returns the digests of the blocks that manifests
    of another interval name: `gc` keeps those.
    """
    intervals: dict[Path, int] = {}
    named: set[bytes] = set()
    for problem in problems:
        if problem.code in _CODES and (manifest := _manifest_of(context, problem)) is not None:
            intervals[problem.path] = manifest.interval
            named.update(ref.digest for ref in manifest.blocks if manifest.interval != context.interval)
    others = Counter(interval for interval in intervals.values() if interval != context.interval)
    agreed = next(iter(others)) if len(others) == 1 and len(intervals) == others.total() else 0
    if not whole and _is_possible(agreed):
        _blame_config(context, problems, intervals, agreed)
        return named
    for problem in problems:
        interval = intervals.get(problem.path, context.interval)
        if interval != context.interval and not _is_possible(interval):
            problem.action = "damaged"
        elif interval != context.interval:
            problem.action = "none"
            problem.sentence = (
                f"It was saved with {interval} tokens a chunk, like {_manifests(others[interval])}, and kvstore.json "
                f"says {context.interval}, like {_manifests(whole)}; so it is whole, and not found. If {interval} is "
                "right, write that into kvstore.json and restart what uses this directory; else `gc` removes it as "
                "it does what is not used."
            )
    return named


def _is_possible(interval: int) -> bool:
    """Whether a directory can have an interval."""
    return MIN_INTERVAL <= interval <= MAX_INTERVAL


def _manifests(number: int) -> str:
    return f"{number:,} manifest{'' if number == 1 else 's'} here"


def _blame_config(context: Context, problems: list[Problem], intervals: Collection[Path], interval: int) -> None:
    config = context.layout.config
    sentence = (
        f"It says {context.interval} tokens a chunk, and all {len(intervals)} manifests were saved with {interval}; "
        "nothing can be found."
    )
    problems[:] = [problem for problem in problems if problem.path not in intervals]
    problems.append(
        Problem("error", "interval-wrong", config, sentence, "interval", seen_of(config.stat()), first=interval)
    )


def _manifest_of(context: Context, problem: Problem) -> Manifest | None:
    """A manifest that is whole in itself."""
    try:
        data, _ = context.fs.read_file(problem.path, MAX_MANIFEST_BYTES)
        return decode(data)
    except (OSError, DamagedManifestError):
        return None


def restore_interval(context: Context, problem: Problem) -> None:
    """Put the interval of all manifests back into kvstore.json. Processes that run go on with the wrong one."""
    if seen_of(problem.path.stat()) != problem.seen:
        problem.left("left, because it was changed meanwhile")
        return
    data, _ = context.fs.read_file(problem.path, MAX_MANIFEST_BYTES)
    document = {**json.loads(data), "interval": problem.first}
    put_file(context, problem.path, [json.dumps(document, indent=2).encode() + b"\n"])
    problem.solved("put back; restart what uses this directory, and check again")
