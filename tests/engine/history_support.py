"""What random histories of a conversation have in common, whatever serves it: what may happen, and what it is about."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from session_support import prompt_of, session_of

TOLERANCE = 1e-4
SYSTEM = 70
"""Tokens that every conversation begins with: more than the fewest that are saved."""

turns = st.tuples(st.just("turn"), st.integers(1, 90), st.integers(0, 5), st.booleans())
edits = st.tuples(st.just("edit"), st.integers(0, 100), st.integers(1, 40))
restarts = st.tuples(st.just("restart"), st.booleans())
damages = st.tuples(st.just("damage"), st.integers(0, 10_000), st.sampled_from(["remove", "flip", "cut"]))

slow = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


class Cancelled(Exception):  # noqa: N818 - nothing went wrong
    """The client went away, or something of its request failed."""


class History(ABC):
    """One conversation held on a directory, and checked by a session without one."""

    def __init__(self, directory: Path, family: str, **more: Any) -> None:
        self.directory, self.family, self.more = directory, family, more
        self.plain = session_of(None, family, **more)
        self.tokens = prompt_of(SYSTEM, seed=1)
        self.seed = 100
        self.reused = 0

    def new(self, count: int) -> list[int]:
        self.seed += 1
        return prompt_of(count, self.seed)

    def do(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def edit(self, percent: int, count: int) -> None:
        self.tokens = [*self.tokens[: len(self.tokens) * percent // 100], *self.new(count)]

    def damage(self, which: int, how: str) -> None:
        self.flush()
        files = sorted(path for path in (self.directory / "objects").rglob("*") if path.is_file())
        if not files:
            return
        path = files[which % len(files)]
        if how == "remove":
            path.unlink()
            return
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[which % len(data)] ^= 1 + which % 255
        else:
            del data[len(data) // 2 :]
        path.write_bytes(data)

    @abstractmethod
    def turn(self, count: int, answer: int, flush: bool) -> None:
        """New tokens, an answer, and perhaps a wait until all is written."""

    @abstractmethod
    def restart(self, orderly: bool) -> None:
        """Another process on the same directory; out of order it loses what was queued."""

    @abstractmethod
    def flush(self) -> bool:
        """Wait until what is queued is written."""

    @abstractmethod
    def close(self) -> None:
        """The end."""


def hold(make: Callable[..., History], family: str, history: list[tuple[Any, ...]], **more: Any) -> int:
    """Play a history, and two turns around a restart after it; the tokens that were reused."""
    folder = Path(tempfile.mkdtemp(prefix="histories-"))
    try:
        conversation = make(folder / "cache", family, **more)
        for step in [*history, ("turn", 3, 2, True), ("restart", True), ("turn", 2, 3, True)]:
            conversation.do(*step)
        conversation.close()
        return conversation.reused
    finally:
        shutil.rmtree(folder)
