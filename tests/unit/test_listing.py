"""Conversations as `ls` counts them: how long, how large, and what would be freed."""

from __future__ import annotations

import errno
import hashlib
import os
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from core_support import INFO, open_store
from gc_support import SECOND, TENANT, forge_circle, manifests, prompt, publish, set_used, space_of, state

from kvstore import FileSystem, State, StateTensor
from kvstore.forest import Forest
from kvstore.layout import NodeName
from kvstore.listing import Conversation, Listing, branches, by_namespace, listing
from kvstore.manifest import decode
from kvstore.marking import Marked, Marks
from kvstore.merge import merge
from kvstore.scan import NodeFile


def conversations(store, namespaces=None):
    """By length."""
    return sorted(listing(store.context, namespaces).conversations, key=lambda each: (each.tokens, each.namespace))


def block_sizes(store) -> dict[bytes, int]:
    return {ref.digest: ref.size for path in manifests(store.path) for ref in decode(path.read_bytes()).blocks}


def test_an_empty_store_has_no_conversation(store):
    found = listing(store.context)
    assert (found.conversations, found.damaged, found.foreign) == ([], 0, 0)


def test_one_conversation_is_its_whole_path(store):
    space = space_of(store)
    publish(space, prompt(40))
    set_used(store, space, prompt(40), 500)
    (found,) = conversations(store)
    assert (found.namespace, found.label) == (space.id, "a test")
    assert found.key == space.lookup(prompt(40)).steps[-1].name.key
    assert (found.tokens, found.nodes, found.complete, found.resumable) == (40, 3, True, False)
    assert found.size == found.own == sum(block_sizes(store).values())
    assert abs(time.time_ns() - found.used_ns - 500 * SECOND) < 60 * SECOND


def test_a_grown_tail_is_one_conversation(store):
    space = space_of(store)
    publish(space, prompt(30), 0, 16, 20, 25, 30)
    (found,) = conversations(store)
    assert (found.tokens, found.nodes) == (30, 2)
    assert found.size == found.own == sum(block_sizes(store).values())


def test_a_tail_inside_a_full_chunk_is_no_conversation(store):
    space = space_of(store)
    publish(space, prompt(40), 0, 9, 16, 32, 40)
    assert [(each.tokens, each.nodes) for each in conversations(store)] == [(40, 3)]


def test_a_contained_tail_with_a_state_is_a_conversation_where_one_can_resume(store):
    space = space_of(store)
    publish(space, prompt(14)[:5])
    large = State((StateTensor("s", "U8", (100_000,)),), [bytes(100_000)], {})
    space.publish_state(prompt(14)[:5], large)
    (before,) = by_namespace(listing(store.context), conversations(store))
    assert before.size > 100_000
    publish(space, prompt(14), 5, 14)
    short, long = conversations(store)
    assert [(each.tokens, each.resumable) for each in (short, long)] == [(5, True), (14, False)]
    assert space.lookup(prompt(14), trimmable=False).count == 5
    found = listing(store.context)
    (row,) = by_namespace(found, found.conversations)
    assert row.size == sum(block_sizes(store).values())
    assert short.own > 100_000
    assert short.size + long.own == row.size
    assert {each.size for each in branches(found, [short, long])} == {short.size, long.size}


def test_a_contained_tail_s_own_blocks_count_for_its_namespace(store):
    """Repack joins the longer sibling's blocks; the tail may keep those that it had."""
    space = space_of(store)
    publish(space, prompt(5))
    publish(space_of(store, TENANT), prompt(5))
    whole = prompt(14)
    other = store.path.parent / "other"
    with open_store(other) as joined:
        publish(space_of(joined), whole)
        merge(joined.context, store.context)
    assert len(block_sizes(store)) == 2
    found = listing(store.context, [space.id])
    assert [each.tokens for each in found.conversations] == [14]
    (row,) = by_namespace(found, found.conversations)
    assert row.size == sum(block_sizes(store).values())


