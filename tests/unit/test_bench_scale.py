"""`bench scale` on a toy, and the page that is made of it: no figure of docs/scale.md is typed by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gc_support import manifests

import bench
import bench_machine
import bench_scale
import bench_scale_figures
import scale_page
from bench_machine import BenchError
from bench_stats import Sample
from make_big_store import make

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
RAW = json.loads((ROOT / "docs" / "bench" / "scale.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Twelve conversations of four chunks."""
    path = tmp_path_factory.mktemp("big") / "store"
    make(path, 48, 4, 2048, 7 * 86400, quiet=True)
    return path


def run(big, tmp_path, *arguments):
    """bench scale on the toy: its exit code and its JSON file."""
    out = tmp_path / "out.json"
    common = ["--store", str(big), "--depth", "4", "--rounds", "2", "--passes", "1"]
    code = bench.main(["scale", *common, *arguments, "--dir", str(tmp_path / "data"), "--out", str(out)])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_parts_are_measured_with_their_conditions_and_added_to_each_other(big, tmp_path):
    code, first = run(big, tmp_path, "--parts", "lookup")
    assert (code, list(first["parts"])) == (0, ["lookup, 48 nodes"])
    code, both = run(big, tmp_path, "--parts", "scan,marking,manifests,ls,fsck", "--add")
    names = ["lookup", "scan", "marking", "ls", "fsck", "manifests"]
    assert (code, [part["part"] for part in both["parts"].values()]) == (0, names)
    assert both["parts"]["lookup, 48 nodes"] == first["parts"]["lookup, 48 nodes"]
    (scanned,), (marked,) = (both["parts"][f"{name}, 48 nodes"]["results"] for name in ("scan", "marking"))
    assert (scanned["nodes"], scanned["files"], marked["named"]) == (48, 96, 48)
    assert all(part["page_cache"] == "kept" and part["date"] for part in both["parts"].values())
    assert len(manifests(big)) == 48


def test_lookups_are_of_whole_chunks_and_of_prompts_that_go_on(big, tmp_path):
    _, document = run(big, tmp_path, "--parts", "lookup")
    jobs = [each["job"] for each in document["parts"]["lookup, 48 nodes"]["results"]]
    assert [job["rest"] for job in jobs] == [0, 300, 0, 300]
    assert len({job["number"] for job in jobs}) == 4


def test_gc_removes_what_it_was_told_to_and_only_when_it_is_asked_for(tmp_path):
    make(tmp_path / "store", 48, 4, 2048, 7 * 86400, quiet=True)
    assert bench_scale.PARTS[-1] == "gc"
    code, document = run(tmp_path / "store", tmp_path, "--parts", "gc", "--remove", "12")
    assert code == 0
    (result,) = document["parts"]["gc, 48 nodes"]["results"]
    assert result["files"] == 24
    assert len(manifests(tmp_path / "store")) == 36


def test_a_store_without_a_conversation_is_refused_in_a_sentence(tmp_path, capsys):
    make(tmp_path / "store", 3, 4, 2048, 86400, quiet=True)
    code, document = run(tmp_path / "store", tmp_path, "--parts", "lookup")
    assert (code, document) == (1, None)
    assert "less than two conversations" in capsys.readouterr().err


def test_without_the_right_to_drop_the_page_cache_nothing_is_measured(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr("os.sync", lambda: None)
    with pytest.raises(BenchError, match="be root"):
        bench_machine.drop_all_caches()


def figure(**changes):
    sample = Sample.of([2, 1, 4])
    return bench_scale_figures.Figure("it", "s", sample, "warm", **changes)


def test_a_verdict_is_about_the_median():
    assert (figure(at_most=2).verdict(), figure(at_most=1.9).verdict()) == ("met", "missed")
    assert (figure(at_least=2).verdict(), figure(at_least=2.1).verdict()) == ("met", "missed")
    assert (figure().verdict(), figure().target_text()) == ("", "")
    assert figure(at_least=7000).target_text() == "at least 7,000 s"
    assert figure().text() == "2.00 (1.00 to 4.00)"


def test_what_was_read_from_the_disk_is_not_called_warm():
    result = {"job": {"jobs": 1}, "seconds": 2, "manifests": 8, "read_bytes": 0}
    part = {"part": "manifests", "nodes": 8, "page_cache": "kept"}
    (warm,) = bench_scale_figures.figures_of({**part, "results": [result]})
    assert (warm.cache, warm.sample.median, warm.verdict()) == ("warm", 4, "missed")
    results = [result, {**result, "read_bytes": 1 << 29}]
    (partly,) = bench_scale_figures.figures_of({**part, "results": results})
    assert (partly.cache, partly.verdict(), partly.target_text()) == ("kept, 0.5 GiB read", "", "")
    (fast,) = bench_scale_figures.figures_of({**part, "results": [{**results[1], "manifests": 200_000}]})
    assert fast.verdict() == "met"
    (cold,) = bench_scale_figures.figures_of({**part, "page_cache": "dropped", "results": [result]})
    assert (cold.cache, cold.verdict()) == ("dropped, 0.0 GiB read", "")


def test_a_missed_target_of_gc_is_shown_whatever_marking_had_to_read():
    result = {"look": 1, "plan": 1, "remove": 1, "files": 6_000, "read_bytes": 1 << 30, "peak_bytes": 1}
    part = {"part": "gc", "nodes": 8, "page_cache": "kept", "results": [result]}
    verdicts = [each.verdict() for each in bench_scale_figures.figures_of(part)]
    assert verdicts == ["", "", "missed", ""]


def test_the_page_is_what_the_tool_makes_of_the_file_beside_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(scale_page.MARKERS.sub(r"\1an old table\n\2", PAGE), encoding="utf-8")
    assert page.read_text() != PAGE
    raw = tmp_path / "deep" / "raw.json"
    source = ROOT / "docs" / "bench" / "scale.json"
    assert scale_page.main(["--json", str(source), "--page", str(page), "--raw", str(raw)]) == 0
    assert page.read_text(encoding="utf-8") == PAGE
    assert raw.read_bytes() == source.read_bytes()
    assert scale_page.main(["--json", str(tmp_path / "none.json"), "--page", str(page)]) == 1


def test_every_line_of_the_page_has_its_n_and_its_page_cache():
    lines = [line for line in scale_page.block(RAW).splitlines() if re.match(r"\| [a-z`]", line)]
    rows = [line.strip("| ").split(" | ") for line in lines if line.count("|") == 8]
    assert len(rows) == len(bench_scale_figures.figures(RAW)) >= 15
    for _, nodes, cache, n, measured, *_ in rows:
        assert re.fullmatch(r"[\d,]+", nodes)
        assert cache
        assert int(n) >= 1
        assert re.match(r"[\d.,]+ \([\d.,]+ to [\d.,]+\) \S+$", measured)


def test_times_have_targets_for_a_million_nodes_only():
    result = {"nodes": 8, "mark": 2, "named": 8, "read_bytes": 0, "peak_bytes": 1}
    part = {"part": "marking", "page_cache": "kept", "results": [result]}
    verdicts = {nodes: bench_scale_figures.figures_of({**part, "nodes": nodes})[0].verdict() for nodes in (8, 950_000)}
    assert verdicts == {8: "", 950_000: "met"}


def test_the_page_is_about_a_million_nodes():
    assert {part["part"] for part in RAW["parts"].values()} == set(bench_scale.PARTS)
    many = {part["part"] for part in RAW["parts"].values() if part["nodes"] >= 1_000_000}
    assert {"lookup", "scan", "marking", "ls", "fsck"} <= many
