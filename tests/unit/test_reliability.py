"""docs/reliability.md names tests that exist, and its figures come from what tests counted."""

from __future__ import annotations

import json
import re
from glob import glob
from pathlib import Path

import pytest
from record_support import record

import reliability_table
from reliability_table import load, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


def expanded(path: str) -> list[str]:
    """A path with {a,b} in it, as a shell expands it."""
    match = re.search(r"\{([^}]*)\}", path)
    if match is None:
        return [path]
    return [one for each in match[1].split(",") for one in expanded(path[: match.start()] + each + path[match.end() :])]


def named() -> set[str]:
    """Every path in the page, also the names of files that follow one of the same folder."""
    found: set[str] = set()
    for line in PAGE.splitlines():
        folder = ""
        for text in re.findall(r"`([^`]+)`", line):
            for word in re.split(r"[\s=]", text):
                if re.match(r"(tests|tools|kvstore|docs)/", word):
                    found.update(expanded(word))
                    folder = word.rpartition("/")[0]
                elif re.fullmatch(r"test_\w+\.py", word):
                    found.add(f"{folder}/{word}")
    return found


def test_every_path_it_names_is_there():
    paths = named()
    assert len(paths) > 25
    assert sorted(path for path in paths if not glob(str(ROOT / path))) == []


def test_every_promise_has_a_test_and_a_target():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| **")]
    assert len(rows) > 12
    for promise, tests, target in rows:
        assert "test" in tests, promise
        assert set(re.split(r",\s*", target.strip())) <= {"test", "soak"}, promise
        paths = [one for path in re.findall(r"tests/\S+?\.py", tests) for one in expanded(path)]
        soaked = [path for path in paths if "mark.soak" in (ROOT / path).read_text()]
        assert not soaked or "soak" in target, f"{promise}: {soaked}"


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\((?!https?://)([^)#]+)", PAGE):
        assert (ROOT / "docs" / link).exists()


def test_the_targets_it_names_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make (\w+)", PAGE))
    assert {"test", "soak", "reliability"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


class Report:
    """What pytest tells of a test."""

    when = "call"
    nodeid = "tests/x/test_y.py::test_z[a b]"
    duration = 1.26

    def __init__(self, outcome="passed", **figures) -> None:
        self.outcome = outcome
        self.user_properties = list(figures.items())
        self.keywords = {"soak": 1}


def document(outcome="passed", what="this", command="make soak TESTS=x", **figures) -> dict:
    conditions = dict.fromkeys(("cores", "machine", "system", "python", "commit"), "x")
    return {
        "what": what,
        "command": command,
        "outcome": outcome,
        "seconds": 600.4,
        "figures": figures,
        "conditions": {**conditions, "date": "2030-01-02T03:04:05", "load_average": [2.5, 1, 1]},
    }


def test_what_a_test_counted_is_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_RECORD", str(tmp_path / "new"))
    record(Report(what="this", histories=7))
    record(Report(histories=7))
    (found,) = load(tmp_path / "new")
    assert (found["what"], found["figures"], found["outcome"], found["seconds"]) == (
        "this",
        {"histories": 7},
        "passed",
        1.3,
    )
    assert found["command"] == "make soak TESTS=tests/x/test_y.py"
    assert found["conditions"]["cores"]
    record(Report("failed", what="this", histories=3))
    (found,) = load(tmp_path / "new")
    assert found["outcome"] == "failed"


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("KVSTORE_RECORD", raising=False)
    monkeypatch.chdir(tmp_path)
    record(Report(what="this", histories=7))
    assert list(tmp_path.iterdir()) == []


def test_the_table_adds_up_and_hides_no_failure():
    documents = [
        document(histories=1000, steps=5),
        document("failed", histories=234),
        document(what="that", command="make test TESTS=y", damages=3, other=9),
    ]
    text = table(documents)
    assert "| this | 1,234 histories, 5 steps | 1 of 2 tests | 1,201 s | `make soak TESTS=x` |" in text
    assert "| that | 3 damages | 0 of 1 tests | 600 s | `make test TESTS=y` |" in text
    assert text.index("| this") < text.index("| that")
    assert "2030-01-02, commit x" in text


def test_the_page_is_rewritten_between_its_markers(tmp_path, monkeypatch, capsys):
    (tmp_path / "records").mkdir()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin (x) -->\nold\n<!-- figures: end -->\nafter\n")
    command = ["x", "--write", "--records", str(tmp_path / "records"), "--page", str(page)]
    monkeypatch.setattr("sys.argv", command)
    assert reliability_table.main() == 1
    assert "make soak" in capsys.readouterr().err
    (tmp_path / "records" / "a.json").write_text(json.dumps(document(histories=1)))
    assert reliability_table.main() == 0
    text = page.read_text()
    assert "old" not in text
    assert "| this | 1 histories |" in text
    assert text.startswith("before\n<!-- figures: begin (x) -->\n| what |")
    assert text.endswith("<!-- figures: end -->\nafter\n")


def test_rows_of_earlier_runs_are_kept_when_asked_to(tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    page = tmp_path / "page.md"
    old = table([document(what="this", histories=1), document(what="that", command="make test TESTS=y", damages=3)])
    page.write_text(f"<!-- figures: begin (x) -->\n{old}<!-- figures: end -->\n")
    monkeypatch.setattr("sys.argv", ["x", "--add", "--records", str(tmp_path / "records"), "--page", str(page)])
    new = document(what="this", histories=2)
    new["conditions"]["commit"] = "y"
    (tmp_path / "records" / "a.json").write_text(json.dumps(new))
    for _ in range(2):
        assert reliability_table.main() == 0
        text = page.read_text()
        assert text.count("| this | 2 histories |") == 1
        assert "| this | 1 histories |" not in text
        assert text.count("| that | 3 damages |") == 1
        assert text.count("commit x") == text.count("commit y") == 1


@pytest.mark.parametrize("marker", ["<!-- figures: begin (make reliability) -->", "<!-- figures: end -->"])
def test_the_page_has_its_markers(marker):
    assert PAGE.count(marker) == 1
