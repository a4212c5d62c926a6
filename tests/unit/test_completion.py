"""Shell completion: bash is really asked; zsh and fish get what typer's scripts for them read."""

from __future__ import annotations

import argparse
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvstore.cli.adapters import Completion, completions

ENGINE = pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm's own flags need mlx-lm")
HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "tokenizers")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """`kvstore` under its own name, which notes beside it what heavy packages it imported."""
    folder = tmp_path_factory.mktemp("bin")
    path = folder / "kvstore"
    path.write_text(
        f"#!{sys.executable}\n"
        "import atexit, pathlib, sys\n"
        "from kvstore.cli import main\n"
        f"atexit.register(lambda: pathlib.Path({str(folder / 'imported')!r}).write_text(\n"
        f"    ' '.join(sorted({set(HEAVY)!r} & set(sys.modules)))))\n"
        "main()\n"
    )
    path.chmod(0o755)
    return path


def environment(program: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", **more}


@pytest.fixture(scope="module")
def script(program) -> dict[str, str]:
    """The script of each shell, as a packager gets it."""

    def source(shell: str) -> str:
        told = environment(program, _KVSTORE_COMPLETE=f"source_{shell}")
        return subprocess.run([program], env=told, capture_output=True, text=True, check=True).stdout

    return {shell: source(shell) for shell in ("bash", "zsh", "fish")}


@pytest.fixture
def bash(program, script):
    """What bash offers for the last of some words."""

    def ask(*words: str) -> list[str]:
        commands = (
            f"{script['bash']}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}\n"
            '_kvstore_completion kvstore\nprintf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", commands], env=environment(program), capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        assert (program.parent / "imported").read_text() == "", "a key press pays for an engine"
        return done.stdout.split()

    return ask


def test_commands_of_the_store_and_of_adapters(bash):
    assert {"ls", "gc", "fsck", "serve", "generate", "chat", "doctor"} <= set(bash("kvstore", ""))
    assert bash("kvstore", "g") == ["gc", "generate"]


def test_options_of_a_command(bash):
    assert bash("kvstore", "gc", "--") == [
        *("--size", "--min-free", "--older-than", "--namespace", "--dry-run", "--json", "--help")
    ]
    assert bash("kvstore", "fsck", "--re") == ["--read-data", "--repair", "--resume"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ls", "--sort", ""], ["tokens", "bytes", "age"]),
        (["ls", "--sort", "b"], ["bytes"]),
        (["serve", "--kv-cache-durability", ""], ["none", "barrier", "full"]),
        (["chat", "--kv-cache-durability", "=", "f"], ["full"]),
    ],
)
def test_values_to_choose_from(bash, words, offered):
    assert bash("kvstore", *words) == offered


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_cache_flags_of_an_engine_s_command(bash, command):
    found = set(bash("kvstore", command, "--kv-cache-"))
    assert {"--kv-cache-dir", "--kv-cache-size", "--kv-cache-salt-file", "--kv-cache-explain"} <= found
    assert ("--kv-cache-report" in found) == (command == "serve")
    assert bash("kvstore", command, "--kv-cache-dir", "somewhere", "--kv-cache-w") == ["--kv-cache-write-limit"]


@ENGINE
def test_the_engine_s_own_flags_and_their_values(bash):
    assert bash("kvstore", "serve", "--po") == ["--port"]
    assert bash("kvstore", "serve", "--log-level", "D") == ["DEBUG"]
    assert bash("kvstore", "generate", "--prompt-c") == ["--prompt-cache-file"]


def test_doctor_s_flags(bash):
    assert bash("kvstore", "doctor", "--no") == ["--no-speed"]


@pytest.mark.parametrize(
    "words",
    [
        ["ls", ""],
        ["merge", "a", ""],
        ["show", "--model", ""],
        ["why", "--tokenizer", ""],
        ["report", "-o", ""],
        ["serve", "--kv-cache-dir", ""],
        ["serve", "--model", ""],
        ["doctor", ""],
    ],
)
def test_names_of_files_and_folders_are_left_to_the_shell(bash, words):
    """An empty answer is what makes each script fall back on the shell's own completion of names."""
    assert bash("kvstore", *words) == []


def test_an_interactive_bash_completes_a_directory(program, script, tmp_path):
    (tmp_path / "conversations").mkdir()
    (tmp_path / "rc").write_text(f"{script['bash']}\nPS1='ready '\nbind 'set enable-bracketed-paste off'\n")
    terminal, other_end = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", tmp_path / "rc", "-i"],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
        env=environment(program, TERM="dumb"),
        cwd=tmp_path,
    )
    os.close(other_end)
    try:
        read_until(terminal, "ready ")
        os.write(terminal, b"kvstore ls ./conv\t")
        told = read_until(terminal, "conversations/")
        assert "conversations/ " not in told, "the next part of the path could not be typed"
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def read_until(terminal: int, text: str, seconds: float = 30) -> str:
    """What a terminal shows until it shows text."""
    seen, end = "", time.monotonic() + seconds
    while text not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096).decode()
    assert text in seen
    return seen


@pytest.mark.parametrize(
    ("shell", "offered"), [("zsh", '"--kv-cache-salt-file"'), ("fish", "--kv-cache-salt-file\tThe")]
)
def test_what_the_scripts_of_other_shells_read(program, script, shell, offered):
    assert f"_KVSTORE_COMPLETE=complete_{shell}" in script[shell]
    told = environment(
        program,
        _KVSTORE_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS="kvstore serve --kv-cache-salt-f",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    done = subprocess.run([program], env=told, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert offered in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_understands(script, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script[shell])
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_hidden_flags_are_not_offered_and_flags_without_a_value_ask_for_none():
    parser = argparse.ArgumentParser("x")
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    parser.add_argument("--fast", action="store_true", help="faster")
    assert list(completions(parser, [], "--")) == [
        Completion("--help", "show this help message and exit"),
        Completion("--fast", "faster"),
    ]
    assert list(completions(parser, ["--fast"], "")) == []


def test_an_adapter_that_is_broken_offers_nothing_and_says_nothing(monkeypatch):
    from kvstore.cli import adapters

    def broken(name: str) -> None:
        raise RuntimeError(name)

    monkeypatch.setattr(adapters, "parser_of", broken)
    assert adapters._Command("serve").shell_complete(None, "--") == []
