"""rsync itself, killed at random while gc and a server are at work on the target: no wrong byte, nothing lost.

Plain, it renames each file when it is whole; --partial leaves what it had under the file's name; --inplace writes under
it from the start. Whatever lies there, a block is its digest's bytes or a miss, and copying once more completes it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, prompt, restore
from gc_support import TENANT, manifests, publish, state
from stress_support import examine, quick_place
from upkeep_support import read_state

from kvstore.fsck import check
from kvstore.gc import Policy, collect

SEED = int(os.environ.get("KVSTORE_RACE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
KILLS = 10
PROMPTS = [prompt(40, seed) for seed in range(30)]
OWN = prompt(40, 1000)
"""What the target had before."""

OLD_S = 3 * 86400
"""How old the source is: rsync keeps its times, and only the time of the copy's last change shows that it is new."""


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def place():
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed here")
    with quick_place() as folder:
        yield Path(folder)


def fill(place: Path) -> tuple[Path, Path]:
    """A source of 30 conversations, days old and two of them with states, and a target with one of its own."""
    with open_store(place / "source") as store:
        for tokens in PROMPTS:
            publish(store.namespace(INFO), tokens)
        for tokens in PROMPTS[:2]:
            store.namespace(INFO).publish_state(tokens, state(5))
    then = time.time() - OLD_S
    for path in (place / "source").rglob("*"):
        os.utime(path, (then, then))
    with open_store(place / "target") as store:
        publish(store.namespace(TENANT), OWN)
    return place / "source", place / "target"


class Server(threading.Thread):
    """Restores, publishes and collects in the target until it is told to stop."""

    def __init__(self, target: Path, choose: random.Random) -> None:
        super().__init__()
        self.target, self.choose = target, choose
        self.stopped = threading.Event()
        self.restores = self.collections = self.published = 0
        self.wrong: BaseException | None = None

    def run(self) -> None:
        try:
            with open_store(self.target, None, FAST) as store:
                while not self.stopped.is_set():
                    self.work(store)
                    time.sleep(0.002)
        except BaseException as error:
            self.wrong = error

    def work(self, store) -> None:
        self.restores += restore(store.namespace(INFO), self.choose.choice(PROMPTS), threads=1).tokens > 0
        assert restore(store.namespace(TENANT), OWN, threads=1).tokens == 40
        if not self.collections or self.choose.random() < 0.2:
            report = collect(store.context, Policy(size=1 << 40))
            assert (report.error, report.nodes, report.orphans) == ("", 0, 0)
            self.collections += 1
        if not self.published or self.choose.random() < 0.1:
            publish(store.namespace(TENANT), prompt(20, 2000 + self.published % 10))
            self.published += 1

    def stop(self) -> None:
        self.stopped.set()
        self.join()
        if self.wrong is not None:
            raise self.wrong


def kill_often(source: Path, target: Path, options: list[str], choose: random.Random) -> int:
    """Start rsync and kill it; how often it was still at work. It is slowed down, to be caught at it."""
    caught = 0
    for _ in range(KILLS):
        command = ["rsync", "-a", "--bwlimit=100", *options, f"{source}/", f"{target}/"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(choose.uniform(0.02, 0.25))
            caught += process.poll() is None
            process.kill()
        # Its other half ends when it notices; until then it may still write.
        if choose.random() < 0.5:
            time.sleep(0.01)
        with open_store(target, None) as store:
            for tokens in PROMPTS:
                assert restore(store.namespace(INFO), tokens, threads=1).tokens in {0, 16, 32, 40}
    return caught


@pytest.mark.parametrize("options", [[], ["--partial"], ["--inplace"]], ids=["plain", "partial", "inplace"])
def test_rsync_killed_at_random_with_a_server_and_gc_on_the_target(place, options, record_property):
    choose = random.Random(SEED)
    source, target = fill(place)
    server = Server(target, random.Random(SEED + 1))
    server.start()
    try:
        caught = kill_often(source, target, options, choose)
        subprocess.run(["rsync", "-a", *options, f"{source}/", f"{target}/"], check=True)
        for _ in range(1000):
            if server.restores or not server.is_alive():
                break
            time.sleep(0.02)
    finally:
        server.stop()
    record_property("what", "rsync killed at random while gc and a server work on its target")
    record_property("kills", caught)
    record_property("restores", server.restores + KILLS * len(PROMPTS))
    record_property("collections", server.collections)
    assert min(caught, server.collections, server.restores, server.published) > 0, f"KVSTORE_RACE_SEED={SEED}"
    with open_store(target, None) as store:
        for tokens in PROMPTS:
            assert restore(store.namespace(INFO), tokens).tokens == 40
        for tokens in PROMPTS[:2]:
            assert read_state(store.namespace(INFO), tokens)[0] == {"n": 5}
        assert restore(store.namespace(TENANT), OWN).tokens == 40
        assert check(store.context, read_data=True).errors == 0
    examine(target)
    names = {path.name for path in manifests(target)}
    assert {path.name for path in manifests(source)} <= names
