"""What fails in the cache of a session never fails an answer: it is counted, said once, and done without."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from traceback import walk_tb
from typing import TypeVar

from kvstore.errors import KVStoreError, TokenError
from kvstore_mlx.live import HookError
from kvstore_mlx.seldom import Seldom
from kvstore_mlx.trouble import in_words

__all__ = ["Guard"]

log = logging.getLogger("kvstore")

Result = TypeVar("Result")

_SAY_EVERY_S = 60.0


class Guard:
    """failures: how many steps of the cache failed. An interrupt is none of them, and passes."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self._said = Seldom(_SAY_EVERY_S, monotonic)

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
        return self._said.due(_kind(error))


def _kind(error: Exception) -> Hashable:
    """What tells one trouble from others: not its text, which names a file or a number that is another each time."""
    own = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in {"kvstore", "kvstore_mlx"}
    ]
    number = error.errno if isinstance(error, OSError) else None
    return type(error), number, type(error.__cause__), tuple(own[-1:])
