"""The two locks: exclusive between threads and processes, gone with their process, files never unlinked."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import filelock
import pytest
from core_support import open_store

from kvstore import LockTimeoutError, UnavailableError
from kvstore.clear import clear
from kvstore.layout import Layout
from kvstore.locks import POLL_S, gc_lock, publish_lock

HOLD = """
import sys, time
from pathlib import Path
from kvstore.layout import Layout
from kvstore.locks import publish_lock
with publish_lock(Layout(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def layout(tmp_path) -> Layout:
    return open_store(tmp_path / "cache").context.layout


@pytest.fixture
def holder(layout):
    """Another process that holds the publish lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(layout.root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_lock_held_by_another_process_times_out_with_advice(layout, holder):
    with pytest.raises(LockTimeoutError, match=r"publish\.lock is held"), publish_lock(layout, timeout=0.05):
        pass


def test_a_collector_that_cannot_have_the_publish_lock_is_told_so(layout, holder):
    """And not that another one collects, nor with an error of the lock's own code."""
    publish = publish_lock(layout, timeout=0.05)
    with pytest.raises(LockTimeoutError, match=r"publish\.lock is held"), gc_lock(layout), publish:
        pass


def test_clearing_without_the_publish_lock_ends_with_a_sentence(layout, holder, monkeypatch):
    monkeypatch.setattr("kvstore.locks.publish_lock.__wrapped__.__defaults__", (0.05,))
    with open_store(layout.root) as store:
        report = clear(store.context)
    assert "publish.lock is held by another process" in report.error


def test_who_has_waited_asks_more_often_and_not_longer(layout, holder, monkeypatch):
    asked: list[tuple[float, float]] = []
    real = filelock.FileLock.acquire

    def acquire(self, timeout=None, poll_interval=None):
        asked.append((timeout, poll_interval or self.poll_interval))
        return real(self, timeout=timeout, poll_interval=poll_interval)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    for timeout in (0, 0.05, 0.3):
        with pytest.raises(LockTimeoutError), publish_lock(layout, timeout):
            pass
    assert asked == [(0, POLL_S), (0.05, POLL_S), (0.1, POLL_S), (pytest.approx(0.2), POLL_S / 5)]


@pytest.mark.timeout(30)
def test_a_killed_holder_leaves_nothing_behind(layout, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with publish_lock(layout, timeout=5):
        assert layout.lock("publish").exists()


def test_threads_of_one_process_exclude_each_other(layout):
    inside = most = 0

    def work():
        nonlocal inside, most
        for _ in range(10):
            with publish_lock(layout):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_the_lock_is_free_again_after_an_error_inside(layout):
    with pytest.raises(KeyError), publish_lock(layout):
        raise KeyError
    with publish_lock(layout, timeout=0.05):
        assert layout.lock("publish").exists()


def test_lock_files_are_never_unlinked(layout):
    with publish_lock(layout), gc_lock(layout):
        inodes = [layout.lock(name).stat().st_ino for name in ("publish", "gc")]
    assert [layout.lock(name).stat().st_ino for name in ("publish", "gc")] == inodes


def test_there_is_one_collector(layout):
    with gc_lock(layout) as first:
        assert first is True
        with_thread = []
        thread = threading.Thread(target=lambda: with_thread.append(gc_lock(layout).__enter__()))
        thread.start()
        thread.join()
        assert with_thread == [False]
    with gc_lock(layout) as again:
        assert again is True


def test_a_collector_does_not_hinder_a_publish(layout):
    with gc_lock(layout) as collecting, publish_lock(layout, timeout=0.05):
        assert collecting


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_flock_is_refused_with_advice(layout, monkeypatch, code):
    def flock(_fd, _operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UnavailableError, match="without flock"), publish_lock(layout):
        pass


def test_lock_files_are_as_private_as_the_rest(tmp_path):
    before = os.umask(0)
    try:
        layout = open_store(tmp_path / "cache").context.layout
        with gc_lock(layout):
            modes = [stat.S_IMODE(layout.lock(name).stat().st_mode) for name in ("publish", "gc")]
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]


def test_a_lock_does_not_bring_a_vanished_directory_back(layout):
    """An unplugged volume: an empty tree on its mount point would hide it."""
    os.rename(layout.root, layout.root.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError), publish_lock(layout):
        pass
    assert not layout.root.exists()
