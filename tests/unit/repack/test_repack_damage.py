"""What is damaged, or does not belong together, is left as it is."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
from core_support import INFO, SPECS, kv, open_store, prompt
from gc_support import blocks, manifests
from upkeep_support import HARM, counts, forget_tails, refs, rest, snapshot

from kvstore import DamagedManifestError, FileSystem, Span
from kvstore.manifest import decode
from kvstore.repack import repack

TOKENS = prompt(40)


DAMAGE = HARM | {
    "header": lambda path: path.write_bytes(path.read_bytes().replace(b"BF16", b"FB16")),
}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_block_leaves_its_node_alone(cold, how, which):
    path = cold.context.layout.block(refs(cold.path)[16][which].digest)
    DAMAGE[how](path)
    report = repack(cold.context)
    assert (report.nodes, report.damaged) == (2, 1)
    assert len(report.problems) == 1
    assert path.name in report.problems[0]
    assert counts(cold.path) == {16: [5, 6, 5], 32: [16], 40: [8]}
    assert not any((cold.path / "tmp").rglob("[0-9a-f]"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), "cannot be read: Input/output error"),
        (EOFError("cut off"), "cut off"),
    ],
)
def test_blocks_that_cannot_be_read_to_their_end_leave_their_nodes_alone(cold, monkeypatch, error, said):
    def failing(*_):
        raise error

    before = snapshot(cold.path)
    monkeypatch.setattr("kvstore.joining.preadv_full", failing)
    report = repack(cold.context)
    assert (report.nodes, report.damaged, report.error) == (0, 3, "")
    assert [sentence for sentence in report.problems if said not in sentence] == []
    assert snapshot(cold.path) == before


def test_blocks_with_other_tensors_are_not_joined(tmp_path):
    with open_store(tmp_path) as store:
        space = store.namespace(INFO)
        space.publish(TOKENS[:8], [Span(0, 8, SPECS, kv(TOKENS, 0, 8))])
        # A publish that cannot see what is before it, as one of another kvstore may not ask.
        (block,) = blocks(tmp_path)
        data = block.read_bytes()
        block.write_bytes(bytes(len(data)))
        space.publish(TOKENS[:16], [Span(8, 8, SPECS[:1], kv(TOKENS, 8, 16, SPECS[:1]))])
        block.write_bytes(data)
        forget_tails(tmp_path)
        rest(store)
        before = snapshot(tmp_path)
        report = repack(store.context)
        assert (report.nodes, report.damaged) == (0, 1)
        assert "different tensors" in report.problems[0]
        assert snapshot(tmp_path) == before


def test_nodes_beside_a_damaged_manifest_are_left_because_it_may_name_their_blocks(cold):
    sibling = [*TOKENS[:16], *prompt(5, 3)]
    cold.namespace(INFO).publish(sibling, [Span(16, 5, SPECS, kv(sibling, 16, 21))])
    path = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 21)
    rest(cold)
    path.write_bytes(path.read_bytes()[:-1])
    report = repack(cold.context)
    # The second chunk is its sibling; the others have nothing to do with it.
    assert counts_of_whole(cold.path) == {16: [16], 32: [4, 12], 40: [8]}
    assert (report.nodes, report.damaged) == (2, 1)
    assert "fsck" in report.problems[0]


def counts_of_whole(root: Path) -> dict[int, list[int]]:
    found = {}
    for path in manifests(root):
        try:
            manifest = decode(path.read_bytes())
        except DamagedManifestError:
            continue
        found[manifest.end] = [ref.count for ref in manifest.blocks]
    return found


def test_a_manifest_under_another_name_is_left(cold):
    path = next(path for path in manifests(cold.path) if decode(path.read_bytes()).end == 16)
    other = path.with_name(path.name.replace("-16-", "-15-"))
    path.rename(other)
    rest(cold)
    report = repack(cold.context)
    assert (report.nodes, report.damaged) == (2, 1)
    assert other.name in report.problems[0]


def test_a_full_disk_ends_it_with_a_sentence_and_nothing_lost(cold):
    @dataclass(frozen=True)
    class Full(FileSystem):
        def allocate(self, fd, size):
            raise OSError(errno.ENOSPC, "No space left on device")

    before = snapshot(cold.path)
    with open_store(cold.path, None, Full()) as store:
        report = repack(store.context)
    assert "the disk is full" in report.error
    assert report.nodes == 0
    assert snapshot(cold.path) == before
