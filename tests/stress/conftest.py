"""What the tests of failures share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def quiet():
    """Thousands of failures are on purpose here, one line for each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
