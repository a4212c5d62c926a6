"""fsck finds every kind of trouble in a real directory, says what it is, and changes nothing unless asked to.

A repair ends it, and a second check is satisfied.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store
from fsck_damage import (
    blocks_of_other_tensors,
    child_of_a_tail,
    child_of_another_namespace,
    child_of_other_tensors,
    child_too_far,
    claim,
    copied,
    description,
    edited,
    emptied,
    enlarged,
    file_for_folder,
    first_of_another_interval,
    flipped,
    foldered,
    future,
    linked,
    missing_block,
    newer,
    no_folder,
    other_interval,
    other_namespace,
    other_rungs,
    other_span,
    parentless_start,
    piped,
    removed,
    renamed,
    replaced_folder,
    second_block_missing,
    staging,
    state_elsewhere,
    state_of_another,
    swapped,
    tensors,
    tokens_entry,
    truncate,
    two_states,
    unusable,
    without_kv,
    without_parent,
)
from fsck_support import LONG, OTHER, block, codes, make, node, refs, rewrite, run, snapshot
from gc_support import TENANT, space_of, state

from kvstore import FileSystem, Span
from kvstore.errors import DamagedBlockError
from kvstore.fsck import ExitCode
from kvstore.fsck.data import Headers
from kvstore.fsck.values import Reader
from kvstore.keys import block_digest
from kvstore.quotas import write_quota
from kvstore.stats import StatsFile


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
    "first chunk of another interval": Case("manifest-parent", first_of_another_interval),
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
    "block with a header that only Python reads": Case(
        "block-damaged", lambda root: unusable(root, b" " + json.dumps(tensors((0, 80))).encode())
    ),
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
