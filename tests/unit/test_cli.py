"""The commands ls and gc as people and programs use them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import typer
from core_support import INFO, open_store
from gc_support import TENANT, blocks, check_valid, manifests, prompt, publish, set_used, space_of
from typer.testing import CliRunner

import kvstore.cli.clear
import kvstore.cli.du
import kvstore.cli.fsck
import kvstore.cli.gc
import kvstore.cli.ls
import kvstore.cli.merge
import kvstore.cli.quota
import kvstore.cli.repack
import kvstore.cli.show
import kvstore.cli.stats
from kvstore.cli.app import app
from kvstore.gc import GcReport, Policy
from kvstore.locks import gc_lock


@pytest.fixture
def path(tmp_path) -> Path:
    with open_store(tmp_path / "s") as store:
        space = space_of(store)
        for seed, age in ((1, 5000), (2, 100_000)):
            publish(space, prompt(20 + 16 * seed, seed))
            set_used(store, space, prompt(20 + 16 * seed, seed), age)
    return tmp_path / "s"


@pytest.fixture
def nothing_is_young(monkeypatch):
    """A command has the real clock, and a test has no minute to wait."""
    monkeypatch.setattr("kvstore.cli.gc.Policy", partial(Policy, protect_ns=0))


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def sentence(*arguments: object, code: int = 1) -> str:
    """What a failing command says, which must be one line on stderr and nothing on stdout."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("kvstore: ")
    return result.stderr.strip()


def test_ls_shows_a_row_a_conversation_last_used_first(path):
    lines = run("ls", path).stdout.splitlines()
    assert lines[0].split() == ["model", "namespace", "key", "tokens", "nodes", "size", "own", "last", "used"]
    rows = [line.split() for line in lines[1:]]
    assert [row[:3] for row in rows] == [["a", "test", INFO.id[:12]]] * 2
    assert [row[4:6] for row in rows] == [["36", "3"], ["52", "4"]]
    assert [row[-2:] for row in rows] == [["1", "h"], ["27", "h"]]


@pytest.mark.parametrize(("sort", "tokens"), [("age", [36, 52]), ("tokens", [52, 36]), ("bytes", [52, 36])])
def test_ls_sorts(path, sort, tokens):
    document = json.loads(run("ls", path, "--json", "--sort", sort).stdout)
    assert [each["tokens"] for each in document["conversations"]] == tokens


def test_ls_json_has_the_documented_shape(path):
    document = json.loads(run("ls", path, "--json").stdout)
    assert document["directory"] == str(path)
    assert document["damaged"] == document["foreign"] == 0
    with open_store(path) as store:
        space = space_of(store)
        step = space.lookup(prompt(36, 1)).steps[-1]
    each = document["conversations"][0]
    assert each == {
        "namespace": INFO.id,
        "label": "a test",
        "key": step.name.key,
        "tokens": 36,
        "nodes": 3,
        "bytes": each["bytes"],
        "own_bytes": each["bytes"],
        "used": step.mtime_ns / 1e9,
        "resumable": False,
        "complete": True,
    }
    documented = Path(kvstore.cli.ls.__file__).read_text().split('"""')[1]
    assert all(f'"{key}"' in documented for key in [*document, *each])


def test_ls_of_an_empty_directory_says_so(tmp_path):
    open_store(tmp_path / "s").close()
    assert run("ls", tmp_path / "s").stdout == f"{tmp_path / 's'} holds no conversation yet.\n"
    assert json.loads(run("ls", tmp_path / "s", "--json").stdout)["conversations"] == []


def test_ls_chooses_namespaces_by_their_beginning(path):
    with open_store(path) as store:
        publish(space_of(store, TENANT), prompt(9))
    document = json.loads(run("ls", path, "--json", "--namespace", TENANT.id[:8].upper()).stdout)
    assert [each["label"] for each in document["conversations"]] == ["another"]
    assert "no namespace begins with 'xyz'" in sentence("ls", path, "--namespace", "xyz")


def test_ls_never_obeys_a_label(path):
    description = next((path / "namespaces").iterdir())
    evil = {"label": "[red]\x1b[2J\u202e:smile:\ud800\n" + "x" * 5000}
    description.write_text(json.dumps(evil))
    output = run("ls", path).stdout
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "[red]?[2J?:smile:??" in output
    assert len(output.splitlines()) == 3
    json.loads(run("ls", path, "--json").stdout)


