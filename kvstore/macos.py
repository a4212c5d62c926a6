"""What Python cannot do on macOS by itself: tell Time Machine, which ignores CACHEDIR.TAG, to pass a folder over.

Its imports take milliseconds, so they happen where a directory is created on a Mac, and nowhere else.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["exclude_from_backup"]

_EXCLUDE_ITEM = b"com.apple.metadata:com_apple_backup_excludeItem"
"""The extended attribute that stays with an item wherever it is moved; ``tmutil addexclusion`` sets it, too."""


def exclude_from_backup(path: Path) -> None:
    """Set the attribute, on what a link points to. Raises OSError, also where there is no such call."""
    import plistlib  # noqa: PLC0415 - see above

    value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
    try:
        import ctypes  # noqa: PLC0415 - see above

        setxattr = ctypes.CDLL(None, use_errno=True).setxattr
    except (ImportError, AttributeError, OSError) as error:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path)) from error
    # int setxattr(const char *path, const char *name, void *value, size_t size, u_int32_t position, int options)
    setxattr.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_uint32,
        ctypes.c_int,
    )
    setxattr.restype = ctypes.c_int
    if setxattr(os.fsencode(path), _EXCLUDE_ITEM, value, len(value), 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
