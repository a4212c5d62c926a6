"""Counters of many processes: they survive a kill, copies and merges, and count once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import pytest
from core_support import INFO, clone, open_store, prompt, spans
from hypothesis import given
from hypothesis import strategies as st

from kvstore import FileSystem
from kvstore.clear import clear
from kvstore.context import this_process
from kvstore.errors import PublishError
from kvstore.fsck import check
from kvstore.merge import merge
from kvstore.scan import scan
from kvstore.stats import COUNTERS, FOLD_ABOVE, MAX_ROWS, Row, Stats, StatsFile, fold, merge_stats, read_stats

ME = this_process()
GONE = f"{ME.host}.{'0' * 31}1"  # another boot of this machine


def write(store, number: int, *, host: str = GONE, **counts: int) -> str:
    """A file as another process left it."""
    writer = f"{host}.{number}.{number:08x}"
    folder = store.path / "stats"
    folder.mkdir(exist_ok=True)
    row = {"began": 1000 + number, "updated": 2000 + number, **counts}
    (folder / f"{writer}.json").write_text(json.dumps({"format": 1, "rows": {writer: row}}))
    return writer


def names(store) -> list[str]:
    return sorted(os.listdir(store.path / "stats"))


@pytest.fixture
def one(tmp_path):
    with open_store(tmp_path / "one") as store:
        yield store


def test_nothing_was_counted(one):
    assert read_stats(one.context) == Stats()
    assert not (one.path / "stats").exists()
    fold(one.context)


def test_counters_are_written_when_told_and_kept_over_a_restart(one):
    for reused in (10, 20):
        stats = StatsFile(one.context)
        assert stats.flush()
        assert not stats.path.exists()  # nothing happened yet
        stats.add(requests=1, prompt_tokens=100, disk_tokens=reused)
        stats.close()
    found = read_stats(one.context)
    assert [found.total(name) for name in COUNTERS] == [2, 200, 0, 30, 0, 0, 0, 0, 0, 0]
    assert len(found.rows) == len(found.files) == 2
    assert all(row.began <= row.updated for row in found.rows.values())
    assert os.stat(stats.path).st_mode & 0o777 == 0o600
    one.close()
    assert os.listdir(one.path / "tmp") == []


def test_a_kill_loses_what_was_not_flushed_and_nothing_else(tmp_path):
    with open_store(tmp_path / "s"):
        pass
    program = """
import os, sys
from kvstore import Store
from kvstore.stats import StatsFile
stats = StatsFile(Store.open(sys.argv[1]).context)
for _ in range(50):
    stats.add(requests=1)
    stats.flush()
stats.add(requests=7)
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    with open_store(tmp_path / "s", None) as store:
        assert read_stats(store.context).total("requests") == 50


def test_writes_that_fail_are_counted_once(one):
    stats = StatsFile(one.context)
    for _ in range(2):
        with pytest.raises(PublishError):
            one.namespace(INFO).publish([1, 2, 3], [])
        assert stats.flush()
        assert stats.flush()
    assert StatsFile(one.context).flush()  # of another engine in this process, which saw none of them fail
    stats.close()
    assert [row.counts["failed_writes"] for row in read_stats(one.context).rows.values()] == [2]


def test_threads_count_together(one):
    stats = StatsFile(one.context)

    def work():
        for _ in range(200):
            stats.add(requests=1)
            stats.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats.close()
    assert read_stats(one.context).total("requests") == 800


@dataclass(frozen=True)
class Slow(FileSystem):
    """A disk that has not written yet."""

    reached: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def create(self, path):
        self.reached.set()
        assert self.goes_on.wait(30)
        return super().create(path)


def test_whoever_counts_does_not_wait_for_the_disk(one):
    fs = Slow()
    with open_store(one.path, None, fs) as store:
        stats = StatsFile(store.context)
        stats.add(requests=1)
        flushing = threading.Thread(target=stats.flush)
        flushing.start()
        assert fs.reached.wait(30)
        adding = threading.Thread(target=stats.add, kwargs={"requests": 1})
        adding.start()
        adding.join(30)
        counted = not adding.is_alive()
        fs.goes_on.set()
        flushing.join()
        adding.join()
        stats.close()
    assert counted
    assert read_stats(one.context).total("requests") == 2


@dataclass(frozen=True)
class Full(FileSystem):
    """A disk on which nothing can be written."""

    def create(self, path):
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_no_error_and_loses_nothing(one):
    stats = StatsFile(one.context)
    full = StatsFile(open_store(one.path, None, Full()).context)
    for each in (stats, full):
        each.add(requests=3)
    assert not full.flush()
    assert not full.flush()  # still to be written
    assert stats.flush()
    shutil.rmtree(one.path / "stats")
    stats.add(requests=1)
    assert stats.flush()
    assert read_stats(one.context).total("requests") == 4


# Folding.


