"""The demo says what it measured, and fails when the cache changes an answer or does not pay."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import demo
import demo_conversation
import demo_files
import demo_report
from demo_report import CASES, Case, Run, check
from demo_servers import DemoError, Reuse, parse_reuse, tail

TOOL = Path(demo.__file__)

LINE = "2026-01-02 03:04:05,678 - INFO - kvstore: reused {} of {} tokens from {} in {} ms ({} read)"


def test_reuse_is_read_from_the_log():
    log = LINE.format(2798, 2799, "disk", "121.5", "123 MiB")
    assert parse_reuse(log, 2799) == Reuse(2798, 2799, "disk", 121.5, "123 MiB")


def test_the_last_line_about_this_prompt_counts():
    lines = [
        LINE.format(0, 2799, "nothing", "0.3", "0 B"),
        "2026-01-02 03:04:05,678 - INFO - Prompt processing progress: 2048/2799",
        LINE.format(2798, 2799, "memory", "1.6", "0 B"),
        LINE.format(0, 1, "nothing", "0.1", "0 B"),
    ]
    assert parse_reuse("\n".join(lines), 2799) == Reuse(2798, 2799, "memory", 1.6, "0 B")


def test_a_log_without_the_line_is_no_reuse():
    assert parse_reuse("", 2799) is None
    assert parse_reuse(LINE.format(5, 10, "disk", "1.0", "1 KiB"), 2799) is None


def test_the_line_is_the_one_that_the_adapter_writes():
    from kvstore_mlx import tier

    source = Path(tier.__file__).read_text(encoding="utf-8")
    assert '"kvstore: reused %d of %d tokens from %s in %.1f ms (%s read)%s"' in source


def measured(ttft_s: float, reused: int = 0, *, ids=(5, 6, 7), log: Path | None = None) -> Run:
    return Run(
        ttft_s=ttft_s,
        wall_s=ttft_s + 1,
        prompt_tokens=2800,
        reused_tokens=reused,
        restore_ms=1.5,
        written_mib=2.0,
        peak_memory_mib=900.0,
        output_ids=list(ids),
        log=log,
    )


def good(**changed: Case) -> dict[str, Case]:
    """Three repeats in which everything is as it should be, but for the cases that are given."""
    cases = {name: Case(name, [measured(0.5, 2799) for _ in range(3)]) for name in CASES}
    cases["disabled"] = Case("disabled", [measured(26.0 + noise) for noise in (0, 1, 5)])
    cases["first_write"] = Case("first_write", [measured(26.5 + noise) for noise in (0, 1, 40)])
    # Other requests than the first one may be answered otherwise.
    for name in ("appended_turn", "branch"):
        cases[name] = Case(name, [measured(1.0, 2700, ids=(8, 9)) for _ in range(3)])
    return {**cases, **changed}


def sentences(cases: dict[str, Case]) -> list[str]:
    return [problem.sentence for problem in check(cases)]


def test_good_measurements_are_no_problem():
    assert check(good()) == []


@pytest.mark.parametrize("name", ["first_write", "repeat", "restart", "restart_cold"])
@pytest.mark.parametrize("ids", [(5, 6, 8), (5, 6), (5, 6, 7, 8), ()])
def test_other_tokens_in_any_repeat_are_told(name, ids):
    log = Path("server-3.log")
    cases = good()
    runs = list(cases[name].runs)
    runs[1] = replace(runs[1], output_ids=list(ids), log=log)
    (problem,) = check({**cases, name: Case(name, runs)})
    at = {(5, 6): 3, (5, 6, 8): 3, (5, 6, 7, 8): 4, (): 1}[ids]
    assert problem.sentence == f"{name} gave other output tokens than disabled (repeat 2, from token {at} on)."
    assert problem.log == log


def test_disabled_must_agree_with_itself():
    runs = list(good()["disabled"].runs)
    runs[2] = replace(runs[2], output_ids=[1])
    (sentence,) = sentences(good(disabled=Case("disabled", runs)))
    assert sentence.startswith("disabled gave other output tokens")


def test_restart_must_reuse_nearly_everything_every_time():
    limit = 2800 * 95 // 100
    enough = [measured(0.5, reused) for reused in (2799, limit, 2799)]
    assert check(good(restart=Case("restart", enough))) == []
    little = [measured(0.5, reused) for reused in (2799, limit - 1, 2799)]
    (sentence,) = sentences(good(restart=Case("restart", little)))
    assert "only 2659 of 2800 prompt tokens (95.0%)" in sentence


def test_restart_must_be_forty_times_faster():
    # The median of disabled is 27 s.
    enough = [measured(seconds, 2799) for seconds in (0.1, 27 / 40, 9.0)]
    assert check(good(restart=Case("restart", enough))) == []
    slow = [measured(seconds, 2799) for seconds in (0.1, 0.9, 0.9)]
    (sentence,) = sentences(good(restart=Case("restart", slow)))
    assert sentence == (
        "restart took 0.900 s to the first token, 1/30.0 of disabled's 27.000 s; at most 1/40 was wanted."
    )


def test_first_write_must_cost_next_to_nothing():
    enough = [measured(seconds) for seconds in (1.0, 27.0 * 1.05, 99.0)]
    assert check(good(first_write=Case("first_write", enough))) == []
    slow = [measured(seconds) for seconds in (1.0, 28.5, 28.5)]
    (sentence,) = sentences(good(first_write=Case("first_write", slow)))
    assert "first_write took 28.500 s" in sentence
    assert "1.056 times disabled's 27.000 s" in sentence


def test_every_problem_is_told():
    bad = Case("restart", [measured(3.0, 100, ids=(1,)) for _ in range(3)])
    assert len(check(good(restart=bad))) == 3


def test_document_has_medians_and_all_runs():
    document = demo_report.document(good(), {"repeats": 3}, [])
    assert [case["name"] for case in document["cases"]] == list(CASES)
    first_write = document["cases"][1]
    assert first_write["ttft_s"] == 27.5
    assert first_write["wall_s"] == 28.5
    assert (first_write["prompt_tokens"], first_write["reused_tokens"]) == (2800, 0)
    assert first_write["output_ids"] == [5, 6, 7]
    assert [run["ttft_s"] for run in first_write["runs"]] == [26.5, 27.5, 66.5]
    assert document["ratios"]["restart_ttft_to_disabled"] == pytest.approx(0.5 / 27)
    assert document["ratios"]["first_write_ttft_to_disabled"] == pytest.approx(27.5 / 27)
    assert document["ratios"]["restart_reused_share"] == pytest.approx(2799 / 2800)
    assert json.loads(json.dumps(document)) == document


def test_what_could_not_be_measured_is_null():
    runs = [replace(measured(1.0), restore_ms=None, peak_memory_mib=None)]
    document = demo_report.document({**good(), "disabled": Case("disabled", runs)}, {}, [])
    assert document["cases"][0]["restore_ms"] is None
    assert document["cases"][0]["peak_memory_mib"] is None


def test_table_has_a_row_a_case(capsys):
    from rich.console import Console

    Console(width=120).print(demo_report.table(good()))
    shown = capsys.readouterr().out
    assert all(name in shown for name in CASES)
    assert "2,799 of 2,800" in shown
    assert "1/54" in shown


def test_tail_is_the_end_of_a_log(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff\n" + b"".join(b"%d\n" % number for number in range(30)))
    assert tail(log, 3) == "27\n28\n29"


def test_directory_is_measured_and_waited_for(tmp_path):
    assert demo_files.directory_bytes(tmp_path / "missing") == 0
    assert demo_files.saved_tokens(tmp_path / "missing") == 0
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").write_bytes(os.urandom(100_000))
    assert 100_000 <= demo_files.directory_bytes(tmp_path) < 200_000
    assert demo_files.wait_written(tmp_path, 0, timeout=30)
    assert not demo_files.wait_written(tmp_path, 1, timeout=1.5)
    (tmp_path / "tmp" / "staged").touch()
    assert not demo_files.wait_written(tmp_path, 0, timeout=1.5)


def test_page_cache_is_dropped_or_the_report_says_not(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    (tmp_path / "empty").touch()
    assert demo_files.drop_page_cache(tmp_path).startswith(("dropped with posix_fadvise", "not dropped: "))
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert demo_files.drop_page_cache(tmp_path) == demo_files.DROP_IMPOSSIBLE


def test_a_file_that_stays_in_the_page_cache_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    said = demo_files.drop_page_cache(tmp_path)
    if sys.platform == "linux":
        assert said == "not dropped: 3 of 3 MiB stayed in spite of posix_fadvise"
    else:
        assert said.endswith("could not be verified")


def test_conversation_is_the_same_every_time_and_branches_at_the_end():
    first = demo_conversation.first_request()
    assert first == demo_conversation.first_request()
    assert [message["role"] for message in first] == ["system", "user", "assistant", "user"]
    other = demo_conversation.branch()
    assert other[:-1] == first[:-1]
    assert other[-1] != first[-1]
    appended = demo_conversation.appended_turn("It is not.")
    assert appended[:-2] == first
    assert appended[-2] == {"role": "assistant", "content": "It is not."}


@pytest.mark.real_model
def test_conversation_has_the_tokens_it_should_have(smollm2):
    assert 2600 <= demo.check_prompt(demo.load_tokenizer(smollm2)) <= 3000


def test_conversation_of_another_length_is_refused(tiny_llama):
    with pytest.raises(DemoError, match="2600 to 3000 are needed"):
        demo.check_prompt(demo.load_tokenizer(tiny_llama))


class FakeServer:
    """Stands where the demo's servers stand; said is its log, code how it ends."""

    said = ""
    code = 0

    def __init__(self, log, *_):
        log.write_text(self.said)
        self.log = log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stop(self):
        return self.code


