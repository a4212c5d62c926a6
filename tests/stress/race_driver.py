"""Many processes on one directory, killed and stopped at random; run by test_races.py as a program of its own.

    python race_driver.py DIR --processes 8 --seconds 15 --seed 1 [--vandal]

Workers are forked, so that a killed one is replaced within milliseconds. What a worker does follows from its seed; when
it is killed does not. Prints one JSON document; a worker that saw something it must not has written down what.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stress_support import Hesitant, lacks

from kvstore import Durability, LockTimeoutError, MissingParentError, NamespaceInfo, Store
from kvstore.eviction import GRACE_NS
from kvstore.fsck import check
from kvstore.gc import Policy, collect, usage
from kvstore.repack import repack
from kvstore.testing import Memory, Oracle, StateMemory, random_tokens

INTERVAL = 64
INFO = NamespaceInfo({"model": "races"}, "races")
ORACLE = Oracle()
CONVERSATIONS = 6
TURNS = 5
AHEAD_NS = 3 * 86_400 * 10**9
"""Past every grace time: a collector with this clock takes everything for old, also what is being written just now."""

COUNTERS = (
    "publishes", "refused", "states", "restores", "tokens", "misses", "collections", "collected", "checks", "found",
    "repacks", "joined", "watched", "vandalised", "opened", "timeouts",
)  # fmt: skip
LOCKED = ("publishes", "states", "collected", "joined")
"""Each of these took the publish lock."""
PATIENCE_S = 20.0


class Counted:
    """Counters of one worker's place, in memory that outlives it."""

    def __init__(self, memory: mmap.mmap, place: int) -> None:
        self._memory = memory
        self._at = place * len(COUNTERS) * 8

    def add(self, name: str, amount: int = 1) -> None:
        at = self._at + COUNTERS.index(name) * 8
        (value,) = struct.unpack_from("<q", self._memory, at)
        struct.pack_into("<q", self._memory, at, value + amount)


def ended(error: str) -> None:
    """What a report says of a command that could not do its work."""
    if "is held by another process" in error:
        raise LockTimeoutError(error)
    assert not error, error


def prompt(conversation: int, turns: int, branch: int) -> bytes:
    """Conversations of two kinds of system text; a branch asks something else in its last turn."""
    parts = [random_tokens(conversation % 2, 100)]
    for turn in range(turns):
        seed = 1000 * (conversation + 1) + turn + (100 * branch if turn == turns - 1 else 0)
        parts.append(random_tokens(seed, 20 + seed * 37 % 90))
    return b"".join(parts)


def any_prompt(choose: random.Random) -> bytes:
    return prompt(choose.randrange(CONVERSATIONS), choose.randint(0, TURNS), choose.choice([0, 0, 1, 2]))


def restored(store: Store, tokens: bytes, count: Counted) -> int:
    """Restore and compare; the border. Wrong bytes raise, and so does any exception of the store's."""
    space, memory = store.namespace(INFO), Memory()
    match = space.lookup(tokens)
    result = space.read(match, memory)
    assert result.tokens <= match.count <= len(tokens) // 4
    ORACLE.check(memory, tokens, result.tokens)
    count.add("restores")
    count.add("tokens", result.tokens)
    count.add("misses", result.tokens < match.count)
    return result.border


def read_state(store: Store, tokens: bytes) -> None:
    space, memory = store.namespace(INFO), StateMemory()
    match = space.lookup(tokens, trimmable=False)
    values = space.read_state(match, memory)
    if values is not None:
        ORACLE.check_state(memory, values, tokens[: match.count * 4])


def read(store: Store, choose: random.Random, count: Counted) -> None:
    tokens = any_prompt(choose)
    restored(store, tokens + random_tokens(choose.randrange(5), 40), count)
    read_state(store, tokens)
    cached = store.tokenizations(b"races").get(b"text of " + tokens)
    assert cached in {None, tokens}


def write(store: Store, choose: random.Random, count: Counted) -> None:
    """As an engine: restore, publish the rest in some pieces, states at some of their ends."""
    tokens = any_prompt(choose)
    end = len(tokens) // 4
    first = restored(store, tokens, count)
    space = store.namespace(INFO)
    cuts = {choose.randint(first, end) for _ in range(3)} | set(range(0, end, INTERVAL)) | {end}
    ends = sorted(cut for cut in cuts if cut > first)
    try:
        while ends:
            some = ends[: choose.randint(1, 3)]
            del ends[: len(some)]
            decode = choose.random() < 0.3
            spans = [ORACLE.span(tokens, *pair, decode=decode) for pair in zip([first, *some], some, strict=False)]
            space.publish(tokens, spans)
            count.add("publishes")
            first = some[-1]
            if choose.random() < 0.3:
                space.publish_state(tokens[: first * 4], ORACLE.state(tokens[: first * 4]))
                count.add("states")
    except MissingParentError:
        # Collected between two steps: the one error that a publisher must expect here.
        count.add("refused")
    store.tokenizations(b"races").put(b"text of " + tokens, tokens)


