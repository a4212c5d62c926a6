"""Where a merge goes: apart from what it reads, and made like it where nothing is yet."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.context import Context
from kvstore.directory import check_free, open_directory, read_config, unavailable
from kvstore.errors import KVStoreError, NotACacheDirectoryError
from kvstore.fs import Durability
from kvstore.layout import Layout

__all__ = ["check_apart", "destination"]


def check_apart(source: Path, target: Path) -> None:
    """Raise KVStoreError when one is the other, or lies inside it. The target need not be there yet."""
    try:
        if os.path.lexists(target) and os.path.samefile(source, target):
            raise KVStoreError(f"{source} and {target} are the same directory; name two")
        for inner, outer in ((source, target), (target, source)):
            if any(os.path.lexists(each) and os.path.samefile(each, outer) for each in _above(inner, outer)):
                raise KVStoreError(f"{inner} lies inside {outer}; move it out first")
    except OSError as error:
        raise unavailable(Path(error.filename or target), error) from error


def _above(inner: Path, outer: Path) -> list[Path]:
    """The folders that one lies in, when the other is there."""
    return list(inner.resolve().parents) if os.path.lexists(outer) else []


def destination(source: Context, path: Path, *, create: bool, dry_run: bool) -> tuple[Context, bool]:
    """The directory at path; with create, where nothing or an empty folder is, a new one with the source's interval,
    and shared as that is. With dry_run a new one is only named. Whether it is new.

    Raises KVStoreError when it can be neither: before anything is made, so that a wrong name makes no folder.
    """
    check_apart(source.layout.root, path)
    try:
        return _open(source, path, interval=None, create=False), False
    except NotACacheDirectoryError:
        if not create:
            raise
        layout = Layout(path)
        try:
            if read_config(source.fs, layout) is not None:
                raise
            check_free(layout, create=True)
        except OSError as error:
            raise unavailable(path, error) from error
    if dry_run:
        return Context(layout, source.fs, source.interval, source.clock, source.writer), True
    return _open(source, path, interval=source.interval, create=True), True


def _open(source: Context, path: Path, *, interval: int | None, create: bool) -> Context:
    return open_directory(
        path,
        interval=interval,
        create=create,
        shared=not source.fs.private,
        durability=Durability.BARRIER,
        fs=None,
        clock=source.clock,
    )
