"""The benchmarks' arithmetic, what their files look like, and that they run at all."""

from __future__ import annotations

import json

import pytest

import bench
import bench_machine
import bench_quick
import bench_restore_methods
from bench_amplification import conversation
from bench_kv import Payload, Shape
from bench_machine import BenchError, data_folder, need_disk, need_memory
from bench_report import count_list, write_json
from bench_stats import Sample, interleaved, paired, rotated

TOY = ["--layers", "2", "--heads", "2", "--dim", "16"]


def test_a_sample_keeps_its_values_and_sums_them_up():
    sample = Sample.of([3, 1, 2, 10])
    assert (sample.n, sample.median, sample.low, sample.high) == (4, 2.5, 1, 10)
    assert sample.document() == {"n": 4, "median": 2.5, "min": 1.0, "max": 10.0, "values": [3.0, 1.0, 2.0, 10.0]}
    assert sample.text(1000, 1) == "2500.0 (1000.0 to 10000.0)"
    with pytest.raises(ValueError, match="at least one"):
        Sample.of([])


def test_ratios_are_of_pairs():
    """A slow second hits both of a pair. The ratio of the medians would be 2."""
    assert paired([1, 2, 30], [1, 1, 30]).values == (1, 2, 1)
    assert paired([1, 2, 30], [1, 1, 30]).median == 1
    with pytest.raises(ValueError, match="shorter"):
        paired([1, 2], [1])


def test_methods_take_turns():
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    calls = []

    def method(name):
        def run():
            calls.append(name)
            return float(len(calls))

        return run

    measured = interleaved({name: method(name) for name in "ab"}, rounds=2, warm_up=1)
    assert "".join(calls) == "baabba"
    assert measured == {"a": [3, 6], "b": [4, 5]}


def test_payloads_are_finite_and_never_the_same_twice():
    payload = Payload(Shape(1, 2, 16, "bf16"), 8)
    before = [bytes(data) for data in payload.data]
    assert [len(data) for data in before] == [2 * 8 * 16 * 2] * 2
    payload.renew()
    assert [bytes(data) for data in payload.data] != before
    words = memoryview(b"".join(before)).cast("H")
    assert not any(word & 0x7F80 == 0x7F80 for word in words)
    assert Shape().token_bytes == 144 << 10


def test_conversations_are_the_same_each_time_and_only_grow():
    turns = conversation(20)
    assert turns == conversation(20)
    ends = [0, *(turn.end for turn in turns)]
    assert all(end < turn.prompt < turn.end for end, turn in zip(ends, turns, strict=False))


def test_lists_on_the_command_line():
    assert count_list("2048,8192") == [2048, 8192]
    for wrong in ("", "a", "1,,2", "0", "-1"):
        with pytest.raises(bench.argparse.ArgumentTypeError, match="2048,8192"):
            count_list(wrong)


def test_data_are_removed_unless_kept(tmp_path):
    def use(*, keep: bool):
        with data_folder(tmp_path / "data", keep=keep) as folder:
            (folder / "file").write_bytes(b"x")
            raise KeyError(folder)

    for keep in (False, True):
        with pytest.raises(KeyError) as caught:
            use(keep=keep)
        assert caught.value.args[0].exists() is keep


