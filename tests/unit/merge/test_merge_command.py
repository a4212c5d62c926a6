"""`kvstore merge`."""

from __future__ import annotations

import time

import pytest
from core_support import INFO, open_store, restore, span
from gc_support import DAY, HOUR, TENANT, set_used
from merge_support import ONE, THREE, TWO, by_end
from upkeep_support import assert_restores, flip, invoke, invoke_json, snapshot

from kvstore import Store
from kvstore.gc import Policy, collect
from kvstore.manifest import decode
from kvstore.merge import merge


def test_the_command_merges_and_says_so(pair):
    a, b = pair
    code, out, err = invoke("merge", a.path, b.path)
    assert code == 0
    # A word about the place: where tests run is a temporary folder, or in memory.
    assert [line for line in err.splitlines() if not line.startswith(f"kvstore: {b.path} is ")] == []
    assert out.startswith("Copied 4 nodes, 1 boundary state, 1 tokenization, 1 namespace description, 5 blocks of ")
    assert_restores(b.path, [(INFO, ONE), (INFO, TWO), (TENANT, THREE)])
    assert f"Copied nothing into {b.path}." in invoke("merge", a.path, b.path)[1]


def test_the_command_in_json_and_dry(pair):
    a, b = pair
    before = snapshot(b.path)
    document = invoke_json("merge", a.path, b.path, "--dry-run")
    assert (document["source"], document["target"], document["nodes"]) == (str(a.path), str(b.path), 4)
    assert snapshot(b.path) == before


def test_damage_is_warned_of_on_stderr_and_no_failure(pair):
    a, b = pair
    flip(a.context.layout.block(decode(by_end(a.path)[40].read_bytes()).blocks[0].digest))
    code, out, err = invoke("merge", a.path, b.path)
    assert code == 0
    assert "2 damaged files left out." in out
    assert "digest does not match its bytes" in " ".join(err.split())


def test_what_cannot_be_merged_is_one_sentence(pair, tmp_path):
    a, b = pair
    with open_store(tmp_path / "wide", 32) as wide:
        other = wide.path
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "newer" / "kvstore.json").write_text('{"format": 2, "interval": 16}')
    before = [snapshot(store.path) for store in pair]
    for source, target, sentence in (
        (a.path, a.path, "are the same directory"),
        (a.path, other, "only directories of one interval can be merged"),
        (tmp_path / "empty", b.path, "is not a cache directory"),
        (a.path, tmp_path / "full", "holds other files (x) and is not a cache directory"),
        (a.path, tmp_path / "full" / "x", "is a file; name a directory"),
        (a.path, a.path / "inside", "lies inside"),
        (a.path, tmp_path / "newer", "has format 2"),
        (tmp_path / "missing", b.path, f"there is no {tmp_path / 'missing'} "),
    ):
        for options in ([], ["--dry-run"]):
            code, out, err = invoke("merge", source, target, *options)
            assert (code, out) == (1, ""), sentence
            assert sentence in " ".join(err.split())
            assert err.count("kvstore: ") == 1
    assert [snapshot(store.path) for store in pair] == before
    assert list((tmp_path / "empty").iterdir()) == []
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["missing", "empty", "deep/missing"])
def test_a_target_that_is_not_there_is_made_like_the_source(tmp_path, name, shared):
    (tmp_path / "empty").mkdir()
    target = tmp_path / name
    with Store.open(tmp_path / "a", interval=32, shared=shared) as a:
        a.namespace(INFO).publish(ONE, [span(ONE, 0, 32), span(ONE, 32, 40)])
        document = invoke_json("merge", a.path, target, "--dry-run")
        assert (document["made"], document["nodes"]) == (True, 2)
        assert "Would make the cache directory" in invoke("merge", a.path, target, "--dry-run")[1]
        assert not target.exists() or not list(target.iterdir())
        code, out, _ = invoke("merge", a.path, target)
    assert code == 0
    assert out.startswith(f"Made the cache directory {target} with chunks of 32 tokens")
    assert ("shared by several users" in out) is shared
    with Store.open(target, create=False) as made:
        assert (made.interval, made.context.fs.private) == (32, not shared)
        assert restore(made.namespace(INFO), ONE).tokens == 40
    assert invoke_json("merge", tmp_path / "a", target)["made"] is False


def test_the_default_target_is_said_with_its_reason(pair, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "full"))
    assert "because KVSTORE_DIR names it" in " ".join(invoke("merge", pair[0].path)[2].split())


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_made_where_only_a_variable_names_a_target(pair, tmp_path, monkeypatch, there, options):
    """It may be the mount point of a volume that is not mounted now."""
    target = tmp_path / "mnt" / "kv"
    if there:
        target.mkdir(parents=True)
    monkeypatch.setenv("KVSTORE_DIR", str(target))
    code, out, err = invoke("merge", pair[0].path, *options)
    assert (code, out) == (1, "")
    sentence = f"{target} is not a cache directory; check the path (looked there because KVSTORE_DIR names it)"
    assert sentence in " ".join(err.split())
    assert list(tmp_path.rglob("mnt/*")) == ([target] if there else [])
    assert not there or list(target.iterdir()) == []


def test_a_used_node_keeps_its_place_in_the_queue(pair):
    """What was used long ago in the source goes first in the target too."""
    a, b = pair
    set_used(a, a.namespace(TENANT), THREE, 50 * 86400)
    b.context.recent.clear()
    merge(a.context, b.context)
    with open_store(b.path, None, clock=lambda: time.time_ns() + HOUR) as later:
        report = collect(later.context, Policy(older_than_ns=20 * DAY))
    assert report.nodes == 2
    with open_store(b.path, None) as store:
        assert restore(store.namespace(TENANT), THREE).tokens == 0
        assert restore(store.namespace(INFO), ONE).tokens == 40
