"""A directory that is emptied, or exchanged for another one, under a process that has it open.

Looked at before each publish, by some stat calls. One that was emptied (`rm -r DIR/*`, a new disk in place of the old)
is set up anew with the interval it had, and the process goes on. One that is another directory now is used if its
format and interval are the same, and otherwise refused with nothing touched.

A folder that is not there is never made, and neither is anything in one whose volume is not mounted: it would fill the
disk below the mount point, and lie hidden there when the volume is back. (A volume that goes in the microseconds
between the look and the first folder leaves some empty folders there.)
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TypeAlias

from kvstore.context import Context
from kvstore.directory import check_free, check_interval, complete, fill, read_config
from kvstore.forks import renew_in_forks

__all__ = ["Renewal"]

log = logging.getLogger("kvstore")

_Identity: TypeAlias = tuple[int, int, int]


class Renewal:
    """What one process knows about the directory it has open. Safe to use from several threads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._volume = context.fs.mount_point(context.layout.root)
        self._known: _Identity | None = None
        self._lock = threading.Lock()
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks."""
        self._lock = threading.Lock()

    def check(self) -> bool:
        """Set the directory up anew if it was emptied; True when its content is not what it was.

        Raises OSError, NotACacheDirectoryError when something else lies there now, FormatVersionError and
        IntervalMismatchError when another directory does. For a folder that is not there it does nothing, and neither
        raises: the publish that comes next says so.
        """
        if self._is_as_known(self._identity()):
            return False
        with self._lock:
            now = self._identity()  # another thread may have been here first
            if self._is_as_known(now):
                return False
            return self._missing() if now is None else self._changed(now)

    def _is_as_known(self, now: _Identity | None) -> bool:
        folders = self._context.layout.folders
        return now is not None and now == self._known and all(folder.is_dir() for folder in folders)

    def _identity(self) -> _Identity | None:
        try:
            status = os.stat(self._context.layout.config, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def _missing(self) -> bool:
        """kvstore.json is not there."""
        context = self._context
        root = context.layout.root
        if not root.is_dir() or not self._is_mounted():
            return False
        check_free(context.layout, create=True)
        check_interval(context, fill(context.fs, context.layout, context.interval, context.clock))
        self._known = self._identity()
        log.warning("kvstore: %s was emptied while in use; it was set up anew", root)
        return True

    def _changed(self, now: _Identity) -> bool:
        """kvstore.json is there and was not looked at yet, or folders are missing.

        Of something else in the place of one the publish tells that needs it.
        """
        context = self._context
        config = read_config(context.fs, context.layout)
        if config is None:
            return False
        check_interval(context, config)
        missing = [folder for folder in context.layout.folders if not folder.is_dir()]
        complete(context.fs, context.layout)
        healed = any(folder.is_dir() for folder in missing)
        if healed:
            log.warning("kvstore: folders of %s were removed while in use; they were made anew", context.layout.root)
        other = self._known is not None and now != self._known
        self._known = now
        return healed or other

    def _is_mounted(self) -> bool:
        """Whether a volume is mounted where the one was on which the directory was opened, or below."""
        now = self._context.fs.mount_point(self._context.layout.root)
        return self._volume in {now, *now.parents}
