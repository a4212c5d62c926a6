"""A manifest of a scan: one that cannot be served from where it lies is refused, and stays behind in a merge."""

from __future__ import annotations

import pytest
from core_support import open_store
from fsck_damage import other_interval, other_namespace, other_rungs, parentless_start
from fsck_support import make

from kvstore.errors import DamagedManifestError
from kvstore.merge import merge
from kvstore.scan import nodes
from kvstore.stored import load
from kvstore.walk import Tally


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (other_rungs, "it is the manifest of another prefix than its name says"),
        (other_namespace, "it belongs to another namespace than its folder"),
        (other_interval, "its interval is 32 tokens, not 16"),
        (parentless_start, "it begins at token 0 but does not continue the namespace's root"),
    ],
)
def test_what_does_not_belong_there_is_refused(tmp_path, lie, said):
    path = lie(make(tmp_path / "s"))
    with open_store(tmp_path / "s", None) as store, open_store(tmp_path / "target") as target:
        layout = store.context.layout
        (file,) = (file for file in nodes(layout, Tally()) if file.path(layout) == path)
        with pytest.raises(DamagedManifestError, match=said):
            load(store.context, file)
        report = merge(store.context, target.context)
        assert [sentence for sentence in report.problems if said in sentence and str(path) in sentence]
        assert not (target.path / path.relative_to(store.path)).exists()
