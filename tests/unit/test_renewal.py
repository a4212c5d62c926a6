"""A directory that is emptied or exchanged under a process: set up anew, used as it is, or left alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading

import pytest
from stress_support import examine, staged

from kvstore import (
    FormatVersionError,
    IntervalMismatchError,
    KVStoreError,
    NamespaceInfo,
    NotACacheDirectoryError,
    Store,
    pack_tokens,
)
from kvstore.commit import make_folders
from kvstore.errors import UnavailableError
from kvstore.fs import FileSystem
from kvstore.stats import StatsFile
from kvstore.testing.oracle import Memory, Oracle, random_tokens

INTERVAL = 32
INFO = NamespaceInfo({"model": "renewal"})
ORACLE = Oracle()
TOKENS = random_tokens(3, 40)


def publish(store):
    store.namespace(INFO).publish(TOKENS, [ORACLE.span(TOKENS, 0, 32), ORACLE.span(TOKENS, 32, 40)])


def restored(store):
    space, memory = store.namespace(INFO), Memory()
    result = space.read(space.lookup(TOKENS), memory, 1)
    ORACLE.check(memory, TOKENS, result.tokens)
    return result.tokens


def empty(root):
    for entry in list(root.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "kv", interval=INTERVAL) as opened:
        publish(opened)
        assert restored(opened) == 40
        yield opened


def test_an_emptied_directory_is_set_up_anew(store, caplog):
    empty(store.path)
    assert restored(store) == 0
    assert os.listdir(store.path) == []  # a reader changes nothing
    publish(store)
    assert restored(store) == 40
    assert [record.message for record in caplog.records if "emptied" in record.message] == [
        f"kvstore: {store.path} was emptied while in use; it was set up anew"
    ]
    with Store.open(store.path, create=False) as again:
        assert again.interval == INTERVAL
        assert restored(again) == 40


def test_an_emptied_directory_is_set_up_as_shared_as_it_was(tmp_path):
    before = os.umask(0o027)
    try:
        with Store.open(tmp_path / "shared", interval=INTERVAL, shared=True) as store:
            empty(store.path)
            publish(store)
            assert json.loads((store.path / "kvstore.json").read_text())["shared"] is True
            assert stat.S_IMODE(os.stat(store.path / "objects").st_mode) == 0o750
    finally:
        os.umask(before)


def test_what_the_system_leaves_in_an_empty_folder_does_not_matter(store):
    empty(store.path)
    (store.path / ".DS_Store").touch()
    publish(store)
    assert restored(store) == 40


def test_a_folder_that_is_not_there_is_not_made(store):
    shutil.rmtree(store.path)
    with pytest.raises(UnavailableError, match="does not exist"):
        publish(store)
    assert not store.renew()
    assert not store.path.exists()
    # Somebody does what the sentence says.
    store.path.mkdir()
    publish(store)
    assert restored(store) == 40


def test_nothing_is_made_among_other_files(store):
    empty(store.path)
    (store.path / "thesis.tex").write_text("mine")
    with pytest.raises(NotACacheDirectoryError, match=r"thesis\.tex"):
        publish(store)
    assert os.listdir(store.path) == ["thesis.tex"]


def a_folder_of_something_else(root):
    empty(root)
    (root / "tmp").mkdir()
    (root / "thesis.tex").write_text("mine")


def a_newer_format(root):
    (root / "kvstore.json").write_text(json.dumps({"format": 2, "interval": INTERVAL}))


def another_interval(root):
    (root / "kvstore.json").write_text(json.dumps({"format": 1, "interval": 2 * INTERVAL}))


def a_damaged_configuration(root):
    (root / "kvstore.json").write_bytes(b"")


@pytest.mark.parametrize(
    "exchange", [a_folder_of_something_else, a_newer_format, another_interval, a_damaged_configuration]
)
def test_counters_and_tokenizations_are_not_put_into_what_does_not_fit(store, exchange):
    """They are written without a publish, which would have looked."""
    counters, entries = StatsFile(store.context), store.tokenizations(b"scope")
    counters.add(requests=1)
    exchange(store.path)
    before = tree(store.path)
    assert not counters.flush()
    with pytest.raises(KVStoreError):
        entries.put(b"request", pack_tokens(TOKENS))
    assert tree(store.path) == before


def tree(root):
    return sorted(path.relative_to(root) for path in root.rglob("*"))


def test_folders_that_were_removed_are_made_anew(store, caplog):
    shutil.rmtree(store.path / "objects")
    publish(store)
    assert restored(store) == 40
    assert "were made anew" in caplog.text


@pytest.mark.parametrize("name", ["quarantine", "objects/tokens"])
def test_a_folder_that_cannot_be_made_anew_is_not_said_to_be(store, name, caplog):
    """What is saved needs neither, and each publish comes by here."""
    assert not store.renew()
    shutil.rmtree(store.path / name)
    (store.path / name).write_text("something else")
    assert not store.renew()
    publish(store)
    assert restored(store) == 40
    assert caplog.records == []


def test_another_directory_of_the_same_kind_is_used(store, tmp_path):
    with Store.open(tmp_path / "other", interval=INTERVAL) as other:
        publish(other)
    assert not store.renew()
    shutil.rmtree(store.path)
    os.rename(tmp_path / "other", store.path)
    assert restored(store) == 40
    assert store.renew()
    assert not store.renew()
    publish(store)


def test_another_interval_is_refused_and_nothing_touched(store, tmp_path):
    Store.open(tmp_path / "other", interval=64).close()
    publish(store)
    shutil.rmtree(store.path)
    os.rename(tmp_path / "other", store.path)
    for _ in range(2):
        with pytest.raises(IntervalMismatchError, match="64 tokens instead of 32; restart"):
            publish(store)
    assert not list((store.path / "objects" / "blocks").iterdir())


def test_a_newer_format_is_refused_and_nothing_touched(store):
    publish(store)
    config = store.path / "kvstore.json"
    document = json.loads(config.read_text())
    empty(store.path)
    config.write_text(json.dumps({**document, "format": 2}))
    with pytest.raises(FormatVersionError):
        publish(store)
    with pytest.raises(FormatVersionError):
        store.renew()
    assert os.listdir(store.path) == ["kvstore.json"]


def test_renewing_says_once_that_something_changed(store):
    assert not store.renew()
    empty(store.path)
    assert store.renew()
    assert not store.renew()


def test_many_threads_of_two_stores(store, caplog):
    with Store.open(store.path) as second:
        publish(second)
        empty(store.path)
        barrier, failed = threading.Barrier(8), []

        def work(which):
            barrier.wait()
            try:
                publish(which)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(each,)) for each in (store, second) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        assert restored(store) == restored(second) == 40
    assert [path for path in staged(store.path) if path.is_file()] == []
    assert caplog.text.count("was emptied") in {1, 2}  # once a store
    examine(store.path)


class Mounts(FileSystem):
    """A file system whose volumes the test mounts."""

    at = None

    def mount_point(self, path):
        return type(self).at


@pytest.mark.parametrize(
    ("opened", "now", "renewed"),
    [
        ("", "", True),
        ("kv", "kv", True),
        ("kv", "", False),  # the volume was unmounted: the empty folder is its mount point
        ("", "kv", True),  # one was mounted over it
    ],
)
def test_only_where_the_volume_is_mounted(tmp_path, opened, now, renewed):
    Mounts.at = tmp_path / opened
    with Store.open(tmp_path / "kv", interval=INTERVAL, fs=Mounts()) as store:
        empty(store.path)
        Mounts.at = tmp_path / now
        if renewed:
            publish(store)
            assert restored(store) == 40
        else:
            with pytest.raises(UnavailableError, match="check that its volume is mounted"):
                publish(store)
            assert os.listdir(store.path) == []


def mount(place):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root and a kernel that lets one: {done.stderr.strip()}")


@pytest.mark.parametrize("folder", ["", "kv"], ids=["at the mount point", "in a folder of the volume"])
def test_a_real_volume_is_pulled_out_and_another_one_put_in(tmp_path, folder):
    place = tmp_path / "volume"
    place.mkdir()
    mount(place)
    try:
        root = place / folder
        with Store.open(root, interval=INTERVAL) as store:
            publish(store)
            subprocess.run(["umount", str(place)], check=True)
            if folder:
                # As a mistake left it: the same name, below the mount point.
                root.mkdir()
            with pytest.raises(UnavailableError, match="check that its volume is mounted"):
                publish(store)
            assert [path for path in place.rglob("*") if path != root] == []
            mount(place)
            root.mkdir(exist_ok=True)
            publish(store)
            assert restored(store) == 40
        with Store.open(root, create=False, interval=INTERVAL) as again:
            assert restored(again) == 40
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a folder that is surely a mount point: /proc")
def test_a_link_to_a_volume_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("/proc")
    assert FileSystem().mount_point(tmp_path / "link" / "self").as_posix() == "/proc"


def test_a_file_on_its_way_makes_no_folder_that_a_directory_is_set_up_with(store):
    """The volume may have gone since somebody looked whether it is there."""
    context = store.context
    layout = context.layout
    ours = [layout.block(bytes(16)).parent, layout.tokens / "00", layout.nodes / INFO.id / "00", layout.quarantine]
    setup = (layout.blocks, layout.tokens, layout.nodes, layout.quarantine)
    for folder in setup:
        shutil.rmtree(folder)
    for folder in ours[:3]:
        with pytest.raises(FileNotFoundError):
            make_folders(context, folder)
    make_folders(context, layout.quarantine)
    assert [folder for folder in setup if folder.exists()] == []
    for folder in setup:
        folder.mkdir()
    for folder in ours[:3]:
        make_folders(context, folder)
        assert folder.is_dir()
