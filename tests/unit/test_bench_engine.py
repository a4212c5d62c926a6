"""The benchmarks that run an engine, as small as they go: that they measure what they say, and can be drawn."""

from __future__ import annotations

import json

import pytest

import bench
import bench_tokens

TOY = ["--layers", "8", "--heads", "8", "--dim", "128"]


def run(tmp_path, *arguments):
    """The JSON file of one subcommand, of which tables and plots were made."""
    out = tmp_path / "out.json"
    assert bench.main([*arguments, "--dir", str(tmp_path / "data"), "--out", str(out)]) == 0
    assert not (tmp_path / "data").exists()
    document = json.loads(out.read_text())
    module = bench.SUBCOMMANDS[arguments[0]]
    assert module.tables(document)
    assert module.panels(document)
    return document


def test_lookup_runs(tmp_path):
    document = run(tmp_path, "lookup", "--depths", "1,3", "--nodes", "8", "--rounds", "1")
    assert set(document["results"]) == {"1", "3"}
    assert all(part["n"] == 1 and part["min"] > 0 for each in document["results"].values() for part in each.values())


def test_ttft_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    document = run(tmp_path, "ttft", "--pairs", "1", "--restarts", "1", "--prompt-tokens", "200")
    counts = {name: each["n"] for name, each in document["seconds"].items()}
    assert counts == dict.fromkeys(("disabled", "first_write", "repeat_disabled", "repeat", "restart"), 1)
    assert document["cached_tokens_after_restart"] == [199]
    assert set(document["over_disabled"]) == set(counts) - {"disabled"}


def test_decode_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    sizes = [
        "--count",
        "256",
        "--rounds",
        "1",
        "--between",
        "0.1",
        "--nodes",
        "120",
        "--collections",
        "1",
        "--alone",
        "0.1",
    ]
    found = run(tmp_path, "decode", *TOY, "--model", "tiny", *sizes)["models"]["tiny"]
    for part, name in ((found, "publishing"), (found["collection"], "collecting")):
        assert set(part["ways"]) == {"paced", "full speed"}
        for turns in part["ways"].values():
            assert min(turns["tokens_a_second"][name]["values"]) > 0
    assert all(turns["pause_seconds"]["min"] > 0 for turns in found["ways"].values())
    ways = found["collection"]["ways"]
    assert all(turns["removed_nodes"][0] >= 5 for turns in ways.values())
    paced, fast = (ways[way]["collection_seconds"]["median"] for way in ("paced", "full speed"))
    assert paced > fast, "it rested"


def test_layers_runs(tmp_path):
    pytest.importorskip("mlx_lm")
    found = run(tmp_path, "layers", "--model", "tiny", "--tokens", "64", "--rest", "1,3", "--rounds", "1")["models"]
    assert found["tiny"]["layers"] == 4
    assert found["tiny"]["bytes"] == 64 * 4096
    for result in found["tiny"]["results"].values():
        seconds = {name: each["median"] for name, each in result["seconds"].items()}
        assert 0 < seconds["first"] <= seconds["read"] < seconds["whole"]
        assert seconds["early"] > 0


@pytest.mark.real_model
def test_tokens_runs(tmp_path, smollm2, monkeypatch):
    monkeypatch.setattr(bench_tokens, "MODEL", smollm2)
    document = run(tmp_path, "tokens", "--messages", "4", "--rounds", "2")
    assert document["tokens"] > 400
    assert document["ratio"]["n"] == 2