def test_no_room_is_one_sentence(tmp_path, monkeypatch, capsys):
    with pytest.raises(BenchError, match=r"free some space, choose another --dir"):
        need_disk(tmp_path, 1 << 60)
    monkeypatch.setattr(bench_machine, "_read", lambda _: "MemAvailable:  1024 kB")
    with pytest.raises(BenchError, match="measure fewer tokens"):
        need_memory(1)
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda _: bench_machine.shutil._ntuple_diskusage(1, 1, 0))
    assert bench.main(["publish", *TOY, "--dir", str(tmp_path / "data"), "--out", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_results_are_written_whole(tmp_path):
    write_json(tmp_path / "deep" / "out.json", {"a": [1.5]})
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out.json"]
    assert json.loads((tmp_path / "deep" / "out.json").read_text()) == {"a": [1.5]}


def test_the_headline_has_every_figure_that_was_promised():
    sample = Sample.of([1, 2, 4]).document()
    others = dict.fromkeys(("raw1", "raw4", "load_prompt_cache", "mx_load_room"), sample)
    results = [
        {"tokens": tokens, "regime": regime, "store_over": others, "extra_peak_bytes": {"store": sample}}
        for tokens in (2048, 8192)
        for regime in ("touched", "fresh")
    ]
    figures = bench_quick.headline(
        {
            "restore": {"results": results},
            "publish": {
                "over": {"store": sample, "store_synced": sample},
                "extra_peak_bytes": {"publish": sample, "copy_and_publish": sample},
            },
            "amplification": {"written_over_new": 1.01, "turns": 20},
            "ttft": {"over_disabled": {"first_write": sample, "restart": sample}},
        }
    )
    assert {
        "restore_over_raw1",
        "restore_over_load_prompt_cache_fresh",
        "publish_over_raw",
        "write_amplification",
        "first_write_over_disabled",
    } <= set(figures)
    assert figures["restore_over_raw1"] | {"meaning": ""} == {"meaning": "", "n": 3, "median": 2, "min": 1, "max": 4}
    assert figures["write_amplification"]["median"] == 1.01


def run(tmp_path, *arguments):
    """A subcommand on a toy: its JSON file, something to plot, and nothing left of its data."""
    out = tmp_path / "out.json"
    assert bench.main([*arguments, "--dir", str(tmp_path / "data"), "--out", str(out)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == {"out"}
    document = json.loads(out.read_text())
    assert document["command"] == arguments[0]
    assert {"date", "machine", "cores", "versions", "system"} <= set(document["conditions"])
    assert bench.SUBCOMMANDS[arguments[0]].panels(document)
    return document


def test_restore_runs(tmp_path, capsys):
    pytest.importorskip("mlx_lm")
    document = run(
        tmp_path,
        "restore",
        *TOY,
        "--tokens",
        "512",
        "--rounds",
        "1",
        "--processes",
        "2",
        "--regime",
        "touched",
        "--threads",
        "1",
    )
    (result,) = document["results"]
    assert set(result["seconds"]) == {"store", "raw1", "raw4", "load_prompt_cache", "mx_load_room", "store1"}
    assert result["store_over_best_raw"] == result["store_over"]["raw4"]
    assert all(sample["n"] == 2 and sample["min"] > 0 for sample in result["seconds"].values())
    assert result["payload_bytes"] == 512 * 2 * 2 * 2 * 16 * 2
    assert "kvstore, digests verified" in capsys.readouterr().out


def test_restore_into_new_memory_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    lengths = ["--tokens", "512", "--fresh-rounds", "2", "--regime", "fresh"]
    (result,) = run(tmp_path, "restore", *TOY, *lengths)["results"]
    assert {"raw4", "raw4_populated"} < set(result["seconds"])
    ways = [result["store_over"][name]["values"] for name in ("raw4", "raw4_populated")]
    assert result["store_over_best_raw"]["values"] == [min(each) for each in zip(*ways, strict=True)]


def test_what_mx_load_joins_an_engine_goes_on_with_in_place():
    """One block or several: without room the engine would copy all of it at its first token."""
    mx = pytest.importorskip("mlx.core")
    cache_module = pytest.importorskip("mlx_lm.models.cache")
    for rows in ([512], [256, 256]):
        parts = [mx.full((2, count, 16), at + 1.0) for at, count in enumerate(rows)]
        made = [bench_restore_methods.joined(parts, bench_restore_methods.ROOM) for _ in range(2)]
        assert [array.shape for array in made] == [(1, 2, 768, 16)] * 2
        cache = cache_module.KVCache()
        cache.keys, cache.values, cache.offset = *made, 512
        one = mx.zeros((1, 2, 1, 16))
        keys, _ = cache.update_and_fetch(one, one)
        assert cache.keys.shape[2] == 768
        assert mx.array_equal(keys[0, :, :512], mx.concatenate(parts, axis=1))


def test_publish_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    document = run(tmp_path, "publish", *TOY, "--count", "256", "--rounds", "2", "--memory-rounds", "1")
    assert set(document["over"]) == {"store", "store_synced"}
    assert set(document["extra_peak_bytes"]) == {"publish", "copy_and_publish"}


def test_amplification_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    document = run(tmp_path, "amplification", *TOY, "--turns", "2")
    assert document["written_over_new"] > 1
    assert document["written_bytes"] >= document["new_kv_bytes"]
    assert document["nodes"] >= 2


def test_lengths_that_mlx_lm_would_pad_are_refused(tmp_path, capsys):
    assert bench.main(["restore", "--tokens", "100", "--dir", str(tmp_path / "data")]) == 1
    assert "multiples of 256" in capsys.readouterr().err
