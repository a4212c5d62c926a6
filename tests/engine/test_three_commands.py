"""serve, generate and chat take what mlx-lm's commands of these names take, with the same meaning, and do the same with
it; with a directory, all three find it and its salt in the same places.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY_LLAMA, make_model

from kvstore_mlx import local, running, serve
from kvstore_mlx.wrapping import run_engine

ENGINES = {"serve": "server", "generate": "generate", "chat": "chat"}
COMMANDS = {"serve": serve.command, "generate": local.generate, "chat": local.chat}
VALUES = ("5", "0.5", "False", "word")
SECRET = "a secret of mine"


class StoppedError(Exception):
    """Raised where a command would begin its work."""


def engine(command: str):
    return importlib.import_module(f"mlx_lm.{ENGINES[command]}")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("KVSTORE_DIR", "KVSTORE_SALT"):
        monkeypatch.delenv(name, raising=False)


# Flags.


@pytest.fixture(params=COMMANDS)
def command(request) -> str:
    return request.param


@pytest.fixture
def parsers(command, monkeypatch) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser that the engine's main makes, and the one that it makes when kvstore calls it."""
    made: list[argparse.ArgumentParser] = []

    def parse_args(parser, *_args, **_more):
        made.append(parser)
        raise StoppedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(StoppedError):
        engine(command).main()
    with pytest.raises(StoppedError):
        run_engine(command, engine(command), [], lambda *_: None)
    monkeypatch.undo()
    theirs, ours = made
    return theirs, ours


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in parser._actions for flag in action.option_strings}


def words_of(action: argparse.Action, flag: str) -> list[str]:
    """A flag with a value that it takes, and that is not its default."""
    if action.nargs == 0 or isinstance(action, argparse._StoreTrueAction):
        return [flag]
    if action.choices:
        return [flag, str(next(choice for choice in action.choices if choice != action.default))]
    for text in VALUES:
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            if (action.type or str)(text) != action.default:
                return [flag, text]
    raise AssertionError(f"no value for {flag}")


def test_every_flag_is_there_with_its_default(parsers):
    theirs, ours = map(flags_of, parsers)
    assert len(theirs) > 10
    for flag, action in theirs.items():
        found = ours[flag]
        for name in ("dest", "default", "nargs", "const", "choices", "required", "help"):
            assert getattr(found, name) == getattr(action, name), (flag, name)
    assert all(flag.startswith("--kv-cache-") for flag in set(ours) - set(theirs))
    assert "--kv-cache-dir" in ours


def test_every_flag_is_understood_alike(command, parsers):
    theirs, _ = parsers
    seen: list[argparse.Namespace] = []

    def prepared(arguments, cache):
        assert cache.directory is None
        seen.append(arguments)
        raise StoppedError

    each = [words_of(action, flag) for flag, action in flags_of(theirs).items() if flag not in {"-h", "--help"}]
    for words in ([], *each):
        with pytest.raises(StoppedError):
            run_engine(command, engine(command), words, prepared)
        wanted = theirs.parse_args(words)
        assert seen.pop() == wanted, words
        assert not words or wanted != theirs.parse_args([]), words


def test_what_is_short_for_a_flag_stays_so(parsers):
    """argparse takes unique beginnings: those that people use must not have become ambiguous."""
    theirs, ours = parsers
    for flag in flags_of(theirs):
        for end in range(3, len(flag)):
            found = theirs._get_option_tuples(flag[:end]) if flag.startswith("--") else []
            if len(found) == 1:
                assert len(ours._get_option_tuples(flag[:end])) == 1, flag[:end]


# What they print.

PROMPT = "explain why a cache must never lie. " * 4
GENERATE = [
    [],
    ["--verbose", "False"],
    ["--temp", "0.7", "--top-p", "0.9", "--seed", "5"],
    ["--temp", "1", "--min-p", "0.05", "--top-k", "20", "--min-tokens-to-keep", "2"],
    ["--temp", "1", "--xtc-probability", "0.5", "--xtc-threshold", "0.1"],
    ["--max-kv-size", "64"],
    ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "16"],
    ["--prefill-step-size", "32"],
    ["--system-prompt", "You are brief.", "--prefill-response", "Because"],
    ["--ignore-chat-template"],
    ["--chat-template-config", '{"enable_thinking": false}'],
    ["--extra-eos-token", "e", "a"],
    ["--draft-model", "MODEL", "--num-draft-tokens", "2"],
    ["--use-default-chat-template"],
]
CHAT = [
    [],
    ["--temp", "0.7", "--top-p", "0.9", "--seed", "5"],
    ["--temp", "1", "--xtc-probability", "0.5", "--xtc-threshold", "0.1"],
    ["--max-kv-size", "64"],
    ["--prefill-step-size", "32"],
    ["--system-prompt", "You are brief."],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Wide enough for quantized caches."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", {**TINY_LLAMA, "head_dim": 32})


