"""Writers, readers, gc, fsck and repack in many processes on one directory, each killed or stopped at random.

While they run: no wrong byte, no exception but the one that a publisher must expect. Afterwards: every manifest
decodes, has its parent and its blocks; what killed processes left behind can be reclaimed; and all is as good as new.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stress_support import examine, quick_place, staged

from kvstore import Durability, FileSystem, NamespaceInfo, Store
from kvstore.eviction import PROTECT_NS
from kvstore.fsck import check
from kvstore.gc import collect
from kvstore.testing import Memory, Oracle, random_tokens

DRIVER = Path(__file__).with_name("race_driver.py")
FS = FileSystem(Durability.NONE)
INFO = NamespaceInfo({"model": "races"}, "races")
SEED = int(os.environ.get("KVSTORE_RACE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)


@pytest.fixture
def place():
    with quick_place() as folder:
        yield Path(folder)


def race(place: Path, processes: int, seconds: float, *, vandal: bool = False) -> dict:
    command = [sys.executable, DRIVER, place, f"--processes={processes}", f"--seconds={seconds}", f"--seed={SEED}"]
    done = subprocess.run([*command, *(["--vandal"] if vandal else [])], check=False, capture_output=True, text=True)
    again = f"KVSTORE_RACE_SEED={SEED} repeats the workers' choices (not when they are killed)"
    assert done.stdout, f"{done.stderr}\n{again}"
    report = json.loads(done.stdout)
    assert not report["failed"], "\n".join([*report["failed"], again])
    return report


def whole_again(root: Path) -> None:
    """Everything that can be published is published and restored, as in a new directory."""
    oracle = Oracle()
    with Store.open(root, fs=FS) as store:
        space = store.namespace(INFO)
        for seed in range(10):
            tokens = random_tokens(seed, 300)
            for _ in range(50):
                memory = Memory()
                restored = space.read(space.lookup(tokens), memory)
                oracle.check(memory, tokens, restored.tokens)
                if restored.tokens == 300:
                    break
                ends = [*range((restored.border // 64 + 1) * 64, 300, 64), 300]
                pairs = zip([restored.border, *ends], ends, strict=False)
                space.publish(tokens, [oracle.span(tokens, *pair) for pair in pairs])
            else:
                pytest.fail(f"prompt {seed} cannot be saved any more")


def reclaimed(root: Path) -> None:
    """What killed processes left in staging is removed by a collection a little later."""
    with Store.open(root, fs=FS, clock=lambda: time.time_ns() + 2 * PROTECT_NS) as store:
        report = collect(store.context)
    assert (report.error, report.busy, report.failed) == ("", False, 0)
    assert staged(root) == []


def checked(root: Path, *, repair: bool) -> None:
    with Store.open(root, fs=FS) as store:
        if repair:
            report = check(store.context, read_data=True, repair=True, settle_s=0)
            assert not report.error
        report = check(store.context, read_data=True)
    assert not report.error
    assert [each for each in report.findings if each.severity == "error"] == []


def after(place: Path, *, vandal: bool) -> None:
    root = place / "store"
    logging.disable(logging.WARNING)
    try:
        if vandal:
            checked(root, repair=True)
        else:
            examine(root)
        reclaimed(root)
        checked(root, repair=False)
        whole_again(root)
        if not vandal:
            examine(root)
    finally:
        logging.disable(logging.NOTSET)


WHAT = "{} processes on one directory{}, killed and stopped at random"


@pytest.fixture
def noted(record_property):
    """Count what the workers did."""

    def note(what: str, report: dict) -> None:
        record_property("what", what)
        for name, value in report.items():
            if name != "failed" and value:
                record_property(name, value)

    return note


def did(report: dict, *names: str, least: int = 1) -> None:
    """The run was one: all of this happened. Not how often, which is the machine's: others may be using it, too."""
    assert min(report["publishes"], report["kills"]) > 3
    idle = [name for name in names if report[name] < least]
    assert not idle, f"hardly any {idle} in {report}"


def test_eight_processes(place, noted):
    report = race(place, 8, 12)
    noted(WHAT.format(8, ""), report)
    after(place, vandal=False)
    did(report, "restores", "tokens", "states", "collections", "collected", "checks", "repacks", "watched")


def test_eight_processes_and_a_vandal(place, noted):
    """Bytes change and files vanish meanwhile: less is found, nothing wrong is, and nothing raises."""
    report = race(place, 8, 8, vandal=True)
    noted(WHAT.format(8, ", one of them a vandal"), report)
    after(place, vandal=True)
    did(report, "restores", "tokens", "vandalised")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("vandal", [False, True], ids=["", "and a vandal"])
def test_twenty_four_processes(place, noted, vandal):
    report = race(place, 24, float(os.environ.get("KVSTORE_RACE_SECONDS", "300")), vandal=vandal)
    noted(WHAT.format(24, ", one of them a vandal" if vandal else ""), report)
    after(place, vandal=vandal)
    did(report, "restores", "tokens", "states", "collections", "collected", "checks", "repacks", "joined", least=20)
