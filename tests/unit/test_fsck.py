"""fsck finds every kind of trouble in a real directory, says what it is, and changes nothing unless asked to.

A repair ends it, loses nothing that is whole, and a second check is satisfied.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from core_support import FAST, INFO, SPECS, kv, open_store
from fsck_support import (
    GROWN,
    LATER,
    LONG,
    OTHER,
    PROMPTS,
    block,
    codes,
    errors,
    flip,
    make,
    match_of,
    node,
    refs,
    restored,
    rewrite,
    run,
    snapshot,
)
from gc_support import DAY, TENANT, prompt, publish, space_of, state

from kvstore import FileSystem, Span, Store
from kvstore.blocks import block_parts
from kvstore.context import Owner, this_process
from kvstore.errors import DamagedBlockError
from kvstore.fsck import ExitCode, repair
from kvstore.fsck.data import Headers
from kvstore.fsck.values import Reader
from kvstore.keys import block_digest, checksum, pack_tokens
from kvstore.layout import Layout
from kvstore.manifest import BlockRef, decode
from kvstore.quotas import write_quota
from kvstore.states import state_parts
from kvstore.stats import StatsFile


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A directory with nothing wrong with it; tests work on copies."""
    return make(tmp_path_factory.mktemp("sound") / "cache")


@pytest.fixture
def root(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "cache"))


def test_a_sound_directory_has_no_findings(root):
    before = snapshot(root)
    report = run(root, read_data=True)
    assert report.findings == ()
    assert report.error == ""
    assert report.exit_code == ExitCode.CLEAN
    counts = report.counts
    blocks = [path.stat().st_size for path in (root / "objects" / "blocks").rglob("*") if path.is_file()]
    assert (counts.blocks, counts.block_bytes) == (len(blocks), sum(blocks))
    assert (counts.verified, counts.verified_bytes) == (len(blocks), sum(blocks))
    assert (counts.manifests, counts.states, counts.tokenizations) == (10, 2, 1)
    assert snapshot(root) == before
    assert run(root, read_data=True, repair=True).findings == ()
    assert snapshot(root) == before


# What is wrong with one file: where, how it is called, and what is left after a repair.


@dataclass(frozen=True)
class Case:
    """damage returns the path that must be reported. data: found with --read-data only. left: not to be repaired."""

    code: str
    damage: Callable[[Path], Path]
    severity: str = "error"
    data: bool = False
    left: bool = False


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


