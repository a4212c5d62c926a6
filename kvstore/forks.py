"""What is of one process only begins anew in a fork of it.

A fork takes along the locks that other threads hold, but not those threads: in the child nobody would ever let go of
them. Nor may a child write into a file or folder that is its parent's.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["Forkable", "renew_in_forks"]


class Forkable(Protocol):
    """Something with locks, or with what is of one process only."""

    def forked(self) -> None:
        """Take new locks and forget what is the parent's. Called in the child, which has one thread."""


_known: WeakSet[Forkable] = WeakSet()


def renew_in_forks(one: Forkable) -> None:
    """Have forked called in every child from now on, for as long as somebody keeps the object."""
    _known.add(one)


def _forked() -> None:
    """One that fails keeps no other from it. What is raised here the interpreter prints, and the child goes on."""
    failed: BaseException | None = None
    for one in list(_known):
        try:
            one.forked()
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_forked)
