"""Servers that do not outlive their test, and a small store with what writes into it."""

from __future__ import annotations

import pytest
from engine_support import Server
from mlx_lm import load
from recording_support import INTERVAL, fake_plan

from kvstore import NamespaceInfo, Store
from kvstore_mlx.forms import Form
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.writer import Writer


@pytest.fixture
def serve(tmp_path):
    """Start servers that do not outlive the test: serve(model, *flags) -> Server, ready unless ready=False."""
    started: list[Server] = []

    def start(model, *flags: str, ready: bool = True, **more) -> Server:
        server = Server(tmp_path / f"server-{len(started)}.log", model, *flags, **more)
        started.append(server)
        return server.wait_ready() if ready else server

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "cache", interval=INTERVAL) as opened:
        yield opened


@pytest.fixture
def form(store):
    """Of a model with plain attention, which is only a plan."""
    return Form(fake_plan(), store.namespace(NamespaceInfo({"model": "fake"})))


@pytest.fixture
def writer(store):
    made = Writer(Housekeeping(store, 1 << 30))
    yield made
    made.close(10)


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    """The model and the tokenizer, as a program has them."""
    return load(str(tiny_llama))
