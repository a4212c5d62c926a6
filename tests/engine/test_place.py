"""Where `kvstore serve` keeps its directory: what --kv-cache-dir names, else KVSTORE_DIR, else among the caches."""

from __future__ import annotations

import argparse

import pytest
from engine_support import conversation, wait_saved

from kvstore import KVStoreError
from kvstore_mlx.flags import CacheArguments


def taken(*flags: str) -> CacheArguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    CacheArguments.add_to(parser, "an engine")
    arguments = parser.parse_args(flags)
    found = CacheArguments.take_from(arguments)
    assert set(vars(arguments)) == {"port"}
    return found


def test_the_flag_alone_switches_the_directory_on(monkeypatch):
    monkeypatch.setenv("KVSTORE_DIR", "/elsewhere")
    assert taken().directory is None
    assert taken("--kv-cache-dir", "/here").directory == "/here"
    for flags in (["--kv-cache-dir"], ["--kv-cache-dir", "--port", "9"], ["--kv-cache-dir="]):
        assert taken(*flags).directory == ""


def test_the_other_flags_need_it(monkeypatch):
    monkeypatch.setenv("KVSTORE_DIR", "/elsewhere")
    with pytest.raises(KVStoreError, match="need --kv-cache-dir"):
        taken("--kv-cache-size", "5GiB")
    assert taken("--kv-cache-dir", "--kv-cache-size", "5GiB").size == 5 << 30


def test_without_a_name_the_environment_names_the_directory(serve, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "cache"))
    server = serve(tiny_llama, "--kv-cache-dir", "--kv-cache-interval", "256")
    answer = server.chat(conversation(1))
    wait_saved(server, tmp_path / "cache", answer.prompt_tokens - 1)
    assert f"caching in {tmp_path / 'cache'} " in server.log
    # What the place is worth is said at the start, once.
    assert server.log.count("is a temporary folder") + server.log.count("is in memory") == 1
