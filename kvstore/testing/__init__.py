"""A public conformance suite: run it against your own backend, or against an adapter that keeps prefixes.

    from kvstore import Store
    from kvstore.testing import Subject, store_machine

    class MyStore(Subject):
        def open(self) -> Store:
            return Store.open(self.folder, interval=self.interval)

    TestMyStore = store_machine(MyStore).TestCase

hypothesis then makes up histories (publishing, branching, growing, reopening, damage, collections, two handles) and
compares every answer with a plain dict. store_machine needs hypothesis, which kvstore itself does not: ``pip install
'kvstore-llm[testing]'``. pytest is not needed; a TestCase is a unittest one. docs/testing.md has the details.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.testing.model import Model
from kvstore.testing.oracle import TENSORS, Memory, Oracle, StateMemory, random_tokens
from kvstore.testing.subject import DirectorySubject, NamespaceLike, StoreLike, Subject

if TYPE_CHECKING:
    from kvstore.testing.machine import store_machine

__all__ = [
    "TENSORS",
    "DirectorySubject",
    "Memory",
    "Model",
    "NamespaceLike",
    "Oracle",
    "StateMemory",
    "StoreLike",
    "Subject",
    "random_tokens",
    "store_machine",
]


def __getattr__(name: str) -> Any:
    """Import hypothesis when its part is asked for, and not for who only wants the oracle."""
    if name != "store_machine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvstore.testing.machine import store_machine  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "hypothesis":
            raise
        raise ImportError(
            "kvstore.testing.store_machine needs hypothesis, which kvstore does not; pip install 'kvstore-llm[testing]'"
        ) from error
    return store_machine
