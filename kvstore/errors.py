"""Every error kvstore raises.

    KVStoreError
    ├── NotACacheDirectoryError   the path is a file, or a folder of something else
    ├── FormatVersionError        written by a newer kvstore; nothing was touched
    ├── IntervalMismatchError     the directory was created with another interval
    ├── UnavailableError          the file system said no (read-only, full, vanished, no permission)
    ├── LockTimeoutError          another process holds a lock longer than it ever should
    ├── TokenError                a token id is not an unsigned 32-bit integer
    ├── SizeError                 a size such as "20GiB" or an age such as "30d" could not be understood
    ├── PublishError              a span cannot be published as asked (a caller's mistake)
    │   └── MissingParentError    its parent prefix is not in the store: publish that first
    └── DamagedError              bytes on disk are not what their name says
        ├── DamagedManifestError
        └── DamagedBlockError

The read path never lets one of these reach an engine: a damaged or missing file is a shorter match (rule 3 of the
design). They reach people, through the command line and the library calls that people make on purpose.
"""

from __future__ import annotations

__all__ = [
    "DamagedBlockError",
    "DamagedError",
    "DamagedManifestError",
    "FormatVersionError",
    "IntervalMismatchError",
    "KVStoreError",
    "LockTimeoutError",
    "MissingParentError",
    "NotACacheDirectoryError",
    "PublishError",
    "SizeError",
    "TokenError",
    "UnavailableError",
]


class KVStoreError(Exception):
    """Base of every error raised by kvstore; its text is one sentence that says what to do next."""


class NotACacheDirectoryError(KVStoreError):
    """The path exists and is not a cache directory."""


class FormatVersionError(KVStoreError):
    """The directory was written by a newer format version."""


class IntervalMismatchError(KVStoreError):
    """The directory's interval is fixed at creation and differs from the one asked for."""


class UnavailableError(KVStoreError):
    """The operating system refused an operation the store needs."""


class LockTimeoutError(KVStoreError):
    """A lock that is held for milliseconds was not free for seconds."""


class TokenError(KVStoreError):
    """A token id does not fit an unsigned 32-bit integer."""


class SizeError(KVStoreError):
    """A size or an age could not be parsed."""


class PublishError(KVStoreError):
    """A publish was asked for that the format cannot hold."""


class MissingParentError(PublishError):
    """The prefix before the first span is not in the store; publishing would leave a hole."""


class DamagedError(KVStoreError):
    """Bytes on disk contradict their name, their checksum or the format."""


class DamagedManifestError(DamagedError):
    """A manifest failed its checks."""


class DamagedBlockError(DamagedError):
    """A block failed its checks."""
