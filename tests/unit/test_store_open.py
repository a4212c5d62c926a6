"""Opening a cache directory: what is created, what is refused, and that refusing changes nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import pytest
from core_support import FAST, INFO, files, open_store, prompt, restore, spans

from kvstore import (
    DEFAULT_INTERVAL,
    Durability,
    FileSystem,
    FormatVersionError,
    IntervalMismatchError,
    KVStoreError,
    NotACacheDirectoryError,
    Store,
    UnavailableError,
)


def tree(root: Path) -> dict[str, tuple]:
    """Everything below root that a change would change."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_ino,
            path.lstat().st_mtime_ns,
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted([root, *root.rglob("*")])
    }


def test_a_new_directory_is_the_tree_of_the_format_page(tmp_path):
    open_store(tmp_path / "new" / "cache", interval=None)
    folders = {str(p.relative_to(tmp_path / "new" / "cache")) for p in (tmp_path / "new").rglob("*") if p.is_dir()}
    assert folders - {"."} == {
        "objects",
        "objects/nodes",
        "objects/blocks",
        "objects/tokens",
        "namespaces",
        "tmp",
        "locks",
        "quarantine",
    }
    assert set(files(tmp_path / "new" / "cache")) == {"CACHEDIR.TAG", "kvstore.json"}


def test_the_config_says_format_and_interval(tmp_path):
    open_store(tmp_path / "cache", interval=512, clock=lambda: 1_700_000_000_500_000_000)
    config = json.loads((tmp_path / "cache" / "kvstore.json").read_text())
    assert (config["format"], config["interval"], config["created"]) == (1, 512, 1_700_000_000.5)
    assert config["writer"].startswith("kvstore ")


