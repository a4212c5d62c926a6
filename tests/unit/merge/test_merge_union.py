"""Whatever two directories hold, the union holds every prefix of either."""

from __future__ import annotations

import shutil

from core_support import INFO, open_store, prompt, restore
from gc_support import TENANT, check_valid, manifests, publish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import NamespaceInfo
from kvstore.manifest import decode
from kvstore.merge import merge


@st.composite
def stores(draw):
    """For each of two directories: conversations of a few beginnings, how each was cut, and what it lost."""
    return [
        [
            (
                draw(st.sampled_from([0, 5, 16, 21])),
                draw(st.integers(0, 1)),
                draw(st.integers(22, 40)),
                draw(st.sampled_from([INFO, TENANT])),
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        for _ in range(2)
    ]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stores(), st.booleans(), st.data())
def test_every_prefix_of_either_is_in_the_union(tmp_path, found, squeeze, data):
    for name in "ab":
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    known: list[tuple[NamespaceInfo, list[int]]] = []
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        for store, conversations in zip((a, b), found, strict=True):
            for branch, seed, length, info in conversations:
                tokens = [*prompt(branch), *prompt(length - branch, seed)]
                publish(store.namespace(info), tokens)
                known.append((info, tokens))
        if squeeze and manifests(a.path):
            # Some leaf goes, as under a budget.
            chosen = data.draw(st.sampled_from(manifests(a.path)))
            manifest = decode(chosen.read_bytes())
            if not any(decode(path.read_bytes()).parent == manifest.key for path in manifests(a.path)):
                chosen.unlink()
        before = [max(restore(store.namespace(info), tokens).tokens for store in (a, b)) for info, tokens in known]
        report = merge(a.context, b.context)
        assert (report.damaged, report.without_parent, report.skipped, report.error) == (0, 0, 0, "")
        after = [restore(b.namespace(info), tokens).tokens for info, tokens in known]
        assert all(new >= old for new, old in zip(after, before, strict=True))
        check_valid(b.path)
        assert {path.name for path in manifests(b.path)} >= {path.name for path in manifests(a.path)}