def test_branches_share_their_beginning(store):
    space = space_of(store)
    beginning = prompt(32)
    publish(space, beginning + prompt(8, 1))
    publish(space, beginning + prompt(20, 2), 0, 16, 32, 48, 52)
    short, long = conversations(store)
    assert (short.tokens, long.tokens) == (40, 52)
    assert (short.nodes, long.nodes) == (3, 4)
    sizes = block_sizes(store)
    shared = sum(sizes.values()) - short.own - long.own
    assert short.size == shared + short.own
    assert long.size == shared + long.own
    assert shared > 0
    # What removing one would free is what is left named by nobody.
    publish(space, beginning)
    assert conversations(store) == [short, long]


def test_tails_that_share_a_block_do_not_own_it(store):
    space = space_of(store)
    publish(space, prompt(14), 0, 5, 14)
    publish(space, prompt(14)[:5] + prompt(7, 3), 0, 5, 12)
    one, other = conversations(store)
    sizes = sorted(block_sizes(store).values())
    assert one.size - one.own == other.size - other.own
    assert one.own + other.own + (one.size - one.own) == sum(sizes)


def test_states_count_and_make_a_conversation_resumable(store):
    space = space_of(store)
    publish(space, prompt(40))
    (before,) = conversations(store)
    space.publish_state(prompt(16), state(1))
    (middle,) = conversations(store)
    assert middle.size > before.size
    assert not middle.resumable
    space.publish_state(prompt(40), state(2))
    (after,) = conversations(store)
    assert after.resumable
    assert after.size == after.own == sum(block_sizes(store).values())


def test_namespaces_are_apart_and_can_be_chosen(store):
    publish(space_of(store), prompt(20))
    tenant = space_of(store, TENANT)
    publish(tenant, prompt(20))
    assert {(each.namespace, each.label) for each in conversations(store)} == {
        (INFO.id, "a test"),
        (TENANT.id, "another"),
    }
    # Equal bytes are one block for both, and each conversation still names all of it.
    assert [each.namespace for each in conversations(store, [tenant.id])] == [tenant.id]
    assert conversations(store, []) == []


def test_a_namespace_without_a_description_has_no_label(store):
    publish(space_of(store), prompt(20))
    path = store.context.layout.namespace_file(INFO.id)
    for content in (b"", b"[1]", b'{"label": 7}', b"\xff", None):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert [each.label for each in conversations(store)] == [""]


def test_a_hole_makes_a_conversation_incomplete(store):
    space = space_of(store)
    publish(space, prompt(60))
    steps = space.lookup(prompt(60)).steps
    steps[1].path.unlink()
    first, second = conversations(store)
    assert (first.tokens, first.nodes, first.complete) == (16, 1, True)
    assert (second.tokens, second.nodes, second.complete) == (60, 2, False)


def test_damaged_manifests_are_left_out_and_counted(store):
    space = space_of(store)
    publish(space, prompt(40))
    last = space.lookup(prompt(40)).steps[-1].path
    last.write_bytes(last.read_bytes()[:-1])
    (last.parent / ".DS_Store").touch()
    found = listing(store.context)
    assert (found.damaged, found.foreign) == (1, 1)
    assert [(each.tokens, each.complete) for each in found.conversations] == [(32, True)]


def test_a_state_without_kv_is_incomplete(store):
    space = space_of(store)
    publish(space, prompt(9))
    space.publish_state(prompt(9), state())
    space.lookup(prompt(9)).steps[0].path.unlink()
    (found,) = conversations(store)
    assert (found.tokens, found.complete, found.resumable) == (9, False, True)


def test_the_last_use_is_that_of_kv_or_state(store):
    space = space_of(store)
    publish(space, prompt(9))
    space.publish_state(prompt(9), state())
    path = space.lookup(prompt(9)).steps[0].path
    os.utime(path, ns=(1, 1))
    os.utime(path.with_suffix(".state"), ns=(2, 2))
    (found,) = conversations(store)
    assert found.used_ns == 2


def test_forged_circles_end(store):
    space = space_of(store)
    publish(space, prompt(9))
    forge_circle(store.path)
    assert [each.tokens for each in conversations(store)] == [9]


