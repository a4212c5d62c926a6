"""`kvstore repack`."""

from __future__ import annotations

import os

import pytest
from core_support import INFO, prompt
from gc_support import blocks, manifests
from upkeep_support import counts, flip, forget_tails, grow, invoke, invoke_json, refs, rest

from kvstore import Store
from kvstore.repack import repack
from kvstore.scan import scan

TOKENS = prompt(40)


def test_the_command_joins_and_says_so(cold):
    code, out, err = invoke("repack", cold.path)
    assert (code, err) == (0, "")
    assert out.startswith("Joined 7 blocks of 3 nodes into 3 (")
    assert counts(cold.path) == {16: [16], 32: [16], 40: [8]}
    assert invoke("repack", cold.path)[1] == "Joined nothing.\n"


def test_the_command_in_json_and_dry(cold):
    document = invoke_json("repack", cold.path, "--dry-run", "--namespace", cold.namespace(INFO).id[:6])
    assert (document["directory"], document["nodes"], document["dry_run"]) == (str(cold.path), 3, True)
    assert counts(cold.path)[16] == [5, 6, 5]
    for path in manifests(cold.path):
        os.utime(path)
    assert invoke_json("repack", cold.path)["warm"] == 3
    assert invoke_json("repack", cold.path, "--older-than", "0s")["nodes"] == 3


def test_damage_is_warned_of_and_no_failure(cold):
    flip(cold.context.layout.block(refs(cold.path)[16][0].digest))
    code, out, err = invoke("repack", cold.path)
    assert code == 0
    assert "1 node was left alone because of damage." in out
    assert "digest does not match" in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "sentence", "exit_code"),
    [(["--older-than", "5"], "is not an age", 2), (["--namespace", "zz"], "no namespace begins with", 1)],
)
def test_mistakes_are_one_sentence(cold, options, sentence, exit_code):
    code, out, err = invoke("repack", cold.path, *options)
    assert (code, out) == (exit_code, "")
    assert sentence in err


def test_not_a_cache_directory(tmp_path):
    code, _, err = invoke("repack", tmp_path)
    assert code == 1
    assert "is not a cache directory" in " ".join(err.split())


def test_modes_of_a_shared_directory_are_kept(tmp_path):
    old = os.umask(0o002)
    try:
        with Store.open(tmp_path / "s", interval=16, shared=True) as store:
            grow(store.namespace(INFO), TOKENS, 5, 16)
            forget_tails(store.path)
            rest(store)
        assert invoke("repack", tmp_path / "s")[0] == 0
        assert {path.stat().st_mode & 0o777 for path in [*manifests(store.path), *blocks(store.path)]} == {0o664}
    finally:
        os.umask(old)


def test_the_scan_that_other_commands_use_sees_one_block_more_for_each(cold):
    before = len(scan(cold.context).blocks)
    repack(cold.context)
    assert len(scan(cold.context).blocks) == before + 3
