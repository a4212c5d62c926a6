"""Without --kv-cache-dir, `kvstore serve` is mlx_lm.server: the same parser, the same objects, the same bytes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import urllib.error

import pytest
from engine_support import conversation

REQUESTS = [
    {"messages": conversation(1), "max_tokens": 8},
    {"messages": conversation(2), "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    {"messages": conversation(1), "max_tokens": 8, "seed": 3, "temperature": 0.7},
    {"messages": conversation(1), "max_tokens": 8, "stop": ["e"]},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "repetition_penalty": 1.3},
]
VOLATILE = {"id", "created"}


def test_answers_are_those_of_mlx_lm_server(serve, tiny_llama):
    ours = serve(tiny_llama)
    theirs = serve(tiny_llama, command=("-m", "mlx_lm", "server"))
    for body in REQUESTS:
        answers = [server.post("/v1/chat/completions", body) for server in (ours, theirs)]
        ours_only, theirs_only = ({k: v for k, v in answer.items() if k not in VOLATILE} for answer in answers)
        assert ours_only == theirs_only


def test_errors_are_those_of_mlx_lm_server(serve, tiny_llama):
    ours = serve(tiny_llama)
    theirs = serve(tiny_llama, command=("-m", "mlx_lm", "server"))
    for body in ({"messages": [], "temperature": "hot"}, {"prompt": 5}, {"messages": [{"role": "user"}]}):
        seen = []
        for server in (ours, theirs):
            try:
                seen.append(server.post("/v1/chat/completions", body)["choices"])
            except urllib.error.HTTPError as error:
                seen.append((error.code, error.read()))
        assert seen[0] == seen[1]


def test_nothing_of_the_engine_is_replaced(monkeypatch, tiny_llama, tmp_path):
    """Without the flag main() hands to run() what mlx_lm.server would have run, whatever the environment says."""
    from mlx_lm import server

    from kvstore_mlx import serve

    before = {
        name: getattr(server, name) for name in ("BatchGenerator", "stream_generate", "LRUPromptCache", "argparse")
    }
    seen = {}

    def run(host, port, provider, **more):
        seen.update(host=host, port=port, provider=provider, more=more)
        seen.update({name: getattr(server, name) for name in ("BatchGenerator", "stream_generate", "LRUPromptCache")})

    monkeypatch.setattr(server, "run", run)
    monkeypatch.setenv("KVSTORE_DIR", str(tmp_path / "cache"))
    assert serve.command(["--model", str(tiny_llama), "--port", "9", "--max-tokens", "77"]) == 0
    assert (seen["host"], seen["port"], seen["more"]) == ("127.0.0.1", 9, {})
    assert type(seen["provider"]) is server.ModelProvider
    for name in ("BatchGenerator", "stream_generate", "LRUPromptCache"):
        assert seen[name] is before[name]
    arguments = vars(seen["provider"].cli_args)
    assert arguments["max_tokens"] == 77
    assert not [name for name in arguments if name.startswith("kv_cache")]
    assert server.argparse is argparse
    assert not (tmp_path / "cache").exists()


def test_flags_are_those_of_mlx_lm_server_and_ours():
    def flags(*command: str) -> set[str]:
        text = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True, check=True).stdout
        return {word.strip(",") for word in text.split() if word.startswith("--")}

    ours, theirs = flags("-m", "kvstore", "serve"), flags("-m", "mlx_lm", "server")
    assert theirs <= ours
    assert ours - theirs >= {"--kv-cache-dir", "--kv-cache-size", "--kv-cache-interval"}
    assert all(flag.startswith("--kv-cache") for flag in ours - theirs)


@pytest.mark.parametrize("command", [("-m", "kvstore", "serve"), ("-m", "mlx_lm", "server")])
def test_a_wrong_flag_ends_both_alike(command):
    result = subprocess.run([sys.executable, *command, "--no-such-flag"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in result.stderr
    assert "Traceback" not in result.stderr
