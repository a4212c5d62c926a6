"""One wrong digit in kvstore.json makes everything unreachable: then that file is damaged, and not all the others.

Every manifest records the interval it was made with. When none in the directory has the interval of kvstore.json and
all have the same other one, the repair is to put that back; but never one that no directory can have, and that makes
kvstore refuse it.
"""

from __future__ import annotations

import json

from kvstore.commit import put_file
from kvstore.context import Context
from kvstore.directory import MIN_INTERVAL
from kvstore.errors import DamagedManifestError
from kvstore.fsck.findings import Problem
from kvstore.fsck.values import seen_of
from kvstore.manifest import MAX_INTERVAL, MAX_MANIFEST_BYTES, decode

__all__ = ["judge_interval", "restore_interval"]

_CODES = {"manifest-interval", "manifest-damaged"}
"""What manifests of a longer interval look like: too long to be read as one of this."""


def judge_interval(context: Context, problems: list[Problem], whole: int) -> None:
    """Replace the problems of all manifests by one of kvstore.json, when that is what is wrong.

    whole: manifests and states that are of the directory's interval.
    """
    if whole:
        return
    intervals = {}
    for problem in problems:
        if problem.code in _CODES and (interval := _interval_of(context, problem)) is not None:
            intervals[problem.path] = interval
    if len(set(intervals.values())) != 1 or context.interval in intervals.values():
        return
    interval = next(iter(intervals.values()))
    if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        return
    config = context.layout.config
    sentence = (
        f"It says {context.interval} tokens a chunk, and all {len(intervals)} manifests were saved with {interval}; "
        "nothing can be found."
    )
    problems[:] = [problem for problem in problems if problem.path not in intervals]
    problems.append(
        Problem("error", "interval-wrong", config, sentence, "interval", seen_of(config.stat()), first=interval)
    )


def _interval_of(context: Context, problem: Problem) -> int | None:
    """The interval that a whole manifest records."""
    try:
        data, _ = context.fs.read_file(problem.path, MAX_MANIFEST_BYTES)
        return decode(data).interval
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
