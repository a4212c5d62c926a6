"""The two directories that the tests of merge work on."""

from __future__ import annotations

import pytest
from core_support import INFO, open_store
from gc_support import TENANT, publish, state
from merge_support import ONE, THREE, TWO

from kvstore import Store


@pytest.fixture
def pair(tmp_path) -> tuple[Store, Store]:
    """Two directories whose conversations share a first chunk; the first has a tenant, a state, a tokenization."""
    with open_store(tmp_path / "a") as a, open_store(tmp_path / "b") as b:
        publish(a.namespace(INFO), ONE)
        a.namespace(INFO).publish_state(ONE[:32], state(4))
        publish(a.namespace(TENANT), THREE)
        a.tokenizations(b"scope").put(b"request", bytes(8))
        publish(b.namespace(INFO), TWO)
        yield a, b
