"""``kvstore serve``: mlx_lm.server with the same flags, and a cache directory when ``--kv-cache-dir`` is given.

Without that flag mlx_lm.server's own main runs, and nothing of it is replaced but the parser's flag list. With it,
three names of the server module are replaced while it runs: what it makes batches with, what it makes single responses
with, and how it starts and stops.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kvstore.errors import KVStoreError
from kvstore_mlx.flags import CacheArguments
from kvstore_mlx.parsers import parser
from kvstore_mlx.wrapping import CommandRefused, leave, open_store, replaced, run_engine, settings_of

__all__ = ["command", "parser"]

_MAX_PORT = 65535


def command(argv: Sequence[str]) -> int:
    """mlx_lm.server, with a cache directory when --kv-cache-dir is given; returns the exit code of the process."""
    try:
        from mlx_lm import server  # noqa: PLC0415 - takes a second; only this command pays it
    except ImportError as error:
        raise CommandRefused(
            "serve", f"mlx-lm cannot be imported ({error}); install it with: pip install 'kvstore-llm[mlx]'"
        ) from None

    given = CacheArguments()

    def prepared(arguments: argparse.Namespace, cache: CacheArguments) -> None:
        nonlocal given
        if cache.directory is not None and not 0 <= arguments.port <= _MAX_PORT:
            # Without a directory it is mlx_lm.server's, which takes the number modulo 65,536.
            raise KVStoreError(f"argument --port: {arguments.port} is not a port; they are from 0 to {_MAX_PORT}")
        given = cache

    def run(host: str, port: int, provider: Any, **kwargs: Any) -> None:
        if given.directory is None:
            original(host, port, provider, **kwargs)
        else:
            _serve(server, given, host, port, provider)

    original = server.run
    code = run_engine("serve", server, argv, prepared, run=run)
    if given.directory is not None:
        leave(code)
    return code


def _serve(server: ModuleType, cache: CacheArguments, host: str, port: int, provider: Any) -> None:
    """Serve with a cache directory until told to stop; CommandRefused with one sentence when that cannot be done."""
    from kvstore_mlx.running import RunningServer  # noqa: PLC0415 - imports the engine

    try:
        settings = settings_of(provider.cli_args, cache)
        store = open_store(cache)
    except KVStoreError as error:
        raise CommandRefused("serve", error) from None
    with store:
        running = RunningServer(server, store, cache, provider, settings=settings)
        with replaced(
            server,
            BatchGenerator=running.batch_generator,
            stream_generate=running.stream_generate(server.stream_generate),
        ):
            failure = running.serve(host, port)
    if failure is not None:
        raise CommandRefused("serve", failure)
