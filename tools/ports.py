"""A port for a server that is about to be started by its command line."""

from __future__ import annotations

import errno
import os
import socket
from itertools import count

__all__ = ["free_port"]

_FIRST, _COUNT = 20_000, 12_000
"""Below those that a system gives away by itself (from 32,768 on, on macOS from 49,152): nobody's connection takes one
in the seconds until the server has it."""

_numbers = count(os.getpid() * 997)
"""Processes that run at once begin far from each other."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at; another one each time. Raises OSError when there is none."""
    for _ in range(_COUNT):
        port = _FIRST + next(_numbers) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
