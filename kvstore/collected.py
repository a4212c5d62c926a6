"""What a collection did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GcReport"]


@dataclass
class GcReport:
    """What a collection did, or with dry_run would do. Bytes are those allocated on disk.

    before_bytes and after_bytes: the whole directory. nodes, states: manifests removed. blocks: removed, orphans (that
    no manifest named) included. staging, quarantined, tokenizations: removed. skipped: left because they changed since
    the mark. failed: could not be removed. waiting: blocks that no manifest names but that must stay for now. damaged:
    manifests whose references are unknown. foreign: files that are not kvstore's. future: when something is unmet,
    files that stayed because they were written while the clock was ahead. unmet_bytes: still missing to what
    the policy asked for; over_quota_bytes: to what its quotas allow. coldest_ns: no leaf that was left is colder (see
    kvstore.admission); None when there is none. busy: another collection runs and nothing was done. error: one
    sentence, why it stopped; what was removed until then is counted. rested_seconds: of mark_seconds and sweep_seconds,
    what was spent at rest, beside an engine at work (kvstore.pacing).
    """

    dry_run: bool = False
    busy: bool = False
    error: str = ""
    before_bytes: int = 0
    after_bytes: int = 0
    freed_bytes: int = 0
    unmet_bytes: int = 0
    over_quota_bytes: int = 0
    coldest_ns: int | None = None
    nodes: int = 0
    states: int = 0
    blocks: int = 0
    orphans: int = 0
    staging: int = 0
    quarantined: int = 0
    tokenizations: int = 0
    skipped: int = 0
    failed: int = 0
    waiting: int = 0
    damaged: int = 0
    foreign: int = 0
    future: int = 0
    mark_seconds: float = 0.0
    sweep_seconds: float = 0.0
    rested_seconds: float = 0.0