def test_ls_names_damage(path):
    manifest = manifests(path)[0]
    manifest.write_bytes(b"x")
    result = run("ls", path)
    assert "1 damaged manifest" in result.stderr
    assert "kvstore fsck" in result.stderr
    assert json.loads(run("ls", path, "--json").stdout)["damaged"] == 1


def test_gc_without_a_limit_removes_garbage_and_says_so(path):
    before = manifests(path)
    output = run("gc", path).stdout
    assert "No limit was given" in output
    assert "Removed nothing: 0 B." in output
    assert manifests(path) == before


def test_gc_by_age(path, nothing_is_young):
    output = run("gc", path, "--older-than", "20h").stdout
    assert "Removed 4 nodes, 4 blocks: 32.0 KiB." in output
    assert "No limit" not in output
    assert len(manifests(path)) == 3
    check_valid(path)


def test_gc_by_size(path, nothing_is_young):
    output = run("gc", path, "--size", "1KiB").stdout
    assert "Removed 7 nodes, 7 blocks" in output
    assert "more would have to go" in output
    assert blocks(path) == []


def test_gc_by_free_space(path, nothing_is_young, monkeypatch):
    monkeypatch.setattr("kvstore.gc.free_bytes", lambda context: 100_000)
    assert "Removed nothing" in run("gc", path, "--min-free", "100kB").stdout
    assert len(manifests(path)) == 7
    before = len(manifests(path))
    output = run("gc", path, "--min-free", "110kB").stdout
    assert output.startswith("Removed")
    assert "more would have to go" not in output
    assert 0 < len(manifests(path)) < before
    check_valid(path)
    output = run("gc", path, "--min-free", "1TB").stdout
    assert "more would have to go: the rest is in use" in output
    assert manifests(path) == []
    assert json.loads(run("gc", path, "--min-free", "1TB", "--json").stdout)["unmet_bytes"] == 10**12 - 10**5


def test_gc_says_what_the_clock_keeps(path, monkeypatch):
    monkeypatch.setattr("kvstore.cli.gc.collect", lambda *_args, **_more: GcReport(unmet_bytes=1, future=3))
    output = run("gc", path, "--size", "0").stdout
    assert "Written while the clock was ahead, so left: 3 files" in output
    assert "kvstore fsck --repair" in output


def test_gc_protects_what_was_just_written(path):
    output = run("gc", path, "--size", 0).stdout
    assert "Removed nothing" in output
    assert len(manifests(path)) == 7


def test_gc_dry_run_and_json(path, nothing_is_young):
    output = run("gc", path, "--size", "0", "--dry-run").stdout
    assert "Would remove 7 nodes, 7 blocks" in output
    assert "would take" in output
    document = json.loads(run("gc", path, "--size", "0", "--dry-run", "--json").stdout)
    assert (document["nodes"], document["dry_run"], document["directory"]) == (7, True, str(path))
    assert len(manifests(path)) == 7
    documented = Path(kvstore.cli.gc.__file__).read_text().split('"""')[1]
    assert all(f'"{key}"' in documented for key in document)
    assert json.loads(run("gc", path, "--size", "0", "--json").stdout)["nodes"] == 7
    assert manifests(path) == []


def test_gc_of_one_namespace(path, nothing_is_young):
    with open_store(path) as store:
        publish(space_of(store, TENANT), prompt(20))
    run("gc", path, "--namespace", TENANT.id[:6], "--size", 0)
    assert len(manifests(path)) == 7
    assert "no namespace begins with" in sentence("gc", path, "--namespace", "0" * 32)
    os.mkdir(path / "objects" / "nodes" / (INFO.id[:31] + ("0" if INFO.id[-1] != "0" else "1")))
    assert "2 namespaces begin with" in sentence("gc", path, "--namespace", INFO.id[:31])


def test_gc_reports_damage_with_advice(path):
    manifests(path)[0].write_bytes(b"x")
    output = run("gc", path).stdout
    assert "Unreadable: 1 manifest." in output
    assert "kvstore fsck --repair" in output


def test_gc_beside_another_one_says_so(path):
    with open_store(path) as store, gc_lock(store.context.layout):
        said = sentence("gc", path, "--size", "0")
        assert "another collection" in said
        result = run("gc", path, "--json", code=1)
        assert json.loads(result.stdout)["busy"] is True


