"""Examine manifests and tokenizations, one by one and folder by folder.

Pure reading, and plain values in and out, so that a folder can be examined by another process. What is wrong comes back
as a value; OSError means that a file could not be read, which is not damage. A file that vanished is no finding at all:
gc and publishers work at the same time.

The bulk of a check is one pass over all folders that only tells whole files from suspects. Suspects are few, and are
examined again, one by one, by whoever reports them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvstore.errors import DamagedBlockError, DamagedManifestError
from kvstore.fsck.data import Headers
from kvstore.fsck.tree import WIDE, Folder
from kvstore.fsck.values import UNLIKE, Fault, Inspected, Node, Reader, is_future, newer, seen_of, unopened
from kvstore.keys import root_key
from kvstore.layout import NAME_KEY_BYTES
from kvstore.manifest import MAGIC, MAX_MANIFEST_BYTES, BlockRef, Manifest, decode
from kvstore.tokenizations import MAGIC as TOKENS_MAGIC
from kvstore.tokenizations import MAX_ENTRY_BYTES
from kvstore.tokenizations import decode as decode_tokens

__all__ = ["FolderRead", "inspect_node", "inspect_tokens", "read_folder"]


@dataclass(slots=True)
class FolderRead:
    """What one folder holds. suspects: names of files that are not whole. future: names with an mtime ahead of now.

    wide: how many files others may read, and example one of them. size: bytes of blocks.
    """

    files: int = 0
    size: int = 0
    nodes: list[Node] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    future: list[str] = field(default_factory=list)
    wide: int = 0
    example: str = ""

    def note(self, name: str, mode: int, mtime_ns: int, now_ns: int) -> None:
        """Count a file, and look at its mode and mtime."""
        self.files += 1
        if is_future(mtime_ns, now_ns):
            self.future.append(name)
        if mode & WIDE:
            self.wide += 1
            self.example = self.example or name


def read_folder(reader: Reader, folder: Folder) -> FolderRead:
    """Examine all files of one folder: manifests with the headers of their blocks; of blocks only the stat."""
    found = FolderRead()
    if folder.kind == "nodes":
        _read_nodes(reader, folder, found)
    elif folder.kind == "tokens":
        _read_tokens(reader, folder, found)
    else:
        base, now = folder.path + "/", reader.now_ns
        for name in folder.names:
            try:
                status = os.stat(base + name, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                found.suspects.append(name)
                continue
            found.note(name, status.st_mode, status.st_mtime_ns, now)
            found.size += status.st_size
            found.digests.append(bytes.fromhex(name))
    return found


def _read_nodes(reader: Reader, folder: Folder, found: FolderRead) -> None:
    headers = Headers(reader)
    for name in folder.names:
        try:
            one = inspect_node(reader, folder.namespace, name, headers)
        except OSError:
            found.suspects.append(name)
            continue
        if one is None:
            continue
        found.note(name, one.mode, one.seen[2], reader.now_ns)
        if one.node is None or one.missing or one.wrong:
            found.suspects.append(name)
        else:
            found.nodes.append(one.node)


def _read_tokens(reader: Reader, folder: Folder, found: FolderRead) -> None:
    for name in folder.names:
        try:
            one = inspect_tokens(reader, name)
        except OSError:
            found.suspects.append(name)
            continue
        if one is not None:
            found.note(name, one.mode, one.seen[2], reader.now_ns)
            if one.fault is not None:
                found.suspects.append(name)


def inspect_node(reader: Reader, namespace: str, file: str, headers: Headers | None = None) -> Inspected | None:
    """Examine one manifest and the headers of the blocks it names; None when it is gone.

    headers: those of blocks that were found good before, which are not looked at again. Raises OSError.
    """
    path = f"{reader.nodes}/{namespace}/{file[:2]}/{file}"
    try:
        data, status = reader.fs.read_file(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return unopened(path, error, "manifest-damaged")
    seen, mode = seen_of(status), status.st_mode
    try:
        manifest = decode(data)
    except DamagedManifestError as error:
        damaged = Fault("manifest-damaged", f"It is damaged: {error}.")
        return Inspected(seen, mode, newer(data, MAGIC, "manifest-newer") or damaged)
    misplaced = _misplaced(reader, manifest, namespace, file)
    if misplaced is not None:
        return Inspected(seen, mode, misplaced)
    headers = headers or Headers(reader)
    missing: list[BlockRef] = []
    wrong: list[tuple[BlockRef, str]] = []
    tensors = b""
    for ref in manifest.blocks:
        try:
            found = headers.check(ref, manifest.kind)
        except FileNotFoundError:
            missing.append(ref)
        except (OSError, DamagedBlockError) as error:
            wrong.append((ref, str(error)))
        else:
            tensors = found if tensors in {b"", found} else UNLIKE
    digests = b"".join([ref.digest for ref in manifest.blocks])
    node = Node(namespace, file, manifest.first, manifest.parent, manifest.key, digests, tensors)
    return Inspected(seen, mode, None, node, manifest.blocks, tuple(missing), tuple(wrong))


def _misplaced(reader: Reader, manifest: Manifest, namespace: str, file: str) -> Fault | None:
    """What contradicts the place of a manifest that is whole in itself."""
    if manifest.fingerprint[:NAME_KEY_BYTES].hex() != namespace:
        return Fault("manifest-misnamed", "It belongs to another namespace than its folder.")
    if manifest.file_name != file:
        return Fault("manifest-misnamed", "It is the manifest of another prefix than its name says.")
    # The root of its own interval, so that one with only a wrong number in it is not taken for another directory's.
    if manifest.first == 0 and manifest.parent != root_key(manifest.fingerprint, manifest.interval):
        return Fault("manifest-parent", "It begins at token 0 but does not continue the namespace's root.")
    if manifest.interval != reader.interval:
        sentence = f"Its interval is {manifest.interval} tokens, and the directory's is {reader.interval}."
        return Fault("manifest-interval", sentence)
    return None


def inspect_tokens(reader: Reader, name: str) -> Inspected | None:
    """Examine one tokenization; None when it is gone. Raises OSError."""
    path = f"{reader.tokens}/{name[:2]}/{name}"
    try:
        data, status = reader.fs.read_file(path, MAX_ENTRY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return unopened(path, error, "tokens-damaged")
    fault = None
    if data[16:32].hex() != name or decode_tokens(data, data[16:48]) is None:
        fault = newer(data, TOKENS_MAGIC, "tokens-newer") or Fault(
            "tokens-damaged", "It is damaged: its size, checksum or key does not match."
        )
    return Inspected(seen_of(status), status.st_mode, fault)
