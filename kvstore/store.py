"""Open a cache directory and work with it: the public face of the store.

    store = Store.open("~/.cache/kv", interval=2048)
    space = store.namespace(NamespaceInfo({"model": "…"}, label="my model"))
    match = space.lookup(tokens)
    restored = space.read(match, allocate)
    space.publish(tokens, spans)

This module creates the directory, refuses what is not one, and hands each job to the module that knows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.blocks import Span
from kvstore.commit import put_file
from kvstore.context import Clock, Context, Counters, Space
from kvstore.directory import DEFAULT_INTERVAL, open_directory, unavailable
from kvstore.errors import KVStoreError
from kvstore.fs import Durability, FileSystem
from kvstore.keys import pack_tokens
from kvstore.layout import Kind
from kvstore.locks import publish_lock
from kvstore.lookup import Match, find
from kvstore.namespace import NamespaceInfo
from kvstore.prefilled import find_prefilled
from kvstore.publish import Published, publish, publish_state
from kvstore.renewal import Renewal
from kvstore.restore import THREADS, Allocate, Restored, read
from kvstore.standing import Standing, chunk_names, has_node, standing
from kvstore.states import AllocateState, Scalar, State, read_state, state_size
from kvstore.tokenizations import Tokenizations

__all__ = ["DEFAULT_INTERVAL", "Namespace", "Store", "unavailable"]


class Store:
    """One open cache directory. Safe to use from several threads; several processes may open the same directory."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._renewal = Renewal(context)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        interval: int | None = None,
        create: bool = True,
        shared: bool = False,
        durability: Durability = Durability.BARRIER,
        fs: FileSystem | None = None,
        clock: Clock = time.time_ns,
    ) -> Self:
        """Open a cache directory, creating it when it is missing or empty (unless create is False).

        interval is fixed at creation (default 2,048); naming another one later raises IntervalMismatchError. shared is
        fixed at creation too: folders and files then follow the umask instead of being this user's alone. Raises
        NotACacheDirectoryError for a file or a folder of something else, FormatVersionError for a newer format (and
        then touches nothing), UnavailableError when the file system refuses.
        """
        return cls(
            open_directory(
                path, interval=interval, create=create, shared=shared, durability=durability, fs=fs, clock=clock
            )
        )

    @property
    def path(self) -> Path:
        """The cache directory."""
        return self._context.layout.root

    @property
    def interval(self) -> int:
        """Tokens a chunk."""
        return self._context.interval

    @property
    def counters(self) -> Counters:
        """What happened through this object since it was opened."""
        return self._context.counters

    @property
    def context(self) -> Context:
        """For the modules of kvstore that work on a whole directory (gc, listing)."""
        return self._context

    def namespace(self, info: NamespaceInfo) -> Namespace:
        """A namespace of this directory. Nothing is written before something is published into it."""
        return Namespace(Space(self._context, info), self._renewal)

    def tokenizations(self, scope: bytes) -> Tokenizations:
        """Saved tokenizations of whole requests; scope is everything of the tokenizer that decides tokens."""
        return Tokenizations(self._context, scope)

    def renew(self) -> bool:
        """Set the directory up anew if somebody emptied it; True when its content is not what it was (kvstore.renewal).

        Each publish does so; this is for whoever remembers what the directory held. Raises KVStoreError.
        """
        try:
            return self._renewal.check()
        except OSError as error:
            raise unavailable(self.path, error) from error

    def check_writable(self) -> None:
        """Raise UnavailableError now when nothing can be written, rather than at the first publish."""
        try:
            fd, path = self._context.staging.create()
            try:
                self._context.fs.allocate(fd, 1 << 16)
                self._context.fs.write(fd, [bytes(4096)])
            finally:
                os.close(fd)
                self._context.staging.discard(path)
            with publish_lock(self._context.layout):
                pass
        except OSError as error:
            raise unavailable(self.path, error) from error

    def close(self) -> None:
        """Remove this process's staging folder. The object must not be used afterwards."""
        self._context.staging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Namespace:
    """One namespace of a store: look prefixes up, read them, publish them."""

    def __init__(self, space: Space, renewal: Renewal) -> None:
        self._space = space
        self._renewal = renewal
        # Hashed when the namespace is opened rather than in its first lookup, whose time it would be a fifth of.
        _ = space.root, space.nodes

    @property
    def id(self) -> str:
        """The namespace's folder name: 32 hex digits of its fingerprint."""
        return self._space.id

    @property
    def interval(self) -> int:
        """Tokens a chunk."""
        return self._space.context.interval

    def lookup(self, tokens: Iterable[int] | bytes, *, trimmable: bool = True, prefill_only: bool = False) -> Match:
        """The longest saved prefix of these tokens; match.count is 0 when there is none. Raises TokenError for what is
        no token id, and no OSError ever.

        trimmable False is for engines whose caches cannot be cut at any token: the match ends at a boundary state.
        prefill_only leaves out what was decoded and what follows it.
        """
        search = find_prefilled if prefill_only else find
        return search(self._space, pack_tokens(tokens), trimmable=trimmable)

    def names(self, tokens: Iterable[int] | bytes) -> list[str]:
        """What the full chunks of a prompt are called, saved or not: keys for kvstore.admission."""
        return chunk_names(self._space, pack_tokens(tokens))

    def standing(self, tokens: Iterable[int] | bytes) -> Standing:
        """What the node at the end of these tokens is called, and what its publish will refer to."""
        return standing(self._space, pack_tokens(tokens))

    def has_node(self, tokens: Iterable[int] | bytes, kind: Kind = "kv") -> bool:
        """Whether a node, or its state, is there already, so that its publish writes nothing: one stat."""
        return has_node(self._space, pack_tokens(tokens), kind)

    def read(self, match: Match, allocate: Allocate, threads: int = THREADS) -> Restored:
        """Read a match into memory that allocate provides, every digest checked. Never raises for a bad file."""
        return read(match, allocate, threads)

    def read_state(self, match: Match, allocate: AllocateState) -> dict[str, Scalar] | None:
        """Read the boundary state at the end of a match; its values, or None when there is no good one."""
        return read_state(self._space, match.steps[-1], allocate) if match.steps and match.exact else None

    def state_size(self, match: Match) -> int:
        """Bytes that read_state would read; 0 when there is no good state."""
        return state_size(self._space, match.steps[-1]) if match.steps and match.exact else 0

    def publish(self, tokens: Iterable[int] | bytes, spans: Sequence[Span]) -> Published:
        """Publish KV of consecutive spans of a prompt; see kvstore.publish for the rules and errors.

        OSError becomes UnavailableError. Every failure is counted before it is raised.
        """
        with self._publishing():
            return publish(self._space, pack_tokens(tokens), spans)

    def publish_state(self, tokens: Iterable[int] | bytes, state: State) -> Published:
        """Publish the boundary state at the end of these tokens, whose spans were published before."""
        with self._publishing():
            return publish_state(self._space, pack_tokens(tokens), state)

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        context = self._space.context
        try:
            self._renewal.check()
            self._describe()
            yield
        except OSError as error:
            context.counters.add(failed_publishes=1)
            raise unavailable(context.layout.root, error) from error
        except (KVStoreError, MemoryError):
            context.counters.add(failed_publishes=1)
            raise

    def _describe(self) -> None:
        """Write the namespace's description for people when it is not there: `ls` shows it, nothing needs it.

        Looked for at each publish, because `kvstore clear` may take it away beside a running server.
        """
        context = self._space.context
        path = context.layout.namespace_file(self.id)
        if not path.exists():
            put_file(context, path, [self._space.info.document(context.clock() / 1e9)])
