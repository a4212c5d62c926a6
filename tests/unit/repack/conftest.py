"""The directory that the tests of repack work on."""

from __future__ import annotations

import pytest
from core_support import INFO, open_store, prompt
from upkeep_support import forget_tails, grow, rest

from kvstore import Store

TOKENS = prompt(40)


@pytest.fixture
def cold(tmp_path) -> Store:
    """A conversation of 40 tokens (chunks of 16) that grew in turns, rests, and has lost its contained tails."""
    with open_store(tmp_path / "s") as store:
        grow(store.namespace(INFO), TOKENS, 5, 11, 16, 20, 32, 33, 40)
        forget_tails(store.path)
        rest(store)
        yield store
