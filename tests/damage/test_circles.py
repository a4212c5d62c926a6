"""Manifests forged so that, by their names, a prefix continues itself: everything that walks from node to node ends.

Keys are hashes, so no honest writer makes a circle. Contents are such that each manifest decodes: damage would hide the
circle from those who read manifests.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from core_support import INFO, open_store, prompt, restore
from gc_support import DAY, ahead, manifests, publish, space_of

from kvstore import KVStoreError
from kvstore.breakdown import breakdown
from kvstore.clear import clear
from kvstore.forest import Forest
from kvstore.fsck import check
from kvstore.gc import Policy, collect
from kvstore.keys import node_key, pack_tokens, rungs
from kvstore.layout import Layout
from kvstore.listing import listing
from kvstore.manifest import Manifest, encode
from kvstore.marking import mark
from kvstore.merge import merge
from kvstore.nearest import nearest
from kvstore.prefix import find_prefix
from kvstore.repack import repack
from kvstore.report import report
from kvstore.scan import nodes
from kvstore.walk import Tally

INTERVAL = 128
MEMORY = 1 << 30

PARENT = bytes(range(32))
LONG = pack_tokens(prompt(100))
TAIL = LONG[: 80 * 4]
CHUNK = pack_tokens(prompt(INTERVAL, 7))


def put(root: Path, parent: str, key: str, tokens: bytes, kind: str = "kv", above: bytes = PARENT) -> None:
    """A manifest whose name says parent and key, and whose content says what belongs to its tokens."""
    content = Manifest(kind, INFO.fingerprint, above, node_key(above, tokens), INTERVAL, INTERVAL, tokens, (), 1, "x")
    name = f"{parent}-{len(tokens) // 4}-{key}-{rungs(tokens, len(tokens) // 4)}.{kind}"
    path = Layout(root).nodes / INFO.id / parent[:2] / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode(content))


def of_itself(root: Path) -> None:
    put(root, "a" * 32, "a" * 32, CHUNK)


def of_two(root: Path) -> None:
    put(root, "a" * 32, "b" * 32, CHUNK)
    put(root, "b" * 32, "a" * 32, CHUNK)


def of_a_contained_tail(root: Path) -> None:
    """The tail is evicted first, because a longer one contains it; and it is above itself."""
    tail = node_key(PARENT, TAIL)
    put(root, "a" * 32, tail[:16].hex(), TAIL)
    put(root, tail[:16].hex(), "a" * 32, CHUNK, above=tail)
    put(root, "a" * 32, node_key(PARENT, LONG)[:16].hex(), LONG)


def of_states(root: Path) -> None:
    for kind in ("kv", "state"):
        put(root, "a" * 32, "b" * 32, CHUNK, kind)
        put(root, "b" * 32, "c" * 32, CHUNK, kind)
        put(root, "c" * 32, "a" * 32, CHUNK, kind)


def with_a_real_root(root: Path) -> None:
    """What a prompt finds is one of them."""
    (good,) = manifests(root)
    parent, _, key, _ = good.name.split("-")
    put(root, key, parent, CHUNK)
    of_two(root)


CIRCLES = [of_itself, of_two, of_a_contained_tail, of_states, with_a_real_root]


@pytest.fixture(params=CIRCLES, ids=lambda circle: circle.__name__.replace("_", " "))
def root(request, tmp_path) -> Path:
    with open_store(tmp_path / "s", INTERVAL) as store:
        publish(space_of(store), prompt(20, 3), 0, 20)
    request.param(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture(autouse=True)
def _no_more_memory():
    """A walk without end may be one that appends: it should fail, not take the machine with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = Path("/proc/self/statm")
    if size.exists():
        mapped = int(size.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def show_all(store) -> None:
    for path in manifests(store.path):
        with suppress(KVStoreError):
            find_prefix(store.context, path.name.split("-")[2])


def look_up(store) -> None:
    space = space_of(store)
    nearest(space.lookup(prompt(40, 3)), pack_tokens(prompt(40, 3)))
    assert restore(space, prompt(20, 3)).tokens == 20


def walk_the_forest(store) -> None:
    marks = mark(store.context, list(nodes(store.context.layout, Tally())))
    forest = Forest([marks])
    list(forest.conversations())
    for node in marks.nodes:
        with suppress(KeyError):  # a contained tail is part of what contains it
            number = forest.find(node.file.namespace, node.file.key)
            assert len(forest.path(number)) <= len(marks.nodes)


def into_another(store) -> None:
    with open_store(store.path.with_name("other"), INTERVAL) as other:
        merge(store.context, other.context)
        assert restore(space_of(other), prompt(20, 3)).tokens == 20


WALKS: dict[str, Callable] = {
    "lookup": look_up,
    "ls": lambda store: listing(store.context),
    "the forest": walk_the_forest,
    "show": show_all,
    "du": lambda store: breakdown(store.context),
    "report": lambda store: report(store.context),
    "fsck": lambda store: check(store.context, read_data=True),
    "repair": lambda store: check(store.context, read_data=True, repair=True, settle_s=0, grace_ns=0),
    "repack": lambda store: repack(store.context, older_than_ns=0),
    "gc without a limit": lambda store: collect(store.context),
    "gc of all": lambda store: collect(store.context, Policy(size=0)),
    "gc by age": lambda store: collect(store.context, Policy(older_than_ns=1)),
    "gc by quota": lambda store: collect(store.context, Policy(quotas={INFO.id: 1})),
    "clear": lambda store: clear(store.context),
    "clear a namespace": lambda store: clear(store.context, INFO.id),
    "merge": into_another,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("walk", WALKS)
def test_every_walk_ends(root, walk):
    with ahead(root, 2 * DAY) as store:
        result = WALKS[walk](store)
        assert getattr(result, "error", "") == ""
        if walk.startswith("clear"):
            assert manifests(root) == []
