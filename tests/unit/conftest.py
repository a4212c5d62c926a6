"""A store, for the unit tests that need nothing more of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core_support import INFO, open_store

from kvstore import Namespace, Store


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    """An empty store with an interval of 16 tokens in tmp_path / "cache"; nothing is synced."""
    with open_store(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def space(store) -> Namespace:
    """A namespace of the store."""
    return store.namespace(INFO)
