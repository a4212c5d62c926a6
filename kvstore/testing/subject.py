"""What the suite runs against: a Subject is one place for a store, made anew in an empty folder for every history."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvstore.blocks import Span
from kvstore.eviction import GRACE_NS, Policy
from kvstore.fs import Durability, FileSystem
from kvstore.fsck import check as fsck
from kvstore.gc import collect, usage
from kvstore.namespace import NamespaceInfo
from kvstore.restore import Allocate
from kvstore.states import AllocateState, Scalar, State
from kvstore.store import Store

__all__ = ["DirectorySubject", "NamespaceLike", "StoreLike", "Subject"]


class NamespaceLike(Protocol):
    """What is tested: the methods of kvstore.Namespace, with their meaning.

    A match has ``count`` (tokens that can be reused), ``border`` (where a publish may go on) and ``exact``; what a read
    returns has ``tokens`` (valid in the buffers) and ``border``. Anything more is the store's own business.
    """

    def lookup(self, tokens: bytes, *, trimmable: bool = True) -> Any:
        """The longest saved prefix of these packed tokens."""
        ...

    def read(self, match: Any, allocate: Allocate) -> Any:
        """Read a match into memory that allocate provides."""
        ...

    def read_state(self, match: Any, allocate: AllocateState) -> Mapping[str, Scalar] | None:
        """The boundary state at the end of a match."""
        ...

    def publish(self, tokens: bytes, spans: Sequence[Span]) -> Any:
        """Save consecutive spans. Raises KVStoreError when what comes before the first one is not saved."""
        ...

    def publish_state(self, tokens: bytes, state: State) -> Any:
        """Save the boundary state at the end of these tokens. Raises KVStoreError when their spans are not saved."""
        ...


class StoreLike(Protocol):
    """An open store: the part of kvstore.Store that is tested."""

    def namespace(self, info: NamespaceInfo) -> NamespaceLike:
        """One namespace. What is saved in another is not found here."""
        ...

    def close(self) -> None:
        """Called once; the object is not used afterwards."""
        ...


class Subject:
    """Subclass it and write open. A rule whose method is not overridden is left out of the histories."""

    def __init__(self, folder: Path, interval: int) -> None:
        self.folder = folder
        self.interval = interval

    def open(self) -> StoreLike:
        """Open the store, creating it the first time. Several are open at once; all of them see what one saves."""
        raise NotImplementedError

    def files(self) -> Iterable[Path]:
        """Files that a history may delete and damage: afterwards less may be found, and never wrong bytes."""
        raise NotImplementedError

    def collect(self, share: float) -> None:
        """Reclaim space until no more than this share of it is used, as if all was saved long ago."""
        raise NotImplementedError

    def check(self) -> Sequence[str]:
        """What is wrong with the store, one sentence each. Not asked about after files() were damaged."""
        raise NotImplementedError

    def repair(self) -> None:
        """Remove what is damaged. check() is asked again afterwards."""
        raise NotImplementedError


class DirectorySubject(Subject):
    """kvstore itself."""

    def __init__(self, folder: Path, interval: int) -> None:
        super().__init__(folder, interval)
        # Nothing here is about power loss, and syncing would be nearly all of the time.
        self._fs = FileSystem(Durability.NONE)

    def open(self) -> Store:
        """A store in the folder."""
        return Store.open(self.folder, interval=self.interval, fs=self._fs)

    def files(self) -> Iterable[Path]:
        """Manifests and blocks. Without kvstore.json the folder would be no cache directory, and opening be refused."""
        return sorted(path for path in (self.folder / "objects").rglob("*") if path.is_file())

    def collect(self, share: float) -> None:
        """As ``kvstore gc``, with a clock that is ahead of everything's grace time."""
        ahead = 2 * GRACE_NS
        with Store.open(self.folder, fs=self._fs, clock=lambda: time.time_ns() + ahead) as store:
            report = collect(store.context, Policy(size=int(usage(store.context) * share)))
        assert not report.error, report.error
        assert not report.busy

    def check(self) -> Sequence[str]:
        """As ``kvstore fsck --read-data``."""
        with Store.open(self.folder, fs=self._fs) as store:
            report = fsck(store.context, read_data=True, grace_ns=0)
        assert not report.error, report.error
        return [f"{each.path}: {each.sentence}" for each in report.findings if each.severity == "error"]

    def repair(self) -> None:
        """As ``kvstore fsck --read-data --repair``."""
        with Store.open(self.folder, fs=self._fs) as store:
            report = fsck(store.context, read_data=True, repair=True, grace_ns=0, settle_s=0)
        assert not report.error, report.error
