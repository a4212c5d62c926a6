"""What fails in the cache of a session never fails an answer: it is counted, said once, and done without."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import KVStoreError, TokenError
from kvstore_mlx.seldom import Seldom

__all__ = ["Guard"]

log = logging.getLogger("kvstore")

Result = TypeVar("Result")

_SAY_EVERY_S = 60.0


class Guard:
    """failures: how many steps of the cache failed. An interrupt is none of them, and passes."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self._said = Seldom(_SAY_EVERY_S, monotonic)

    def tried(
        self, step: Callable[[], Result], otherwise: Result, mistakes: tuple[type[Exception], ...] = ()
    ) -> Result:
        """What a step of the cache gives, otherwise when it fails. mistakes: errors that are the caller's own."""
        try:
            return step()
        except mistakes:
            raise
        except TokenError as error:
            # mlx-lm marks images with negative ids. What is no number at all is the caller's mistake.
            if not isinstance(error.__cause__, OverflowError):
                raise
            log.info("kvstore: this prompt has images; it is computed without the cache directory")
        except (KVStoreError, MemoryError, OSError, ValueError) as error:
            if self._counted(error):
                log.warning("kvstore: an answer goes on without the cache: %s", str(error) or type(error).__name__)
        except Exception as error:
            if self._counted(error):
                log.exception("kvstore: an answer goes on without the cache, and this is a bug in kvstore; report it")
        return otherwise

    def done(self, step: Callable[[], None], mistakes: tuple[type[Exception], ...] = ()) -> bool:
        """Whether a step was done, and did not fail."""

        def whole() -> bool:
            step()
            return True

        return self.tried(whole, otherwise=False, mistakes=mistakes)

    def _counted(self, error: Exception) -> bool:
        """Whether to say it."""
        self.failures += 1
        return self._said.due((type(error), str(error)))
