"""Exact-message tokenizations: what a whole request was tokenized to, so that 100 messages need no tokenizer.

The key is over the exact request (messages, tools, template and its arguments), never over parts: joining separately
tokenized messages gives other tokens at the seams. An entry is a small file of its own; losing one costs its
tokenization.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from contextlib import suppress
from pathlib import Path

from kvstore.commit import put_file
from kvstore.context import Context
from kvstore.directory import check_same
from kvstore.fs import is_damage
from kvstore.keys import TOKEN_BYTES, checksum, request_key
from kvstore.manifest import newer_format

__all__ = ["MAGIC", "MAX_ENTRY_BYTES", "Tokenizations", "decode", "stands"]

MAGIC = b"KVSTTOKS"
FORMAT = 1
_HEAD = struct.Struct("<8s I I 32s Q")
_CHECKSUM_BYTES = 16
MAX_TOKENS = 1 << 21
"""Above nearly all context lengths; nothing larger is read, and nothing larger is saved: it is tokenized every time."""

MAX_ENTRY_BYTES = _HEAD.size + MAX_TOKENS * TOKEN_BYTES + _CHECKSUM_BYTES

_TOUCH_AFTER_NS = 3600 * 10**9

_NAME = re.compile(r"[0-9a-f]{2}|[0-9a-f]{32}")


class Tokenizations:
    """The tokenizations of one scope: a tokenizer with everything of it that decides tokens, as bytes to be hashed."""

    def __init__(self, context: Context, scope: bytes) -> None:
        self._context = context
        self._scope = scope

    def _path(self, key: bytes) -> Path:
        name = key[:16].hex()
        return self._context.layout.tokens / name[:2] / name

    def get(self, request: bytes) -> bytes | None:
        """The packed tokens of a request, or None: a damaged entry is a miss, and so is one of a newer version."""
        context = self._context
        key = request_key(self._scope, request)
        path = self._path(key)
        try:
            data, status = context.fs.read_file(path, MAX_ENTRY_BYTES)
        except OSError as error:
            if is_damage(error) and error.errno != errno.EFBIG:
                self._found_damaged(path)
            return None
        tokens = decode(data, key)
        if tokens is None and newer_format(data, MAGIC) is None:
            self._found_damaged(path)
            return None
        # Whatever was damaged, somebody has replaced it.
        context.damaged.discard(path)
        if tokens is not None and context.clock() - status.st_mtime_ns > _TOUCH_AFTER_NS:
            with suppress(OSError):
                context.fs.touch(path, context.clock())
        return tokens

    def _found_damaged(self, path: Path) -> None:
        self._context.counters.add(damaged=1)
        self._context.damaged.add(path)

    def put(self, request: bytes, tokens: bytes) -> None:
        """Save the packed tokens of a request. Raises OSError, and KVStoreError where another directory lies there now;
        the caller goes on.
        """
        context = self._context
        check_same(context)
        key = request_key(self._scope, request)
        path = self._path(key)
        if len(tokens) > MAX_TOKENS * TOKEN_BYTES:
            return
        # What was found damaged is read once more: tokenizing took seconds, in which somebody may have replaced it.
        status = _status(path)
        if status is not None and (path not in context.damaged or _is_to_stay(context, path, status, key)):
            context.damaged.discard(path)
            return
        body = _HEAD.pack(MAGIC, FORMAT, len(tokens) // TOKEN_BYTES, key, context.clock()) + tokens
        # Equal keys have equal tokens, so a rename over an entry changes nothing but a damaged one. One that a power
        # cut takes costs one tokenization.
        parts = [body, checksum(body)]
        try:
            put_file(context, path, parts, durable=False)
        except FileNotFoundError:
            self._complete()
            put_file(context, path, parts, durable=False)
        context.damaged.discard(path)

    def _complete(self) -> None:
        """Make the folders that a copy left out because they were empty, where its kvstore.json says that it is one."""
        layout = self._context.layout
        os.stat(layout.config)
        for folder in (layout.tmp, layout.tokens):
            self._context.fs.make_dir(folder)

    def trim(self, budget: int) -> None:
        """Remove entries of any scope, longest unused first, until all of them take budget bytes at most.

        Called by whoever has just written one; raises no OSError: what cannot be removed now is tried the next time.
        """
        context = self._context
        found: list[tuple[int, int, Path]] = []
        for folder in _below(context.layout.tokens):
            for path in _below(folder):
                with suppress(OSError):
                    status = path.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= budget:
                return
            with suppress(OSError):
                context.fs.unlink(path)
                total -= size


def stands(context: Context, path: Path, size: int) -> bool:
    """Whether an entry is there that one of this size need not replace: of that size too, or by a newer kvstore.

    Raises OSError when that cannot be told, or when no file can have the name.
    """
    status = _status(path)
    if status is None:
        return False
    return (stat.S_ISREG(status.st_mode) and status.st_size == size) or _is_to_stay(context, path, status)


def _is_to_stay(context: Context, path: Path, status: os.stat_result, key: bytes | None = None) -> bool:
    """Whether what has an entry's name is by a newer kvstore, or whole and that of this key. Raises OSError as stands.

    What is larger than ours can be may be a newer kvstore's; a link or a FIFO is nobody's.
    """
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        data, _ = context.fs.read_file(path, MAX_ENTRY_BYTES)
    except FileNotFoundError:
        return False
    except OSError as error:
        if is_damage(error):
            return error.errno == errno.EFBIG
        raise
    return newer_format(data, MAGIC) is not None or (key is not None and decode(data, key) is not None)


def _status(path: Path) -> os.stat_result | None:
    """What has a name. A file in place of its folder raises, where kvstore.fs.status_of says that nothing has it."""
    try:
        return os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _below(folder: Path) -> list[Path]:
    """What lies in a folder and has a name of kvstore's; nothing when it cannot be read."""
    try:
        return [folder / name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return []


def decode(data: bytes, key: bytes) -> bytes | None:
    """The tokens in an entry, or None when anything about it is not as it was written."""
    if len(data) < _HEAD.size + _CHECKSUM_BYTES:
        return None
    magic, version, count, found, _created = _HEAD.unpack_from(data)
    end = _HEAD.size + count * TOKEN_BYTES
    if (magic, version, found, end + _CHECKSUM_BYTES) != (MAGIC, FORMAT, key, len(data)):
        return None
    view = memoryview(data)
    return bytes(view[_HEAD.size : end]) if checksum(view[:end]) == view[end:] else None
