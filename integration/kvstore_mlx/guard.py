"""What fails in a cache never fails an answer: it is said once a minute, and done without."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import KVStoreError, TokenError
from kvstore_mlx.live import HookError
from kvstore_mlx.seldom import Seldom, alike
from kvstore_mlx.trouble import BUG, in_words

__all__ = ["Failures", "Guard"]

log = logging.getLogger("kvstore")

Result = TypeVar("Result")

_SAY_EVERY_S = 60.0


class Failures:
    """Which failures of a cache are for the log: the first of each kind, and then one a minute, although each token may
    have one, and each request.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._said = Seldom(_SAY_EVERY_S, monotonic)

    def due(self, error: Exception, what: str = "") -> bool:
        """Whether to say that this failed with such an error; it counts as said then."""
        return self._said.due((what, alike(error)))

    def guarded(self, save: Callable[[], object]) -> None:
        """Run a step of saving; whatever goes wrong is logged and never fails the request."""
        try:
            save()
        except (KVStoreError, MemoryError, OSError, ValueError) as error:
            if self.due(error, "saving"):
                log.warning("kvstore: not saved: %s", in_words(error))
        except Exception as error:
            if self.due(error, "saving"):
                log.exception("kvstore: %s", BUG)


class Guard:
    """For the steps of a session. failures: how many of them failed. An interrupt is none of them, and passes."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self._said = Failures(monotonic)

    def tried(self, step: Callable[[], Result], otherwise: Result) -> Result:
        """What a step of the cache gives, otherwise when it fails. Tokens that are no numbers are told, as the caller's
        mistake. Other mistakes are looked for before a step (ModelSpace.check), where a bug cannot be taken for one.
        """
        try:
            return step()
        except TokenError as error:
            # mlx-lm marks images with negative ids. What is no number at all is the caller's mistake.
            if not isinstance(error.__cause__, OverflowError):
                raise
            log.info("kvstore: this prompt has images; it is computed without the cache directory")
        except HookError as error:
            if self._counted(error):
                log.error("kvstore: an answer goes on without the cache: %s", error, exc_info=error.__cause__)
        except (KVStoreError, MemoryError, OSError, ValueError) as error:
            if self._counted(error):
                log.warning("kvstore: an answer goes on without the cache: %s", in_words(error))
        except Exception as error:
            if self._counted(error):
                log.exception("kvstore: an answer goes on without the cache, and this is a bug in kvstore; report it")
        return otherwise

    def done(self, step: Callable[[], None]) -> bool:
        """Whether a step was done, and did not fail."""

        def whole() -> bool:
            step()
            return True

        return self.tried(whole, otherwise=False)

    def _counted(self, error: Exception) -> bool:
        """Whether to say it."""
        self.failures += 1
        return self._said.due(error)
