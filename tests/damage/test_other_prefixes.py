"""Manifests of another prefix under a name that a lookup finds: names hold half of each key, so all is compared again.

Who may write into the directory can make them, and so could an accident whose odds are one in 2**128.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_support import INFO, Memory, open_store, prompt, restore, spans

from kvstore import pack_tokens
from kvstore.keys import node_key
from kvstore.manifest import Manifest, decode, encode

INTERVAL = 128
TOKENS = prompt(INTERVAL)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "cache", INTERVAL) as opened:
        opened.namespace(INFO).publish(TOKENS, spans(TOKENS, 0, INTERVAL))
        yield opened


def refused(store, match) -> bool:
    """Whether nothing of a match is served, and its node is passed by from then on."""
    space, memory = store.namespace(INFO), Memory()
    assert space.read(match, memory).tokens == 0
    assert store.counters.damaged == 1
    assert store.context.damaged == {match.steps[-1].path}
    return memory.calls == 0 and space.lookup(TOKENS[:100]).count == 0


def another_parent(found: Manifest) -> Manifest:
    parent = found.parent[:16] + bytes(16)
    return replace(found, parent=parent, key=node_key(parent, found.tokens))


def another_place(found: Manifest) -> Manifest:
    """Of an engine that keeps nothing per token, where there is nothing more to be read that could tell."""
    return replace(found, first=INTERVAL, blocks=())


@pytest.mark.parametrize("lie", [another_parent, another_place])
def test_what_continues_another_prefix_is_not_served(store, lie):
    space = store.namespace(INFO)
    path = space.lookup(TOKENS).steps[0].path
    forged = lie(decode(path.read_bytes()))
    path.unlink()
    path.with_name(forged.file_name).write_bytes(encode(forged))
    match = space.lookup(TOKENS[:100])
    assert match.count == 100
    assert refused(store, match)


@pytest.mark.parametrize("at", [0, 50, 99])
def test_tokens_are_compared_once_more(store, at):
    match = store.namespace(INFO).lookup(TOKENS[:100])
    others = [*TOKENS[:at], TOKENS[at] ^ 1, *TOKENS[at + 1 : 100]]
    assert refused(store, replace(match, tokens=pack_tokens(others)))


def test_of_tokens_behind_the_match_nothing_is_asked(store):
    space = store.namespace(INFO)
    assert restore(space, [*TOKENS[:100], 7, 8]).tokens == 100
    assert store.context.damaged == set()
