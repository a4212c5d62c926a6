"""The line that a server's log has for each model that was loaded: where, how full, which namespace, how many prefixes.

    kvstore: /home/u/.cache/kv: 11.2 GiB of 20.0 GiB used; Qwen3-8B-4bit saves into 6e21a1b9a046: 412 prefixes,
    1,204,551 tokens; restored at 2.9 GiB/s so far

It takes a look at every file, so it is made on a thread of its own that works a fifth of the time and nobody waits for:
in a directory of a million nodes the line comes a minute after the model. The speed is what restores on this machine
took, over all processes whose counters the directory has; it is left out until there was one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvstore.context import this_process
from kvstore.glance import Glance, glance
from kvstore.pacing import Pace
from kvstore.sizes import format_size
from kvstore.stats import read_stats
from kvstore.store import Store, unavailable
from kvstore_mlx.forms import ModelSpace

__all__ = ["Status", "sentence"]

log = logging.getLogger("kvstore")

SHARE = 0.2
"""Of its time that the thread works: Python runs one thread at a time, and the engine's must not wait for this one."""

_ID_DIGITS = 12
"""What of a namespace's id is shown: as `kvstore why` and `ls` show it, and as commands take it."""


class _StoppedError(Exception):
    """The server stops; nobody will read the line."""


class Status:
    """The status lines of one server. budget: bytes that its directory may take."""

    def __init__(self, store: Store, budget: int) -> None:
        self._store = store
        self._budget = budget
        self._turn = threading.Lock()
        self._waiting: set[str] = set()
        self._stopped = threading.Event()

    def tell(self, label: str = "", space: ModelSpace | None = None, why: str = "") -> None:
        """Log the line of a model, soon. space: where it saves; None when it does not, for the reason why. Without a
        label: that of the directory, for a server that has not loaded a model yet. Returns at once, never raises.
        """
        if label in self._waiting:
            return
        self._waiting.add(label)
        # Not the space: its plans need not outlive a model that is swapped out.
        ids = [form.namespace.id for form in space.forms] if space is not None else []
        thread = threading.Thread(target=self._look, args=(label, ids, why), name="kvstore-status", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._waiting.discard(label)
            log.debug("kvstore: no status line: %s", error)

    def close(self) -> None:
        """Look no further."""
        self._stopped.set()

    def _look(self, label: str, ids: list[str], why: str) -> None:
        path, context = self._store.path, self._store.context
        with self._turn:
            self._waiting.discard(label)
            try:
                found = glance(context, ids if label else None, _rests(self._stopped.wait))
                speed = read_stats(context).read_speed(this_process().host)
                line = sentence(found, self._budget, label=label, ids=ids, why=why, speed=speed)
                log.info("kvstore: %s: %s", path, line)
            except _StoppedError:
                return
            except OSError as error:
                log.warning("kvstore: it is not known how full the directory is: %s", unavailable(path, error))
            except Exception:
                log.exception("kvstore: no status line, and this is a bug in kvstore; please report it")


def sentence(
    found: Glance, budget: int, *, label: str, ids: Sequence[str], why: str = "", speed: float | None = None
) -> str:
    """The line without its beginning. ids: the namespaces of the model; none when it has none, for the reason why."""
    parts = [f"{format_size(found.used)} of {format_size(budget)} used"]
    held = (
        f"{_counted(found.prefixes, 'prefix')}, {_counted(found.tokens, 'token')}" if found.prefixes else "nothing yet"
    )
    if not label:
        models = f" of {found.namespaces:,} models" if found.namespaces > 1 else ""
        parts.append(f"it holds {held}{models}")
    elif ids:
        parts.append(f"{label} saves into {' and '.join(each[:_ID_DIGITS] for each in ids)}: {held}")
    else:
        parts.append(f"{label} is served without it: {why}")
    if speed is not None:
        parts.append(f"restored at {format_size(speed)}/s so far")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("x") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _rests(wait: Callable[[float], bool]) -> Callable[[], None]:
    """What a scan calls at each folder. wait: sleep, and say whether to look no further."""

    def sleep(seconds: float) -> None:
        if wait(seconds):
            raise _StoppedError

    pace = Pace(sleep)
    pace.share = lambda: SHARE
    return pace.resting()
