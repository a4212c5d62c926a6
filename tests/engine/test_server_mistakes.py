"""Mistakes in the flags of serve, generate and chat: one sentence, exit code 2 for the command line, 1 for the rest."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


def run(command: str, *flags: object, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", command, *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        **more,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--kv-cache-size 1GiB", "the --kv-cache-… flags need --kv-cache-dir"),
        ("--kv-cache-dir {} --kv-cache-size 20GG", "argument --kv-cache-size: '20GG' is not a size; write it like"),
        ("--kv-cache-dir {} --kv-cache-size 1", "argument --kv-cache-size: a budget of 1 B holds no prompt"),
        ("--kv-cache-dir {} --kv-cache-interval 7", "argument --kv-cache-interval: '7' is not a number of tokens"),
        ("--kv-cache-dir {} --kv-cache-durability much", "argument --kv-cache-durability: 'much' is not one of none,"),
        ("--kv-cache-dir {} --kv-cache-salt-file no", "argument --kv-cache-salt-file: no cannot be read"),
        ("--kv-cache-dir {} --kv-cache-salt=", "argument --kv-cache-salt: the salt is empty"),
        ("--kv-cache-dir {} --port 99999", "argument --port: 99999 is not a port; they are from 0 to 65535"),
        ("--kv-cache-dir {} --port -1", "argument --port: -1 is not a port"),
    ],
)
def test_a_wrong_flag_is_one_sentence(tmp_path, monkeypatch, capsys, flags, said):
    from kvstore_mlx import serve

    monkeypatch.delenv("KVSTORE_SALT", raising=False)
    directory = tmp_path / "kv"
    assert serve.command([word.format(directory) for word in flags.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvstore serve: error: {said}")
    assert err.count("\n") == 1
    assert not directory.exists()


def test_without_a_directory_a_port_is_mlx_lm_s_own_matter(monkeypatch, tiny_llama):
    """It takes the number modulo 65,536; with nothing of ours asked for, that is not ours to say."""
    from mlx_lm import server

    from kvstore_mlx import serve

    seen = []
    monkeypatch.setattr(server, "run", lambda host, port, provider, **more: seen.append(port))
    assert serve.command(["--model", str(tiny_llama), "--port", "99999"]) == 0
    assert seen == [99999]


@pytest.mark.parametrize("name", ["serve", "generate", "chat"])
def test_a_file_for_a_directory(tmp_path, name):
    (tmp_path / "file").write_text("x")
    done = run(name, "--model", tmp_path, "--kv-cache-dir", tmp_path / "file")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == f"kvstore {name}: {tmp_path / 'file'} is a file; name a directory"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["no-such-host.invalid", "taken"])
def test_an_address_that_cannot_be_had_beside_a_model_that_cannot_be_loaded(tmp_path, host):
    """Both fail at once, on two threads; whichever is told, it is a sentence and 1, not an interruption."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = ["--host", host] if host != "taken" else ["--port", busy.getsockname()[1]]
        done = run("serve", "--model", tmp_path / "none", "--kv-cache-dir", tmp_path / "kv", *address)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(("kvstore serve: cannot listen on ", "kvstore serve: cannot load "))
    assert "Traceback" not in done.stderr
