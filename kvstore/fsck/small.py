"""Check the content of the small files beside the objects: descriptions, quotas and counters, and what the locks are.

By the rules of who reads each. None of them is served, and whoever reads one takes a damaged one for one that is not
there; so it is set aside, and its writer writes it again: an engine the description at its next save, a process its
counters, and whoever keeps the directory the quota.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import SizeError
from kvstore.fsck.findings import Action, Problem, Severity
from kvstore.fsck.judging import Judge
from kvstore.fsck.tree import Misfits, entries
from kvstore.fsck.values import Fault, seen_of, unopened
from kvstore.keys import namespace_fingerprint
from kvstore.layout import NAME_KEY_BYTES, Layout
from kvstore.namespace import MAX_NAMESPACE_BYTES
from kvstore.quotas import MAX_QUOTA_BYTES, size_in
from kvstore.stats import MAX_STATS_BYTES, rows_in
from kvstore.untrusted import JSON_ERRORS, parse

__all__ = ["check_small"]

_FORMAT = 1


class _Kind(NamedTuple):
    """limit: of its size. code: what damage of it is called. fault_in: what is wrong with its bytes."""

    limit: int
    severity: Severity
    code: str
    fault_in: Callable[[bytes], Fault | None]


def check_small(judge: Judge, used: set[str], misfits: Misfits) -> None:
    """used: the namespaces that have a folder."""
    layout = judge.layout
    described = set()
    for entry in entries(layout.namespaces, misfits):
        path = layout.namespaces / entry.name
        if not Layout.describes_namespace(entry.name):
            misfits.foreign += 1
        elif Layout.quota_of(entry.name) is not None:
            _check(judge, path, _Kind(MAX_QUOTA_BYTES, "error", "quota-damaged", _quota_fault))
        else:
            described.add(path.stem)
            _check(judge, path, _Kind(MAX_NAMESPACE_BYTES, "note", "namespace-wrong", _description_fault(path.stem)))
    for namespace in sorted(used - described):
        path = layout.namespace_file(namespace)
        sentence = "It is not there, so nobody can tell what the namespace is; its engine writes it at the next save."
        judge.problems.append(Problem("note", "namespace-undescribed", path, sentence))
    for entry in entries(layout.stats, misfits):
        if Layout.is_stats_name(entry.name):
            kind = _Kind(MAX_STATS_BYTES, "error", "stats-damaged", _stats_fault)
            _check(judge, layout.stats / entry.name, kind)
    for lock in (layout.lock("publish"), layout.lock("gc")):
        _check_lock(judge, lock)


def _check(judge: Judge, path: Path, kind: _Kind) -> None:
    try:
        data, status = judge.context.fs.read_file(path, kind.limit)
        seen, fault = seen_of(status), kind.fault_in(data)
    except FileNotFoundError:
        return
    except OSError as error:
        try:
            found = unopened(str(path), error, kind.code)
        except OSError:
            judge.unreadable(path, error)
            return
        if found is None:
            return
        seen, fault = found.seen, found.fault
    if fault is not None:
        action: Action = "none" if fault.code.endswith("-newer") else "damaged"
        judge.problems.append(Problem(kind.severity, fault.code, path, fault.sentence, action, seen))


def _quota_fault(data: bytes) -> Fault | None:
    try:
        size_in(data)
    except SizeError:
        return Fault("quota-damaged", "It does not hold a size such as 20GiB, so it limits nothing.")
    return None


def _stats_fault(data: bytes) -> Fault | None:
    try:
        document = parse(data)
        if _is_newer(document):
            return Fault("stats-newer", _newer(document))
        rows_in(document)
    except JSON_ERRORS:
        return Fault("stats-damaged", "It is damaged, so what it counted is left out.")
    return None


def _description_fault(namespace: str) -> Callable[[bytes], Fault | None]:
    """What is wrong with the description of a namespace; it is for people only."""

    def fault(data: bytes) -> Fault | None:
        try:
            document = parse(data)
            if _is_newer(document):
                return Fault("namespace-newer", _newer(document))
            fingerprint = bytes.fromhex(document["fingerprint"])
            if fingerprint[:NAME_KEY_BYTES].hex() != namespace:
                return Fault("namespace-wrong", "It describes another namespace.")
            if not document["salted"] and namespace_fingerprint(document["description"]) != fingerprint:
                return Fault("namespace-wrong", "Its description is not what the namespace was made of.")
        except JSON_ERRORS:
            return Fault("namespace-wrong", "It cannot be understood.")
        return None

    return fault


def _is_newer(document: dict[str, object]) -> bool:
    version = document["format"]
    return isinstance(version, int) and version > _FORMAT


def _newer(document: dict[str, object]) -> str:
    return f"It has format {document['format']}, which a newer kvstore wrote; check it with that one."


def _check_lock(judge: Judge, path: Path) -> None:
    """A lock's content is nobody's business. What is no file cannot be locked, and may be held all the same where it
    was put (a link): so a person must say what becomes of it.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return  # made by whoever needs it first
    except OSError as error:
        judge.unreadable(path, error)
        return
    if not stat.S_ISREG(mode):
        sentence = "A lock must be a file, so nothing is saved or collected; remove it while nobody uses the directory."
        judge.problems.append(Problem("error", "lock-blocked", path, sentence))