CASES = {
    "folder gone": Case("folder-missing", lambda root: no_folder(root / "objects" / "tokens")),
    "quarantine gone": Case("folder-missing", lambda root: no_folder(root / "quarantine")),
    "a link for quarantine": Case("folder-blocked", lambda root: replaced_folder(root / "quarantine"), left=True),
    "a link for blocks": Case("folder-blocked", lambda root: replaced_folder(root / "objects" / "blocks"), left=True),
    "a link for nodes": Case("folder-blocked", lambda root: replaced_folder(root / "objects" / "nodes"), left=True),
    "a link for a fan-out folder": Case(
        "folder-blocked", lambda root: replaced_folder(node(root, LONG[:16]).parent), left=True
    ),
    "a file for a fan-out folder": Case(
        "folder-blocked", lambda root: file_for_folder(root / "objects" / "tokens"), left=True
    ),
    "tag gone": Case("tag-missing", lambda root: removed(root / "CACHEDIR.TAG"), "note"),
    "tag flipped": Case("tag-wrong", lambda root: flipped(root / "CACHEDIR.TAG", 12), "note"),
    "manifest flipped in its tokens": Case("manifest-damaged", lambda root: flipped(node(root, LONG), 150)),
    "manifest flipped in its version": Case("manifest-damaged", lambda root: flipped(node(root, LONG), 8)),
    "manifest flipped in its checksum": Case("manifest-damaged", lambda root: flipped(node(root, LONG))),
    "manifest cut": Case("manifest-damaged", lambda root: truncate(node(root, LONG), 100)),
    "manifest empty": Case("manifest-damaged", lambda root: emptied(node(root, LONG))),
    "manifest far too large": Case("manifest-damaged", lambda root: enlarged(node(root, LONG))),
    "state flipped": Case("manifest-damaged", lambda root: flipped(node(root, LONG, "state"))),
    "state with two blocks": Case("manifest-damaged", two_states),
    "state of another prefix": Case("manifest-damaged", state_of_another),
    "state of another place": Case("manifest-parent", state_elsewhere),
    "child of other tensors": Case("manifest-tensors", child_of_other_tensors, left=True),
    "blocks of other tensors": Case("manifest-tensors", blocks_of_other_tensors, left=True),
    "manifests swapped": Case("manifest-misnamed", lambda root: swapped(node(root, LONG), node(root, OTHER))),
    "manifest with other rungs": Case("manifest-misnamed", other_rungs),
    "manifest in another namespace": Case("manifest-misnamed", other_namespace),
    "manifest of another interval": Case("manifest-interval", other_interval, left=True),
    "start that is none": Case("manifest-parent", parentless_start),
    "child of a tail": Case("manifest-parent", child_of_a_tail),
    "child too far": Case("manifest-parent", child_too_far),
    "child of another namespace": Case("manifest-parent", child_of_another_namespace),
    "first chunk without blocks": Case("manifest-bare", lambda root: rewrite(root, node(root, LONG[:16]), blocks=())),
    "chunk without blocks": Case("manifest-bare", lambda root: rewrite(root, node(root, LONG[:32]), blocks=())),
    "tail without blocks": Case("manifest-bare", lambda root: rewrite(root, node(root, LONG), blocks=())),
    "block gone": Case("block-missing", missing_block),
    "second block gone": Case("block-missing", second_block_missing),
    "parent gone": Case("parent-missing", without_parent),
    "KV of a state gone": Case("kv-missing", without_kv),
    "block flipped": Case("block-damaged", lambda root: flipped(block(root, node(root, LONG))), data=True),
    "state's block flipped": Case(
        "block-damaged", lambda root: flipped(block(root, node(root, LONG, "state"))), data=True
    ),
    "block's header flipped": Case("block-damaged", lambda root: flipped(block(root, node(root, LONG)), 3)),
    "block's JSON flipped": Case("block-damaged", lambda root: flipped(block(root, node(root, LONG)), 8)),
    "block cut": Case("block-damaged", lambda root: truncate(block(root, node(root, LONG)), 99)),
    "block empty": Case("block-damaged", lambda root: emptied(block(root, node(root, LONG)))),
    "block longer": Case("block-damaged", lambda root: truncate(block(root, node(root, LONG)), 5000)),
    "block with a header of nothing": Case("block-damaged", lambda root: unusable(root, [1, 2, 3])),
    "block with a header that is no JSON": Case("block-damaged", lambda root: unusable(root, b"{" * 50_000)),
    "block with a hole": Case("block-damaged", lambda root: unusable(root, tensors((0, 16), (32, 80)))),
    "block with an overlap": Case("block-damaged", lambda root: unusable(root, tensors((0, 48), (32, 80)))),
    "block with more than its tensors": Case("block-damaged", lambda root: unusable(root, tensors((0, 16), (16, 32)))),
    "block with less than its tensors": Case("block-damaged", lambda root: unusable(root, tensors((0, 16), (16, 96)))),
    "block with tensors of other sizes": Case(
        "block-damaged", lambda root: unusable(root, tensors((0, 40), (40, 80), rows=4))
    ),
    "block of unknown numbers": Case("block-damaged", lambda root: unusable(root, tensors((0, 80), dtype="X9"))),
    "blocks swapped": Case(
        "block-damaged", lambda root: swapped(block(root, node(root, LONG)), block(root, node(root, LONG[:32])))
    ),
    "manifest with another size": Case("manifest-block", lambda root: claim(root, size=4000)),
    "manifest with another payload": Case("manifest-block", lambda root: claim(root, payload=64)),
    "manifest of a block from another place": Case("manifest-block", other_span),
    "manifest used in the future": Case("mtime-future", lambda root: future(node(root, LONG))),
    "block used in the future": Case("mtime-future", lambda root: future(block(root, node(root, LONG)))),
    "tokenization used in the future": Case("mtime-future", lambda root: future(tokens_entry(root))),
    "a link for a manifest": Case("not-a-file", lambda root: linked(node(root, LONG))),
    "a pipe for a manifest": Case("not-a-file", lambda root: piped(node(root, LONG))),
    "a folder for a manifest": Case("not-a-file", lambda root: foldered(node(root, LONG))),
    "a link for a block": Case("not-a-file", lambda root: linked(block(root, node(root, LONG)))),
    "a pipe for a block": Case("not-a-file", lambda root: piped(block(root, node(root, LONG)))),
    "a pipe for a tokenization": Case("not-a-file", lambda root: piped(tokens_entry(root))),
    "tokenization flipped": Case("tokens-damaged", lambda root: flipped(tokens_entry(root))),
    "tokenization cut": Case("tokens-damaged", lambda root: truncate(tokens_entry(root), 30)),
    "tokenization far too large": Case("tokens-damaged", lambda root: enlarged(tokens_entry(root))),
    "tokenization renamed": Case(
        "tokens-damaged",
        lambda root: renamed(tokens_entry(root), tokens_entry(root).with_name(tokens_entry(root).name[:2] + "0" * 30)),
    ),
    "manifest flipped to a newer version": Case("manifest-damaged", lambda root: flipped(node(root, LONG), 9)),
    "newer manifest": Case("manifest-newer", lambda root: newer(node(root, LONG[:16])), left=True),
    "newer tokenization": Case("tokens-newer", lambda root: newer(tokens_entry(root)), left=True),
    "stray block": Case(
        "stray",
        lambda root: copied(block(root, node(root, LONG)), root / "objects" / "blocks" / "00" / ("f" * 32)),
        "note",
    ),
    "stray manifest": Case(
        "stray", lambda root: copied(node(root, LONG), node(root, LONG[:16]).parent / node(root, LONG).name), "note"
    ),
    "description gone": Case("namespace-undescribed", lambda root: removed(description(root)), "note", left=True),
    "description cut": Case("namespace-wrong", lambda root: truncate(description(root), 30), "note"),
    "description edited": Case("namespace-wrong", lambda root: edited(description(root), b'"bf16"', b'"f32"'), "note"),
    "description of another": Case(
        "namespace-wrong",
        lambda root: Path(shutil.copy(root / "namespaces" / f"{TENANT.id}.json", description(root))),
        "note",
    ),
    "readable by others": Case(
        "modes-wide", lambda root: (node(root, LONG).chmod(0o644), node(root, LONG))[1], "note", left=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_finding(name, root):
    case = CASES[name]
    path = case.damage(root)
    before = snapshot(root)
    where = str(path.relative_to(root))

    if case.data:
        assert run(root).exit_code == ExitCode.CLEAN
    report = run(root, read_data=case.data)
    found = [finding for finding in report.findings if finding.path == where]
    assert [(finding.severity, finding.code) for finding in found] == [(case.severity, case.code)]
    assert not found[0].repair
    assert report.exit_code == (ExitCode.LEFT if case.severity == "error" else ExitCode.CLEAN)
    assert snapshot(root) == before, "a check without repair changed something"

    repaired = run(root, read_data=case.data, repair=True)
    (again,) = [finding for finding in repaired.findings if finding.path == where]
    assert again.corrected is not case.left
    if case.severity == "error":
        assert repaired.exit_code == (ExitCode.LEFT if case.left else ExitCode.CORRECTED)
    after = run(root, read_data=True)
    if case.left:
        assert where in {finding.path for finding in after.findings}
    else:
        assert not [finding for finding in after.findings if finding.code == case.code or finding.severity == "error"]


def test_an_engine_that_keeps_nothing_per_token_has_blocks_for_its_states_only(tmp_path):
    """Found by the conformance suite: a state has a block, and continues what the node beside it continues."""
    with open_store(tmp_path / "cache") as store:
        space = space_of(store)
        space.publish(LONG, [Span(first, min(16, 40 - first), (), []) for first in (0, 16, 32)])
        for end in (16, 32, 40):
            space.publish_state(LONG[:end], state(end))
    report = run(tmp_path / "cache", read_data=True)
    assert report.findings == ()
    assert (report.counts.manifests, report.counts.states) == (3, 3)


def test_shared_directories_may_be_open(tmp_path):
    root = make(tmp_path / "cache", FileSystem(private=False))
    for path in (node(root, LONG), node(root, LONG).parent):
        path.chmod(0o777)
    report = run(root, fs=replace(FAST, private=False))
    assert report.findings == ()
    assert report.counts.wide >= 2
    assert codes(run(root)) == [("note", "modes-wide")]


def lying_around(root: Path) -> dict[str, Path]:
    """One of every kind of file, and of folders, that is no object and below none."""
    with open_store(root, None) as store:
        write_quota(store.context, INFO.id, 1 << 40)
        counters = StatsFile(store.context)
        counters.add(requests=1)
        counters.flush()
    staged = staging(root, os.getpid())
    aside = root / "quarantine" / f"1.{'0' * 32}"
    aside.write_bytes(b"x")
    (stats,) = (root / "stats").iterdir()
    locks = root / "locks"
    (locks / "gc.lock").touch()
    found = {
        "kvstore.json": root / "kvstore.json",
        "CACHEDIR.TAG": root / "CACHEDIR.TAG",
        "description": description(root),
        "quota": root / "namespaces" / f"{INFO.id}.quota",
        "stats": stats,
        "publish.lock": locks / "publish.lock",
        "gc.lock": locks / "gc.lock",
        "set aside": aside,
        "staged": next(staged.iterdir()),
        "stats folder": stats.parent,
        "locks folder": locks,
        "staging folder": staged,
    }
    for path in found.values():
        path.chmod(0o700 if path.is_dir() else 0o600)
    return found


@pytest.mark.parametrize("name", ["kvstore.json", "CACHEDIR.TAG", "description", "quota", "stats", "publish.lock",
    "gc.lock", "set aside", "staged", "stats folder", "locks folder", "staging folder"])  # fmt: skip
def test_what_lies_beside_the_objects_is_not_open_to_others_either(root, name):
    path = lying_around(root)[name]
    report = run(root)
    assert (report.findings, report.counts.wide) == ((), 0)
    path.chmod(path.stat().st_mode | 0o044)
    report = run(root)
    assert [(finding.code, finding.path) for finding in report.findings] == [
        ("modes-wide", str(path.relative_to(root)))
    ]
    assert report.counts.wide == 1
    assert run(root, fs=replace(FAST, private=False)).findings == ()


def test_a_header_that_is_known_is_still_compared_with_the_size(root):
    """Headers that were found good are not parsed again; what they are good for is a file of that size."""
    path = node(root, LONG)
    (ref,) = refs(path)
    with open_store(root, None) as store:
        headers = Headers(Reader.of(store.context, 0))
        headers.check(ref, "kv")
        data = block(root, path).read_bytes() + bytes(8)
        longer = replace(ref, digest=block_digest([data]), size=len(data))
        target = store.context.layout.block(longer.digest)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
        with pytest.raises(DamagedBlockError, match="contradicts the header"):
            headers.check(longer, "kv")


# What a repair keeps.


def test_damage_in_a_shared_chunk_costs_that_chunk_only(root):
    """Everything that continues a damaged node is in use again as soon as that node was computed again."""
    flip(block(root, node(root, LONG[:16])))
    report = run(root, read_data=True, repair=True)
    # The namespaces of one prompt have equal blocks, so both lose their first node.
    assert sorted(errors(report.findings).values()) == ["block-damaged", "manifest-unusable", "manifest-unusable"]
    assert report.counts.unreachable == 8
    assert report.exit_code == ExitCode.CORRECTED
    with open_store(root, None) as store:
        space = space_of(store)
        assert restored(space, LONG) == restored(space, GROWN) == 0
        assert restored(space, OTHER) == len(OTHER)
        publish(space, LONG[:16])
        assert [restored(space, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        assert space.lookup(LONG, trimmable=False).count == len(LONG)
    again = run(root, read_data=True)
    assert again.exit_code == ExitCode.CLEAN
    assert again.counts.unreachable == 2, "those of the other namespace still wait"


def test_what_continues_a_node_in_quarantine_waits_until_that_is_gone(root):
    flip(node(root, LONG[:16]))
    assert run(root, repair=True).counts.unreachable == 6
    assert run(root, repair=True, late=20 * DAY).findings[0].code == "unreachable"
    for path in (root / "quarantine").iterdir():
        path.unlink()
    report = run(root, repair=True)
    # The whole line: nobody knows any more why the parent is missing.
    assert sorted(errors(report.findings).values()) == ["kv-missing"] * 2 + ["parent-missing"] * 4
    assert report.exit_code == ExitCode.CORRECTED
    assert len(list((root / "quarantine").iterdir())) == 6
    assert run(root).exit_code == ExitCode.CLEAN


@pytest.mark.parametrize("size", [64, 2, 1])
@pytest.mark.parametrize("point", ["names", "batch"])
def test_what_continues_a_parent_that_comes_back_during_a_repair_is_put_back(root, monkeypatch, point, size):
    """A server computes the first chunks anew, before others are set aside or just after."""
    node(root, LONG[:16]).unlink()
    node(root, LONG[:16], info=TENANT).unlink()  # and stays away
    monkeypatch.setattr(repair, "_ROUND", size)
    monkeypatch.setattr(repair, "_BATCH", size)
    real = repair.names_there

    def compute(now: str) -> None:
        if now == point:
            with open_store(root, None) as store:
                publish(space_of(store), LONG[:32])

    def listing(layout: Layout) -> set[str]:
        found = real(layout)
        compute("names")
        return found

    monkeypatch.setattr(repair, "names_there", listing)
    report = run(root, repair=True, pause=compute)
    assert report.exit_code == ExitCode.CORRECTED
    with open_store(root, None, create=False) as store:
        assert [restored(space_of(store), tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        assert space_of(store).lookup(LONG, trimmable=False).count == len(LONG)
        assert restored(space_of(store, TENANT), LONG) == 0
    aside = [finding.path for finding in report.findings if finding.repair.startswith("set aside")]
    assert sum(space_of(store, TENANT).id in path for path in aside) == 2
    assert len(list((root / "quarantine").iterdir())) == len(aside)
    assert len(aside) <= 3, "the second chunk was computed while it was set aside, so there are two"
    assert run(root).exit_code == ExitCode.CLEAN


@pytest.mark.parametrize("damage", [missing_block, without_parent, without_kv])
def test_what_may_be_on_its_way_is_left_alone(root, damage):
    path = damage(root)
    report = run(root, late=0, repair=True)
    assert {severity for severity, _ in codes(report)} == {"note"}
    assert report.exit_code == ExitCode.CLEAN
    assert path.exists()
    assert run(root, late=0, grace_ns=0).exit_code == ExitCode.LEFT


def test_a_copy_with_old_times_is_young(root):
    path = without_parent(root)
    os.utime(path, ns=(0, 0))
    assert run(root, late=0, repair=True).exit_code == ExitCode.CLEAN
    assert path.exists()


def test_quarantine_never_overwrites(root):
    path = node(root, LONG)
    with open_store(root, None, create=False, clock=lambda: 2_000_000_000_000_000_000) as store:
        for _ in range(2):
            shutil.copy(path, root / "keep")
            flip(path)
            report = check_now(store, repair=True)
            assert report.exit_code == ExitCode.CORRECTED
            shutil.move(root / "keep", path)
            path.chmod(0o600)
    assert len(list((root / "quarantine").iterdir())) == 2


def check_now(store: Store, **options):
    from kvstore.fsck import check

    return check(store.context, settle_s=0, **options)


def test_quarantined_files_are_counted_and_foreign_ones_ignored(root):
    foreign = [
        root / ".DS_Store",
        root / "objects" / "notes.txt",
        root / "objects" / "blocks" / "._ab",
        node(root, LONG).parent / f".{node(root, LONG).name}.Xy12",
        block(root, node(root, LONG)).with_suffix(".conflicted copy"),
        root / "namespaces" / "readme",
        root / "tmp" / "upload",
    ]
    for path in foreign:
        path.write_bytes(b"x")
        path.chmod(0o600)
    (root / "quarantine" / "17.something").write_bytes(b"12345")
    report = run(root, read_data=True, repair=True)
    assert report.findings == ()
    assert report.counts.foreign == len(foreign)
    assert (report.counts.quarantined, report.counts.quarantined_bytes) == (1, 5)
    assert all(path.read_bytes() == b"x" for path in foreign)


def test_blocks_that_nothing_names(root):
    node(root, LONG, "state").unlink()
    young = run(root, late=0)
    assert young.findings == ()
    assert young.counts.waiting == 1
    old = run(root, repair=True)
    assert codes(old) == [("note", "orphans")]
    assert (old.counts.orphans, old.counts.waiting) == (1, 0)
    assert old.counts.orphan_bytes == young.counts.waiting_bytes > 0
    assert old.exit_code == ExitCode.CLEAN


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


def test_stale_staging_is_removed(root):
    stale = [staging(root, gone_pid()), staging(root, 1, "0badb007")]
    mine = staging(root, os.getpid())
    report = run(root)
    assert codes(report) == [("note", "staging-stale")] * 2
    assert (report.exit_code, report.counts.staging) == (ExitCode.CLEAN, 3)
    assert run(root, late=0, repair=True).findings == (), "it must have rested for a minute"
    report = run(root, repair=True)
    assert [finding.repair for finding in report.findings] == ["removed"] * 2
    assert not any(folder.exists() for folder in stale)
    assert (mine / "1f").exists()


def test_staging_whose_process_is_there_again_stays(root, monkeypatch):
    """Process numbers come back; what was free when it was looked at may be a server by now."""
    folder = staging(root, gone_pid())

    def come_back(point: str) -> None:
        if point == "repairing":
            monkeypatch.setattr(Owner, "surely_gone", lambda self: False)

    (finding,) = run(root, repair=True, pause=come_back).findings
    assert finding.repair == "left, because its process runs"
    assert (folder / "1f").exists()


def test_staging_that_is_written_to_again_before_its_repair_stays(root):
    """In a container the number of a process that is gone may be another's, on a machine of the same name."""
    folder = staging(root, gone_pid())
    assert codes(run(root)) == [("note", "staging-stale")]

    def pause(point: str) -> None:
        if point == "repairing":
            later = time.time_ns() + LATER
            (folder / "2").write_bytes(b"being written")
            os.utime(folder / "2", ns=(later, later))

    (finding,) = run(root, repair=True, pause=pause).findings
    assert (finding.corrected, finding.repair) == (False, "left, because something was written there just now")
    assert folder.exists()


def test_stale_staging_with_something_else_in_it_stays(root):
    folder = staging(root, gone_pid())
    (folder / "my notes").write_text("x")
    for name in "09af":
        (folder / name).mkdir()
    (finding,) = run(root, repair=True).findings
    assert not finding.corrected
    assert sorted(os.listdir(folder)) == ["0", "9", "a", "f", "my notes"]


def test_a_link_for_quarantine_is_not_followed(root):
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "quarantine").rmdir()
    (root / "quarantine").symlink_to(outside)
    flip(node(root, LONG))
    report = run(root, repair=True)
    assert report.exit_code == ExitCode.LEFT
    assert os.listdir(outside) == []


# What cannot be read.


@dataclass(frozen=True)
class Failing(FileSystem):
    """Answers an error for files whose path contains something."""

    part: str = ""
    code: int = errno.EIO

    def open_fd(self, path):
        if self.part in str(path):
            raise OSError(self.code, os.strerror(self.code), str(path))
        return super().open_fd(path)


@pytest.mark.parametrize("kind", ["manifest", "block", "tokens"])
def test_what_cannot_be_read_is_neither_damaged_nor_repaired(root, kind):
    path = {
        "manifest": lambda: node(root, LONG[:16]),
        "block": lambda: block(root, node(root, LONG)),
        "tokens": lambda: tokens_entry(root),
    }[kind]()
    before = snapshot(root)
    report = run(root, fs=Failing(FAST.durability, part=path.name), read_data=True, repair=True)
    assert codes(report) == [("error", "unreadable")]
    assert report.findings[0].path == str(path.relative_to(root))
    assert report.exit_code == ExitCode.FAILED
    assert snapshot(root) == before, "its children were taken for orphans"


def test_a_check_that_sees_nothing_of_the_nodes_calls_nothing_missing(root):
    replaced_folder(root / "objects" / "nodes")
    report = run(root, repair=True)
    assert codes(report) == [("error", "folder-blocked")]


def test_a_directory_that_vanishes_is_no_clean_one(root):
    def vanish(point: str) -> None:
        if point == "listed":
            root.rename(root.with_name("unmounted"))

    report = run(root, pause=vanish)
    assert report.exit_code & ExitCode.FAILED
    assert "does not exist" in report.error


@dataclass(frozen=True)
class ReadOnly(FileSystem):
    """A file system that lets nothing be changed."""

    def rename(self, source, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_what_cannot_be_repaired_is_left_and_said(root):
    flip(node(root, LONG))
    report = run(root, fs=ReadOnly(FAST.durability), repair=True)
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert "Read-only" in finding.repair
    assert not finding.corrected
    assert report.exit_code == ExitCode.LEFT


def test_exit_codes_add_up(root):
    flip(node(root, LONG))
    newer(node(root, OTHER))
    tokens = tokens_entry(root)
    report = run(root, fs=Failing(FAST.durability, part=tokens.name), repair=True)
    assert report.exit_code == ExitCode.CORRECTED | ExitCode.LEFT | ExitCode.FAILED
    assert (report.errors, report.corrected) == (3, 1)


# Other processes at work.


def test_what_vanishes_during_a_check_is_no_finding(root):
    """gc removes manifests first, so a block that is missing has no manifest any more."""

    def collect(point: str) -> None:
        if point == "listed":
            match = match_of(root, OTHER)
            for step in reversed(match.steps):
                named = refs(step.path)
                step.path.unlink()
                for ref in named:
                    Layout(root).block(ref.digest).unlink()
            tokens_entry(root).unlink()

    assert run(root, read_data=True, repair=True, pause=collect).findings == ()


def test_a_block_that_goes_with_its_manifest_is_no_finding(root):
    """gc removes both between the moment the manifest is read and the moment the block is opened."""
    path = node(root, OTHER)
    lost = block(root, path)

    @dataclass(frozen=True)
    class Collecting(FileSystem):
        def open_fd(self, path_):
            if str(path_) == str(lost):
                opened.append(path_)
                if len(opened) == 2:
                    path.unlink()
                raise FileNotFoundError(errno.ENOENT, "removed", str(path_))
            return super().open_fd(path_)

    opened: list[str] = []
    report = run(root, fs=Collecting(FAST.durability), repair=True)
    assert len(opened) == 2
    assert report.findings == ()


def test_what_is_published_during_a_check_is_whole(root, monkeypatch):
    """Blocks are listed before manifests: those of a manifest that appears in between are not known yet."""
    from kvstore.fsck import inspection

    new = prompt(64, 9)
    listed = inspection.folders

    def publishing(layout, kind, misfits):
        if kind == "nodes":
            with open_store(root, None) as store:
                publish(space_of(store), new)
        return listed(layout, kind, misfits)

    monkeypatch.setattr(inspection, "folders", publishing)
    report = run(root, repair=True)
    assert report.findings == ()
    assert (report.counts.manifests, report.counts.blocks) == (14, 9)
    with open_store(root, None) as store:
        assert restored(space_of(store), new) == 64


def test_a_parent_published_after_its_folder_was_listed_is_found(root, monkeypatch):
    """The listing that misses it is made by hand: what a walk returned before the parent was there."""
    from kvstore.fsck import inspection

    hidden = node(root, LONG[:16]).name
    listed = inspection.folders

    def stale(layout, kind, misfits):
        for folder in listed(layout, kind, misfits):
            yield folder._replace(names=[name for name in folder.names if name != hidden])

    monkeypatch.setattr(inspection, "folders", stale)
    report = run(root, repair=True)
    assert report.findings == ()


def test_a_block_written_again_before_the_repair_keeps_its_manifest(root):
    path = node(root, LONG)
    lost = block(root, path)
    data = lost.read_bytes()
    lost.unlink()

    def write(point: str) -> None:
        if point == "repairing":
            lost.write_bytes(data)

    report = run(root, repair=True, pause=write)
    assert report.exit_code == ExitCode.CORRECTED
    assert path.exists()
    assert errors(run(root, read_data=True).findings) == {}


def test_a_parent_published_before_the_repair_keeps_its_children(root):
    path = without_parent(root)

    def write(point: str) -> None:
        if point == "repairing":
            with open_store(root, None) as store:
                publish(space_of(store), OTHER[:16])

    report = run(root, repair=True, pause=write)
    assert report.exit_code == ExitCode.CORRECTED
    assert path.exists()
    with open_store(root, None) as store:
        assert restored(space_of(store), OTHER) == len(OTHER)


def test_a_file_replaced_before_the_repair_is_left(root):
    path = node(root, LONG)
    data = path.read_bytes()
    flip(path)

    def replace_it(point: str) -> None:
        if point == "repairing":
            fresh = path.with_name("fresh")
            fresh.write_bytes(data)
            fresh.rename(path)

    report = run(root, repair=True, pause=replace_it)
    assert report.findings[0].repair == "left, because it was replaced meanwhile"
    assert path.read_bytes() == data


def test_a_file_still_being_written_is_left(root):
    """cp writes in place: what looks short is whole a moment later, under the same inode."""
    path = block(root, node(root, LONG))
    data = path.read_bytes()
    os.truncate(path, 100)

    def go_on(point: str) -> None:
        if point == "repairing":
            path.write_bytes(data)

    report = run(root, repair=True, pause=go_on)
    assert report.exit_code & ExitCode.LEFT
    assert path.read_bytes() == data
    assert node(root, LONG).exists()
    assert run(root, read_data=True).exit_code == ExitCode.CLEAN


def test_a_repair_waits_for_what_was_changed_just_now(root, monkeypatch):
    from kvstore.fsck import repair

    slept = []
    monkeypatch.setattr(repair.time, "sleep", slept.append)
    flip(node(root, LONG))
    with open_store(root, None, create=False) as store:
        from kvstore.fsck import check

        check(store.context)
        assert slept == []
        check(store.context, repair=True)
    assert repair.SETTLE_S in slept


def test_a_lock_that_is_held_ends_a_repair_with_a_sentence(root, monkeypatch):
    from kvstore import locks

    flip(node(root, LONG))
    monkeypatch.setattr(locks.publish_lock.__wrapped__, "__defaults__", (0.05,))
    with locks.publish_lock(Layout(root)):
        report = run_elsewhere(root)
    assert "is held by another process" in report["error"]
    assert report["exit_code"] == ExitCode.FAILED | ExitCode.LEFT
    assert node(root, LONG[:32]).exists()


def run_elsewhere(root: Path) -> dict:
    """flock knows processes, and threads of one share it: the other holder has to be another process."""
    code = (
        "import json, sys; from pathlib import Path; from kvstore import locks;"
        "locks.publish_lock.__wrapped__.__defaults__ = (0.05,);"
        "from kvstore import Store; from kvstore.fsck import check;"
        "store = Store.open(sys.argv[1], create=False);"
        "print(json.dumps(check(store.context, repair=True, settle_s=0).document()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


# Reading data: in pieces, by several threads and processes, and going on after an interruption.


def stopping_after(number: int, opened: list[str]) -> FileSystem:
    """Is interrupted like by Ctrl-C when that many blocks were opened."""

    @dataclass(frozen=True)
    class Stopping(FileSystem):
        def open_read(self, path):
            if "blocks" in str(path):
                opened.append(Path(path).name)
                if len(opened) > number:
                    raise KeyboardInterrupt
            return super().open_read(path)

    return Stopping(FAST.durability)


def test_an_interrupted_check_goes_on_where_it_was(root, tmp_path):
    record = tmp_path / "record"
    first: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(4, first), read_data=True, resume=record)
    # Torn by a kill in the middle of a write.
    record.write_bytes(record.read_bytes() + b"half a record")
    second: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(4 + 3, second), read_data=True, resume=record)
    report = run(root, read_data=True, resume=record)
    assert report.exit_code == ExitCode.CLEAN
    assert (report.counts.resumed, report.counts.verified) == (7, 2)
    assert report.counts.resumed_bytes + report.counts.verified_bytes == report.counts.block_bytes
    assert not record.exists(), "the next check reads everything again"
    assert run(root, read_data=True, resume=record).counts.resumed == 0


def test_what_changed_since_it_was_read_is_read_again(root, tmp_path):
    record = tmp_path / "record"
    opened: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(4, opened), read_data=True, resume=record)
    layout = Layout(root)
    flip(layout.block(bytes.fromhex(opened[0])))
    shutil.copy(layout.block(bytes.fromhex(opened[1])), tmp_path / "copy")
    (tmp_path / "copy").rename(layout.block(bytes.fromhex(opened[1])))
    report = run(root, read_data=True, resume=record)
    assert report.counts.resumed == 2
    assert opened[0] in {Path(path).name for path, code in errors(report.findings).items() if code == "block-damaged"}


def test_damage_is_found_again_after_an_interruption(root, tmp_path):
    """Only what was read and right is recorded."""
    record = tmp_path / "record"
    opened: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(0, opened), read_data=True, resume=record)
    flip(Layout(root).block(bytes.fromhex(opened[0])))
    with pytest.raises(KeyboardInterrupt):
        run(root, fs=stopping_after(1, opened := []), read_data=True, resume=record)
    assert "block-damaged" in errors(run(root, read_data=True, resume=record).findings).values()


@pytest.mark.parametrize("content", [b"", b"kvstore-f", b"kvstore-fsck/1\n\0", b"kvstore-fsck/1\n\0" + bytes(4800)])
def test_a_record_may_be_cut_anywhere(root, tmp_path, content):
    record = tmp_path / "record"
    record.write_bytes(content)
    report = run(root, read_data=True, resume=record)
    assert report.exit_code == ExitCode.CLEAN
    assert report.counts.resumed == 0


def test_a_file_of_something_else_is_no_record(root, tmp_path):
    letter = tmp_path / "letter"
    letter.write_text("Dear Ada,")
    report = run(root, read_data=True, resume=letter)
    assert report.exit_code == ExitCode.FAILED
    assert "name another file" in report.error
    assert letter.read_text() == "Dear Ada,"
    report = run(root, read_data=True, resume=tmp_path)
    assert report.exit_code == ExitCode.FAILED
    assert "Is a directory" in report.error


def test_threads_and_processes_see_the_same(root, monkeypatch):
    from kvstore.fsck import passes

    for damage in (
        lambda: flip(block(root, node(root, LONG))),
        lambda: flip(node(root, OTHER)),
        lambda: flip(tokens_entry(root)),
        lambda: future(node(root, GROWN)),
        lambda: node(root, LONG[:16]).chmod(0o640),
    ):
        damage()
    alone = run(root, read_data=True)
    pools = []
    pool = passes.ProcessPoolExecutor
    monkeypatch.setattr(passes, "ProcessPoolExecutor", lambda *args, **kwargs: pools.append(1) or pool(*args, **kwargs))
    monkeypatch.setattr(passes, "PROCESSES_FROM", 0)
    together = run(root, read_data=True, jobs=2)
    assert pools
    assert together.findings == alone.findings
    assert together.counts == alone.counts
    assert len(alone.findings) >= 5


def test_progress_ends_where_it_said_it_would(root):
    told: list[tuple[str, int, int]] = []
    run(root, read_data=True, progress=lambda *args: told.append(args))
    for stage in ("files", "bytes"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps[0] == (0, steps[-1][1])
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_a_flipped_name_of_a_tensor_costs_its_block_and_no_manifest(root):
    """The header still reads as one of other tensors; whose fault that is, its bytes tell."""
    path = block(root, node(root, LONG[:16]))
    path.write_bytes(path.read_bytes().replace(b'"0.keys"', b'"0.kexs"', 1))
    before = sorted((root / "objects" / "nodes").rglob("*.kv"))
    report = run(root, repair=True)
    assert {each.code for each in report.findings if each.severity == "error"} == {"manifest-tensors"}
    assert report.exit_code == ExitCode.LEFT
    assert sorted((root / "objects" / "nodes").rglob("*.kv")) == before
    report = run(root, read_data=True)
    assert "block-damaged" in {each.code for each in report.findings}
