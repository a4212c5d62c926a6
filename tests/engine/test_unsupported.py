"""A model with caches that have no codec, and an engine that was not tested, are told apart from a bug by one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import make_model
from engine_support import conversation

GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 128,
    "sliding_window_pattern": 3,
}


def test_a_rotating_cache_turns_caching_off(serve, tmp_path):
    model = make_model(tmp_path / "gemma", GEMMA3)
    plain = serve(model).chat(conversation(1))
    server = serve(model, "--kv-cache-dir", str(tmp_path / "cache"))
    for _ in range(2):
        answer = server.chat(conversation(1))
        assert answer.ids == plain.ids
    assert server.log.count("caching is off for") == 1
    assert "it uses RotatingKVCache" in server.log
    assert not list((tmp_path / "cache" / "objects" / "blocks").iterdir())


def test_kv_bits_turns_caching_off(serve, tiny_llama, tmp_path):
    flags = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    make = make_model(tmp_path / "wide", {**__import__("conftest").TINY_LLAMA, "head_dim": 32})
    plain = serve(make, *flags).chat(conversation(1))
    server = serve(make, *flags, "--kv-cache-dir", str(tmp_path / "cache"))
    assert server.chat(conversation(1)).ids == plain.ids
    assert server.log.count("caching is off for") == 1
    assert "--kv-bits" in server.log


def test_versions_out_of_range_are_refused(monkeypatch):
    from kvstore_mlx import versions

    monkeypatch.setattr(versions, "version", lambda package: "0.33.0" if package == "mlx-lm" else "0.32.9")
    with pytest.raises(versions.UnsupportedVersionError, match=r"mlx-lm 0.33.0 is installed.*pip install 'mlx-lm>="):
        versions.check_versions()
    monkeypatch.setattr(versions, "version", lambda package: "0.32.2" if package == "mlx-lm" else "0.32.4.dev1")
    assert versions.check_versions() == {"mlx": "0.32.4.dev1", "mlx-lm": "0.32.2"}


def test_installed_versions_are_supported():
    from kvstore_mlx.versions import check_versions

    assert set(check_versions()) == {"mlx", "mlx-lm"}


def test_an_engine_that_is_not_installed_is_one_sentence():
    code = "import sys; sys.modules['mlx_lm'] = None; sys.argv[1:] = ['serve', '--model', 'm']; import kvstore.__main__"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'kvstore-llm[mlx]'" in result.stderr
    assert "Traceback" not in result.stderr
