"""A digit of kvstore.json that changed is a fault of that file, and costs nothing that is whole."""

from __future__ import annotations

import json

import pytest
from core_support import open_store, restore
from fsck_support import LONG, PROMPTS, codes, make, put, run
from gc_support import space_of

from kvstore.fsck import ExitCode
from kvstore.keys import node_key, pack_tokens, root_key
from kvstore.manifest import Manifest


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "cache")


def with_interval(root, interval: int) -> None:
    config = root / "kvstore.json"
    document = json.loads(config.read_text())
    assert document["interval"] == 16
    config.write_text(json.dumps({**document, "interval": interval}))


@pytest.mark.parametrize("wrong", [17, 18, 48, 1016, 65536])
def test_it_is_found_and_put_back(root, wrong):
    before = json.loads((root / "kvstore.json").read_text())
    with_interval(root, wrong)
    report = run(root)
    assert ("error", "interval-wrong") in codes(report)
    assert report.errors == 1
    assert report.exit_code == ExitCode.LEFT
    (finding,) = (each for each in report.findings if each.severity == "error")
    assert finding.path == "kvstore.json"
    assert f"says {wrong} tokens a chunk" in finding.sentence
    assert "were saved with 16" in finding.sentence
    report = run(root, repair=True)
    assert report.exit_code == ExitCode.CORRECTED
    assert not list((root / "quarantine").iterdir())
    assert json.loads((root / "kvstore.json").read_text()) == before
    assert run(root, read_data=True).errors == 0
    with open_store(root, None, create=False) as store:
        for tokens in PROMPTS:
            assert restore(space_of(store), tokens).tokens == len(tokens)


def test_a_smaller_interval_makes_manifests_too_long(tmp_path):
    """2048 that became 20: no manifest can be read as one of that interval, and none is set aside."""
    from core_support import spans

    root = tmp_path / "cache"
    tokens = [*range(1, 401)]
    with open_store(root, 200) as store:
        space_of(store).publish(tokens, spans(tokens, 0, 200, 400))
    config = root / "kvstore.json"
    config.write_text(config.read_text().replace("200", "20"))
    assert ("error", "interval-wrong") in codes(run(root))
    assert run(root, repair=True).exit_code == ExitCode.CORRECTED
    with open_store(root, None, create=False) as store:
        assert restore(space_of(store), tokens).tokens == 400


def test_one_manifest_of_the_directory_s_interval_is_enough_to_believe_it(root):
    with_interval(root, 32)
    with open_store(root, None, create=False) as store:
        from core_support import spans

        space_of(store).publish(LONG, spans(LONG, 0, 32, 40))
    report = run(root)
    assert ("error", "interval-wrong") not in codes(report)
    assert ("error", "manifest-interval") in codes(report)


@pytest.mark.parametrize("interval", [1, 5, 15])
def test_an_interval_that_no_directory_can_have_is_not_put_in(tmp_path, interval):
    """All manifests forged: with theirs in kvstore.json, nothing would open the directory any more."""
    root = tmp_path / "cache"
    with open_store(root) as store:
        fingerprint = space_of(store)._space.fingerprint
        (store.context.layout.nodes / space_of(store).id).mkdir(0o700)
    tokens = pack_tokens(range(interval))
    parent = root_key(fingerprint, interval)
    put(root, Manifest("kv", fingerprint, parent, node_key(parent, tokens), 0, interval, tokens, (), 1, "x"))
    report = run(root, repair=True)
    assert codes(report) == [("error", "manifest-interval"), ("note", "namespace-undescribed")]
    assert report.exit_code == ExitCode.CORRECTED
    open_store(root, 16, create=False).close()


def test_an_empty_directory_has_nothing_to_say(tmp_path):
    root = tmp_path / "cache"
    with open_store(root):
        pass
    with_interval(root, 48)
    assert run(root).errors == 0
