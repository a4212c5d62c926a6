"""The flags of writing: what they accept, and what they say about the rest."""

from __future__ import annotations

import argparse

import pytest

from kvstore import KVStoreError
from kvstore_mlx.flags import CacheArguments


def taken(*flags: str) -> CacheArguments:
    parser = argparse.ArgumentParser()
    CacheArguments.add_to(parser, "an engine")
    return CacheArguments.take_from(parser.parse_args(flags))


def test_a_write_limit_is_off_unless_it_is_given():
    assert taken("--kv-cache-dir", "/d").write_limit is None
    assert taken("--kv-cache-dir", "/d", "--kv-cache-write-limit", "50GiB").write_limit == 50 << 30


def test_the_shortest_prefix_is_measured_unless_it_is_given():
    assert taken("--kv-cache-dir", "/d").saving.min_tokens is None
    assert taken("--kv-cache-dir", "/d", "--kv-cache-min-tokens", "auto").saving.min_tokens is None
    assert taken("--kv-cache-dir", "/d", "--kv-cache-min-tokens", "256").saving.min_tokens == 256


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-cache-write-limit", "fast"], "'fast' is not a size"),
        (["--kv-cache-write-limit", "1000"], "1000 B an hour is not a prompt; give at least 1MiB"),
        (["--kv-cache-min-tokens", "-1"], "neither auto nor a number of tokens"),
        (["--kv-cache-min-tokens", "few"], "'few' is neither auto nor a number of tokens such as 256"),
    ],
)
def test_what_is_no_limit_is_refused_with_a_sentence(flags, said, capsys):
    with pytest.raises(SystemExit):
        taken("--kv-cache-dir", "/d", *flags)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--kv-cache-write-limit", "1GiB"], ["--kv-cache-min-tokens", "9"]])
def test_without_a_directory_they_would_do_nothing(flags):
    with pytest.raises(KVStoreError, match="need --kv-cache-dir"):
        taken(*flags)
