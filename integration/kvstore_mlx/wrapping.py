"""Run a command of mlx-lm with kvstore's flags added to its own: what serve, generate and chat have in common.

An engine's main is called as it is. While it runs, its module sees a parser that also knows the cache flags, and the
functions that the caller replaces.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from kvstore.errors import KVStoreError
from kvstore.locations import place_of, warnings_for
from kvstore.sizes import format_size
from kvstore.store import Store
from kvstore_mlx.flags import CacheArguments
from kvstore_mlx.versions import check_versions

__all__ = ["CommandRefused", "leave", "open_store", "replaced", "run_engine", "settings_of"]

log = logging.getLogger("kvstore")


class CommandRefused(SystemExit):
    """A command cannot do what it was asked to; printed as one sentence, exit code 1."""

    def __init__(self, command: str, reason: object) -> None:
        print(f"kvstore {command}: {reason}", file=sys.stderr)  # noqa: T201 - a command's answer
        super().__init__(1)


def run_engine(
    command: str,
    module: ModuleType,
    argv: Sequence[str],
    prepared: Callable[[argparse.Namespace, CacheArguments], None],
    **names: Any,
) -> int:
    """Call module.main() with these arguments and names replaced; its exit code.

    prepared is told the engine's own arguments and kvstore's when both are parsed; a KVStoreError that it raises is a
    wrong command line.
    """

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            self.prog = f"kvstore {command}"
            CacheArguments.add_to(self, module.__name__)
            arguments = super().parse_args(*args, **kwargs)
            try:
                cache = CacheArguments.take_from(arguments)
                if cache.directory is not None:
                    # Some of what a cache asks the system is a child process, which tokenizers would warn of.
                    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
                prepared(arguments, cache)
            except KVStoreError as error:
                self.exit(2, f"{self.prog}: error: {error}\n")
            return arguments

        def error(self, message: str) -> NoReturn:
            # The engine's mistakes are answered as the engine does: with its whole usage.
            if "--kv-cache-" in message:
                self.exit(2, f"{self.prog}: error: {message}\n")
            super().error(message)

    lenient = SimpleNamespace(ArgumentParser=Parser, Namespace=argparse.Namespace)
    with replaced(module, argparse=lenient, **names), _arguments(command, argv):
        try:
            module.main()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def open_store(cache: CacheArguments) -> Store:
    """The cache directory that was asked for, created when missing; raises KVStoreError with one sentence."""
    assert cache.directory is not None
    store = Store.open(
        place_of(cache.directory or None).path,
        interval=cache.interval,
        shared=cache.shared,
        durability=cache.durability,
    )
    store.check_writable()
    for warning in warnings_for(store.path):
        log.warning("kvstore: %s", warning)
    log.info(
        "kvstore: caching in %s (budget %s, interval %d tokens)", store.path, format_size(cache.size), store.interval
    )
    return store


def settings_of(arguments: argparse.Namespace, cache: CacheArguments) -> Any:
    """What of both kinds of flags decides the namespace (kvstore_mlx.spaces.Settings)."""
    import mlx.core as mx  # noqa: PLC0415 - takes a second; only these commands pay it

    from kvstore_mlx.fingerprint import Quantization  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.spaces import Settings  # noqa: PLC0415 - as above

    versions = check_versions()
    if mx.distributed.init().size() > 1:
        raise KVStoreError("--kv-cache-dir does not work with distributed inference; start without it")
    quantization = None
    if getattr(arguments, "kv_bits", None) is not None:
        quantization = Quantization(arguments.kv_bits, arguments.kv_group_size, arguments.quantized_kv_start)
    return Settings(
        versions,
        salt=cache.salt,
        quantization=quantization,
        prefill_step=arguments.prefill_step_size,
        strict=cache.strict,
        window=getattr(arguments, "max_kv_size", None),
    )


@contextmanager
def replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    """Module attributes replaced for a while."""
    before = {name: getattr(module, name) for name in names}
    try:
        vars(module).update(names)
        yield
    finally:
        vars(module).update(before)


def leave(code: int) -> None:
    """End the process without the destructors of the engine's libraries.

    Everything of ours is finished by now. MLX 0.32.4 on Linux may abort while its threads are torn down at exit
    ("terminate called without an active exception": 2 of 5 stops on a loaded machine), which turns an orderly stop
    into exit code 134.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _arguments(command: str, argv: Sequence[str]) -> Iterator[None]:
    """sys.argv as an engine's main expects it."""
    before = sys.argv
    try:
        sys.argv = [f"kvstore {command}", *argv]
        yield
    finally:
        sys.argv = before
