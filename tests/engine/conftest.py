"""Servers that do not outlive their test."""

from __future__ import annotations

import pytest
from engine_support import Server


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
