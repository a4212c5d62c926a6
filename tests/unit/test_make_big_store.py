"""The tool that makes big stores makes valid ones."""

from __future__ import annotations

import sys

import pytest
from core_support import open_store
from gc_support import check_valid, manifests

import make_big_store
from kvstore import NamespaceInfo
from kvstore.listing import listing


def test_a_big_store_is_a_valid_store(tmp_path, monkeypatch):
    arguments = ["make_big_store", str(tmp_path / "s"), "--nodes", "10", "--depth", "4", "--interval", "16", "--quiet"]
    monkeypatch.setattr(sys, "argv", arguments)
    make_big_store.main()
    check_valid(tmp_path / "s")
    assert len(manifests(tmp_path / "s")) == 10
    with open_store(tmp_path / "s", None) as store:
        found = listing(store.context)
        assert sorted(each.tokens for each in found.conversations) == [32, 64, 64]
        assert (found.damaged, found.foreign) == (0, 0)
        space = store.namespace(NamespaceInfo({"model": "big"}))
        tokens = b"".join(make_big_store.conversation_tokens(1, chunk, 16) for chunk in range(4))
        assert space.lookup(tokens).count == 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["full"], "is not an empty folder"),
        (["full/file"], "is not an empty folder"),
        (["new", "--interval", "15"], "from 16 to 65536"),
        (["new", "--interval", "65537"], "from 16 to 65536"),
        (["new", "--nodes", "0"], "must be positive"),
    ],
)
def test_a_mistake_is_said_and_nothing_is_made(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_big_store", *words])
    with pytest.raises(SystemExit) as stop:
        make_big_store.main()
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
