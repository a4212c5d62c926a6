"""Tenants: servers with different salts share a directory and never meet; the salt is written and said nowhere."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from engine_support import conversation, wait_saved

from kvstore import KVStoreError
from kvstore_mlx.flags import CacheArguments
from kvstore_mlx.wrapping import settings_of

MESSAGES = conversation(8)  # long enough that its tokenization is kept
SECRET = "a secret of mine: \u00e9"
ENGINE = argparse.Namespace(kv_bits=None, prefill_step_size=2048)


def taken(*flags: str) -> CacheArguments:
    parser = argparse.ArgumentParser()
    CacheArguments.add_to(parser, "an engine")
    arguments = parser.parse_args(flags)
    found = CacheArguments.take_from(arguments)
    assert vars(arguments) == {}
    return found


@pytest.fixture(autouse=True)
def no_salt(monkeypatch):
    monkeypatch.delenv("KVSTORE_SALT", raising=False)


def test_a_salt_comes_from_a_flag_a_file_or_the_environment(tmp_path, monkeypatch):
    assert taken("--kv-cache-dir", "/d").salt == b""
    assert taken("--kv-cache-dir", "/d", "--kv-cache-salt", SECRET).salt == SECRET.encode()
    for end in ("", "\n", "\r\n"):
        (tmp_path / "salt").write_bytes(SECRET.encode() + end.encode())
        assert taken("--kv-cache-dir", "/d", "--kv-cache-salt-file", str(tmp_path / "salt")).salt == SECRET.encode()
    monkeypatch.setenv("KVSTORE_SALT", SECRET)
    assert taken("--kv-cache-dir", "/d").salt == SECRET.encode()
    assert taken("--kv-cache-dir", "/d", "--kv-cache-salt", "mine").salt == b"mine"
    assert taken() == CacheArguments()


def test_it_reaches_the_namespace_and_is_never_shown():
    cache = taken("--kv-cache-dir", "/d", "--kv-cache-salt", SECRET)
    assert settings_of(ENGINE, cache).salt == SECRET.encode()
    for shown in (cache, settings_of(ENGINE, cache)):
        assert "secret" not in repr(shown)


def test_a_salt_without_a_directory_would_do_nothing():
    with pytest.raises(KVStoreError, match="need --kv-cache-dir"):
        taken("--kv-cache-salt", SECRET)


@pytest.mark.parametrize("content", [None, b"", b"\n", b"  \t\n", b"x" * 5000])
def test_what_holds_no_salt_is_refused(tmp_path, capsys, content):
    path = tmp_path / "salt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit):
        taken("--kv-cache-dir", "/d", "--kv-cache-salt-file", str(path))
    assert str(path) in capsys.readouterr().err


def test_an_empty_salt_and_two_of_them_are_refused(tmp_path, capsys):
    (tmp_path / "salt").write_text("x")
    with pytest.raises(SystemExit):
        taken("--kv-cache-dir", "/d", "--kv-cache-salt", "")
    assert "separates nobody" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        taken("--kv-cache-dir", "/d", "--kv-cache-salt", SECRET, "--kv-cache-salt-file", str(tmp_path / "salt"))
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize("salt", ["", " ", "\t\n", "x" * 5000])
def test_a_variable_that_holds_no_secret_is_a_mistake_and_not_the_salt_of_everybody(monkeypatch, salt):
    """`KVSTORE_SALT=$(cat missing) kvstore serve …` must not share with those who have none."""
    monkeypatch.setenv("KVSTORE_SALT", salt)
    with pytest.raises(KVStoreError, match=r"^KVSTORE_SALT is (empty|too long).*, or unset it$") as refused:
        taken("--kv-cache-dir", "/d")
    assert "xxx" not in str(refused.value)
    assert taken("--kv-cache-dir", "/d", "--kv-cache-salt", "mine").salt == b"mine"
    assert taken() == CacheArguments()


def test_tenants_never_meet(serve, tiny_llama, tmp_path, monkeypatch):
    directory = tmp_path / "cache"
    flags = ("--kv-cache-dir", str(directory), "--kv-cache-interval", "256")
    monkeypatch.setenv("KVSTORE_SALT", SECRET)
    mine = serve(tiny_llama, *flags)
    first = mine.chat(MESSAGES)
    wait_saved(mine, directory, first.prompt_tokens - 1)
    other = serve(tiny_llama, *flags, "--kv-cache-salt", "another")
    theirs = other.chat(MESSAGES)
    assert (theirs.ids, theirs.cached_tokens) == (first.ids, 0)
    assert mine.stop() == other.stop() == 0
    again = serve(tiny_llama, *flags)
    assert again.chat(MESSAGES).cached_tokens == first.prompt_tokens - 1
    assert len(list((directory / "objects" / "nodes").iterdir())) == 2
    tokenized = [path for path in (directory / "objects" / "tokens").rglob("*") if path.is_file()]
    assert len(tokenized) == 2
    everything = [server.log_file for server in (mine, other, again)]
    everything += [path for path in directory.rglob("*") if path.is_file()]
    assert len(everything) > 6
    for path in everything:
        assert not holds_a_salt(path)


def holds_a_salt(path: Path) -> bool:
    data = path.read_bytes()
    return SECRET.encode() in data or b"another" in data or b"secret" in data