RUNS = [("generate", flags) for flags in GENERATE] + [("chat", flags) for flags in CHAT]
SPEEDS = re.compile(r"\d+(\.\d+)? (tok/s|tokens-per-sec|GB)|\d+\.\d+ ?s\b")


@pytest.mark.parametrize(("command", "flags"), RUNS, ids=[" ".join((name, *flags)) for name, flags in RUNS])
def test_they_print_what_mlx_lm_prints(command, flags, model, tmp_path, monkeypatch, capsys):
    """In one process, so that all flags can be tried; test_local.py runs them as people do."""
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KVSTORE_SALT", "")
    module = engine(command)
    names = dict(vars(module))
    words = ["--model", str(model), "--max-tokens", "6", *(flag.replace("MODEL", str(model)) for flag in flags)]
    words += ["--prompt", PROMPT] if command == "generate" else []

    def printed(run) -> tuple[object, str]:
        import mlx.core as mx

        mx.random.seed(11)
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\nand then?\nr\n{PROMPT}\nq\n"))
        code = run()
        return code, SPEEDS.sub("", capsys.readouterr().out)

    monkeypatch.setattr(sys, "argv", [command, *words])
    theirs = printed(module.main)
    ours = printed(lambda: COMMANDS[command](words))
    assert ours == (0, theirs[1])
    assert len(theirs[1]) > 6
    # Nothing is left behind, neither on disk nor in the engine.
    assert not (tmp_path / "cache").exists()
    assert vars(module) == names


# Where they keep what they keep.


@pytest.fixture
def opened(command, monkeypatch, tmp_path, tiny_llama):
    """opened(*flags): path of the store and salt that a command would begin with, None without a directory."""
    seen: list[tuple[Path, bytes]] = []

    def cached(store, _key, settings, _cache):
        seen.append((store.path, settings.salt))
        raise StoppedError

    def served(_server, store, _cache, _provider, *, settings):
        seen.append((store.path, settings.salt))
        raise StoppedError

    def nothing(*_args, **_more):
        raise StoppedError

    monkeypatch.setattr(local, "Cached", cached)
    monkeypatch.setattr(running, "RunningServer", served)
    # What mlx-lm would do next.
    monkeypatch.setattr(engine(command), "run" if command == "serve" else "load", nothing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*flags: str):
        seen.clear()
        with pytest.raises(StoppedError):
            COMMANDS[command](["--model", str(tiny_llama), *flags])
        return SimpleNamespace(path=seen[0][0], salt=seen[0][1]) if seen else None

    return run


def test_the_directory_is_the_named_one_else_the_variables_else_the_default(opened, tmp_path, monkeypatch):
    named, variable = tmp_path / "named", tmp_path / "variable"
    default = opened("--kv-cache-dir").path
    assert default.is_relative_to(tmp_path)
    assert default.parts[-2:] == ("kvstore", "kv")
    monkeypatch.setenv("KVSTORE_DIR", str(variable))
    assert opened() is None
    assert opened("--kv-cache-dir", str(named)).path == named
    assert not variable.exists()
    for flags in (["--kv-cache-dir"], ["--kv-cache-dir="], ["--kv-cache-dir", "--kv-cache-size", "1GiB"]):
        assert opened(*flags).path == variable


def test_the_environment_is_that_of_mlx_lm_without_a_directory(opened, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    before = dict(os.environ)
    assert opened() is None
    assert dict(os.environ) == before
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    opened("--kv-cache-dir", str(tmp_path / "cache"))
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    opened("--kv-cache-dir", str(tmp_path / "cache"))
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_the_salt_is_the_flags_else_the_variables(opened, tmp_path, monkeypatch):
    where = ("--kv-cache-dir", str(tmp_path / "cache"))
    (tmp_path / "salt").write_text("from a file\n")
    assert opened(*where).salt == b""
    monkeypatch.setenv("KVSTORE_SALT", SECRET)
    assert opened(*where).salt == SECRET.encode()
    assert opened(*where, "--kv-cache-salt", "mine").salt == b"mine"
    assert opened(*where, "--kv-cache-salt-file", str(tmp_path / "salt")).salt == b"from a file"
    assert opened() is None


def test_a_mistake_is_answered_alike(command, tiny_llama, tmp_path, monkeypatch, capsys):
    def said(*flags: str) -> str:
        assert COMMANDS[command](["--model", str(tiny_llama), *flags]) == 2
        return capsys.readouterr().err

    assert said("--kv-cache-size", "1GiB") == f"kvstore {command}: error: the --kv-cache-… flags need --kv-cache-dir\n"
    assert "'much' is not a size" in said("--kv-cache-dir", str(tmp_path / "c"), "--kv-cache-size", "much")
    monkeypatch.setenv("KVSTORE_SALT", "")
    assert "KVSTORE_SALT is empty" in said("--kv-cache-dir", str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()
