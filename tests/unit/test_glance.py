"""A look at a directory by names alone: right for what is there, whatever else lies there, and rested in between."""

from __future__ import annotations

import os

import pytest
from core_support import INFO, node_files, prompt
from gc_support import TENANT
from upkeep_support import grow, snapshot

from kvstore.glance import Glance, glance
from kvstore.scan import usage


def never() -> None:
    pass


def test_an_empty_directory(store):
    assert glance(store.context, [store.namespace(INFO).id], never) == Glance(usage(store.context), 0, 0, 1)
    assert glance(store.context, None, never) == Glance(usage(store.context), 0, 0, 0)


def test_prefixes_and_tokens_of_one_namespace_and_of_all(store):
    ours, theirs = store.namespace(INFO), store.namespace(TENANT)
    grow(ours, prompt(60), 16, 32, 40)
    grow(theirs, prompt(60), 16)
    before = snapshot(store.path)
    assert glance(store.context, [ours.id], never) == Glance(usage(store.context), 3, 40, 1)
    assert glance(store.context, [ours.id, theirs.id], never) == Glance(usage(store.context), 4, 56, 2)
    assert glance(store.context, None, never) == glance(store.context, [ours.id, theirs.id], never)
    assert snapshot(store.path) == before


def test_states_and_what_is_not_ours_count_as_no_prefix(store):
    space = store.namespace(INFO)
    grow(space, prompt(60), 16, 32)
    (first, second) = node_files(store.path)
    first.with_suffix(".state").write_bytes(b"x")
    (first.parent / ".DS_Store").write_bytes(b"x")
    (first.parent / f"._{first.name}").write_bytes(b"x")
    other, strange = sorted({"00", "11", "22", "33"} - {first.name[:2], second.name[:2]})[:2]
    (store.context.layout.nodes / space.id / other).write_text("a file in place of a folder")
    stray = store.context.layout.nodes / space.id / strange
    stray.mkdir()
    (stray / first.name).write_bytes(first.read_bytes())  # where no lookup finds it
    found = glance(store.context, [space.id], never)
    assert (found.prefixes, found.tokens) == (2, 32)


def test_a_damaged_manifest_counts_by_its_name(store):
    space = store.namespace(INFO)
    grow(space, prompt(60), 16, 32)
    os.truncate(node_files(store.path)[0], 3)
    assert glance(store.context, [space.id], never).tokens == 32


def test_a_directory_that_is_not_there(store):
    os.rename(store.path, store.path.with_name("away"))
    with pytest.raises(FileNotFoundError):
        glance(store.context, None, never)


def test_the_caller_rests_at_every_folder_and_may_stop(store):
    grow(store.namespace(INFO), prompt(60), 16, 32, 40)
    rests = []
    glance(store.context, [store.namespace(INFO).id], lambda: rests.append(None))
    assert len(rests) > 256 + 8
    for limit in (1, len(rests)):
        left = iter(range(limit - 1))
        with pytest.raises(StopIteration):
            glance(store.context, [store.namespace(INFO).id], lambda left=left: next(left))