def gather(store: Store, choose: random.Random, count: Counted) -> None:
    share = choose.choice([0.3, 0.6, 0.9, 1.0])
    report = collect(store.context, Policy(size=int(usage(store.context) * share)), pause=store.context.fs.pause)
    ended(report.error)
    count.add("collections", not report.busy)
    count.add("collected", report.nodes)
    time.sleep(choose.random() * 0.2)


def inspect(store: Store, choose: random.Random, count: Counted, *, ahead: bool, vandal: bool) -> None:
    # Without grace a manifest that was collected and published again during a check may be called an orphan; one that
    # is would still be. With grace nothing at all may be found.
    graceless = ahead or choose.random() < 0.6
    report = check(
        store.context,
        read_data=choose.random() < 0.5,
        repair=choose.random() < 0.3,
        grace_ns=0 if graceless else GRACE_NS,
        settle_s=0.01,
        pause=store.context.fs.pause,
    )
    ended(report.error)
    errors = [each for each in report.findings if each.severity == "error"]
    if not vandal:
        real = [each for each in errors if not graceless or lacks(store, store.path / each.path)]
        assert not real, real
    count.add("checks")
    count.add("found", len(errors))
    time.sleep(choose.random() * 0.1)


def watch(store: Store, count: Counted) -> None:
    """With nothing of kvstore's but the format: a manifest is never there without what it continues and names."""
    for path in sorted(store.context.layout.nodes.rglob("*")):
        lost = lacks(store, path)
        assert not lost, f"{path} is there without {lost}"
    count.add("watched")
    time.sleep(0.05)


def join(store: Store, choose: random.Random, count: Counted, *, vandal: bool) -> None:
    report = repack(store.context, older_than_ns=0)
    ended(report.error)
    # A node that is collected between its manifest and its blocks counts as damaged.
    problems = [each for each in report.problems if "No such file" not in each]
    assert vandal or not problems, problems
    count.add("repacks")
    count.add("joined", report.nodes)
    time.sleep(choose.random() * 0.2)


def vandalise(store: Store, choose: random.Random, count: Counted) -> None:
    """Damage a file, or lose it."""
    files = sorted(path for path in (store.path / "objects").rglob("*") if path.is_file())
    if files:
        path = choose.choice(files)
        try:
            if choose.random() < 0.3:
                path.unlink()
            else:
                with open(path, "r+b") as file:
                    file.seek(choose.randrange(max(1, path.stat().st_size)))
                    file.write(bytes([choose.randrange(256)]))
            count.add("vandalised")
        except FileNotFoundError:
            pass
    time.sleep(choose.random() * 0.3)


