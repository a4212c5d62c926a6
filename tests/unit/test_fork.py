"""A store that is open while its process forks: each of the two goes on by itself, and takes nothing from the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from core_support import INFO, open_store, prompt, restore
from stress_support import examine, staged

from kvstore.stats import read_stats

TESTS = Path(__file__).resolve().parents[1]

PUBLISH = """
import os, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from core_support import INFO, open_store, prompt, spans

def publish(seed):
    tokens = prompt(40, seed)
    space.publish(tokens, spans(tokens, 0, 16, 32, 40))

def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

store = open_store(Path(sys.argv[1]))
space = store.namespace(INFO)
tmp = Path(sys.argv[1]) / "tmp"
publish(0)
assert threading.active_count() == 1
"""

BOTH_WRITE = """
pid = os.fork()
for seed in range(60):
    publish((1000 if pid else 2000) + seed)
if not pid:
    assert len(list(tmp.iterdir())) == 2
    store.close()
    os._exit(0)
assert end_of(pid) == 0
publish(1)
store.close()
"""

CHILD_CLOSES = """
before = list(tmp.iterdir())
assert len(before) == 1
if not (pid := os.fork()):
    store.close()
    os._exit(0)
assert end_of(pid) == 0
assert list(tmp.iterdir()) == before
publish(1)
store.close()
"""

PARENT_CLOSES = """
ours, theirs = os.pipe()
if not (pid := os.fork()):
    os.read(ours, 1)
    publish(1)
    store.close()
    os._exit(0)
store.close()
os.write(theirs, b"!")
assert end_of(pid) == 0
"""


@pytest.mark.parametrize(
    ("then", "seeds"),
    [
        (BOTH_WRITE, [0, 1, *range(1000, 1060), *range(2000, 2060)]),
        (CHILD_CLOSES, [0, 1]),
        (PARENT_CLOSES, [0, 1]),
    ],
    ids=["both write", "the child closes", "the parent closes"],
)
def test_a_store_that_is_open_while_its_process_forks(tmp_path, then, seeds):
    """In a process of its own, which has no threads: those of a test runner would not be in the child."""
    root = tmp_path / "s"
    command = [sys.executable, "-W", "error", "-c", PUBLISH + then, str(root), str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert staged(root) == []
    examine(root)
    with open_store(root, None) as store:
        for seed in seeds:
            assert restore(store.namespace(INFO), prompt(40, seed)).tokens == 40


COUNTS = """
from kvstore.stats import StatsFile
stats = StatsFile(store.context)
stats.add(requests=100)
store.counters.add(failed_publishes=20)
assert stats.flush()
if not (pid := os.fork()):
    stats.add(requests=6)
    store.counters.add(failed_publishes=3)
    assert stats.flush()
    os._exit(0)
assert end_of(pid) == 0
store.close()
"""


def test_a_fork_counts_into_a_file_of_its_own(tmp_path):
    root = tmp_path / "s"
    command = [sys.executable, "-W", "error", "-c", PUBLISH + COUNTS, str(root), str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with open_store(root, None) as store:
        found = read_stats(store.context)
        assert (found.total("requests"), found.total("failed_writes")) == (106, 23)


HELD = """
import signal
from contextlib import ExitStack
from kvstore.admission import Warmth
from kvstore.interpreter import short_turns
from kvstore.stats import StatsFile

stats = StatsFile(store.context)
counters, staging, renewal = store.counters, store.context.staging, store._renewal
warmth, turn = Warmth(), sys.getswitchinterval()
locks = [counters._lock, staging._lock, renewal._lock, stats._lock, stats._writing, warmth._lock, short_turns._lock]
held, let_go = threading.Event(), threading.Event()

def hold():
    with ExitStack() as stack:
        stack.enter_context(short_turns())
        stack.enter_context(store.context.reading(["a manifest"]))
        for lock in locks:
            stack.enter_context(lock)
        held.set()
        let_go.wait()

other = threading.Thread(target=hold)
other.start()
held.wait()
if not (pid := os.fork()):
    signal.alarm(20)
    (Path(sys.argv[1]) / "CACHEDIR.TAG").unlink()
    (Path(sys.argv[1]) / "kvstore.json").unlink()
    publish(1)
    stats.add(requests=6)
    assert stats.flush()
    assert counters.snapshot()["published_nodes"] == 6
    warmth.used(["a"], 1)
    assert not store.context.is_read(Path("a manifest"))
    assert abs(sys.getswitchinterval() - turn) < 1e-5
    with short_turns():
        assert sys.getswitchinterval() < turn
    assert abs(sys.getswitchinterval() - turn) < 1e-5
    store.close()
    stats.close()
    os._exit(0)
code = end_of(pid)
let_go.set()
other.join()
assert code == 0, code
publish(2)
store.close()
"""


def test_a_fork_does_not_wait_for_threads_that_it_lacks(tmp_path):
    """Another thread holds all locks of the store at the moment of the fork."""
    root = tmp_path / "s"
    warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]  # that a process with threads forks
    command = [sys.executable, *warnings, "-c", PUBLISH + HELD, str(root), str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert staged(root) == []
    with open_store(root, None) as store:
        assert read_stats(store.context).total("requests") == 6
        for seed in range(3):
            assert restore(store.namespace(INFO), prompt(40, seed)).tokens == 40


FAILS = """
import signal
from dataclasses import replace
from kvstore.forks import renew_in_forks
from kvstore.stats import StatsFile

class Broken:
    def forked(self):
        raise ZeroDivisionError("broken")

parent, works = os.getpid(), []

def clock():
    if os.getpid() != parent and not works:
        raise ZeroDivisionError("no clock")
    return 10**18

broken = [Broken() for _ in range(40)]
for each in broken:
    renew_in_forks(each)
stats = StatsFile(replace(store.context, clock=clock))
stats.add(requests=100)
assert stats.flush()
locks = [store.counters._lock, store.context.staging._lock, store._renewal._lock, stats._lock, stats._writing]
for lock in locks:
    lock.acquire()
if not (pid := os.fork()):
    signal.alarm(20)
    works.append(True)
    publish(1)
    stats.add(requests=6)
    assert stats.flush()
    store.close()
    os._exit(0)
assert end_of(pid) == 0
for lock in locks:
    lock.release()
store.close()
"""


def test_what_fails_in_a_fork_leaves_no_dead_lock_in_the_rest(tmp_path):
    """The interpreter prints the first of the errors, and the child goes on."""
    root = tmp_path / "s"
    command = [sys.executable, "-W", "error", "-c", PUBLISH + FAILS, str(root), str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ZeroDivisionError: ") == 1
    with open_store(root, None) as store:
        assert read_stats(store.context).total("requests") == 106
        assert restore(store.namespace(INFO), prompt(40, 1)).tokens == 40
