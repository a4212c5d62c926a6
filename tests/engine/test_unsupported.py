"""A model with caches that have no codec, and an engine that was not tested, are told apart from a bug by one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engine_support import conversation

# A model that brings a cache class of its own, as one with trust_remote_code may: mlx-lm loads it from its folder.
BROUGHT = """
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import ModelArgs


class OwnCache(KVCache):
    pass


class Model(llama.Model):
    def make_cache(self):
        return [OwnCache() for _ in self.layers]
"""


@pytest.fixture
def own_class(tiny_llama, tmp_path):
    """A folder whose model uses a class without codec."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "own"))
    (folder / "own_model.py").write_text(BROUGHT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "own_model.py"}))
    return folder


def test_a_class_without_codec_turns_caching_off(serve, own_class, tmp_path):
    flags = ("--trust-remote-code",)
    plain = serve(own_class, *flags).chat(conversation(1))
    server = serve(own_class, *flags, "--kv-cache-dir", str(tmp_path / "cache"))
    for _ in range(2):
        assert server.chat(conversation(1)).ids == plain.ids
    assert server.stop() == 0
    lines = [line for line in server.log.splitlines() if "caching is off for" in line]
    assert len(lines) == 1
    assert "it uses OwnCache, which cannot be saved yet" in lines[0]
    assert "Traceback" not in server.log
    assert not list((tmp_path / "cache" / "objects" / "blocks").iterdir())


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
