"""Damage on disk and mistakes of people: a request is answered as if uncached, a mistake is one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from engine_support import conversation, wait_saved

FLAGS = ("--kv-cache-interval", "256")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def delete(path: Path) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def saved(tiny_llama, tmp_path_factory):
    """A cache directory with one conversation in it, and the answer it goes with."""
    from engine_support import Server

    folder = tmp_path_factory.mktemp("saved")
    server = Server(folder / "log", tiny_llama, "--kv-cache-dir", str(folder / "cache"), *FLAGS).wait_ready()
    answer = server.chat(conversation(1))
    wait_saved(server, folder / "cache", answer.prompt_tokens - 1 + len(answer.ids))
    assert server.stop() == 0
    return folder / "cache", answer


@pytest.mark.parametrize("harm", [flip, truncate, empty, delete])
@pytest.mark.parametrize("kind", ["blocks", "nodes"])
def test_every_file_harmed(serve, tiny_llama, saved, tmp_path, kind, harm):
    """All blocks, or all manifests, at once: nothing can be restored, and nothing is noticed but a warning."""
    source, expected = saved
    directory = tmp_path / "cache"
    shutil.copytree(source, directory)
    for path in [path for path in (directory / "objects" / kind).rglob("*") if path.is_file()]:
        harm(path)
    server = serve(tiny_llama, "--kv-cache-dir", str(directory))
    answer = server.chat(conversation(1))
    assert answer.ids == expected.ids
    assert answer.cached_tokens == 0
    if not (kind == "nodes" and harm is delete):  # nothing is left that could be called damaged
        assert len(server.warnings) == 1
    assert "Traceback" not in server.log
    # What was computed again is saved again, in place of what was harmed.
    wait_saved(server, directory, answer.prompt_tokens - 1) if harm is delete else server.wait_log("POST")
    assert server.stop() == 0
    healed = serve(tiny_llama, "--kv-cache-dir", str(directory)).chat(conversation(1))
    assert healed.ids == expected.ids
    assert healed.cached_tokens == healed.prompt_tokens - 1


def test_one_block_harmed_in_the_middle(serve, tiny_llama, saved, tmp_path):
    """What lies before the harmed block is still used."""
    from kvstore.manifest import decode

    source, expected = saved
    directory = tmp_path / "cache"
    shutil.copytree(source, directory)
    manifests = [decode(path.read_bytes()) for path in (directory / "objects" / "nodes").rglob("*.kv")]
    (middle,) = [manifest for manifest in manifests if manifest.first == 256 and manifest.count == 256]
    flip(directory / "objects" / "blocks" / middle.blocks[0].digest.hex()[:2] / middle.blocks[0].digest.hex())
    server = serve(tiny_llama, "--kv-cache-dir", str(directory))
    answer = server.chat(conversation(1))
    assert answer.ids == expected.ids
    assert answer.cached_tokens == 256
    assert len(server.warnings) == 1


def remove(folder: Path) -> None:
    """At once, as its server would put files into it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def test_the_directory_vanishes_while_serving(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    first = server.chat(conversation(1))
    wait_saved(server, directory, first.prompt_tokens)
    remove(directory)
    second = server.chat(conversation(2))
    other = server.chat(conversation(1, "another topic"))
    assert len(second.ids) == len(other.ids) == 12
    server.wait_log("WARNING - kvstore: not saved")
    # Any web page may read this, mlx_lm.server's CORS header says; where the directory lies is for the log.
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health") as response:
        health = response.read().decode()
    assert "not saved: the directory or its parent does not exist" in health
    assert str(directory.parent) not in health
    assert str(directory) in server.warnings[-1]
    assert "Traceback" not in server.log
    assert server.stop() == 0


def test_the_directory_is_emptied_while_serving(serve, tiny_llama, tmp_path):
    """`rm -r DIR/*`, or another disk: what is asked next is saved again, with the interval that the server was told."""
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    first = server.chat(conversation(1))
    wait_saved(server, directory, first.prompt_tokens)
    for entry in list(directory.iterdir()):
        remove(entry) if entry.is_dir() else entry.unlink()
    other = server.chat(conversation(1, "another topic"))
    wait_saved(server, directory, other.prompt_tokens)
    again = server.chat(conversation(2, "another topic"))
    wait_saved(server, directory, again.prompt_tokens)
    assert [line for line in server.warnings if "was emptied while in use; it was set up anew" in line]
    assert "Traceback" not in server.log
    assert server.stop() == 0
    fresh = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    restored = fresh.chat(conversation(2, "another topic"))
    assert restored.ids == again.ids
    assert restored.cached_tokens == restored.prompt_tokens - 1


def test_the_disk_fills_while_serving(serve, tiny_llama, tmp_path):
    """A real full file system: a tmpfs of 1 MiB holds the directory and not the conversation."""
    directory = tmp_path / "small"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=False).returncode:
        pytest.skip(
            "mounting a small file system needs root; the same is tested with an injected ENOSPC in tests/crash"
        )
    try:
        server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
        plain = serve(tiny_llama)
        for turns in (1, 2, 3):
            assert server.chat(conversation(turns)).ids == plain.chat(conversation(turns)).ids
        server.wait_log("not saved: .*the disk is full")
        assert "Traceback" not in server.log
        assert server.stop() == 0
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_read_only_directory_is_refused(tiny_llama, tmp_path):
    directory = tmp_path / "ro"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", directory], check=False).returncode:
        directory.chmod(0o500)
        if os.access(directory, os.W_OK):
            pytest.skip("neither a read-only mount nor modes bind this user")
        said = "permission denied"
    else:
        said = "read-only file system"
    try:
        result = run_serve("--model", str(tiny_llama), "--kv-cache-dir", str(directory))
        assert_one_sentence(result, 1, said)
    finally:
        subprocess.run(["umount", "-l", directory], check=False, capture_output=True)


