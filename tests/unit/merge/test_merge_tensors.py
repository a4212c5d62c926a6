"""A prefix is not continued with other tensors than it has: no restore would get past them."""

from __future__ import annotations

import pytest
from core_support import INFO, SPECS, block_files, open_store, prompt, restore, span
from merge_support import by_end
from upkeep_support import forget_tails, grow, invoke, refs

import kvstore.alike
from kvstore import Span, Store
from kvstore.fsck import check
from kvstore.manifest import decode
from kvstore.merge import merge

TOKENS = prompt(40)


def publish(store: Store, end: int, *, other: bool, tokens: list[int] = TOKENS) -> None:
    """Publish a prompt, in chunks, with the usual tensors or with others."""
    parts = [
        span(tokens, first, min(first + 16, end))
        if not other
        else Span(first, count := min(16, end - first), SPECS[:1], [bytes(SPECS[0].span_bytes(count))])
        for first in range(0, end, 16)
    ]
    store.namespace(INFO).publish(tokens, parts)


@pytest.fixture
def two(tmp_path) -> tuple[Store, Store]:
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        yield a, b


def header_of(store: Store, end: int):
    """The file of the first block of a node, and where the name of its first tensor begins."""
    path = store.context.layout.block(decode(by_end(store.path)[end].read_bytes()).blocks[0].digest)
    return path, path.read_bytes().index(b"0.keys")


@pytest.mark.parametrize("dry_run", [True, False])
def test_what_has_other_tensors_is_left_out_with_all_that_continues_it(two, dry_run):
    a, b = two
    publish(a, 40, other=True)
    publish(a, 20, other=True, tokens=prompt(20, 1))
    publish(b, 16, other=False)
    report = merge(a.context, b.context, dry_run=dry_run)
    # The chunk after the first, and the tail that continues it; the other prompt has nothing to do with it.
    assert (report.there, report.nodes, report.damaged, report.without_parent, report.error) == (1, 2, 1, 1, "")
    assert by_end(a.path)[32].name in report.problems[0]
    assert report.problems[0].endswith("is left out: it has other tensors than what it continues")
    code, _, err = invoke("merge", a.path, b.path, *["--dry-run"] * dry_run)
    assert code == 0
    assert "other tensors" in " ".join(err.split())
    assert check(b.context).exit_code == 0
    assert b.namespace(INFO).lookup(TOKENS).count == 16
    published = b.namespace(INFO).publish(TOKENS, [span(TOKENS, 16, 32), span(TOKENS, 32, 40)])
    assert (published.nodes, restore(b.namespace(INFO), TOKENS).tokens) == (2, 40)


def test_what_has_the_same_tensors_is_brought(two):
    a, b = two
    publish(a, 40, other=True)
    publish(b, 16, other=True)
    report = merge(a.context, b.context)
    assert (report.there, report.nodes, report.problems) == (1, 2, [])
    assert check(b.context).exit_code == 0


@pytest.mark.parametrize("whose", ["target", "source"])
def test_a_flipped_bit_in_a_name_is_no_other_tensor(two, whose):
    """In the target it leaves nothing out: the next publish heals it. In the source it is a damaged block."""
    a, b = two
    publish(a, 40, other=False)
    publish(b, 16, other=False)
    path, at = header_of(b, 16) if whose == "target" else header_of(a, 32)
    flip_at(path, at)
    report = merge(a.context, b.context)
    assert not any("other tensors" in sentence for sentence in report.problems)
    if whose == "target":
        assert (report.nodes, report.problems) == (2, [])
    else:
        assert "digest does not match" in report.problems[0]
        assert by_end(b.path).keys() == {16}


def flip_at(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_dry_run_compares_with_what_would_be_brought_before(two):
    a, _ = two
    publish(a, 16, other=True)
    with open_store(a.path.with_name("c")) as c:
        publish(c, 32, other=False)
        # What no publish would write: another process wrote the first chunk at the same time.
        first = by_end(c.path)[16]
        for path in block_files(a.path):
            target = c.path / path.relative_to(a.path)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
        first.write_bytes(by_end(a.path)[16].read_bytes())
        with open_store(a.path.with_name("d")) as d:
            for dry_run in (True, False):
                report = merge(c.context, d.context, dry_run=dry_run)
                assert (report.nodes, report.damaged) == (1, 1)
                assert "other tensors" in report.problems[0]


def test_the_header_of_what_is_continued_is_read_once_a_node(two, monkeypatch):
    """A chunk that grew by a block a turn has hundreds."""
    a, b = two
    publish(b, 16, other=False)
    grow(a.namespace(INFO), TOKENS, 16, *range(17, 33))
    forget_tails(a.path)
    assert len(refs(a.path)[32]) == 16
    specs, seen = kvstore.alike._specs, []

    def counting(context, ref):
        seen.append(ref)
        return specs(context, ref)

    monkeypatch.setattr(kvstore.alike, "_specs", counting)
    report = merge(a.context, b.context)
    assert (report.nodes, report.there, report.error) == (1, 1, "")
    assert len(seen) == len(set(seen)) == 17
