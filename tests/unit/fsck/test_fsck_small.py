"""The small files beside the objects, damaged one by one: found, set aside, and written again by their writers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from core_support import INFO, open_store
from fsck_support import LATER, LONG, codes, make, run, snapshot
from gc_support import DAY, TENANT, ahead, publish, space_of

from kvstore.fsck import ExitCode
from kvstore.gc import Policy, collect
from kvstore.quotas import read_quotas, write_quota
from kvstore.stats import StatsFile, fold, read_stats

SIZE = 1 << 40


@pytest.fixture
def root(tmp_path) -> Path:
    """A store with quotas, counters of two processes, and folded ones."""
    root = make(tmp_path / "cache")
    with open_store(root, None) as store:
        for namespace in (INFO.id, TENANT.id):
            write_quota(store.context, namespace, SIZE)
        for requests in (1, 2):
            counters = StatsFile(store.context)
            counters.add(requests=requests, read_bytes=1 << 62)
            assert counters.flush()
    (root / "locks" / "gc.lock").touch(0o600)
    return root


def quota(root: Path) -> Path:
    return root / "namespaces" / f"{INFO.id}.quota"


def stats(root: Path) -> Path:
    return min((root / "stats").iterdir())


def description(root: Path) -> Path:
    return root / "namespaces" / f"{INFO.id}.json"


def write(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def edit(old: bytes, new: bytes) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return act


def in_place_of(make_it: Callable[[Path], object]) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        path.unlink()
        make_it(path)

    return act


ODD = {
    "a pipe": in_place_of(os.mkfifo),
    "a link": in_place_of(lambda path: path.symlink_to("/etc/passwd")),
    "a folder": in_place_of(Path.mkdir),
}

DAMAGE: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object], str]] = {
    "no size": (quota, write(b"plenty\n"), "quota-damaged"),
    "nothing": (quota, write(b""), "quota-damaged"),
    "half a character": (quota, write(b"5Gi\xc3"), "quota-damaged"),
    "two sizes": (quota, write(b"5GiB\n6GiB\n"), "quota-damaged"),
    "a novel": (quota, write(b" " * 5000 + b"5GiB"), "quota-damaged"),
    "no JSON": (stats, write(b"{"), "stats-damaged"),
    "zeros": (stats, write(bytes(200)), "stats-damaged"),
    "cut": (stats, lambda path: os.truncate(path, 60), "stats-damaged"),
    "too large a file": (stats, lambda path: os.truncate(path, 2 << 20), "stats-damaged"),
    "a list": (stats, write(b"[1]"), "stats-damaged"),
    "no rows": (stats, write(b'{"format":1}'), "stats-damaged"),
    "a negative counter": (stats, edit(b'"requests":', b'"requests":-'), "stats-damaged"),
    "a counter of 2^63": (stats, edit(b'"read_bytes":', b'"read_bytes":9'), "stats-damaged"),
    "an old format": (stats, edit(b'"format":1', b'"format":0'), "stats-damaged"),
    "not even a description": (description, write(b"\xff"), "namespace-wrong"),
    "a description of nothing": (description, write(b"{}"), "namespace-wrong"),
    "a tag of something else": (lambda root: root / "CACHEDIR.TAG", write(b"hello"), "tag-wrong"),
    **{f"{name} for a quota": (quota, act, "not-a-file") for name, act in ODD.items()},
    **{f"{name} for counters": (stats, act, "not-a-file") for name, act in ODD.items()},
    **{f"{name} for a description": (description, act, "not-a-file") for name, act in ODD.items()},
}
NOTES = {"namespace-wrong", "tag-wrong"}


def test_what_is_right_is_no_finding(root):
    assert run(root).findings == ()
    with open_store(root, None) as store:
        fold(store.context)
        quota(root).write_bytes(b"  1.5 TB \n")
    assert run(root).findings == ()


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_set_aside(root, name):
    which, damage, code = DAMAGE[name]
    path = which(root)
    damage(path)
    inode = path.lstat().st_ino
    severity = "note" if code in NOTES or path == description(root) else "error"
    before = snapshot(root)
    report = run(root)
    assert [(found.severity, found.code, found.path) for found in report.findings] == [
        (severity, code, str(path.relative_to(root)))
    ]
    assert report.exit_code == (ExitCode.LEFT if severity == "error" else ExitCode.CLEAN)
    assert snapshot(root) == before, "a check without repair changed something"

    repaired = run(root, repair=True)
    assert [found.corrected for found in repaired.findings] == [True]
    (aside,) = (root / "quarantine").iterdir()
    assert aside.lstat().st_ino == inode
    assert aside.name.endswith(f".{path.name}")
    left = {"namespace-undescribed"} if path == description(root) else set()
    assert {found.code for found in run(root).findings} == left
    # Everything else is where it was.
    with open_store(root, None) as store:
        assert read_quotas(store.context).sizes.get(TENANT.id) == SIZE
        assert read_stats(store.context).total("requests") in {1, 2, 3}


@pytest.mark.parametrize("which", [quota, stats, description])
def test_what_was_set_aside_goes_like_any_other(root, which):
    """kvstore knows it for its own: it is not foreign, and goes after thirty days when room is needed."""
    which(root).write_bytes(b"\xff")
    assert run(root, repair=True).findings[0].corrected
    (aside,) = (root / "quarantine").iterdir()
    with ahead(root, LATER + 31 * DAY) as store:
        report = collect(store.context, Policy(size=0, spare=0))
    assert (report.quarantined, report.foreign, report.error) == (1, 0, "")
    assert not aside.exists()


def test_what_was_set_aside_is_written_again(root):
    description(root).write_bytes(b"{}")
    with open_store(root, None) as store:
        counters = StatsFile(store.context)
        counters.add(requests=5)
        assert counters.flush()
        counters.path.write_bytes(b"{}")
        run(root, repair=True)
        publish(space_of(store), [7, *LONG])
        counters.add(requests=1)
        assert counters.flush()
        assert read_stats(store.context).total("requests") == 9
    assert run(root).findings == ()


def test_a_description_of_a_namespace_without_a_node_is_looked_at_too(root):
    path = root / "namespaces" / f"{'0' * 32}.json"
    shutil.copy(description(root), path)
    assert codes(run(root)) == [("note", "namespace-wrong")]


@pytest.mark.parametrize(
    ("which", "code", "severity"), [(stats, "stats-newer", "error"), (description, "namespace-newer", "note")]
)
def test_what_a_newer_kvstore_wrote_is_left_to_it(root, which, code, severity):
    path = which(root)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2').replace(b'"format": 1', b'"format": 2'))
    before = path.read_bytes()
    report = run(root, repair=True)
    assert codes(report) == [(severity, code)]
    assert not report.findings[0].corrected
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["publish.lock", "gc.lock"])
@pytest.mark.parametrize("odd", ODD)
def test_something_else_where_a_lock_belongs_is_for_a_person(root, name, odd):
    path = root / "locks" / name
    ODD[odd](path)
    report = run(root)
    assert codes(report) == [("error", "lock-blocked")]
    assert report.exit_code == ExitCode.LEFT


def test_a_lock_that_nobody_took_yet_is_none_of_its_business(root):
    (root / "locks" / "gc.lock").unlink()
    assert run(root).findings == ()


def test_a_quota_that_is_written_again_meanwhile_stays(root):
    """Somebody corrects it between the check and the repair."""

    def correct(point: str) -> None:
        if point == "repairing":
            with open_store(root, None) as store:
                write_quota(store.context, INFO.id, 7)

    quota(root).write_bytes(b"much")
    report = run(root, repair=True, pause=correct)
    assert report.findings[0].repair == "left, because it was replaced meanwhile"
    assert quota(root).read_bytes() == b"7\n"
