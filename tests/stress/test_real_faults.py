"""Faults that the kernel itself makes: a full disk, no inodes, read-only, no permission, no file descriptors.

As tests/stress/test_faults.py, without a double: a small tmpfs of its own, filled to the last page.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from stress_support import examine, staged

from kvstore import Durability, KVStoreError, NamespaceInfo, Store, UnavailableError
from kvstore.gc import Policy, collect
from kvstore.testing.oracle import Memory, Oracle, random_tokens

INTERVAL = 64
INFO = NamespaceInfo({"model": "faults"})
ORACLE = Oracle()
PAGE = os.sysconf("SC_PAGE_SIZE")
AHEAD = 3 * 86_400 * 10**9
WHAT = "Faults of the kernel's: no room, no inodes, no descriptors"


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def mounted():
    """A tmpfs of 2 MiB."""
    place = Path(tempfile.mkdtemp(prefix="kvstore-full-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=4096", "kvstore-test", str(place)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        place.rmdir()
        pytest.skip(f"mounting a tmpfs needs root and a kernel that lets one: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
    place.rmdir()


@contextmanager
def pages_left(place: Path, pages: int):
    """Fill the disk but for some pages."""
    ballast = place / "ballast"
    status = os.statvfs(place)
    with open(ballast, "wb") as file, suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, (status.f_bavail - pages) * status.f_frsize)
    try:
        yield
    finally:
        ballast.unlink()


def tokens_of(number: int, count: int = 150) -> bytes:
    return random_tokens(number, count)


def publish(store: Store, number: int, count: int = 150) -> None:
    """What an engine does: restore, publish the rest, a state, a tokenization."""
    tokens = tokens_of(number, count)
    space, memory = store.namespace(INFO), Memory()
    border = space.read(space.lookup(tokens), memory, 1).border
    if border < count:
        ends = [*range((border // INTERVAL + 1) * INTERVAL, count, INTERVAL), count]
        space.publish(tokens, [ORACLE.span(tokens, *pair) for pair in zip([border, *ends], ends, strict=False)])
    space.publish_state(tokens, ORACLE.state(tokens))


def published(store: Store, number: int) -> bool:
    """Whether the disk was not full."""
    full = None
    try:
        publish(store, number)
    except UnavailableError as error:
        full = str(error)
    assert full is None or "the disk is full" in full
    return full is None


def restored(store: Store, number: int, count: int = 150) -> int:
    tokens = tokens_of(number, count)
    space, memory = store.namespace(INFO), Memory()
    result = space.read(space.lookup(tokens), memory, 1)
    ORACLE.check(memory, tokens, result.tokens)
    return result.tokens


def test_a_disk_with_any_number_of_pages_left(mounted, record_property):
    """From none on, until a publish with everything it needs fits in: the disk is full at every one of its calls."""
    with Store.open(mounted / "store", interval=INTERVAL) as store:
        publish(store, 0)
    failed = succeeded = 0
    for pages in range(120):
        with Store.open(mounted / "store") as store:
            cache = store.tokenizations(b"scope")
            with pages_left(mounted, pages):
                if published(store, pages + 1):
                    succeeded += 1
                else:
                    failed += 1
                with suppress(OSError, KVStoreError):
                    cache.put(b"request %d" % pages, tokens_of(pages, 2000))
                assert restored(store, 0) == 150
                assert restored(store, pages + 1) in {0, 64, 128, 150}
            publish(store, pages + 1)
            assert restored(store, pages + 1) == 150
            cache.put(b"request %d" % pages, tokens_of(pages, 2000))
            assert cache.get(b"request %d" % pages) == tokens_of(pages, 2000)
            if succeeded > 3:
                break
        assert staged(mounted / "store") == []
        if os.statvfs(mounted).f_bavail < 200:
            examine(mounted / "store")
            shutil.rmtree(mounted / "store")
            with Store.open(mounted / "store", interval=INTERVAL) as store:
                publish(store, 0)
    assert failed > 5
    assert succeeded > 3
    examine(mounted / "store")
    record_property("what", WHAT)
    record_property("faults", failed)


def test_a_directory_on_a_disk_with_any_number_of_pages_left(mounted, record_property):
    failed = 0
    for pages in range(40):
        with pages_left(mounted, pages):
            try:
                Store.open(mounted / "store", interval=INTERVAL).close()
            except UnavailableError:
                failed += 1
        with Store.open(mounted / "store", interval=INTERVAL) as store:
            publish(store, 1)
            assert restored(store, 1) == 150
        assert staged(mounted / "store") == []
        examine(mounted / "store")
        shutil.rmtree(mounted / "store")
    assert 0 < failed < 40
    record_property("what", WHAT)
    record_property("faults", failed)


def test_filled_to_the_last_byte_and_collected(mounted):
    """A full disk costs what is written then, a collection makes room on it, and publishing goes on."""
    with Store.open(mounted / "store", interval=INTERVAL) as store:
        number = 0
        for _ in range(3):
            number += 1
            while published(store, number):
                number += 1
            good = [each for each in range(number) if restored(store, each) == 150]
            assert good
            with Store.open(mounted / "store", clock=lambda: time.time_ns() + AHEAD) as later:
                report = collect(later.context, Policy(size=1 << 20))
            assert report.error == ""
            assert report.nodes
            examine(mounted / "store")
            publish(store, number)
            assert restored(store, number) == 150
    assert staged(mounted / "store") == []


def test_no_inodes_left(mounted, record_property):
    with Store.open(mounted / "store", interval=INTERVAL) as store:
        publish(store, 0)
        used = mounted / "inodes"
        used.mkdir()
        made: list[Path] = []
        with suppress(OSError):
            while True:
                path = used / str(len(made))
                path.touch()
                made.append(path)
        failed = 0
        for left in range(30):
            failed += not published(store, left + 1)
            assert restored(store, 0) == 150
            made.pop().unlink()
        assert failed > 5
        record_property("what", WHAT)
        record_property("faults", failed)
        shutil.rmtree(used)
        publish(store, 99)
        assert restored(store, 99) == 150
    assert staged(mounted / "store") == []
    examine(mounted / "store")


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


def test_a_disk_that_becomes_read_only(mounted):
    with Store.open(mounted / "store", interval=INTERVAL) as store:
        publish(store, 0)
        remount(mounted, "ro")
        with pytest.raises(UnavailableError, match="read-only"):
            publish(store, 1)
        with pytest.raises(UnavailableError, match="read-only"):
            store.check_writable()
        assert restored(store, 0) == 150
        # A server that starts now can still read, and says that it cannot write.
        with Store.open(mounted / "store") as other:
            assert restored(other, 0) == 150
            with pytest.raises(UnavailableError, match="read-only"):
                publish(other, 1)
        with pytest.raises(UnavailableError, match="read-only"):
            Store.open(mounted / "new")
        assert collect(store.context, Policy(size=0)).error
        remount(mounted, "rw")
        publish(store, 1)
        assert restored(store, 1) == 150
    assert staged(mounted / "store") == []
    examine(mounted / "store")


@contextmanager
def nobody():
    """Without root's rights, for as long as it takes."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's permissions can only be tried by root")
