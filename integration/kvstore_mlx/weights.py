"""Which weights a model has, by content: read once, remembered for as long as the files stay as they are.

20 GB of weights take ten seconds to read and hash, which nobody wants at each start. A digest is remembered under the
file's device, inode, size, mtime and ctime: an edit in place changes ctime, a copied or renamed file is read again or
found again, and nothing a user does by accident makes two files look alike. In a hub snapshot a file is a link to a
blob that is named by its SHA-256, which costs nothing at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs
from mlx.utils import tree_flatten

from kvstore.sizes import format_size
from kvstore_mlx.buffers import copy_whole

__all__ = ["Memory", "parameters_digest", "weights_digest"]

log = logging.getLogger("kvstore")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHECK_BYTES = 8
_READ = 1 << 22
_THREADS = 2
_MAX_REMEMBERED = 4096
_SAY_ABOVE = 1 << 30


class Memory:
    """Digests of files seen before, in one small file of the user's cache folder. Losing it costs reading again.

    Each comes with a checksum of itself and its key: one flipped bit in a digest would be another model, and a miss for
    everything that was saved, as long as the file is remembered.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or Path(platformdirs.user_cache_dir("kvstore")) / "weights.json"
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError, RecursionError):
            known = json.loads(self._path.read_bytes())
            if isinstance(known, dict):
                self._known = {key: digest for key, value in known.items() if (digest := _unsealed(key, value))}

    @staticmethod
    def _key(status: os.stat_result) -> str:
        return ":".join(
            str(field)
            for field in (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        )

    def get(self, status: os.stat_result) -> str | None:
        """The digest of a file with this stat, if it was read before."""
        return self._known.get(self._key(status))

    def put(self, digests: Sequence[tuple[os.stat_result, str]]) -> None:
        """Remember digests. The oldest are forgotten beyond a few thousand; a file that cannot be written is let be."""
        for status, digest in digests:
            self._known.pop(self._key(status), None)
            self._known[self._key(status)] = digest
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd, staged = tempfile.mkstemp(dir=self._path.parent, prefix=".weights-")
            try:
                with os.fdopen(fd, "w") as stream:
                    json.dump({key: _sealed(key, digest) for key, digest in self._known.items()}, stream)
                os.replace(staged, self._path)
            except BaseException:
                os.unlink(staged)
                raise


def _sealed(key: str, digest: str) -> str:
    check = hashlib.blake2s(f"{key} {digest}".encode(), digest_size=_CHECK_BYTES)
    return f"{digest} {check.hexdigest()}"


def _unsealed(key: str, value: object) -> str | None:
    """The digest in a value of the file, unless the value or its key is not what was written."""
    digest = str(value).partition(" ")[0]
    return digest if _SHA256.fullmatch(digest) and value == _sealed(key, digest) else None


def weights_digest(folder: Path, pattern: str, memory: Memory) -> str:
    """SHA-256 over the names and contents of the files that match a pattern in a folder."""
    files = sorted(folder.glob(pattern))
    found = {file: _blob_name(file) or memory.get(file.stat()) for file in files}
    unread = [file for file in files if found[file] is None]
    total = sum(file.stat().st_size for file in unread)
    if total > _SAY_ABOVE:
        log.info("kvstore: reading %s of weights once to tell this model from others", format_size(total))
    if unread:
        with _bar(total) as told, ThreadPoolExecutor(_THREADS) as pool:
            read = list(pool.map(lambda file: _read(file, told), unread))
        memory.put(read)
        found.update(zip(unread, (digest for _, digest in read), strict=True))
    text = json.dumps([[file.name, found[file]] for file in files])
    return hashlib.sha256(text.encode()).hexdigest()


def _blob_name(file: Path) -> str | None:
    """The SHA-256 in the name of the blob that a hub snapshot links to; the hub checked it when it was downloaded."""
    blob = file.resolve()
    return blob.name if file.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal where reading takes seconds; told how many more bytes were read, by any thread."""
    if total <= _SAY_ABOVE:
        yield lambda _: None
        return
    from kvstore.cli.common import bar  # noqa: PLC0415 - imports rich

    done, lock = 0, threading.Lock()
    with bar("reading the model's weights") as told:

        def more(size: int) -> None:
            nonlocal done
            with lock:
                done += size
                told(done, total)

        yield more


def _read(file: Path, told: Callable[[int], None]) -> tuple[os.stat_result, str]:
    state = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        status = os.fstat(stream.fileno())
        while chunk := stream.read(_READ):
            state.update(chunk)
            told(len(chunk))
    return status, state.hexdigest()


def parameters_digest(model: Any) -> str:
    """SHA-256 of a model's parameters as they are in memory, by name, dtype and shape: for models that are no files."""
    digest = hashlib.sha256()
    for name, array in sorted(tree_flatten(model.parameters())):
        mx.eval(array)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(copy_whole(array))
    return digest.hexdigest()
