"""What the tests of repack, merge and clear share: conversations that grew, and the command line."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core_support import FAST, open_store, restore, span
from gc_support import manifests
from typer.testing import CliRunner

from kvstore import FileSystem, Namespace, Store
from kvstore.manifest import BlockRef, decode
from kvstore.states import StateTensor

OLD_NS = 1_700_000_000_000_000_000


def flip(path: Path) -> None:
    """Change a bit of the last byte."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    """A link to the file in its place."""
    path.rename(path.with_name("away"))
    path.symlink_to("away")


def fifo(path: Path) -> None:
    """A pipe in its place."""
    path.unlink()
    os.mkfifo(path)


HARM: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "fifo": fifo,
}
"""What can be wrong with a file that is there, or was."""


def grow(space: Namespace, tokens: Sequence[int], *borders: int, decode: str = "") -> None:
    """Publish a conversation as it grows, a block and a node a turn. decode: a "d" for each decoded turn."""
    for turn, (first, end) in enumerate(zip((0, *borders), borders, strict=False)):
        space.publish(tokens[:end], [span(tokens, first, end, decode=decode[turn : turn + 1] == "d")])


def forget_tails(root: Path, *keep: int) -> None:
    """Remove the manifests of tails, as gc does with those that a longer node contains, but for some lengths."""
    found = [(path, decode(path.read_bytes())) for path in manifests(root)]
    longest: dict[bytes, int] = {}
    for _, manifest in found:
        longest[manifest.parent] = max(longest.get(manifest.parent, 0), manifest.count)
    for path, manifest in found:
        if manifest.count < longest[manifest.parent] and manifest.count not in keep:
            path.unlink()


def rest(store: Store) -> None:
    """Let all nodes have been used long ago, also for all that this process knows."""
    for path in manifests(store.path):
        os.utime(path, ns=(OLD_NS, OLD_NS))
    store.context.recent.clear()


def refs(root: Path) -> dict[int, tuple[BlockRef, ...]]:
    """Block references of all KV manifests, by the length of their prefix (of one conversation)."""
    found = [decode(path.read_bytes()) for path in manifests(root) if path.suffix == ".kv"]
    return {manifest.end: manifest.blocks for manifest in found}


def counts(root: Path) -> dict[int, list[int]]:
    """Tokens in each block of all KV manifests, by the length of their prefix."""
    return {end: [ref.count for ref in blocks] for end, blocks in refs(root).items()}


def named_bytes(root: Path) -> int:
    """Bytes of all blocks that manifests name, each once."""
    return sum({ref.digest: ref.size for path in manifests(root) for ref in decode(path.read_bytes()).blocks}.values())


def read_state(space: Namespace, tokens: Sequence[int]) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
    """The boundary state at the end of some tokens: its values and its tensors."""
    memory: dict[str, bytearray] = {}

    def allocate(tensors: tuple[StateTensor, ...]) -> dict[str, memoryview]:
        memory.update({tensor.name: bytearray(tensor.nbytes) for tensor in tensors})
        return {name: memoryview(data) for name, data in memory.items()}

    values = space.read_state(space.lookup(tokens, trimmable=False), allocate)
    return values, {name: bytes(data) for name, data in memory.items()}


def assert_restores(path: Path, prompts: Sequence[tuple[Any, Sequence[int]]]) -> None:
    """Every prompt, given with the description of its namespace, restores whole and byte for byte in a fresh store."""
    with open_store(path, None) as store:
        for info, tokens in prompts:
            assert restore(store.namespace(info), tokens).tokens == len(tokens)


def later(path: Path, by: int, fs: FileSystem = FAST) -> Store:
    """A store whose clock runs ahead."""
    return open_store(path, None, fs, clock=lambda: time.time_ns() + by)


def invoke(*arguments: object, given: str | None = None) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    from kvstore import cli
    from kvstore.cli.app import app

    for module in pkgutil.iter_modules(cli.__path__):
        importlib.import_module(f"kvstore.cli.{module.name}")
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def invoke_json(*arguments: object) -> dict[str, Any]:
    """The document that a command prints with --json."""
    code, out, err = invoke(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


@contextmanager
def memory_folder(otherwise: Path) -> Iterator[Path]:
    """A folder for thousands of small copies: in memory where that is possible, because nothing of it is synced."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=shared, prefix="kvstore-tests-") as folder:
        yield Path(folder)


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder with its content and mtime, locks left out (taking one may create it)."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "locks"
    }