def test_the_tag_is_that_of_the_cache_directory_specification(tmp_path):
    open_store(tmp_path / "cache")
    assert (tmp_path / "cache" / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_creation_leaves_no_staging_behind(tmp_path):
    open_store(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache" / "tmp") == []


def test_everything_made_is_private_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        store = Store.open(tmp_path / "above" / "cache", interval=16)
        store.namespace(INFO).publish(prompt(20), spans(prompt(20), 0, 16, 20))
    finally:
        os.umask(before)
    paths = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


def test_an_empty_folder_becomes_a_cache_directory(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".DS_Store").write_bytes(b"finder")
    assert open_store(tmp_path / "cache").interval == 16


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store(Path("~/cache")).path == tmp_path / "cache"


def test_a_creation_that_was_cut_off_is_finished(tmp_path):
    open_store(tmp_path / "cache")
    (tmp_path / "cache" / "kvstore.json").unlink()
    (tmp_path / "cache" / "tmp" / "left over").mkdir()
    assert open_store(tmp_path / "cache").interval == 16


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    before = tree(tmp_path)
    with pytest.raises(NotACacheDirectoryError, match=r"cat\.jpg"):
        open_store(tmp_path / "photos")
    assert tree(tmp_path) == before


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(NotACacheDirectoryError, match="is a file"):
        open_store(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"text"


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(KVStoreError):
        open_store(tmp_path / "file" / "cache")


def test_without_create_nothing_is_made(tmp_path):
    with pytest.raises(NotACacheDirectoryError, match="check the path"):
        open_store(tmp_path / "cache", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format_is_refused_and_untouched(tmp_path):
    with open_store(tmp_path / "cache") as store:
        store.namespace(INFO).publish(prompt(16), spans(prompt(16), 0, 16))
    config = tmp_path / "cache" / "kvstore.json"
    config.write_text(json.dumps({"format": 2, "interval": 16, "something": "new"}))
    shutil.rmtree(tmp_path / "cache" / "locks")
    before = tree(tmp_path)
    for create in (True, False):
        with pytest.raises(FormatVersionError, match=r"format 2.*upgrade"):
            open_store(tmp_path / "cache", create=create)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("number", [0, -1])
def test_a_format_that_never_was_is_no_reason_to_upgrade(tmp_path, number):
    open_store(tmp_path / "cache").close()
    (tmp_path / "cache" / "kvstore.json").write_text(json.dumps({"format": number, "interval": 16}))
    for create in (True, False):
        with pytest.raises(NotACacheDirectoryError, match=rf"says format {number}, which no kvstore ever wrote"):
            open_store(tmp_path / "cache", create=create)


def test_the_interval_is_that_of_the_creation(tmp_path):
    open_store(tmp_path / "cache", interval=64)
    assert open_store(tmp_path / "cache", interval=None).interval == 64
    assert open_store(tmp_path / "cache", interval=64).interval == 64
    with pytest.raises(IntervalMismatchError, match=r"64 tokens, not 128"):
        open_store(tmp_path / "cache", interval=128)


def test_the_default_interval_is_2048(tmp_path):
    assert open_store(tmp_path / "cache", interval=None).interval == DEFAULT_INTERVAL == 2048


@pytest.mark.parametrize("interval", [0, -1, 15, 65537, 64.0, "64", True, Fraction(64)])
def test_an_impossible_interval_is_refused_before_anything_is_made(tmp_path, interval):
    with pytest.raises(IntervalMismatchError, match="from 16 to 65536"):
        open_store(tmp_path / "cache", interval=interval)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("durability", Durability)
def test_durability_may_be_a_word(tmp_path, durability):
    """A word that is not the enumeration's member would be as good as barrier, in silence."""
    for _ in ("created", "opened"):
        with Store.open(tmp_path / "cache", durability=str(durability.value)) as store:
            assert store.context.fs.durability is durability
    assert FileSystem(str(durability.value)).durability is durability


def test_an_unknown_durability_is_refused_before_anything_is_made(tmp_path):
    for durability in ("fully", "FULL", None, []):
        with pytest.raises(KVStoreError, match="must be one of none, barrier, full"):
            Store.open(tmp_path / "cache", durability=durability)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "1",
        "{}",
        '{"format": "1", "interval": 16}',
        '{"format": 1}',
        '{"format": 1, "interval": "16"}',
        '{"format": 1, "interval": 15}',
        '{"format": 1, "interval": 1e300}',
        '{"format": 1, "interval": true}',
        "[" * 60000,
        "\xff",
    ],
    ids=lambda text: text[:30],
)
def test_an_unreadable_config_is_refused_and_left_alone(tmp_path, text):
    open_store(tmp_path / "cache")
    (tmp_path / "cache" / "kvstore.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(NotACacheDirectoryError, match="restore it from a copy"):
        open_store(tmp_path / "cache")
    assert (tmp_path / "cache" / "kvstore.json").read_bytes() == text.encode("latin-1")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "huge"])
def test_a_config_that_is_no_small_regular_file_is_refused_without_blocking(tmp_path, kind):
    open_store(tmp_path / "cache")
    config = tmp_path / "cache" / "kvstore.json"
    config.rename(tmp_path / "real.json")
    if kind == "fifo":
        os.mkfifo(config)
    elif kind == "folder":
        config.mkdir()
    elif kind == "link":
        config.symlink_to(tmp_path / "real.json")
    else:
        config.write_bytes(b" " * (1 << 20))
    with pytest.raises(KVStoreError):
        open_store(tmp_path / "cache")


@dataclass(frozen=True)
class Refusing(FileSystem):
    """A file system that answers every creation of a folder with one error."""

    code: int = errno.ENOSPC

    def make_dir(self, path: Path) -> bool:
        raise OSError(self.code, os.strerror(self.code), str(path))


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error; check the disk"),
    ],
)
def test_what_the_system_refuses_becomes_one_sentence_with_advice(tmp_path, code, advice):
    with pytest.raises(UnavailableError, match=advice) as caught:
        Store.open(tmp_path / "cache", fs=Refusing(code=code))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tmp", "objects", "locks"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path, name):
    with open_store(tmp_path / "s") as store:
        shutil.rmtree(store.path / name)
        (store.path / name).write_bytes(b"a file")
        with pytest.raises(UnavailableError, match=f": {name} in it: .* where a folder should be; move it away$"):
            store.namespace(INFO).publish(prompt(16), spans(prompt(16), 0, 16))


def test_two_creations_at_once_agree(tmp_path):
    barrier = threading.Barrier(8)

    def create(interval: int) -> int | type[KVStoreError]:
        barrier.wait()
        try:
            return open_store(tmp_path / "cache", interval=interval).interval
        except IntervalMismatchError as error:
            return type(error)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, [16, 17] * 4))
    winner = open_store(tmp_path / "cache", interval=None).interval
    assert results == [n if n == winner else IntervalMismatchError for n in [16, 17] * 4]


@dataclass(frozen=True)
class Late(FileSystem):
    """Another process finishes the creation right after this one has looked for kvstore.json."""

    looked: list[Path] = field(default_factory=list)

    def read_file(self, path, limit):
        self.looked.append(path)
        if len(self.looked) == 1:
            open_store(path.parent, interval=32)
            raise FileNotFoundError(errno.ENOENT, "not there yet", str(path))
        return super().read_file(path, limit)


