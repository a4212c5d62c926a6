"""A digit of kvstore.json that changed is a fault of that file, and costs nothing that is whole."""

from __future__ import annotations

import json

import pytest
from core_support import open_store, restore, spans
from fsck_support import LONG, PROMPTS, codes, make, put, run
from gc_support import manifests, space_of

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
    assert codes(report) == [("error", "interval-wrong")], "and no word of blocks that nothing names"
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


@pytest.mark.parametrize("wrong", [17, 32])
def test_what_was_saved_with_another_interval_is_whole_and_stays(root, wrong):
    """The digit was wrong for a while, and a prompt was saved meanwhile: nobody but a person knows which is right."""
    saved = manifests(root)
    config = (root / "kvstore.json").read_bytes()
    with_interval(root, wrong)
    with open_store(root, None, create=False) as store:
        space_of(store).publish(LONG, spans(LONG, *range(0, 40, wrong), 40))
    meanwhile = len(manifests(root)) - len(saved)
    for repair in (False, True):
        report = run(root, repair=repair)
        found = [each for each in report.findings if each.severity == "error"]
        assert {each.code for each in found} == {"manifest-interval"}
        assert {root / each.path for each in found} == set(saved)
        assert report.exit_code == ExitCode.LEFT
        assert "orphans" not in {each.code for each in report.findings}, "gc keeps what they name"
        for each in found:
            assert f"saved with 16 tokens a chunk, like {len(saved)} manifests here" in each.sentence
            assert f"says {wrong}, like {meanwhile} manifests here" in each.sentence
    assert not list((root / "quarantine").iterdir())
    with open_store(root, None, create=False) as store:
        assert restore(space_of(store), LONG).tokens == 40
    (root / "kvstore.json").write_bytes(config)
    with open_store(root, None, create=False) as store:
        for tokens in PROMPTS:
            assert restore(space_of(store), tokens).tokens == len(tokens)


def test_what_is_published_with_another_interval_meanwhile_stays_too(root):
    """By a server that has had the directory open since before; a parent is missing, so names are listed again."""
    right = (root / "kvstore.json").read_bytes()
    with_interval(root, 32)
    wrong = (root / "kvstore.json").read_bytes()
    with open_store(root, None, create=False) as store:
        space_of(store).publish(LONG, spans(LONG, 0, 32, 40))
        space_of(store).lookup(LONG).steps[0].path.unlink()
    came = []

    def publish(point: str) -> None:
        if point == "read":
            before = manifests(root)
            (root / "kvstore.json").write_bytes(right)
            with open_store(root, None, create=False) as store:
                space_of(store).publish([7] * 20, spans([7] * 20, 0, 16, 20))
            (root / "kvstore.json").write_bytes(wrong)
            came.extend(path for path in manifests(root) if path not in before)

    report = run(root, repair=True, pause=publish)
    found = {root / each.path: each.code for each in report.findings}
    assert [found[path] for path in came] == ["manifest-interval"] * 2
    assert all(path.exists() for path in came)


def test_manifests_of_several_other_intervals_stay_too(root):
    """None has that of kvstore.json, and they do not agree on another one."""
    with_interval(root, 32)
    with open_store(root, None, create=False) as store:
        space_of(store).publish(LONG, spans(LONG, 0, 32, 40))
    config = root / "kvstore.json"
    config.write_text(config.read_text().replace("32", "48"))
    before = manifests(root)
    report = run(root, repair=True)
    assert {code for severity, code in codes(report) if severity == "error"} == {"manifest-interval"}
    assert report.exit_code == ExitCode.LEFT
    assert manifests(root) == before


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