class Crew:
    """The workers, and who does what: place by place."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.root: Path = given.directory / "store"
        self.reports: Path = given.directory / "reports"
        self.reports.mkdir(parents=True)
        self.given = given
        self.choose = random.Random(given.seed)
        self.memory = mmap.mmap(-1, given.processes * len(COUNTERS) * 8)
        special = ["gc", "gc ahead", "fsck", "repack", "watch"]
        if given.processes > 16:
            special += ["gc ahead", "fsck ahead", "repack", "gc"]
        if given.vandal:
            special[special.index("watch")] = "vandal"
        rest = given.processes - len(special)
        self.roles = [*special, *["write"] * ((rest + 1) // 2), *["read"] * (rest // 2)]
        self.pids: dict[int, int] = {}
        self.stopped: dict[int, float] = {}
        self.until = time.monotonic() + given.seconds
        self.kills = self.stops = self.taken = 0
        self.idle, self.asked = 0.0, time.monotonic()
        self.failed: list[str] = []

    def start(self, place: int) -> None:
        seed = self.choose.randrange(1 << 32)
        pid = os.fork()
        if pid == 0:
            os._exit(self.work(place, seed))
        self.pids[pid] = place

    def work(self, place: int, seed: int) -> int:
        role, choose, count = self.roles[place], random.Random(seed), Counted(self.memory, place)
        vandal = self.given.vandal
        name, _, ahead = role.partition(" ")
        tasks: dict[str, Callable[[Store], None]] = {
            "write": lambda store: write(store, choose, count),
            "read": lambda store: read(store, choose, count),
            "gc": lambda store: gather(store, choose, count),
            "fsck": lambda store: inspect(store, choose, count, ahead=bool(ahead), vandal=vandal),
            "repack": lambda store: join(store, choose, count, vandal=vandal),
            "watch": lambda store: watch(store, count),
            "vandal": lambda store: vandalise(store, choose, count),
        }
        late = AHEAD_NS if ahead else 0
        fs = Hesitant(Durability.NONE, choose=random.Random(seed + 1), often=choose.choice([0, 0, 0.02, 0.3]))
        try:
            while time.monotonic() < self.until:
                with Store.open(self.root, interval=INTERVAL, fs=fs, clock=lambda: time.time_ns() + late) as store:
                    count.add("opened")
                    for _ in range(choose.randint(1, 20)):
                        try:
                            tasks[name](store)
                        except LockTimeoutError:
                            count.add("timeouts")  # see moves
                        if time.monotonic() >= self.until:
                            break
        except BaseException:
            report = f"worker {place} ({role}, seed {seed}) at {time.time():.3f}:\n{traceback.format_exc()}"
            (self.reports / f"{os.getpid()}").write_text(report)
            return 1
        return 0

    def moves(self) -> bool:
        """Whether somebody got the publish lock lately. That one worker does not get it in time is allowed: it is
        polled, and others hold it while they are stopped, or wait for a processor. That nobody gets it is not.
        """
        now = time.monotonic()
        taken = sum(self.counter(place, name) for place in range(len(self.roles)) for name in LOCKED)
        # A longer gap is this process's own: it was stopped, or had no processor, and so were the workers.
        self.idle += min(now - self.asked, 0.5)
        self.asked = now
        if taken != self.taken:
            self.taken, self.idle = taken, 0.0
        return self.idle < PATIENCE_S

    def counter(self, place: int, name: str) -> int:
        """One counter of one place."""
        value: int = struct.unpack_from("<q", self.memory, (place * len(COUNTERS) + COUNTERS.index(name)) * 8)[0]
        return value

    def run(self) -> None:
        for place in range(len(self.roles)):
            self.start(place)
        while time.monotonic() < self.until and not self.failed:
            time.sleep(self.choose.random() * 0.15)
            self.reap()
            self.resume(time.monotonic())
            if not self.moves():
                self.failed.append(f"nobody has got the publish lock for {PATIENCE_S} s")
            if self.pids:  # Those that end when the time is over are not started anew.
                self.disturb(self.choose.choice(list(self.pids)))
        self.resume(float("inf"))
        patience = time.monotonic() + 60
        while self.pids and time.monotonic() < patience and not self.failed:
            self.reap(restart=False)
            time.sleep(0.01)
        if self.pids and not self.failed:
            self.failed.append(f"workers {[self.roles[place] for place in self.pids.values()]} do not end")
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def disturb(self, pid: int) -> None:
        """Kill a worker, or stop it for a while: others go on, whatever this one is in the middle of."""
        if self.choose.random() < 0.6:
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
        elif pid not in self.stopped:
            os.kill(pid, signal.SIGSTOP)
            self.stopped[pid] = time.monotonic() + self.choose.random() * 0.4
            self.stops += 1

    def resume(self, now: float) -> None:
        """Let those go on whose time has come."""
        for pid in [pid for pid, due in self.stopped.items() if due <= now]:
            del self.stopped[pid]
            if pid in self.pids:
                os.kill(pid, signal.SIGCONT)

    def reap(self, *, restart: bool = True) -> None:
        """Replace the dead; a worker that ended by itself with an error is a finding."""
        for pid in list(self.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            place = self.pids.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code not in {0, -signal.SIGKILL}:
                report = self.reports / str(pid)
                self.failed.append(report.read_text() if report.exists() else f"worker {place} ended with {code}")
            elif restart and time.monotonic() < self.until:
                self.start(place)

    def totals(self) -> dict[str, int]:
        return {name: sum(self.counter(place, name) for place in range(len(self.roles))) for name in COUNTERS}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--vandal", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    crew = Crew(given)
    crew.run()
    json.dump({**crew.totals(), "kills": crew.kills, "stops": crew.stops, "failed": crew.failed}, sys.stdout)
    return 1 if crew.failed else 0


if __name__ == "__main__":
    sys.exit(main())
