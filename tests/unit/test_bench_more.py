"""The benchmarks of issue 5's "also measured" on toys: what their files hold, and their arithmetic."""

from __future__ import annotations

import gzip
import itertools
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench
import bench_peers
import bench_sustained
from bench_machine import BenchError
from bench_peer_sqlite import SqliteBlocks
from bench_servers import Answer
from bench_stats import break_even

TOY = ["--layers", "2", "--heads", "2", "--dim", "16"]


def run(tmp_path, *arguments):
    """The JSON file of one subcommand."""
    out = tmp_path / "out.json"
    assert bench.main([*arguments, "--dir", str(tmp_path / "data"), "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_break_even_is_where_the_ratio_reaches_one():
    lengths = [64, 128, 256]
    assert break_even(lengths, [2, 1, 0.5]) == 128
    assert break_even(lengths, [1.5, 0.5, 0.1]) == 96
    assert break_even(lengths, [0.9, 0.5, 0.1]) == 64
    assert break_even(lengths, [2, 0.5, 1]) is None
    # One lucky measurement in between is not where it begins to pay.
    assert break_even(lengths, [0.5, 1.5, 0.5]) == 192


def test_break_even_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    document = run(tmp_path, "break-even", "--model", "tiny", "--lengths", "64,256", "--rounds", "1")
    found = document["models"]["tiny"]
    assert found["lengths"] == [64, 256]
    # A header beside the rows, whose length depends on where this process's memory begins.
    assert all(0 < found["restored_bytes"][length] - int(length) * 4096 < 8192 for length in ("64", "256"))
    floors = ("over_floor", "repeat_over_floor", "same_over_floor", "same_repeat_over_floor", "engine_over_floor")
    floors += ("over_new_floor", "same_over_new_floor", "new_floor_seconds")
    assert all(found[floor][length]["n"] == 1 for floor in floors for length in ("64", "256"))
    assert found["disagreed"] == 0


def test_fsync_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    document = run(tmp_path, "fsync", *TOY, "--counts", "64", "--rounds", "2")
    assert set(document["seconds"]) == {"none", "barrier", "full", "raw", "raw_synced"}
    assert set(document["over_none"]) == {"barrier", "full"}
    assert document["seconds"]["none"]["64"]["n"] == 2


def test_blocks_runs_and_refuses_what_is_no_multiple(tmp_path, capsys):
    pytest.importorskip("mlx_lm")
    lengths = ["--tokens", "512", "--lookup-tokens", "2048", "--rounds", "1"]
    document = run(tmp_path, "blocks", *TOY, "--intervals", "256", *lengths)
    assert set(document["seconds"]) == {"restore", "raw", "publish_none", "publish_barrier", "lookup"}
    assert all(each["256"]["n"] == 1 for each in document["seconds"].values())
    assert bench.main(["blocks", "--tokens", "300", "--dir", str(tmp_path / "data")]) == 1
    assert "multiples of every interval" in capsys.readouterr().err


def test_gc_removes_half(tmp_path):
    document = run(tmp_path, "gc", "--nodes", "64", "--depth", "4", "--rounds", "1")
    (files,) = document["files"]["64"]
    assert files == 2 * 32
    assert set(document["seconds"]["64"]) == {"look", "plan", "remove"}


def test_peers_load_what_they_saved_and_who_is_missing_has_a_row(tmp_path, monkeypatch):
    pytest.importorskip("mlx_lm")
    monkeypatch.setattr(bench_peers, "_version", lambda name, _: None if name in {"lmcache", "diskcache"} else "1")
    chosen = ["kvstore", "raw", "mlx_lm", "sqlite", "safetensors_mlx", "diskcache", "lmcache"]
    lengths = ["--tokens", "1024", "--step", "512", "--rounds", "1"]
    document = run(tmp_path, "peers", *TOY, *lengths, *(f"--peer={name}" for name in chosen))
    assert document["missing"] == ["diskcache", "lmcache"]
    (made,) = bench_peers.tables(document)
    assert list(made.columns[1].cells).count("not installed") == 2
    size = document["payload_bytes"]
    written = {name: each["written"]["median"] / size for name, each in document["results"].items()}
    assert set(written) == set(chosen) - {"diskcache", "lmcache"}
    # Who cannot add to a file writes half of the conversation twice.
    for name in ("mlx_lm", "sqlite", "safetensors_mlx"):
        assert 1.5 <= written[name] < 2
    assert 1 <= written["raw"] < 1.1
    assert 1 <= written["kvstore"] < 1.4
    assert set(document["kvstore_faster"]["load"]) == set(written) - {"kvstore"}


def test_diskcache_loads_what_it_saved(tmp_path):
    pytest.importorskip("mlx_lm")
    pytest.importorskip("diskcache")
    lengths = ["--tokens", "512", "--step", "256", "--rounds", "1"]
    document = run(tmp_path, "peers", *TOY, *lengths, "--peer", "diskcache")
    assert document["results"]["diskcache"]["load"]["n"] == 1
    assert "kvstore_faster" not in document


def test_steps_that_mlx_lm_would_pad_are_refused(tmp_path, capsys):
    assert bench.main(["peers", "--step", "100", "--tokens", "200", "--dir", str(tmp_path)]) == 1
    assert "of 256" in capsys.readouterr().err


def test_the_sqlite_peer_finds_what_it_published_and_nothing_else(tmp_path):
    mx = pytest.importorskip("mlx.core")
    blocks = SqliteBlocks(tmp_path, ["a", "b"], block_tokens=4)
    arrays = [mx.arange(20).reshape(1, 2, 10, 1), mx.arange(20, 40).reshape(1, 2, 10, 1)]
    blocks.publish(range(6), [array[..., :6, :] for array in arrays])
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.safetensors")}
    blocks.publish(range(10), arrays)
    found = SqliteBlocks(tmp_path, ["a", "b"], block_tokens=4).load(range(10))
    assert all(mx.array_equal(one, two) for one, two in zip(found, arrays, strict=True))
    # The design that it stands for: the first block was serialised again. (The old tail is left to be evicted.)
    after = {path.name: path.stat().st_ino for path in tmp_path.glob("*.safetensors")}
    assert sum(after[name] != before[name] for name in before) == 1
    with pytest.raises(KeyError):
        blocks.load([1, *range(9)])


@pytest.fixture
def traces(tmp_path):
    """Two sessions of three requests; the first grows, the second is the same twice."""
    made = [
        {
            "session": 0,
            "block_tokens": 64,
            "requests": [[0, 6400, 1, 0, list(range(100))], [5, 7040, 1, 100, [7] * 10]],
        },
        {"session": 1, "block_tokens": 64, "requests": [[1, 6400, 1, 0, list(range(100))], [9, 6400, 1, 100, []]]},
    ]
    with gzip.open(tmp_path / bench_sustained.AGENT, "wt") as file:
        file.writelines(json.dumps(session) + "\n" for session in made)
    return tmp_path


def test_equal_recorded_blocks_are_equal_letters_of_their_session(traces):
    lanes = sorted((list(lane) for lane in bench_sustained.prompts(traces, 2, 2, 4096)), key=lambda lane: len(lane[1]))
    (other, again), (first, longer) = lanes
    assert longer.startswith(first)
    assert other == again
    assert len(first) == 200
    assert len(longer) == 220
    assert longer[200:] == longer[200:202] * 10
    assert other[:64] != first[:64]
    assert {len(prompt) for lane in bench_sustained.prompts(traces, 2, 2, 64) for prompt in lane} == {64}
    (one,) = bench_sustained.prompts(traces, 1, 2, 4096)
    assert sorted(one) == sorted([first, other, longer, again])


class Barriered:
    """A server that answers a request only when so many are waiting at once."""

    process = 0

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties, timeout=30)
        self.asked = []

    def ask(self, prompt, max_tokens):
        assert max_tokens > 1
        self.asked.append(prompt)
        if prompt == "bad":
            raise BenchError("a server did not answer")
        self.barrier.wait()
        return Answer(0.1, 0.2, 5, 3)


def test_lanes_ask_at_once_and_each_in_its_order(tmp_path):
    server = Barriered(2)
    rows = bench_sustained.replayed(
        [iter(["a", "b"]), iter(["x", "y"])], bench_sustained._Watched(server, tmp_path), 60
    )
    assert len(rows) == 4
    assert [each for each in server.asked if each in "ab"] == ["a", "b"]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert len(rows[0]) == len(bench_sustained._COLUMNS)


def test_lanes_stop_when_the_time_is_over(tmp_path):
    server = Barriered(1)
    rows = bench_sustained.replayed([itertools.repeat("a")], bench_sustained._Watched(server, tmp_path), 0.2)
    assert rows
    assert rows[-1][0] < 20


def test_an_error_in_one_lane_ends_all(tmp_path):
    server = Barriered(1)
    lanes = [iter(["a", "bad"]), itertools.repeat("x")]
    with pytest.raises(BenchError, match="did not answer"):
        bench_sustained.replayed(lanes, bench_sustained._Watched(server, tmp_path), 60)


def test_sustained_runs(traces):
    pytest.importorskip("mlx_lm")
    document = run(traces, "sustained", "--traces", str(traces), "--minutes", "5", "--lanes", "2")
    found = document["requests"]
    assert {len(values) for values in found.values()} == {4}
    assert max(found["cached_tokens"]) >= 128
    assert found["cached_tokens"][0] == 0
    assert found["at"] == sorted(found["at"])
    assert found["resident_bytes"][0] > 0
    assert sum(each["n"] for each in bench_sustained.windows(document)) == 4
    assert found["written_bytes"] == sorted(found["written_bytes"])


@pytest.mark.parametrize("times", [[0.0], [0.0, 0.0], [0.05, 0.1, 0.11]], ids=str)
def test_every_request_is_in_one_window(times):
    _in_windows(times)


@given(st.lists(st.integers(0, 400_000), min_size=1))
def test_every_request_is_in_one_window_whatever_the_time(hundredths):
    _in_windows([round(each / 100, 2) for each in sorted(hundredths)])


def _in_windows(times):
    requests = {name: [1] * len(times) for name in bench_sustained._COLUMNS} | {"at": times}
    windows = bench_sustained.windows({"requests": requests})
    assert sum(each["n"] for each in windows) == len(times)
    ends = [each["end"] for each in windows]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(times[-1])


def test_sustained_needs_a_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVSTORE_TRACES", raising=False)
    assert bench.main(["sustained", "--dir", str(tmp_path)]) == 1
    assert "docs/admission.md" in capsys.readouterr().err
