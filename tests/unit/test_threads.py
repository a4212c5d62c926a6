"""Several writers and readers of one directory at once: threads of one store, and stores of one directory."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from core_support import INFO, node_files, open_store, prompt, restore, span, spans

TOKENS = prompt(96)
WORKERS = 6


@pytest.fixture(params=["one store", "several stores"])
def spaces(request, tmp_path):
    """One namespace a worker, of the same store or of stores that know nothing of each other."""
    stores = [open_store(tmp_path / "cache") for _ in range(WORKERS if request.param == "several stores" else 1)]
    return [stores[i % len(stores)].namespace(INFO) for i in range(WORKERS)]


def at_once(work, spaces) -> list:
    barrier = threading.Barrier(len(spaces))

    def start(item):
        barrier.wait()
        return work(*item)

    with ThreadPoolExecutor(len(spaces)) as pool:
        return list(pool.map(start, enumerate(spaces)))


def test_the_same_prefix_may_be_published_by_all_at_once(tmp_path, spaces):
    def work(_number, space):
        return space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48, 60)).end

    assert at_once(work, spaces) == [60] * WORKERS
    assert [restore(space, TOKENS).tokens for space in spaces] == [60] * WORKERS
    assert len(node_files(tmp_path / "cache")) == 4


def test_differently_cut_spans_of_the_same_prefix_may_be_published_at_once(spaces):
    def work(number, space):
        borders = [0, *range(1 + number, 16, 3), 16, 32]
        return space.publish(TOKENS, spans(TOKENS, *borders)).end

    assert at_once(work, spaces) == [32] * WORKERS
    assert [restore(space, TOKENS).tokens for space in spaces] == [32] * WORKERS


def test_branches_may_grow_from_one_prefix_at_once(spaces):
    spaces[0].publish(TOKENS, spans(TOKENS, 0, 16, 20))

    def work(number, space):
        tokens = [*TOKENS[:20], *prompt(30, number + 1)]
        space.publish(tokens, spans(tokens, 20, 32, 48, 50))
        return restore(space, tokens).tokens

    assert at_once(work, spaces) == [50] * WORKERS


def test_readers_see_a_whole_prefix_while_it_grows(spaces):
    done = threading.Event()

    def work(number, space):
        seen = [0]
        if number == 0:
            for first in range(0, 96, 8):
                space.publish(TOKENS, [span(TOKENS, first, first + 8)])
            done.set()
        while not done.is_set() or number == 0:
            seen.append(restore(space, TOKENS).tokens)
            if number == 0:
                break
        return seen

    results = at_once(work, spaces)
    assert results[0] == [0, 96]
    for seen in results[1:]:
        assert seen == sorted(seen)
        assert {count % 8 for count in seen} == {0}


def test_all_heal_the_same_damage_at_once(tmp_path, spaces):
    spaces[0].publish(TOKENS, spans(TOKENS, 0, 16, 32))
    for folder, _, names in os.walk(tmp_path / "cache" / "objects" / "blocks"):
        for name in names:
            with open(os.path.join(folder, name), "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"?")

    def work(_number, space):
        restored = restore(space, TOKENS).tokens
        space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
        return restored

    assert set(at_once(work, spaces)) <= {0, 16, 32}
    assert [restore(space, TOKENS).tokens for space in spaces] == [32] * WORKERS
