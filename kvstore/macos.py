"""What Python cannot do on macOS by itself: tell Time Machine, which ignores CACHEDIR.TAG, to pass a folder over, and
ask which run of the system this is.

Its imports take milliseconds, so they happen where a directory is created or written to on a Mac, and nowhere else.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["boot_session", "exclude_from_backup"]

_EXCLUDE_ITEM = b"com.apple.metadata:com_apple_backup_excludeItem"
"""The extended attribute that stays with an item wherever it is moved; ``tmutil addexclusion`` sets it, too."""

_BOOT_SESSION = b"kern.bootsessionuuid"


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


def boot_session() -> str:
    """The UUID that this run of the system was given when it started. Raises OSError, also where there is none."""
    try:
        import ctypes  # noqa: PLC0415 - see above

        sysctl = ctypes.CDLL(None, use_errno=True).sysctlbyname
    except (ImportError, AttributeError, OSError) as error:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), _BOOT_SESSION.decode()) from error
    # int sysctlbyname(const char *name, void *oldp, size_t *oldlenp, void *newp, size_t newlen)
    sysctl.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    )
    sysctl.restype = ctypes.c_int
    value = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(value))
    if sysctl(_BOOT_SESSION, value, ctypes.byref(size), None, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), _BOOT_SESSION.decode())
    return value.value.decode("ascii", "replace")