def test_a_traceback_in_a_log_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "said", "Traceback (most recent call last):\nOSError: no\n")
    run = demo.Demo(argparse.Namespace(model=None), None, {}, tmp_path, Silent())
    with run._server(None) as server:
        pass
    assert run.problems == [("there is a traceback in the log of a server.", server.log)]


@pytest.mark.parametrize("code", [1, -15])
def test_a_server_that_does_not_end_well_is_told(monkeypatch, tmp_path, code):
    monkeypatch.setattr(demo, "Server", FakeServer)
    monkeypatch.setattr(FakeServer, "code", code)
    run = demo.Demo(argparse.Namespace(model=None), None, {}, tmp_path, Silent())
    with run._server(None) as server:
        run._stop(server)
    assert run.problems == [(f"a server ended with exit code {code} on SIGTERM instead of 0.", server.log)]


class Silent:
    def begin(self, text: str) -> None:
        pass

    def done(self, text: str) -> None:
        pass


def test_all_cases_on_a_small_model(tiny_llama, tmp_path):
    options = argparse.Namespace(model=tiny_llama, max_tokens=12, repeats=1)
    run = demo.Demo(options, demo.load_tokenizer(tiny_llama), os.environ, tmp_path, Silent())
    run.repeat(tmp_path / "cache")
    cases = run.cases()
    assert run.problems == []
    # A model this small computes a prompt too fast for the ratios to mean anything.
    assert [sentence for sentence in sentences(cases) if "first token" not in sentence] == []
    (restart,), (cold,), (first_write,) = (cases[name].runs for name in ("restart", "restart_cold", "first_write"))
    assert restart.source == cold.source == "disk"
    assert restart.reused_tokens == restart.prompt_tokens - 1
    assert restart.restore_ms > 0
    assert first_write.written_mib > 1
    assert restart.written_mib < first_write.written_mib / 100
    assert cold.page_cache is not None
    assert cases["disabled"].runs[0].restore_ms is None
    assert all(case.runs[0].peak_memory_mib > 50 for case in cases.values())