def test_gc_that_has_to_stop_says_why(path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error", "/x/y")

    monkeypatch.setattr("kvstore.gc.scan", broken)
    result = run("gc", path, code=1)
    assert "the collection stopped, because /x/y: Input/output error" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--size", "20XB"], "'20XB' is not a size"),
        (["--size", "-1"], "'-1' is not a size"),
        (["--size", ""], "'' is not a size"),
        (["--min-free", "lots"], "'lots' is not a size"),
        (["--older-than", "30"], "'30' is not an age"),
        (["--older-than", "1y"], "'1y' is not an age"),
    ],
)
def test_a_limit_that_cannot_be_read_is_one_sentence(path, arguments, expected):
    assert expected in sentence("gc", path, *arguments, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["gc", "--size", "0"],
        ["repack", "--older-than", "0s"],
        ["clear", "--yes"],
        ["quota", "--size", "1MiB"],
        ["quota", "--clear"],
    ],
)
def test_an_empty_namespace_is_a_mistake_not_all_or_the_only_one(path, arguments):
    before = sorted(path.rglob("*"))
    assert "--namespace is empty" in sentence(arguments[0], path, "--namespace", "", *arguments[1:])
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("command", ["ls", "du", "gc", "clear", "fsck", "merge", "show", "stats"])
def test_an_empty_name_is_not_the_current_directory(path, monkeypatch, command):
    monkeypatch.chdir(path)
    more = {"clear": ["--all", "--yes"], "show": ["00"]}.get(command, [])
    result = run(command, "", *more, code=16 if command == "fsck" else 2)
    assert "the name of the directory is empty" in result.stderr
    assert result.stderr.startswith(
        f"kvstore: {'' if command == 'show' else 'SRC: ' if command == 'merge' else 'DIR: '}the"
    )
    assert len(manifests(path)) == 7


def test_show_without_a_key_says_so(path):
    assert "is not a key" in sentence("show", path)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    "command", [["ls"], ["du"], ["stats"], ["tree"], ["report", "--output", "-"], ["ls", "--json"]]
)
def test_any_name_can_be_written_in_any_encoding(path, command, encoding):
    odd = path.parent / os.fsdecode(b"a duck \xf0\x9f\xa6\x86, no text \xff,\x1b[31m and\na line")
    path.rename(odd)
    result = subprocess.run(
        [sys.executable, "-m", "kvstore", command[0], odd, *command[1:]],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
    if "--json" in command:
        assert json.loads(result.stdout.decode(encoding))["directory"] == str(odd)


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """A command line of bash with `kvstore` for the command."""
    return subprocess.run(
        ["bash", "-c", command.replace("kvstore", f"'{sys.executable}' -m kvstore")],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["ls", "ls --json", "report -o -", "fsck"])
def test_a_reader_that_leaves_had_what_it_wanted(path, command):
    name, *options = command.split()
    result = shell(f"kvstore {name} '{path}' {' '.join(options)} | true; echo ${{PIPESTATUS[0]}}")
    assert result.stdout == "0\n"
    assert "Error" not in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("command", "code"), [("ls", 1), ("ls --json", 1), ("stats", 1), ("report -o -", 1), ("fsck", 8)]
)
def test_a_full_disk_behind_stdout_is_one_sentence(path, command, code):
    name, *options = command.split()
    result = shell(f"kvstore {name} '{path}' {' '.join(options)} > /dev/full")
    assert result.returncode == code
    assert "cannot write to stdout: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["ls", "ls --json", "fsck"])
def test_a_closed_stdout_is_nobody_listening(path, command):
    name, *options = command.split()
    result = shell(f"kvstore {name} '{path}' {' '.join(options)} >&-")
    assert result.returncode == 0
    assert "Traceback" not in result.stderr


