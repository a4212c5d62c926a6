"""docs/benchmarks.md: no figure is typed by hand, and a target that is missed is called missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_targets
import benchmarks_page
from bench import SUBCOMMANDS
from bench_plot import Line, Panel, draw
from bench_stats import Sample
from bench_targets import Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"


def test_the_page_is_what_the_tool_makes_of_the_files_beside_it(tmp_path):
    made = tmp_path / "page.md"
    assert benchmarks_page.main(["--page", str(made)]) == 0
    assert made.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_file_is_on_the_page_and_every_picture_is_there():
    text = PAGE.read_text(encoding="utf-8")
    scale = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for path in benchmarks_page.RAW.glob("*.json"):
        assert path.stem == "scale" or f"](bench/{path.name})" in text
        assert f"](bench/{path.stem}.svg)" in (scale if path.stem == "scale" else text)
        assert path.with_suffix(".svg").is_file()


def test_the_benchmarks_of_the_issue_are_there():
    found = {document["command"] for document in benchmarks_page.load(benchmarks_page.RAW).values()}
    wanted = {"restore", "publish", "lookup", "amplification", "ttft", "break-even", "fsync", "blocks", "gc", "peers"}
    assert wanted <= found


def test_figures_of_two_machines_say_which():
    own = {
        name: json.loads((ROOT / "docs" / "bench" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("publish", "tokens")
    }
    own["publish"]["conditions"] |= {"machine": "one"}
    own["tokens"]["conditions"] = {**own["publish"]["conditions"]}
    assert not any("| machine |" in line for line in benchmarks_page._conditions(own))
    own["tokens"]["conditions"] |= {"machine": "another"}
    lines = list(benchmarks_page._conditions(own))
    assert [line[:9] for line in lines if line.startswith(("A: ", "B: "))] == ["A: one, 2", "B: anothe"]
    assert [line[-4:] for line in lines[-2:]] == [" A |", " B |"]


def test_a_verdict_is_about_the_median_and_its_direction():
    least = Row("it", 0.8, 1.0, Sample.of([0.7, 0.9, 1.1]))
    assert (least.limit(0.8), least.verdict(0.8), least.verdict(1.0)) == ("≥ 0.8", "met", "**not met**")
    most = Row("it", 8, 1, Sample.of([3]), unit="MiB", at_most=True)
    assert (most.limit(8), most.verdict(8), most.verdict(1)) == ("≤ 8 MiB", "met", "**not met**")
    assert Row("it", 1, 2).verdict(1) == ""


def test_the_first_screen_counts_what_the_table_says():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and ("≥" in line or "≤" in line)]
    cells = [(row[7].strip(), row[8].strip()) for row in rows if len(row) == 10]
    for at, kind in enumerate(("musts are met,", "aims.")):
        assert f"{sum(cell[at] == 'met' for cell in cells)} of {len(cells)} {kind}" in text


def test_missed_musts_are_grouped_by_kind():
    made = [Row("it", 2, 1, Sample.of([value]), unit="ms", at_most=True, detail=str(value)) for value in (3, 1.5, 4, 5)]
    made += [Row("other", 1, 2, Sample.of([0.5])), Row("good", 1, 2, Sample.of([3])), Row("none", 1, 2)]
    assert list(benchmarks_page._summary(made)) == [
        "2 of 6 musts are met, 1 of 6 aims. Not measured: 1. Musts that are not met:",
        "",
        "- it: 3.00 to 5.00 ms (must ≤ 2 ms), 3 of 4 rows",
        "- other: 0.50 (must ≥ 1), 1 of 1 rows",
        "",
    ]
    assert list(benchmarks_page._summary(made[5:6])) == ["1 of 1 musts are met, 1 of 1 aims.", ""]


def test_what_was_not_measured_is_a_row_that_says_so():
    rows = bench_targets.rows({})
    assert len(rows) >= 12
    assert all(row.sample is None for row in rows)
    text = benchmarks_page.page({})
    assert text.count("| not measured |") == len(rows)
    assert "met |\n" not in text


def test_a_cold_restore_is_held_against_no_target():
    values = {"values": [0.5]}
    result = {
        "tokens": 2048,
        "regime": "fresh",
        "cores_used_by_others": 0.1,
        "store_over": dict.fromkeys(("raw1", "raw4", "load_prompt_cache", "mx_load_room"), values),
        "store_over_best_raw": {"values": [0.4]},
        "extra_peak_bytes": {"store": values},
    }
    document = {"command": "restore", "page_cache": "warm", "results": [result]}
    warm = [row for row in bench_targets.rows({"restore": document}) if row.sample]
    assert len(warm) == 5
    assert warm[0].verdict(0.8) == "**not met**"
    (best,) = [row for row in warm if "the best raw" in row.what]
    assert best.sample.values == (0.4,)
    older = {**result, "store_over": dict.fromkeys(("raw1", "raw4", "load_prompt_cache", "mx_load"), values)}
    del older["store_over_best_raw"]
    what = [row.what for row in bench_targets.rows({"restore": {**document, "results": [older]}}) if row.sample]
    assert any("no room" in each for each in what)
    assert any("not populated" in each for each in what)
    assert not any("best raw" in each or "the same room" in each for each in what)
    cold = {**document, "page_cache": "dropped before each reading (posix_fadvise)"}
    assert not [row for row in bench_targets.rows({"restore": cold}) if row.sample]


def test_a_cold_file_beside_the_warm_one_has_a_table_and_a_plot_of_its_own():
    documents = {}
    for name in ("restore", "break-even"):
        warm = json.loads((benchmarks_page.RAW / f"{name}.json").read_text(encoding="utf-8"))
        cold = {**warm, "page_cache": "dropped before each (drop_caches)"}
        documents |= {name: warm, f"{name}-cold": cold}
        module = SUBCOMMANDS[name]
        assert all("cold files" in str(table.title) for table in module.tables(cold))
        assert all("cold files" in panel.title for panel in module.panels(cold))
        assert not any("cold" in panel.title for panel in module.panels(warm))
    text = benchmarks_page.page(documents)
    for name in ("restore", "break-even"):
        assert f"![{name}](bench/{name}-cold.svg)" in text
    only_warm = [name for name in documents if not name.endswith("-cold")]
    assert bench_targets.rows(documents) == bench_targets.rows({name: documents[name] for name in only_warm})


def test_a_repeat_is_held_against_the_floor_where_it_was_measured():
    document = json.loads((benchmarks_page.RAW / "break-even.json").read_text(encoding="utf-8"))
    found = document["models"]["tiny"]
    found["seconds"]["repeat"] = found["seconds"]["restored"]
    found["repeat_over_floor"] = {length: {"values": [1.4]} for length in found["over_floor"]}
    of_one = "of a repeat with one token more", "tiny llama"
    rows = bench_targets.rows({"break-even": document})
    rows = [row for row in rows if all(part in row.what for part in of_one)]
    assert [row.verdict(row.must) for row in rows] == ["met"] * 4
    (_, table, *_) = SUBCOMMANDS["break-even"].tables(document)
    assert [column.header for column in table.columns][1:3] == ["repeat, one token more", "restart, the same prompt"]


def test_raw_values_are_taken_with_their_plot(tmp_path):
    pytest.importorskip("matplotlib")
    values = {"n": 1, "median": 0.5, "min": 0.5, "max": 0.5, "values": [0.5]}
    conditions = json.loads((ROOT / "docs" / "bench" / "scale.json").read_text(encoding="utf-8"))["conditions"]
    document = {
        "command": "gc",
        "conditions": conditions,
        "page_cache": "warm",
        "nodes": [100],
        "cores_used_by_others": None,
        "files": {"100": [7]},
        "seconds": {"100": dict.fromkeys(("look", "plan", "remove"), values)},
        "peak_bytes": {"100": values},
    }
    source = tmp_path / "gc.json"
    source.write_text(json.dumps(document), encoding="utf-8")
    raw, page = tmp_path / "raw", tmp_path / "page.md"
    assert benchmarks_page.main(["--take", str(source), "--raw", str(raw), "--page", str(page)]) == 0
    assert json.loads((raw / "gc.json").read_text(encoding="utf-8")) == document
    assert (raw / "gc.svg").read_bytes().startswith(b"<?xml")
    text = page.read_text(encoding="utf-8")
    assert "| 100 | 500.0 (500.0 to 500.0) |" in text
    assert "![gc](bench/gc.svg)" in text
    assert benchmarks_page.main(["--take", str(tmp_path / "none.json")]) == 1


def test_a_plot_is_the_same_bytes_each_time_and_never_a_failure(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    sample = Sample.of([1, 2, 4])
    panels = [
        Panel("curve", "x", "y", [Line.of("a", [1, 2], [sample, sample])], log_x=True, log_y=True),
        Panel("bars", "x", "", [Line.of("a", range(1), [sample])], bars=["one"]),
    ]
    assert draw(panels, tmp_path / "one.svg") == f"plot: {tmp_path / 'one.svg'}"
    draw(panels, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert draw([], tmp_path / "none.svg") is None
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "not installed" in draw(panels, tmp_path / "three.svg")
    assert not (tmp_path / "three.svg").exists()


def test_every_file_makes_tables_and_a_plot():
    for name, document in benchmarks_page.load(benchmarks_page.RAW).items():
        module = SUBCOMMANDS[document["command"]]
        panels = module.panels(document)
        assert panels, name
        assert all(panel.lines and all(len(line.y) for line in panel.lines) for panel in panels), name
        assert name == "scale" or module.tables(document)
    assert all(callable(module.panels) for module in SUBCOMMANDS.values())


def test_a_plot_is_written_as_svg_and_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    bars = [Panel.of_bars("bars", "ms", {"one": Sample.of([1]), "two": Sample.of([2, 3])}, mark=1)] * 3
    for kind, start in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        draw(bars, tmp_path / f"it{kind}")
        assert (tmp_path / f"it{kind}").read_bytes().startswith(start)
