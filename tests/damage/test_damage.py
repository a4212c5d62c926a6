"""Bit flips, cuts, extensions and swaps in manifests and blocks: a shorter prefix, never wrong bytes or an exception.

The small files (kvstore.json, descriptions, quotas, counters, tokenizations) are in test_small_files.py.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
from core_support import INFO, block_files, node_files, open_store, prompt, restore, span, spans

from kvstore import Namespace, State, StateTensor
from kvstore.manifest import decode

TOKENS = prompt(44)
CUT = (0, 9, 16, 32, 40)
ENDS = {0, *CUT}
STATE = State((StateTensor("conv", "F32", (3, 4)), StateTensor("none", "U8", (0,))), [bytes(range(48)), b""], {"n": 7})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Four nodes of one prompt, the first with two blocks, a boundary state at the end; another prompt."""
    root = tmp_path_factory.mktemp("damage") / "cache"
    with open_store(root) as store:
        space = store.namespace(INFO)
        space.publish(TOKENS, spans(TOKENS, *CUT))
        space.publish_state(TOKENS[:40], STATE)
        space.publish(prompt(20, 3), spans(prompt(20, 3), 0, 16, 20))
    return root


@pytest.fixture
def root(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "cache"))


def flip(at: int, bit: int = 0) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        index = at % len(data)
        return data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :]

    return change


def payload_of(data: bytes) -> int:
    return 8 + struct.unpack_from("<Q", data)[0]


