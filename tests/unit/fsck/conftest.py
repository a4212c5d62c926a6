"""The directory that the tests of fsck damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fsck_support import make


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A directory with nothing wrong with it; tests work on copies."""
    return make(tmp_path_factory.mktemp("sound") / "cache")


@pytest.fixture
def root(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "cache"))