def run_serve(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", *flags], capture_output=True, text=True, timeout=60, check=False
    )


def assert_one_sentence(result: subprocess.CompletedProcess, code: int, text: str) -> None:
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("kvstore serve: ")
    assert text in last


def test_a_file_in_place_of_the_directory(tiny_llama, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run_serve("--model", str(tiny_llama), "--kv-cache-dir", str(tmp_path / "file"))
    assert_one_sentence(result, 1, "is a file; name a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_something_else(tiny_llama, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    result = run_serve("--model", str(tiny_llama), "--kv-cache-dir", str(tmp_path))
    assert_one_sentence(result, 1, "holds other files (thesis.tex)")
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_another_interval(tiny_llama, saved):
    result = run_serve("--model", str(tiny_llama), "--kv-cache-dir", str(saved[0]), "--kv-cache-interval", "512")
    assert_one_sentence(result, 1, "created with an interval of 256 tokens, not 512")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--kv-cache-size", "lots"], "'lots' is not a size; write it like 20GiB"),
        (["--kv-cache-size", "5"], "holds no prompt"),
        (["--kv-cache-interval", "many"], "'many' is not a number of tokens from 16 to 65536, such as 2048"),
        (["--kv-cache-interval", "1"], "'1' is not a number of tokens"),
        (["--kv-cache-durability", "hope"], "'hope' is not one of none, barrier, full"),
        (["--kv-cache-dri", "x"], "unrecognized arguments: --kv-cache-dri"),
    ],
)
def test_wrong_values(flags, text, tmp_path):
    result = run_serve("--model", "m", "--kv-cache-dir", str(tmp_path / "c"), *flags)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_cache_flags_without_a_directory_are_not_ignored():
    result = run_serve("--model", "m", "--kv-cache-size", "5GiB")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "kvstore serve: error: the --kv-cache-… flags need --kv-cache-dir"


def test_a_missing_model(tmp_path):
    result = run_serve("--model", str(tmp_path / "nowhere"), "--kv-cache-dir", str(tmp_path / "cache"))
    assert_one_sentence(result, 1, "there is no such folder")


def test_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "model").mkdir()
    result = run_serve("--model", str(tmp_path / "model"), "--kv-cache-dir", str(tmp_path / "cache"))
    assert_one_sentence(result, 1, "cannot load the model")


def test_a_taken_port(serve, tiny_llama, tmp_path):
    server = serve(tiny_llama)
    result = run_serve("--model", str(tiny_llama), "--kv-cache-dir", str(tmp_path / "c"), "--port", str(server.port))
    assert_one_sentence(result, 1, "choose another --port")
