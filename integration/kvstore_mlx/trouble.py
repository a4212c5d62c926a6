"""What went wrong with a write, in words: for the log, and for whoever reaches the server, who is told of no file."""

from __future__ import annotations

from kvstore.directory import advice
from kvstore.errors import (
    FormatVersionError,
    IntervalMismatchError,
    LockTimeoutError,
    NotACacheDirectoryError,
    UnavailableError,
)

__all__ = ["BUG", "in_words", "kind_of"]

BUG = "not saved, and this is a bug in kvstore; please report it"

_NO_MEMORY = "there was not enough memory for it; answer fewer prompts at once"

_KINDS: dict[type[Exception], str] = {
    LockTimeoutError: "another process holds a lock of the cache directory; stop it or try again",
    FormatVersionError: "a newer kvstore wrote to the cache directory; upgrade this one",
    IntervalMismatchError: "another cache directory, with another interval, is in its place; see the log",
    NotACacheDirectoryError: "something else is in the cache directory's place; see the log",
}


def kind_of(error: Exception) -> str:
    """What went wrong, without the name of any file."""
    if isinstance(error, UnavailableError) and isinstance(error.__cause__, OSError):
        return advice(error.__cause__)
    return _NO_MEMORY if isinstance(error, MemoryError) else _KINDS.get(type(error), "the log says why")


def in_words(error: Exception) -> str:
    """What went wrong, for the log. A MemoryError mostly says nothing, or only what it had no room for."""
    return _NO_MEMORY if isinstance(error, MemoryError) else str(error) or type(error).__name__
