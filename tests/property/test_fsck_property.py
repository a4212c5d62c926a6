"""Whatever happens to any file: a repair ends it, costs nothing that is whole, and never lets a wrong byte through."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

import pytest
from core_support import INFO, open_store
from fsck_support import GROWN, LATER, LONG, OTHER, PROMPTS, make, match_of, refs, restored, run
from gc_support import TENANT, publish, space_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import NamespaceInfo
from kvstore.fsck import ExitCode
from kvstore.layout import Layout

WAYS = [(tokens, INFO) for tokens in (*PROMPTS, GROWN[:25], LONG[:32], LONG[:16])] + [(LONG, TENANT)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("sound") / "cache")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return (folder / f"{number}" / "cache" for number in count())


def objects(root: Path) -> list[Path]:
    """Everything that may be damaged: objects, descriptions and the tag; not kvstore.json, which is a refusal."""
    below = [path for part in ("objects", "namespaces") for path in (root / part).rglob("*") if path.is_file()]
    return [*sorted(below), root / "CACHEDIR.TAG"]


damages = st.tuples(
    st.sampled_from(["flip", "cut", "extend", "zero", "remove", "swap", "link", "pipe"]),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)


def inflict(root: Path, damage: tuple[str, int, int]) -> set[Path]:
    """Do one thing to one file, and return what is not what it was."""
    how, which, where = damage
    paths = [path for path in objects(root) if path.is_file() and not path.is_symlink()]
    path = paths[which % len(paths)]
    data = path.read_bytes()
    at = where % max(len(data), 1)
    if how == "swap":
        other = paths[where % len(paths)]
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return {path, other}
    if how == "flip" and data:
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << (where % 8))]) + data[at + 1 :])
    elif how == "zero":
        path.write_bytes(data[:at] + bytes(len(data) - at))
    elif how == "extend":
        path.write_bytes(data + b"\0" * (at + 1))
    elif how == "cut":
        os.truncate(path, at)
    else:
        path.unlink()
        if how == "link":
            path.symlink_to("/dev/zero")
        elif how == "pipe":
            os.mkfifo(path)
    return {path}


def read(path: Path) -> bytes | None:
    """A regular file's content."""
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None


def files_of(root: Path, tokens: list[int], info: NamespaceInfo) -> set[Path]:
    """All files that a prompt's restore needs."""
    found = set()
    for step in match_of(root, tokens, info).steps:
        found |= {step.path, *(Layout(root).block(ref.digest) for ref in refs(step.path))}
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(damages, min_size=1, max_size=3), st.sampled_from([0, LATER]))
def test_any_damage(sound, runs, several, late):
    root = next(runs)
    shutil.copytree(sound, root)
    needs = [(tokens, info, files_of(root, tokens, info)) for tokens, info in WAYS]
    before = {path: path.read_bytes() for path in objects(root)}
    for damage in several:
        inflict(root, damage)
    touched = {path for path, data in before.items() if read(path) != data}

    report = run(root, late=late, read_data=True, repair=True)
    assert report.error == ""
    assert report.exit_code in (ExitCode.CLEAN, ExitCode.CORRECTED)
    assert run(root, late=late, read_data=True).exit_code == ExitCode.CLEAN
    with open_store(root, None) as store:
        for tokens, info, files in needs:
            found = restored(space_of(store, info), tokens)
            assert found == len(tokens) or files & touched
        # Computed again, everything is there again, and nothing of what was set aside is in the way.
        space = space_of(store)
        publish(space, LONG)
        publish(space, GROWN, 0, 16, 25, 30)
        publish(space, OTHER)
        assert [restored(space, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
    assert run(root, late=late, read_data=True).exit_code == ExitCode.CLEAN
    shutil.rmtree(root.parent)
