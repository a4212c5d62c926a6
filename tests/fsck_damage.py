"""Damage for fsck to find: each function does one kind of it to a directory and returns the path that is wrong then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from core_support import INFO, SPECS, kv
from fsck_support import GROWN, LATER, LONG, OTHER, block, flip, node, refs, rewrite
from gc_support import DAY, TENANT, state

from kvstore import Span
from kvstore.blocks import block_parts
from kvstore.context import this_process
from kvstore.keys import block_digest, checksum, pack_tokens
from kvstore.layout import Layout
from kvstore.manifest import BlockRef, decode
from kvstore.states import state_parts


def truncate(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


def flipped(path: Path, offset: int = -1) -> Path:
    flip(path, offset)
    return path


def emptied(path: Path) -> Path:
    return truncate(path, 0)


def removed(path: Path) -> Path:
    path.unlink()
    return path


def enlarged(path: Path) -> Path:
    return truncate(path, 80 << 20)


def renamed(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    return target


def copied(source: Path, target: Path) -> Path:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(shutil.copy2(source, target))


def linked(path: Path, to: str = "/etc/passwd") -> Path:
    path.unlink()
    path.symlink_to(to)
    return path


def piped(path: Path) -> Path:
    path.unlink()
    os.mkfifo(path)
    return path


def foldered(path: Path) -> Path:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")
    return path


def other_rungs(root: Path) -> Path:
    path = node(root, LONG)
    return renamed(path, path.with_name(path.name[:-6] + "123.kv"))


def other_namespace(root: Path) -> Path:
    path = node(root, LONG[:16])
    return renamed(path, Layout(root).nodes / ("0" * 32) / path.parent.name / path.name)


def other_interval(root: Path) -> Path:
    return rewrite(root, node(root, LONG), interval=32)


def first_of_another_interval(root: Path) -> Path:
    """With the root key of this one: nobody saved that."""
    return rewrite(root, node(root, OTHER[:16]), interval=32)


def parentless_start(root: Path) -> Path:
    return rewrite(root, node(root, OTHER[:16]), parent=b"p" * 32)


def child_of_a_tail(root: Path) -> Path:
    tail = decode(node(root, LONG).read_bytes())
    return rewrite(root, node(root, LONG), parent=tail.key, first=48, blocks=())


def child_too_far(root: Path) -> Path:
    first = decode(node(root, LONG[:16]).read_bytes())
    path = node(root, LONG)
    return rewrite(root, path, parent=first.key, first=32, tokens=pack_tokens(range(8)))


def child_of_another_namespace(root: Path) -> Path:
    other = decode(node(root, LONG[:16], info=TENANT).read_bytes())
    path = node(root, LONG[:32])
    return rewrite(root, path, parent=other.key, tokens=pack_tokens(range(16)))


def two_states(root: Path) -> Path:
    path = node(root, LONG, "state")
    return rewrite(root, path, blocks=refs(path) * 2)


def state_of_another(root: Path) -> Path:
    return rewrite(root, node(root, LONG, "state"), blocks=refs(node(root, LONG[:32], "state")))


def installed(root: Path, parts: list, payload: int, first: int, count: int) -> BlockRef:
    """A block of such parts, in its place, and what refers to it."""
    data = b"".join(parts)
    ref = BlockRef(block_digest([data]), len(data), first, count, payload)
    target = Layout(root).block(ref.digest)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    target.write_bytes(data)
    target.chmod(0o600)
    return ref


def state_elsewhere(root: Path) -> Path:
    """All of it says that it begins at token 16, and its KV begins at 32."""
    ref = installed(root, *state_parts(state(2), 16, 8), 16, 8)
    return rewrite(root, node(root, LONG, "state"), first=16, blocks=(ref,))


def other_tensors(root: Path, tokens: list[int], first: int, count: int) -> BlockRef:
    specs = tuple(replace(spec, name=f"other {spec.name}") for spec in SPECS)
    parts, payload = block_parts(Span(first, count, specs, kv(tokens, first, first + count)))
    return installed(root, parts, payload, first, count)


def child_of_other_tensors(root: Path) -> Path:
    return rewrite(root, node(root, LONG), blocks=(other_tensors(root, LONG, 32, 8),))


def blocks_of_other_tensors(root: Path) -> Path:
    path = node(root, GROWN)
    return rewrite(root, path, blocks=(*refs(path)[:-1], other_tensors(root, GROWN, 25, 5)))


def unusable(root: Path, header: object, payload: int = 80) -> Path:
    """A block whose bytes are those of its name, and which still no reader can use."""
    path = node(root, LONG)
    (old,) = refs(path)
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    data = len(text).to_bytes(8, "little") + text + bytes(payload)
    ref = BlockRef(block_digest([data]), len(data), old.first, old.count, 8 + len(text))
    rewrite(root, path, blocks=(ref,))
    target = Layout(root).block(ref.digest)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    target.write_bytes(data)
    target.chmod(0o600)
    return target


def tensors(*offsets: tuple[int, int], rows: int = 0, dtype: str = "U8") -> dict:
    """A header with tensors at these offsets."""
    metadata = {"format": "kvstore/1", "first": "32", "count": "8"}
    found = {
        f"{number}": {"dtype": dtype, "shape": [1, 8, rows or (end - begin) // 8], "data_offsets": [begin, end]}
        for number, (begin, end) in enumerate(offsets)
    }
    return {"__metadata__": metadata, **found}


def claim(root: Path, **changes) -> Path:
    """A manifest that says something about a whole block that is not so."""
    path = node(root, LONG)
    (ref,) = refs(path)
    return rewrite(root, path, blocks=(replace(ref, **changes),))


def other_span(root: Path) -> Path:
    """A manifest that names the block of another place in the prompt: same tensors, same size, other positions."""
    path = node(root, LONG[:32])
    (ref,) = refs(node(root, LONG[:16]))
    return rewrite(root, path, blocks=(replace(ref, first=16),))


def future(path: Path) -> Path:
    stamp = path.stat().st_mtime_ns + LATER + 2 * DAY
    os.utime(path, ns=(stamp, stamp))
    return path


def missing_block(root: Path) -> Path:
    path = node(root, LONG)
    block(root, path).unlink()
    return path


def second_block_missing(root: Path) -> Path:
    path = node(root, GROWN)
    assert len(refs(path)) == 2
    block(root, path, 1).unlink()
    return path


def without_parent(root: Path) -> Path:
    path = node(root, OTHER)
    node(root, OTHER[:16]).unlink()
    return path


def without_kv(root: Path) -> Path:
    path = node(root, LONG, "state")
    node(root, LONG).unlink()
    return path


def tokens_entry(root: Path) -> Path:
    (path,) = (path for path in (root / "objects" / "tokens").rglob("*") if path.is_file())
    return path


def newer(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    path.write_bytes(bytes(data[:-16]) + checksum(data[:-16]))
    return path


def replaced_folder(folder: Path) -> Path:
    shutil.move(folder, folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")
    return folder


def file_for_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "ff").write_text("x") if not (folder / "ff").exists() else None
    return folder / "ff"


def no_folder(folder: Path) -> Path:
    shutil.rmtree(folder)
    return folder


def swapped(path: Path, other: Path) -> Path:
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)
    return path


def description(root: Path) -> Path:
    return root / "namespaces" / f"{INFO.id}.json"


def edited(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def staging(root: Path, pid: int, boot: str | None = None) -> Path:
    me = this_process()
    folder = root / "tmp" / f"{me.host}.{boot or me.boot}.{pid}.0123abcd"
    folder.mkdir(mode=0o700)
    (folder / "1f").write_bytes(b"half")
    (folder / "1f").chmod(0o600)
    return folder