def changes(path: Path) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Each way in which a file can be damaged, with its name."""
    data = path.read_bytes()
    size = len(data)
    if path.suffix in (".kv", ".state"):
        tokens_end = 144 + 4 * int(path.name.split("-")[1])
        offsets = {
            "magic": 0,
            "format": 8,
            "kind": 12,
            "fingerprint": 20,
            "parent": 60,
            "key": 90,
            "first": 112,
            "first, high": 119,
            "count": 120,
            "interval": 124,
            "blocks": 128,
            "blocks, high": 131,
            "writer's length": 132,
            "created": 137,
            "first token": 144,
            "last token": tokens_end - 1,
            "digest": tokens_end + 3,
            "size": tokens_end + 16,
            "span first": tokens_end + 24,
            "span count": tokens_end + 32,
            "payload offset": tokens_end + 36,
            "flags": tokens_end + 40,
            "reserved": tokens_end + 44,
            "writer": size - 17,
            "checksum": size - 1,
        }
    else:
        payload = payload_of(data)
        offsets = {
            "length, low": 0,
            "length, high": 7,
            "brace": 8,
            "metadata": 12,
            "dtype": data.index(b"dtype") + 8,
            "shape": data.index(b"shape") + 8,
            "data offsets": data.index(b"data_offsets") + 15,
            "padding": payload - 1,
            "payload, first": payload,
            "payload, middle": (payload + size) // 2,
            "payload, last": size - 1,
        }
    for name, at in offsets.items():
        for bit in (0, 5, 7):
            yield f"bit {bit} of {name}", flip(at, bit)
    for cut in (0, 1, 8, size // 2, size - 1):
        yield f"cut to {cut}", lambda data, cut=cut: data[:cut]
    for tail in (b"\0", b"x" * 100, bytes(5 << 20)):
        yield f"extended by {len(tail)}", lambda data, tail=tail: data + tail
    yield "zeros", lambda data: bytes(len(data))
    yield "twice", lambda data: data + data
    yield "shifted", lambda data: data[1:] + data[:1]


def whole_prefix(space: Namespace, damaged: Path) -> int:
    """Tokens before the first block of TOKENS that needs the damaged file."""
    end = 0
    for step in space.lookup(TOKENS[:40]).steps:
        if step.path == damaged:
            return end
        for ref in decode(step.path.read_bytes()).blocks:
            if ref.digest.hex() == damaged.name:
                return end
            end = ref.first + ref.count
    return end


def replace(path: Path, data: bytes) -> None:
    """As a copying tool would: the damaged file is another inode, with the old times."""
    status = path.stat()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("kind", ["manifests", "blocks"])
def test_no_damage_of_one_file_gives_wrong_bytes_or_an_exception(root, kind, record_property):
    record_property("what", "One file damaged: bits flipped, cut, extended, shifted, zeroed, at every class of offset")
    with open_store(root) as store:
        space = store.namespace(INFO)
        seen = 0
        for path in node_files(root) if kind == "manifests" else block_files(root):
            data = path.read_bytes()
            expected = whole_prefix(space, path)
            for name, change in changes(path):
                replace(path, change(data))
                with open_store(root) as fresh:
                    found = restore(fresh.namespace(INFO), TOKENS).tokens
                assert found == expected, f"{name} of {path.name}"
                seen += 1
            replace(path, data)
        assert restore(space, TOKENS).tokens == 40
        record_property("damages", seen)
        assert seen > 300


def test_a_damaged_candidate_for_an_overlap_is_passed_over(tmp_path):
    """The wanted prompt shares 90 tokens with the first, whose manifest is then damaged, and 80 with the other."""
    root = tmp_path / "cache"
    one, wanted = prompt(128), [*prompt(128)[:90], *prompt(38, 8)]
    with open_store(root, interval=128) as store:
        space = store.namespace(INFO)
        space.publish(one, spans(one, 0, 70, 128))
        path = space.lookup(one).steps[-1].path
        other = [*one[:80], *prompt(48, 9)]
        space.publish(other, [span(other, 70, 128)])
        assert restore(space, wanted).tokens == 90
    data = path.read_bytes()
    for name, change in changes(path):
        replace(path, change(data))
        with open_store(root, interval=128) as store:
            assert restore(store.namespace(INFO), wanted).tokens == 80, name


@pytest.mark.parametrize("kind", ["manifests", "blocks"])
def test_publishing_again_heals_any_damage_that_was_read(root, kind):
    with open_store(root) as store:
        store.namespace(INFO).publish(TOKENS, [span(TOKENS, 40, 44)])
    for path in node_files(root) if kind == "manifests" else block_files(root):
        data = path.read_bytes()
        for name, change in list(changes(path))[::5]:
            replace(path, change(data))
            with open_store(root) as store:
                space = store.namespace(INFO)
                border = restore(space, TOKENS).border
                if border < 44:
                    borders = [border, *(end for end in (16, 32, 44) if end > border)]
                    space.publish(TOKENS, spans(TOKENS, *borders))
                assert restore(space, TOKENS).tokens == 44, f"{name} of {path.name}"
        # The next file is damaged beside what healing this one left.
        replace(path, data)
    assert len(os.listdir(root / "quarantine")) > 30


@pytest.mark.parametrize("kind", ["manifests", "blocks"])
def test_two_files_in_each_others_place_are_two_misses(root, kind):
    paths = node_files(root) if kind == "manifests" else block_files(root)
    with open_store(root) as store:
        space = store.namespace(INFO)
        expected = {path: whole_prefix(space, path) for path in paths}
    for one, other in combinations(paths, 2):
        swap(one, other, root / "tmp" / "swap")
        with open_store(root) as store:
            assert restore(store.namespace(INFO), TOKENS).tokens == min(expected[one], expected[other])
        swap(one, other, root / "tmp" / "swap")


def swap(one: Path, other: Path, spare: Path) -> None:
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def state_files(root: Path) -> list[Path]:
    """The manifest of the boundary state and its block."""
    (manifest,) = (root / "objects" / "nodes").rglob("*.state")
    digest = decode(manifest.read_bytes()).blocks[0].digest.hex()
    return [manifest, root / "objects" / "blocks" / digest[:2] / digest]


def read_state(root: Path) -> tuple[dict | None, bytes]:
    """The state at token 40 as an engine that cannot trim resumes from it."""
    memory = bytearray(48)
    with open_store(root) as store:
        space = store.namespace(INFO)
        match = space.lookup(TOKENS, trimmable=False)
        if match.count == 0:
            return None, b""
        values = space.read_state(match, lambda tensors: {t.name: memoryview(memory)[: t.nbytes] for t in tensors})
    return values, bytes(memory)


def test_no_damage_of_a_boundary_state_gives_wrong_bytes_or_an_exception(root):
    assert read_state(root) == ({"n": 7}, bytes(range(48)))
    for path in state_files(root):
        data = path.read_bytes()
        for name, change in changes(path):
            replace(path, change(data))
            values, _ = read_state(root)
            assert values is None, f"{name} of {path.name}"
        replace(path, data)
    assert read_state(root) == ({"n": 7}, bytes(range(48)))


def test_a_boundary_state_does_not_pass_for_token_spans(root):
    manifest, _ = state_files(root)
    kv = manifest.with_suffix(".kv")
    kv.write_bytes(manifest.read_bytes())
    with open_store(root) as store:
        assert restore(store.namespace(INFO), TOKENS).tokens == 32


def test_a_node_of_another_namespace_is_not_served(root):
    """A folder renamed by hand: the manifests say whose they are."""
    nodes = root / "objects" / "nodes"
    other = INFO.__class__({"model": "another"})
    shutil.copytree(nodes / INFO.id, nodes / other.id)
    with open_store(root) as store:
        assert restore(store.namespace(other), TOKENS).tokens == 0


def test_damage_does_not_spread_to_what_is_published_after_it(root):
    with open_store(root) as store:
        space = store.namespace(INFO)
        last = space.lookup(TOKENS).steps[-1].path
        replace(last, flip(60)(last.read_bytes()))
        assert restore(space, TOKENS).tokens == 32
        space.publish(TOKENS, [span(TOKENS, 32, 44)])
        assert restore(space, TOKENS).tokens == 44
