"""Whatever a directory holds, it restores the same afterwards."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from core_support import INFO, open_store, prompt, restore
from gc_support import check_valid, manifests, named
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upkeep_support import grow, named_bytes, rest

from kvstore import MissingParentError
from kvstore.manifest import decode
from kvstore.repack import repack


@st.composite
def conversations(draw):
    """Conversations that share beginnings: each is a prompt of a few tokens' variety, cut into turns, some decoded."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        branch = draw(st.sampled_from([0, 5, 16, 21]))
        tokens = [*prompt(branch), *prompt(40 - branch, draw(st.integers(0, 1)))]
        length = draw(st.integers(branch + 1, 40))
        cuts = draw(st.sets(st.integers(1, length), max_size=8))
        borders = sorted({*cuts, *range(16, length + 1, 16), length, *([branch] if branch else [])})
        found.append((tokens, borders, draw(st.text("d.", min_size=len(borders), max_size=len(borders)))))
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations(), st.data())
def test_whatever_is_stored_restores_the_same_and_takes_no_more(tmp_path, found, data):
    shutil.rmtree(tmp_path / "s", ignore_errors=True)
    with open_store(tmp_path / "s") as store:
        space = store.namespace(INFO)
        for tokens, borders, decoded in found:
            # Another conversation may have other borders in this chunk.
            with suppress(MissingParentError):
                grow(space, tokens, *borders, decode=decoded)
        # Some tails go, as under a budget.
        tails = [path for path in manifests(store.path) if "-16-" not in path.name]
        for path in data.draw(st.sets(st.sampled_from(tails), max_size=len(tails))) if tails else ():
            path.unlink()
        rest(store)
        known = [tokens for tokens, *_ in found]
        before = [restore(space, tokens).tokens for tokens in known]
        flags = {path.name: _flags(path) for path in manifests(store.path)}
        size, names = named_bytes(store.path), len(named(store.path))
        rest(store)
        report = repack(store.context)
        assert (report.damaged, report.skipped, report.error) == (0, 0, "")
        assert [restore(space, tokens).tokens for tokens in known] == before
        assert {path.name: _flags(path) for path in manifests(store.path)} == flags
        assert named_bytes(store.path) <= size
        assert len(named(store.path)) == names - report.replaced + report.written
        check_valid(store.path)
        rest(store)
        assert repack(store.context).nodes == 0


def _flags(path: Path) -> list[bool]:
    """For each token of a node, whether its KV was made by decoding."""
    return [ref.decode for ref in decode(path.read_bytes()).blocks for _ in range(ref.count)]