def test_forged_names_of_one_node_are_one_node(store):
    """Its key with other rungs: no lookup asks for them, but a listing comes across them all."""
    space = space_of(store)
    publish(space, prompt(9))
    (good,) = manifests(store.path)
    before = conversations(store)
    for number in range(300):
        (good.parent / good.name.replace("0" * 18, f"{number + 1:018x}")).write_bytes(good.read_bytes())
    assert len(manifests(store.path)) == 301
    (found,) = conversations(store)
    assert (found.tokens, found.nodes, found.own, found.complete) == (9, 1, before[0].own, True)
    assert not found.resumable


def test_what_cannot_be_seen_is_an_error(tmp_path):
    class Failing(FileSystem):
        def read_file(self, path, limit):
            if "/nodes/" in str(path):
                raise OSError(errno.EIO, "Input/output error", str(path))
            return super().read_file(path, limit)

    with open_store(tmp_path / "s") as store:
        publish(space_of(store), prompt(9))
    with open_store(tmp_path / "s", None, Failing()) as store, pytest.raises(OSError, match="Input/output"):
        listing(store.context)


def test_a_node_that_is_not_shown_takes_few_bytes():
    """A directory may have a million: what was read of one is gone when the next folder is read."""
    folders, each = 50, 100

    def parts() -> Iterator[Marks]:
        keys = [bytes(16), *(hashlib.md5(bytes([at // each, at % each])).digest() for at in range(folders * each))]
        for folder in range(folders):
            marked = []
            for at in range(folder * each, (folder + 1) * each):
                name = NodeName(keys[at].hex(), 64, keys[at + 1].hex(), "0" * 18).file("kv")
                block = (keys[at + 1][::-1], 1000)
                marked.append(Marked(NodeFile(INFO.id, name, 9000, 12288, at, at), 64 * at, (block,)))
            yield Marks(marked)

    tracemalloc.start()
    try:
        (leaf,) = Forest(parts()).conversations()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (leaf.nodes, leaf.size, leaf.own) == (5000, 5_000_000, 5_000_000)
    assert peak / leaf.nodes < 600


def test_namespaces_are_added_up_in_one_pass():
    """However many there are: a tenant with a salt of its own has one of its own."""

    class Walked(list):
        times = 0

        def __iter__(self):
            Walked.times += 1
            return super().__iter__()

    marked = []
    for at in range(60):
        space, key = (hashlib.md5(b"%d %d" % (kind, at)).hexdigest() for kind in range(2))
        name = NodeName("00" * 16, 64, key, "0" * 18).file("kv")
        blocks = ((bytes.fromhex(key), 1000 + at), (bytes(16), 7))
        marked.append(Marked(NodeFile(space, name, 9000, 12288, at, at), 0, blocks))
    forest = Forest([Marks(marked)])
    leaves = [Conversation(label="", **leaf._asdict()) for leaf in forest.conversations()]
    forest._names = Walked(forest._names)
    rows = by_namespace(Listing(leaves, 0, 0, forest), leaves)
    assert sorted(row.size for row in rows) == [1007 + at for at in range(60)]
    assert Walked.times == 1


def test_what_a_namespace_takes_does_not_depend_on_which_is_read_first():
    """Two tenants with equal blocks, of which one was repacked: its contained tail names what the other names, too."""

    def node(space: str, tokens: int, *blocks: tuple[bytes, int]) -> Marked:
        name = NodeName("00" * 16, tokens, hashlib.md5(b"%d" % tokens).hexdigest(), "0" * 18).file("kv")
        return Marked(NodeFile(space * 16, name, 9000, 12288, tokens, tokens), 0, blocks)

    first, second, joined = (b"first", 100), (b"second", 20), (b"joined", 120)
    repacked = Marks([node("aa", 5, first), node("aa", 14, joined)], containers={0: [1]})
    grown = Marks([node("bb", 5, first), node("bb", 14, first, second)], containers={0: [1]})
    for parts in ((repacked, grown), (grown, repacked), (repacked,), (grown,)):
        forest = Forest(parts)
        sizes = forest.sizes()
        assert sizes == {key: size for key, size in (("aa" * 16, 220), ("bb" * 16, 120)) if key in sizes}
        assert len(sizes) == len(parts)
        assert forest.total() == (240 if len(parts) == 2 else sum(sizes.values()))
