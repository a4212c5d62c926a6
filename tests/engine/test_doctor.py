"""`kvstore doctor`: what it says, where it writes, how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import typer

from kvstore import Store
from kvstore_mlx import doctor, selfcheck, speeds
from kvstore_mlx.doctor import command

SMALL = ("--size", "4MiB")


@pytest.fixture(autouse=True)
def _quiet_place(monkeypatch):
    """Tests run in a temporary folder, which is worth a warning of its own."""
    monkeypatch.setattr(doctor, "warnings_for", lambda path: [])
    yield
    selfcheck.answer.cache_clear()


def report(capsys, *arguments: str) -> tuple[int, dict]:
    code = command([*arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    return code, document


def test_a_machine_and_a_directory_that_go_together(tmp_path, capsys):
    Store.open(tmp_path / "cache", interval=512).close()
    code, found = report(capsys, str(tmp_path / "cache"), *SMALL)
    assert code == 0
    assert (found["state"], found["interval"], found["problems"], found["warnings"]) == ("ready", 512, [], [])
    assert found["used"] > 0
    assert found["engine"]["in_place"]
    assert 0 <= found["engine"]["phase"] < 4096
    assert found["versions"]["mlx"]
    measured = found["speeds"]
    assert measured["bytes_each"] == 4 << 20
    assert all(measured[name] > 1e5 for name in ("write", "read", "publish", "restore"))


def test_nothing_is_left_on_the_disk(tmp_path, capsys):
    Store.open(tmp_path / "cache").close()
    before = sorted(tmp_path.rglob("*"))
    report(capsys, str(tmp_path / "cache"), *SMALL)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_is_not_there_yet_is_not_made(tmp_path, capsys):
    code, found = report(capsys, str(tmp_path / "a" / "b"), *SMALL)
    assert (code, found["state"], found["used"]) == (0, "absent", None)
    assert os.listdir(tmp_path) == []


def test_a_folder_of_something_else_cannot_be_used(tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    code, found = report(capsys, str(tmp_path / "photos"), "--no-speed")
    assert (code, found["state"], found["speeds"]) == (1, "unusable", None)
    assert "photos" in found["problems"][0]
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_what_speaks_against_a_place_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "warnings_for", lambda path: ["it is far away"])
    code, found = report(capsys, str(tmp_path / "cache"), "--no-speed")
    assert (code, found["warnings"]) == (3, ["it is far away"])


def test_releases_that_were_not_tested_are_a_problem(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvstore_mlx.versions.version", lambda package: "0.99.0")
    code, found = report(capsys, str(tmp_path / "cache"), "--no-speed")
    assert code == 1
    assert "0.99.0" in found["problems"][0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (selfcheck.Answer(in_place=False, donates=False, reason="it is haunted"), "haunted"),
        (selfcheck.Answer(in_place=True, donates=False), "each token copies the whole cache"),
    ],
)
def test_memory_that_cannot_be_used_in_place_is_a_warning(tmp_path, capsys, monkeypatch, answer, said):
    def found() -> selfcheck.Answer:
        return answer

    found.cache_clear = lambda: None
    monkeypatch.setattr(selfcheck, "answer", found)
    code, document = report(capsys, str(tmp_path / "cache"), "--no-speed")
    assert code == 3
    assert said in document["warnings"][0]


def test_again_looks_whatever_is_remembered(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    selfcheck.answer.cache_clear()
    notes = selfcheck.Notes()
    notes._write(selfcheck.machine_key(), {"looking": 2**22 + 1})
    code, document = report(capsys, str(tmp_path / "cache"), "--no-speed")
    assert (code, document["engine"]["in_place"]) == (3, False)
    selfcheck.answer.cache_clear()
    code, document = report(capsys, str(tmp_path / "cache"), "--no-speed", "--again")
    assert (code, document["engine"]["in_place"]) == (0, True)
    assert notes.get(selfcheck.machine_key()).in_place


def test_a_disk_that_refuses_is_a_problem_and_no_traceback(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr(speeds, "measure", full)
    code, document = report(capsys, str(tmp_path / "cache"))
    assert code == 1
    assert document["problems"] == ["speeds could not be measured: /somewhere: No space left on device"]


def test_scratch_files_lie_on_the_disk_of_the_directory(tmp_path, monkeypatch):
    assert speeds.scratch_parent(tmp_path / "no" / "such") == tmp_path
    (tmp_path / "cache").mkdir()
    assert speeds.scratch_parent(tmp_path / "cache") == tmp_path
    monkeypatch.setattr(speeds.os, "access", lambda path, mode: False)
    assert speeds.scratch_parent(tmp_path / "cache") == tmp_path / "cache"


def test_the_safe_path_restores_the_same(tmp_path, capsys, monkeypatch):
    """The store's speed is measured with real restores, each checked: also when MLX's memory is left alone."""
    monkeypatch.setenv(selfcheck.SAFE_ENV, "1")
    selfcheck.answer.cache_clear()
    code, document = report(capsys, str(tmp_path / "cache"), *SMALL)
    assert (code, document["engine"]["in_place"], document["engine"]["phase"]) == (3, False, 0)
    assert document["speeds"]["restore"] > 0


def test_people_get_a_table(tmp_path, capsys):
    assert command([str(tmp_path / "cache"), *SMALL]) == 0
    said = capsys.readouterr().out
    for word in ("not there yet", "filled and read in place", "write and sync", "iB/s", "publish"):
        assert word in said
    assert "B/s" not in said.replace("iB/s", "")  # as in all other commands


def test_a_wrong_command_line_is_2(capsys):
    with pytest.raises(typer.Exit) as error:
        command(["--size", "many"])
    assert error.value.exit_code == 2
    assert "--size" in capsys.readouterr().err


def test_an_empty_name_is_not_the_current_directory(capsys):
    with pytest.raises(typer.Exit) as error:
        command(["", "--no-speed"])
    assert error.value.exit_code == 2
    assert "the name of the directory is empty" in capsys.readouterr().err


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "doctor", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_mistake_is_one_sentence_and_no_usage():
    done = run("--nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvstore: no such option: --nope; see `kvstore doctor --help`\n"


def test_it_is_a_command_of_kvstore(tmp_path):
    done = run(str(tmp_path / "cache"), "--no-speed", "--json")
    assert json.loads(done.stdout)["state"] == "absent"
    # A temporary folder, or one in memory: that is what the warning is about.
    assert done.returncode == 3
    assert "temporary" in done.stdout or "in memory" in done.stdout