def run_tool(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    environment = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_missing_model_is_one_sentence(tmp_path):
    result = run_tool("--model", tmp_path / "none", "--output", tmp_path / "demo.json")
    assert result.returncode == 1
    assert result.stdout == ""
    assert (
        result.stderr.replace("\n", " ").strip()
        == f"demo: {tmp_path / 'none'} is not a model folder: it has no config.json."
    )
    assert not (tmp_path / "demo.json").exists()


@pytest.mark.real_model
def test_model_that_cannot_be_served_is_told_with_the_end_of_the_log(smollm2, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(smollm2 / name)
    result = run_tool("--model", tmp_path, "--output", tmp_path / "demo.json", COLUMNS="500")
    assert result.returncode == 1
    assert "last 20 lines" in result.stderr
    # mlx_lm.server listens at once and loads its model meanwhile, so either may be noticed first.
    assert re.search("demo: a server could not (load its model|answer its first request)", result.stderr)
    assert not (tmp_path / "demo.json").exists()


def test_folder_to_keep_must_be_free(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    result = run_tool("--keep", tmp_path)
    assert result.returncode == 2
    assert "name a new or an empty folder" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS of its own")
def test_one_repeat_without_a_fast_blas(monkeypatch):
    monkeypatch.setenv("KVSTORE_BLAS", "none")
    assert demo.parse([]).repeats == 1
    assert demo.parse(["--repeats", "2"]).repeats == 2