def test_another_users_directory():
    place = Path(tempfile.mkdtemp(prefix="kvstore-user-", dir="/tmp"))
    place.chmod(0o755)
    try:
        with Store.open(place / "private", interval=INTERVAL) as store:
            publish(store, 0)
        with nobody():
            with pytest.raises(UnavailableError, match="permission denied"):
                Store.open(place / "private")
            with pytest.raises(UnavailableError, match="permission denied"):
                Store.open(place / "new")
            # A server that had it open when its permissions went.
            with suppress(KVStoreError):
                publish(store, 1)
            assert restored(store, 0) == 0
            assert collect(store.context, Policy(size=0)).error
        for folder, _, files in os.walk(place / "private"):
            os.chmod(folder, 0o755)
            for name in files:
                os.chmod(os.path.join(folder, name), 0o644)
        # To be read, and not to be written.
        with nobody(), Store.open(place / "private") as reader:
            assert restored(reader, 0) == 150
            with pytest.raises(UnavailableError, match="permission denied"):
                publish(reader, 1)
        with Store.open(place / "private") as store:
            publish(store, 1)
            assert restored(store, 1) == 150
        examine(place / "private")
    finally:
        shutil.rmtree(place)


@contextmanager
def descriptors_left(count: int):
    """All file descriptors but some are in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = 256 if soft == resource.RLIM_INFINITY else min(256, soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", range(6))
def test_no_file_descriptors_left(tmp_path, left, record_property):
    record_property("what", WHAT)
    record_property("faults", 1)
    with Store.open(tmp_path / "store", interval=INTERVAL, durability=Durability.NONE) as store:
        publish(store, 0)
        with descriptors_left(left):
            with suppress(KVStoreError):
                publish(store, 1)
            with suppress(KVStoreError, OSError):
                store.tokenizations(b"scope").put(b"request", tokens_of(1))
            with suppress(KVStoreError):
                Store.open(tmp_path / "other").close()
            assert restored(store, 0) in {0, 64, 128, 150}
            store.namespace(INFO).lookup(tokens_of(0), trimmable=False)
            assert collect(store.context, Policy(size=0)).nodes == 0
        # Nothing about the files is wrong, so nothing is remembered.
        assert restored(store, 0) == 150
        publish(store, 1)
        assert restored(store, 1) == 150
    assert staged(tmp_path / "store") == []
    examine(tmp_path / "store")
