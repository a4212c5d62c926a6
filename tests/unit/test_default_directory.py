"""Every command finds its directory without being told, says where it looked, and warns of places that do not last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core_support import open_store, restore
from gc_support import prompt, publish, space_of
from typer import Exit
from typer.testing import CliRunner, Result

from kvstore import locations

# Importing the command modules registers the commands.
from kvstore.cli import clear, du, fsck, gc, ls, merge, repack, show  # noqa: F401
from kvstore.cli.app import app, opened

COMMANDS = {
    "ls": [],
    "du": [],
    "gc": [],
    "fsck": [],
    "repack": [],
    "clear": ["--all", "--dry-run"],
}


@pytest.fixture
def default(tmp_path, monkeypatch) -> Path:
    """Where the default directory of this test's user would lie."""
    monkeypatch.delenv("KVSTORE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name, appauthor: tmp_path / "caches" / name)
    return tmp_path / "caches" / "kvstore" / "kv"


@pytest.fixture
def key(default) -> str:
    """The key of a prefix in the default directory, which this makes."""
    return made(default)


def made(path: Path, seed: int = 0) -> str:
    with open_store(path) as store:
        space = space_of(store)
        publish(space, prompt(20, seed))
        return space.lookup(prompt(20, seed)).steps[-1].name.key


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_finds_the_default_directory(command, key, default):
    assert run(command, *COMMANDS[command]).exit_code == 0
    assert run(command, default, *COMMANDS[command]).exit_code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_the_environment_comes_before_the_default_and_the_argument_before_both(command, key, default, monkeypatch):
    monkeypatch.setenv("KVSTORE_DIR", str(default.parent / "none"))
    assert run(command, *COMMANDS[command]).exit_code != 0
    assert run(command, default, *COMMANDS[command]).exit_code == 0
    monkeypatch.setenv("KVSTORE_DIR", str(default))
    assert run(command, *COMMANDS[command]).exit_code == 0
    assert run(command, default.parent / "none", *COMMANDS[command]).exit_code != 0


@pytest.mark.parametrize("command", [*COMMANDS, "show"])
def test_what_is_not_there_is_one_sentence_that_says_where_and_why(command, default, monkeypatch):
    rest = COMMANDS.get(command, ["abcdef"])
    for arguments, named, path, reason in (
        ([], None, default, "it is the default, and neither the command line nor KVSTORE_DIR names another"),
        ([], "/no/such", "/no/such", "KVSTORE_DIR names it"),
        (["/no/where"], "/no/such", "/no/where", "the command line names it"),
    ):
        if named is not None:
            monkeypatch.setenv("KVSTORE_DIR", named)
        result = run(command, *arguments, *rest)
        assert (result.exit_code, result.stdout) == (8 if command == "fsck" else 1, "")
        assert result.stderr.startswith(f"kvstore: there is no {path} (looked there because {reason}); ")
        assert result.stderr.count("\n") == 1
    assert not default.exists()


def test_a_folder_of_something_else_in_the_environment_is_said_to_come_from_there(default, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "other"))
    said = run("ls").stderr
    assert "is not a cache directory" in said
    assert "because KVSTORE_DIR names it" in said
    assert "because" not in run("ls", tmp_path / "other").stderr


def test_show_takes_a_key_alone_or_behind_a_directory(key, default, tmp_path):
    other = made(tmp_path / "s", seed=1)
    assert "20 tokens" in run("show", key[:12]).stdout
    assert "20 tokens" in run("show", tmp_path / "s", other).stdout
    assert run("show", other).exit_code == 1
    assert run("show").exit_code == run("show", default, key, "more").exit_code == 2


def test_merge_brings_into_the_default_directory(key, default, tmp_path):
    made(tmp_path / "s", seed=1)
    assert f"into {default}." in run("merge", tmp_path / "s").stdout
    with open_store(default) as store:
        assert restore(space_of(store), prompt(20, 1)).tokens == 20


@pytest.fixture
def warned(monkeypatch) -> str:
    """What is said of every place."""
    monkeypatch.setattr(locations, "_synced_by", lambda path: "Some Drive")
    return "is synchronised by Some Drive"


@pytest.mark.parametrize("arguments", [["fsck"], ["merge"]])
def test_checking_and_filling_a_directory_warns_of_its_place(arguments, key, default, tmp_path, warned):
    if arguments == ["merge"]:
        made(tmp_path / "s", seed=1)
        arguments = ["merge", tmp_path / "s"]
    told = run(*arguments)
    assert (told.exit_code, told.stderr.count(warned)) == (0, 1)
    assert str(default) in told.stderr
    document = json.loads(run(*arguments, "--json").stdout)
    assert [warned in warning for warning in document["warnings"]][:1] == [True]


@pytest.mark.parametrize("command", ["ls", "du", "gc", "repack"])
def test_looking_at_a_directory_does_not(command, key, warned):
    result = run(command)
    assert result.exit_code == 0
    assert warned not in result.stderr
    assert "warnings" not in json.loads(run(command, "--json").stdout)


def test_the_help_says_where_the_default_is():
    for command in (*COMMANDS, "show", "merge"):
        assert "$KVSTORE_DIR" in run(command, "--help").stdout


@pytest.mark.parametrize("given", [True, False])
def test_no_error_is_its_own_cause(default, tmp_path, monkeypatch, given):
    """Whoever walks along the causes (a debugger, a log) would walk for ever."""
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "other"))
    with pytest.raises(Exit) as raised, opened(tmp_path / "other" if given else None):
        pass
    seen, error = [], raised.value
    while error is not None:
        assert error not in seen
        seen.append(error)
        error = error.__cause__
    assert len(seen) == (2 if given else 3)
