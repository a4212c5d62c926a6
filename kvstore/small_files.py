"""Bring the small files that nothing depends on from one cache directory into another: tokenizations and descriptions.

What is wrong with one of them, or with its place in the target, is said and keeps none of the others from coming.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from kvstore.commit import put_file
from kvstore.context import Context
from kvstore.directory import unavailable
from kvstore.layout import Layout
from kvstore.manifest import newer_format
from kvstore.merged import MergeReport
from kvstore.namespace import MAX_NAMESPACE_BYTES, namespace_document
from kvstore.scan import HashedFile, tokenizations
from kvstore.tokenizations import MAGIC, MAX_ENTRY_BYTES, decode, stands
from kvstore.walk import Tally

__all__ = ["bring_descriptions", "bring_tokenizations"]

_OF_ONE_PLACE = {errno.EACCES, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.EPERM}
"""What a system answers for one name or one folder that something is wrong with. (A full disk is full for all.)"""


def bring_tokenizations(source: Context, target: Context, report: MergeReport) -> None:
    """Bring all that the target has not. Raises OSError when nothing more can be written there, and UnavailableError
    when the source's cannot be listed.
    """
    tally = Tally()
    try:
        found = list(tokenizations(source.layout, tally))
    except OSError as error:
        raise unavailable(source.layout.root, error) from error
    report.foreign += tally.foreign
    for file in found:
        path = target.layout.tokens / file.name[:2] / file.name
        try:
            _bring_tokenization(source, target, report, file, path)
        except OSError as error:
            if error.errno not in _OF_ONE_PLACE:
                raise
            report.leave_damaged(f"tokenization {path} is not brought: {error.strerror}")


def _bring_tokenization(source: Context, target: Context, report: MergeReport, file: HashedFile, path: Path) -> None:
    used_ns = min(file.mtime_ns, target.clock())
    if stands(target, path, file.size):
        if not report.dry_run:
            with suppress(OSError):
                if os.stat(path, follow_symlinks=False).st_mtime_ns < used_ns:
                    target.fs.touch(path, used_ns)
        return
    there = source.layout.tokens / file.name[:2] / file.name
    try:
        data, _ = source.fs.read_file(there, MAX_ENTRY_BYTES)
    except FileNotFoundError:
        report.skipped += 1
        return
    except OSError as error:
        report.leave_damaged(f"tokenization {there} is left out: {error.strerror}")
        return
    if (version := newer_format(data, MAGIC)) is not None:
        report.leave_newer(f"tokenization {there}", version)
        return
    if data[16:32].hex() != file.name or decode(data, data[16:48]) is None:
        report.leave_damaged(f"tokenization {there} is left out: it is damaged")
        return
    if not report.dry_run:
        put_file(target, path, [data], used_ns)
    report.tokenizations += 1


def bring_descriptions(source: Context, target: Context, report: MergeReport) -> None:
    """Bring what namespaces are, where the target does not know it. Raises OSError when it cannot be written."""
    try:
        names = sorted(os.listdir(source.layout.namespaces))
    except OSError:
        names = []
    for name in names:
        stem, _, suffix = name.partition(".")
        path = target.layout.namespaces / name
        if suffix != "json" or not Layout.is_namespace_id(stem) or path.exists():
            continue
        there = source.layout.namespaces / name
        try:
            data, _ = source.fs.read_file(there, MAX_NAMESPACE_BYTES)
        except FileNotFoundError:
            report.skipped += 1
            continue
        except OSError:
            data = b""
        if not namespace_document(data):
            report.leave_damaged(f"namespace description {there} is left out: it cannot be read")
            continue
        if not report.dry_run:
            put_file(target, path, [data])
        report.namespaces += 1
