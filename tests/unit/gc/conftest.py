"""The directory that is collected."""

from __future__ import annotations

import pytest
from core_support import open_store


@pytest.fixture
def writer(tmp_path):
    with open_store(tmp_path / "s") as store:
        yield store