def test_files_of_processes_that_are_gone_become_one(one):
    for number in range(1, 9):
        write(one, number, requests=number)
    alive = StatsFile(one.context)
    alive.add(requests=100)
    alive.flush()
    elsewhere = write(one, 9, host="elsewhere." + "0" * 32, requests=1000)
    (one.path / "stats" / f"{elsewhere}.json").write_text(
        json.dumps(
            {"format": 1, "rows": {elsewhere: {"began": 1, "updated": one.context.clock() // 10**9, "requests": 1000}}}
        )
    )
    before = read_stats(one.context)
    fold(one.context)
    after = read_stats(one.context)
    assert after.rows == before.rows
    assert len(after.files) == 3
    fold(one.context)
    assert read_stats(one.context) == after  # one folded file stays as it is
    alive.add(requests=1)
    alive.close()
    assert read_stats(one.context).total("requests") == 36 + 101 + 1000


def test_few_files_are_left_alone_until_they_are_many(one):
    for number in range(1, FOLD_ABOVE + 1):
        write(one, number)
    fold(one.context, FOLD_ABOVE)
    assert len(names(one)) == FOLD_ABOVE
    write(one, 99)
    fold(one.context, FOLD_ABOVE)
    assert len(names(one)) == 1


def test_a_kill_between_two_steps_counts_nothing_twice(one, monkeypatch):
    for number in range(1, 6):
        write(one, number, requests=10)

    def killed(self, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            fold(one.context)
    assert len(names(one)) == 6
    assert read_stats(one.context).total("requests") == 50
    fold(one.context)
    assert len(names(one)) == 1
    assert read_stats(one.context).total("requests") == 50


def test_a_process_thought_gone_goes_on_counting(one):
    """As on a shared volume, where nobody can look for it: its row appears again, larger."""
    stats = StatsFile(one.context)
    stats.add(requests=5)
    stats.flush()
    old = names(one)[0]
    folded = one.path / "stats" / "folded.00000001.json"
    shutil.copyfile(one.path / "stats" / old, folded)
    (one.path / "stats" / old).unlink()
    stats.add(requests=1)
    stats.flush()
    assert read_stats(one.context).total("requests") == 6


def test_old_rows_are_added_up_so_that_they_stay_few(one):
    for number in range(1, MAX_ROWS + 102):
        write(one, number, requests=1, read_bytes=number)
    expected = read_stats(one.context)
    for _ in range(3):
        fold(one.context)
        found = read_stats(one.context)
        assert [found.total(name) for name in COUNTERS] == [expected.total(name) for name in COUNTERS]
    assert len(names(one)) == 1
    assert len(found.rows) == MAX_ROWS // 2 + 1
    (older,) = [row for writer, row in found.rows.items() if writer.startswith("older.")]
    assert (older.began, older.updated) == (1001, 2000 + MAX_ROWS + 101 - MAX_ROWS // 2)


def test_thousands_of_files_are_folded_bit_by_bit(one):
    for number in range(1, 3 * MAX_ROWS + 50):
        write(one, number, requests=1)
    for _ in range(6):
        fold(one.context)
    assert len(names(one)) == 1
    assert read_stats(one.context).total("requests") == 3 * MAX_ROWS + 49


# Copies and merges.


def test_a_merge_counts_each_process_once_at_its_latest(tmp_path):
    with open_store(tmp_path / "a") as a:
        write(a, 1, requests=5)
        write(a, 2, requests=7)
        clone(a.path, tmp_path / "b")
        with open_store(tmp_path / "b", None) as b:
            write(a, 1, requests=6)  # went on after the copy
            write(b, 3, requests=100)
            fold(b.context)
            for _ in range(2):
                report = merge(a.context, b.context)
                assert (report.error, report.foreign) == ("", 0)
                assert read_stats(b.context).total("requests") == 113
            files = names(b)
            merge(a.context, b.context)
            assert names(b) == files  # nothing new, nothing written
            report = merge(b.context, a.context, dry_run=True)
            assert report.foreign == 0
            assert len(names(a)) == 2
            shutil.copytree(b.path / "stats", a.path / "stats", dirs_exist_ok=True)  # as rsync would
            assert read_stats(a.context).rows == read_stats(b.context).rows


def write_folded(store, files: int, rows: int, **counts: int) -> None:
    """Rows as a fold or a merge left them, in several files."""
    folder = store.path / "stats"
    folder.mkdir(exist_ok=True)
    for file in range(files):
        found = {
            f"{GONE}.{1 + file * rows + row}.{row:08x}": {"began": 1, "updated": 1000 + row, **counts}
            for row in range(rows)
        }
        (folder / f"folded.{file:08x}.json").write_text(json.dumps({"format": 1, "rows": found}))


def test_a_merge_of_thousands_of_processes_writes_what_a_reader_takes(tmp_path):
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        write_folded(a, 4, 1000, **dict.fromkeys(COUNTERS, 10**11))
        expected = read_stats(a.context)
        assert len(expected.rows) == 4000
        for _ in range(2):
            merge_stats(a.context, b.context)
            found = read_stats(b.context)
            assert (found.rows, found.unreadable) == (expected.rows, 0)
        files = names(b)
        merge_stats(a.context, b.context)
        assert names(b) == files
        for _ in range(20):
            fold(b.context)
        found = read_stats(b.context)
        assert [found.total(name) for name in COUNTERS] == [expected.total(name) for name in COUNTERS]
        assert len(names(b)) == 1


def test_counters_to_come_may_be_large_and_are_not_folded_into_what_no_reader_takes(one, tmp_path):
    unknown = {f"a counter of version {number} that is not known yet": 2**62 for number in range(25)}
    write_folded(one, 3, 250, requests=1, **unknown)
    with open_store(tmp_path / "other") as other:
        for store in (one, other):
            merge_stats(one.context, other.context)
            for _ in range(3):
                fold(store.context)
            found = read_stats(store.context)
            assert (found.total("requests"), found.unreadable) == (750, 0)


counts = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9), max_size=5)


@given(st.lists(counts, max_size=4), st.randoms())
def test_the_order_of_copies_does_not_matter(states, random):
    """Union of grow-only counters: the same whatever is put together first, and however often."""
    from kvstore.stats import _join

    expected: dict[str, Row] = {}
    shuffled: dict[str, Row] = {}
    rows = [{name: Row(1, 2, {"requests": count}) for name, count in state.items()} for state in states]
    for each in rows:
        _join(expected, each)
    again = [*rows, *rows]
    random.shuffle(again)
    for each in again:
        _join(shuffled, each)
    assert shuffled == expected
    assert {name: row.counts["requests"] for name, row in expected.items()} == {
        name: max(state[name] for state in states if name in state) for state in states for name in state
    }


def test_every_command_knows_the_files(one):
    space = one.namespace(INFO)
    space.publish(prompt(20), spans(prompt(20), 0, 16, 20))
    write(one, 1, requests=1)
    found = scan(one.context)
    assert found.tally.foreign == 0
    assert found.tally.allocated >= os.stat(one.path / "stats" / names(one)[0]).st_blocks * 512
    report = check(one.context)
    assert [finding.code for finding in report.findings if finding.severity != "note"] == []
    assert report.counts.foreign == 0
    clear(one.context)
    assert read_stats(one.context).total("requests") == 1  # what was, not what is
    with open_store(one.path, None):
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 200,
        b"[]",
        b"{}",
        b'{"format":2,"rows":{}}',
        b'{"format":1,"rows":[]}',
        b'{"format":1,"rows":{"w":{"requests":-1}}}',
        b'{"format":1,"rows":{"w":{"requests":1.5}}}',
        b'{"format":1,"rows":{"w":{"requests":true}}}',
        b'{"format":1,"rows":{"w":{"requests":99999999999999999999}}}',
        b'{"format":1,"rows":{"w":5}}',
        b"{" * 100_000,
        b" " * ((1 << 20) + 1),
    ],
)
def test_what_is_no_such_file_counts_as_nothing(one, content):
    writer = write(one, 1, requests=1)
    other = write(one, 2, requests=5)
    (one.path / "stats" / f"{writer}.json").write_bytes(content)
    found = read_stats(one.context)
    assert (found.total("requests"), found.unreadable, found.files) == (5, 1, (f"{other}.json",))
    fold(one.context)
    assert len(names(one)) == 2  # what cannot be read is not removed


def test_other_files_and_counters_to_come_are_left_alone(one):
    write(one, 1, requests=1, hits_to_come=7)
    folder = one.path / "stats"
    for name in (".DS_Store", "notes.txt", "x.json", "._folded.00000001.json"):
        (folder / name).write_text("?")
    os.symlink("/etc/passwd", folder / f"{GONE}.5.00000005.json")
    os.mkfifo(folder / f"{GONE}.6.00000006.json")
    found = read_stats(one.context)
    assert found.total("requests") == 1
    assert found.unreadable == 2
    write(one, 2)
    fold(one.context)
    assert read_stats(one.context).total("hits_to_come") == 7
    assert {".DS_Store", "notes.txt", "x.json"} <= set(names(one))
    with open_store(one.path.parent / "other") as target:
        merge_stats(one.context, target.context)
        assert read_stats(target.context).total("hits_to_come") == 7


def test_the_speed_is_of_those_who_measured_it(one):
    """Rows of older versions have no times, and sums of old rows may be of both; another machine has another disk."""
    assert read_stats(one.context).read_speed() is None
    write(one, 1, read_bytes=10**9)
    assert read_stats(one.context).read_speed() is None
    write(one, 2, read_bytes=3 * 10**9, read_us=10**6)
    write(one, 3, read_bytes=10**9, read_us=10**6)
    write(one, 4, host="mac.1", read_bytes=10**9, read_us=10**9)
    write(one, 5, read_bytes=0, read_us=0)
    older = {"older.00000001": {"began": 1, "updated": 2, "read_bytes": 1 << 40, "read_us": 1}}
    (one.path / "stats" / "folded.00000001.json").write_text(json.dumps({"format": 1, "rows": older}))
    assert read_stats(one.context).read_speed(ME.host) == 2e9
    assert read_stats(one.context).read_speed("mac") == 1e6
    assert read_stats(one.context).read_speed("nobody") is None
    assert 4e6 < read_stats(one.context).read_speed() < 6e6