def test_ctrl_c_while_importing_is_quiet(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    result = subprocess.run(
        [sys.executable, "-m", "kvstore", "ls"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_a_sentence_is_one_line_whatever_a_name_holds(tmp_path):
    assert "\x1b" not in sentence("ls", tmp_path / "two\nlines \x1b[31m")


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_what_is_no_cache_directory_is_one_sentence(tmp_path, command):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    assert f"there is no {tmp_path / 'missing'} " in sentence(command, tmp_path / "missing")
    assert "is not a cache directory" in sentence(command, tmp_path / "folder")
    assert "is a file" in sentence(command, tmp_path / "file")
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_a_newer_format_is_one_sentence(path, command):
    config = json.loads((path / "kvstore.json").read_text())
    (path / "kvstore.json").write_text(json.dumps(config | {"format": 9}))
    assert "has format 9" in sentence(command, path)


def test_ls_of_a_directory_that_cannot_be_read_is_one_sentence(path, monkeypatch):
    def broken(context, namespaces):
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr("kvstore.cli.ls.listing", broken)
    assert "permission denied" in sentence("ls", path)


@pytest.mark.parametrize("arguments", [["--bogus"], ["--sort", "name"], ["one", "too many"]])
def test_a_wrong_command_line_is_code_2(arguments):
    result = CliRunner().invoke(app, ["ls", *arguments], env={"KVSTORE_DIR": None})
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_the_directory_can_come_from_the_environment(path):
    result = CliRunner().invoke(app, ["ls"], env={"KVSTORE_DIR": str(path)})
    assert result.exit_code == 0
    assert INFO.id[:12] in result.stdout


def test_help_names_every_option():
    output = run("gc", "--help").stdout
    for option in ("--size", "--min-free", "--older-than", "--namespace", "--dry-run", "--json"):
        assert option in output


def test_help_says_no_types_of_switches_and_directories():
    commands = [name for name in app_commands() if name not in ("serve", "generate", "chat", "doctor")]
    assert "gc" in commands
    for name in ["", *commands]:
        text = run(*([name] if name else []), "--help").stdout
        assert "--help" in text
        assert not re.search(r"<(bool|Path|str|list.*)>", text), name


def app_commands() -> list[str]:
    import kvstore.cli.report
    import kvstore.cli.top
    import kvstore.cli.tree
    import kvstore.cli.why  # noqa: F401 - importing a command registers it

    return list(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", [["gc"], ["repack"], ["clear", "--all", "--yes"], ["clear", "--all", "--dry-run"]])
def test_folders_that_a_copy_left_out_are_made_where_they_are_needed(path, command):
    run("clear", path, "--all", "--yes")
    for folder in ("locks", "tmp", "namespaces", "objects/nodes"):
        shutil.rmtree(path / folder)
    run(command[0], path, *command[1:])
    assert (path / "locks").is_dir() == ("--dry-run" not in command)


def test_where_nothing_is_saved_there_is_nothing_to_clear(path):
    shutil.rmtree(path / "objects" / "nodes")
    said = sentence("clear", path, "--namespace", "6e", "--yes")
    assert said == f"kvstore: {path} holds no conversation yet, so there is nothing to clear"
    assert "no conversation yet" in run("ls", path).stdout


@pytest.mark.parametrize(("age", "told"), [("0s", True), ("59s", True), ("60s", False), ("1d", False)])
def test_clear_says_that_what_was_just_used_stays(path, age, told):
    out = run("clear", path, "--older-than", age, "--dry-run").stdout
    assert ("What was written or used in the last minute stays" in out) is told


def test_the_command_works_as_a_program(path):
    command = [sys.executable, "-W", "error", "-m", "kvstore", "ls", str(path), "--json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(json.loads(result.stdout)["conversations"]) == 2
    assert result.stderr == ""


@pytest.mark.parametrize("command", [["gc", "--size", "0"], ["clear", "--all", "--yes"]])
def test_a_collection_that_cannot_begin_makes_no_statement_about_sizes(path, command):
    (path / "locks" / "gc.lock").unlink(missing_ok=True)
    (path / "locks" / "gc.lock").symlink_to("/dev/zero")
    assert "gc.lock" in sentence(command[0], path, *command[1:])


def test_help_says_what_an_adapter_s_command_is_for(tmp_path, monkeypatch):
    """Read from its source: an engine takes a second to import, and help must not need one."""
    from importlib.metadata import EntryPoint

    from kvstore.cli.adapters import summary

    (tmp_path / "engine.py").write_text(
        'import nothing_like_it\ndef run(argv):\n    """Serve it; returns the code."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert summary(EntryPoint("x", "engine:run", "kvstore.commands")) == "Serve it."
    assert summary(EntryPoint("x", "engine:other", "kvstore.commands")) == "Provided by engine."
    assert summary(EntryPoint("x", "no_such.engine:run", "kvstore.commands")) == "Provided by no_such."