def test_a_creation_that_another_process_finishes_first_is_opened(tmp_path):
    assert open_store(tmp_path / "cache", interval=None, fs=Late()).interval == 32


def test_a_copy_without_its_empty_folders_works(tmp_path):
    """Many copying and syncing tools drop folders without files."""
    tokens = prompt(40)
    with open_store(tmp_path / "cache") as store:
        store.namespace(INFO).publish(tokens, spans(tokens, 0, 16))
    for folder in ("tmp", "locks", "quarantine", "namespaces", "objects/tokens"):
        shutil.rmtree(tmp_path / "cache" / folder)
    with open_store(tmp_path / "cache") as store:
        space = store.namespace(INFO)
        assert restore(space, tokens).tokens == 16
        store.check_writable()
        space.publish(tokens, spans(tokens, 16, 32, 40))
        assert restore(space, tokens).tokens == 40


def test_opening_without_create_makes_no_folders_either(tmp_path):
    open_store(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / "quarantine")
    before = tree(tmp_path)
    open_store(tmp_path / "cache", create=False)
    assert tree(tmp_path) == before


def test_a_directory_that_cannot_be_written_still_serves(tmp_path):
    tokens = prompt(16)
    with open_store(tmp_path / "cache") as store:
        store.namespace(INFO).publish(tokens, spans(tokens, 0, 16))
    shutil.rmtree(tmp_path / "cache" / "quarantine")
    store = Store.open(tmp_path / "cache", fs=Refusing(code=errno.EROFS))
    assert restore(store.namespace(INFO), tokens).tokens == 16


def test_check_writable_leaves_nothing(tmp_path):
    with open_store(tmp_path / "cache") as store:
        before = files(tmp_path / "cache")
        store.check_writable()
        assert not [path for path in (tmp_path / "cache" / "tmp").rglob("*") if path.is_file()]
        assert files(tmp_path / "cache") == before
    assert os.listdir(tmp_path / "cache" / "tmp") == []


def test_check_writable_says_what_is_wrong(tmp_path):
    open_store(tmp_path / "cache")
    store = Store.open(tmp_path / "cache", fs=Refusing(code=errno.EROFS))
    with pytest.raises(UnavailableError, match="read-only"):
        store.check_writable()


def test_closing_removes_this_process_staging_and_nobody_elses(tmp_path):
    one, other = open_store(tmp_path / "cache"), open_store(tmp_path / "cache")
    for store in (one, other):
        os.close(store.context.staging.create()[0])
    one.close()
    assert len(os.listdir(tmp_path / "cache" / "tmp")) == 1
    other.close()
    assert os.listdir(tmp_path / "cache" / "tmp") == []


def test_closing_leaves_nothing_beside_what_it_cannot_remove(tmp_path):
    """A file server puts a folder into every folder."""
    store = open_store(tmp_path / "s")
    for _ in range(3):
        os.close(store.context.staging.create()[0])
    folder = store.context.staging._folder
    for name in ("0", "7", "f"):
        (folder / name).mkdir()
    store.close()
    assert sorted(os.listdir(folder)) == ["0", "7", "f"]


def test_a_staging_folder_that_was_cleaned_away_is_made_again(tmp_path):
    with open_store(tmp_path / "cache") as store:
        space = store.namespace(INFO)
        space.publish(prompt(16), spans(prompt(16), 0, 16))
        shutil.rmtree(tmp_path / "cache" / "tmp")
        (tmp_path / "cache" / "tmp").mkdir()
        space.publish(prompt(32), spans(prompt(32), 16, 32))
        assert restore(space, prompt(32)).tokens == 32


def test_the_counters_start_at_zero(tmp_path):
    assert set(open_store(tmp_path / "cache", fs=FAST).counters.snapshot().values()) == {0}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Path.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "a symbolic link where a file should be"),
        (os.mkfifo, "not a regular file"),
    ],
)
def test_what_lies_where_a_file_should_be_is_named(tmp_path, make, what):
    open_store(tmp_path / "s").close()
    config = tmp_path / "s" / "kvstore.json"
    config.unlink()
    make(config)
    with pytest.raises(UnavailableError, match=f": kvstore.json in it: {what}; move it away$"):
        open_store(tmp_path / "s")
