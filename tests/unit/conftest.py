"""What the unit tests of the store's three operations share."""

from __future__ import annotations

import pytest
from core_support import INFO, open_store

from kvstore import Namespace, Store


@pytest.fixture
def store(tmp_path) -> Store:
    """An empty store with an interval of 16 tokens in tmp_path / "cache"; nothing is synced."""
    return open_store(tmp_path / "cache")


@pytest.fixture
def space(store) -> Namespace:
    """A namespace of the store."""
    return store.namespace(INFO)
