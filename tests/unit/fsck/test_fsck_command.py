"""`kvstore fsck`: exit codes of fsck(8), sentences for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from fsck_support import LONG, block, flip, make, node, rewrite
from typer.testing import CliRunner

from kvstore.cli import app as cli
from kvstore.cli import fsck as command
from kvstore.fsck import check


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Damage of this moment is not waited for."""
    monkeypatch.setattr(command, "check", partial(check, settle_s=0))


def fsck(*arguments, env=None):
    return CliRunner(env={"KVSTORE_DIR": None, **(env or {})}).invoke(cli.app, ["fsck", *map(str, arguments)])


def test_exit_codes(root, tmp_path):
    assert fsck(root).exit_code == 0
    flip(node(root, LONG))
    assert fsck(root).exit_code == 4
    assert fsck(root, "--repair").exit_code == 1
    assert fsck(root).exit_code == 0
    flip(block(root, node(root, LONG[:32])))
    assert fsck(root).exit_code == 0
    assert fsck(root, "--read-data").exit_code == 4
    assert fsck(root, "--read-data", "--repair").exit_code == 1
    assert fsck(root, "--read-data").exit_code == 0
    assert fsck(tmp_path / "nothing").exit_code == 8


@pytest.mark.parametrize(
    "arguments", [["--bogus"], ["--jobs", "0"], ["--jobs", "many"], ["one too many"], ["--resume", "file"]]
)
def test_a_wrong_command_line_exits_with_16(root, arguments):
    result = fsck(root, *arguments)
    assert result.exit_code == 16
    assert result.stdout == ""
    assert result.stderr


def test_without_an_argument_the_environment_names_the_directory(root):
    assert fsck(env={"KVSTORE_DIR": str(root)}).exit_code == 0
    assert fsck(env={"KVSTORE_DIR": str(root / "nowhere")}).exit_code == 8


def test_what_is_no_cache_directory_is_said_in_one_sentence(root, tmp_path):
    for path, words in ((tmp_path, "is not a cache directory"), (root / "kvstore.json", "is a file")):
        result = fsck(path)
        assert (result.exit_code, result.stdout) == (8, "")
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    (root / "kvstore.json").write_text('{"format": 2, "interval": 16}')
    result = fsck(root, "--repair")
    assert result.exit_code == 8
    assert "upgrade" in result.stderr


def test_sentences(root):
    assert "No errors." in fsck(root, "--read-data").stdout
    path = block(root, node(root, LONG))
    flip(path)
    result = fsck(root, "--read-data")
    assert f"error: {path.relative_to(root)}: Its" in result.stdout
    assert "3 errors; --repair sets aside what is damaged." in result.stdout
    assert "Read 9 blocks" in result.stdout
    result = fsck(root, "--read-data", "--repair")
    assert "set aside as quarantine/" in result.stdout
    assert "3 errors: 3 corrected, 0 left." in result.stdout
    assert "3 files" in fsck(root).stdout, "what is in quarantine is mentioned"


def test_one_is_said_as_one(root):
    flip(node(root, LONG))
    assert "1 error; --repair sets aside what is damaged." in fsck(root).stdout
    assert "1 error: 1 corrected, 0 left." in fsck(root, "--repair").stdout
    assert "In quarantine before: 1 file (" in fsck(root).stdout


def test_many_findings_are_cut_for_people_and_whole_for_programs(root):
    path = node(root, LONG)
    for number in range(60):
        rewrite(root, path, tokens=number.to_bytes(4, "little") * 8, interval=32)
    result = fsck(root)
    assert len(result.stdout.splitlines()) < 60
    assert "… and 10 more" in result.stdout
    assert len(json.loads(fsck(root, "--json").stdout)["findings"]) == 60


def test_json(root):
    path = block(root, node(root, LONG))
    flip(path)
    result = fsck(root, "--json", "--read-data", "--repair")
    document = json.loads(result.stdout)
    assert result.stderr == "".join(f"kvstore: {warning}\n" for warning in document.pop("warnings"))
    counts = document.pop("counts")
    findings = document.pop("findings")
    assert document.pop("seconds") >= 0
    assert document == {
        "directory": str(root),
        "read_data": True,
        "repair": True,
        "exit_code": 1,
        "error": "",
        "errors": 3,
        "corrected": 3,
        "notes": 1,
    }
    assert (result.exit_code, counts["manifests"], counts["verified"]) == (1, 10, 9)
    assert all(type(count) is int for count in counts.values())
    assert {finding["code"] for finding in findings} == {"block-damaged", "manifest-unusable", "unreachable"}
    for finding in findings:
        assert set(finding) == {"severity", "code", "path", "sentence", "repair", "corrected"}
    (damaged,) = [finding for finding in findings if finding["code"] == "block-damaged"]
    assert damaged["path"] == str(path.relative_to(root))
    assert damaged["corrected"] is True
    assert (root / damaged["repair"].removeprefix("set aside as ")).is_file()


def test_an_interruption_says_how_to_go_on(root, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "check", interrupted)
    result = fsck(root, "--read-data", "--resume", tmp_path / "record")
    assert result.exit_code == 32
    assert f"--resume {tmp_path / 'record'}" in result.stderr.replace("\n", "")


@pytest.mark.parametrize("where", ["manifests", "data"])
def test_ctrl_c_ends_the_whole_process_at_once(root, where):
    """A real signal, with worker processes and threads at work, leaves no traceback and nobody behind."""
    code = f"""
import os, signal, sys
from kvstore.fsck import passes, reading
passes.PROCESSES_FROM = 0
if {where!r} == "data":
    verify = passes.Verifier.verify
    def slow(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return verify(self, *args)
    passes.Verifier.verify = slow
else:
    told = passes._told
    def killing(folders, results, progress):
        for pair in told(folders, results, progress):
            os.killpg(0, signal.SIGINT)
            yield pair
    passes._told = killing
from kvstore.cli import main
if __name__ == "__main__":
    sys.argv = ["kvstore", "fsck", sys.argv[1], "--read-data"]
    main()
"""
    script = root.parent / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script), str(root)],
        check=False,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    assert done.returncode == 32, done.stderr
    assert done.stderr.strip() == "kvstore: interrupted"


def test_the_installed_command(root):
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "fsck", str(root), "--json"], capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert document["findings"] == []
    assert done.stderr == "".join(f"kvstore: {warning}\n" for warning in document["warnings"])
    shown = subprocess.run(
        [sys.executable, "-m", "kvstore", "fsck", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert "1 errors were found and corrected" in shown.stdout
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
