"""kvstore generate and chat: the output of mlx-lm's own commands, and prompts that are there the next time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROMPT = "explain why a cache must never lie. " * 12
FLAGS = ("--prompt", PROMPT, "--max-tokens", "12", "--verbose", "False")


def run(*command: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
        timeout=120,
        **more,
    )


def saved(directory) -> list[int]:
    """Tokens of each saved prompt."""
    done = run("kvstore", "ls", str(directory), "--json")
    return sorted(entry["tokens"] for entry in json.loads(done.stdout)["conversations"])


@pytest.mark.parametrize("flags", [(), ("--max-kv-size", "96")], ids=["whole", "window"])
def test_generate_prints_what_mlx_lm_prints_and_saves_it(tiny_llama, tmp_path, flags):
    directory = tmp_path / "cache"
    wanted = run("mlx_lm", "generate", "--model", str(tiny_llama), *FLAGS, *flags)
    assert wanted.returncode == 0
    for _ in range(2):
        done = run("kvstore", "generate", "--model", str(tiny_llama), *FLAGS, *flags, "--kv-cache-dir", str(directory))
        assert (done.returncode, done.stdout) == (0, wanted.stdout), done.stderr
    (tokens,) = saved(directory)
    # The prompt and what was forwarded of the answer.
    assert tokens > len(PROMPT) + 11
    counted = json.loads(run("kvstore", "stats", str(directory), "--json").stdout)
    assert (counted["processes"], counted["counters"]["requests"]) == (2, 2)
    assert counted["counters"]["written_tokens"] == tokens
    assert counted["counters"]["disk_tokens"] > 0
    assert counted["counters"]["generated_tokens"] > 2


def test_generate_without_the_flag_is_mlx_lm(tiny_llama, tmp_path):
    wanted = run("mlx_lm", "generate", "--model", str(tiny_llama), *FLAGS)
    done = run("kvstore", "generate", "--model", str(tiny_llama), *FLAGS)
    assert (done.returncode, done.stdout) == (0, wanted.stdout)


@pytest.mark.parametrize("more", [(), ("--kv-cache-exact",)])
def test_a_chat_goes_on_from_what_it_said(tiny_llama, tmp_path, more):
    """The second turn extends the first one's caches, or, exact, computes the first answer anew; the same chat later
    begins where it is saved.
    """
    directory = tmp_path / "cache"
    text = f"{PROMPT}\nand what follows?\nq\n".encode()
    flags = ("chat", "--model", str(tiny_llama), "--max-tokens", "8")
    wanted = run("mlx_lm", *flags, input=text)
    assert wanted.returncode == 0
    for _ in range(2):
        done = run("kvstore", *flags, "--kv-cache-dir", str(directory), *more, input=text)
        assert done.returncode == 0, done.stderr
        assert answers(done.stdout) == answers(wanted.stdout)
    assert max(saved(directory)) > len(PROMPT) + len("and what follows?") + 16


def answers(output: bytes) -> list[bytes]:
    """A chat's output without the lines that tell speeds."""
    return [line for line in output.splitlines() if b"tok/s" not in line]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--model", "/no/such/folder", "--kv-cache-dir", "{}"), "cannot load the model /no/such/folder"),
        (("--model", "{model}", "--kv-cache-size", "1GiB"), "the --kv-cache-… flags need --kv-cache-dir"),
        (("--model", "{model}", "--kv-cache-dir", "{model}/config.json"), "config.json"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_mistake_is_one_sentence(tiny_llama, tmp_path, command, flags, sentence):
    given = [flag.format(tmp_path / "cache", model=tiny_llama) for flag in flags]
    done = run("kvstore", command, *given, input=b"q\n")
    assert done.returncode in {1, 2}
    assert sentence in done.stderr.decode()
    assert b"Traceback" not in done.stderr
