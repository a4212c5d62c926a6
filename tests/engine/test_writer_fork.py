"""A process that forks beside a writer: the parent's goes on, and the child's takes nothing and waits for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from core_support import SPECS, Memory, open_store
from writer_support import TOKENS, rows

from kvstore import NamespaceInfo

FORK = """
import os, signal, sys, threading, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from core_support import open_store
from kvstore import NamespaceInfo
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.metrics import Metrics
from kvstore_mlx.writer import Writer
from writer_support import MIB, SPECS, Form, job_of

store = open_store(Path(sys.argv[1]), interval=32)
form = Form(store.namespace(NamespaceInfo({"model": "writer"})))
metrics = Metrics(store)
metrics.generated(1)
begun, go, publish = threading.Event(), threading.Event(), form.namespace.publish
held, let_go = threading.Event(), threading.Event()

def slow(*args):
    begun.set()
    assert go.wait(60)
    return publish(*args)

def hold():
    with writer._changed, writer._pool._lock, metrics._lock:
        held.set()
        assert let_go.wait(60)

form.namespace.publish = slow
writer = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB)
assert writer.offer(job_of(writer, form, 0, 32))
assert begun.wait(30)
threading.Thread(target=hold).start()
assert held.wait(30)
if not (pid := os.fork()):
    signal.alarm(20)
    assert writer.lend(4096) is None
    assert writer.drain(10)
    assert writer.close(10)
    metrics.close()
    store.close()
    os._exit(0)
let_go.set()
assert writer.offer(job_of(writer, form, 32, 64))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
go.set()
assert writer.close(30)
metrics.close()
store.close()
"""

COPIES = """
import os, signal
from kvstore_mlx.pool import Pool

pool = Pool(1 << 20)
pool.lend(100).give_back()
copied, told = os.pipe()
pool._lock.acquire()  # as another thread may hold it
if not (child := os.fork()):
    signal.alarm(20)
    os.read(copied, 1)
    loan = pool.lend(100)
    loan.take(100)[:] = b"c" * 100
    os._exit(0)
pool._lock.release()
loan = pool.lend(100)
part = loan.take(100)
part[:] = b"p" * 100
os.write(told, b"!")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bytes(part) == b"p" * 100
"""


def run(script: str, *arguments: str) -> None:
    """In a process of its own, which has no other threads."""
    command = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_fork_copies_into_memory_of_its_own():
    """It went into what the parent had queued, and to the disk with a digest that was right."""
    run(COPIES)


def test_a_fork_writes_nothing_and_waits_for_nothing(tmp_path):
    folder = Path(__file__).resolve().parent
    run(FORK, str(tmp_path / "s"), str(folder.parent), str(folder))
    with open_store(tmp_path / "s", None) as store:
        space = store.namespace(NamespaceInfo({"model": "writer"}))
        memory = Memory()
        assert space.read(space.lookup(TOKENS), memory).tokens == len(TOKENS)
        for spec in SPECS:
            assert memory.rows(spec, 0, len(TOKENS)) == rows(spec, 0, len(TOKENS))
