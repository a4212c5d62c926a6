"""What is worth a place when the directory is full: how warm nodes are, and how much warmer a new one must be.

Pure: names and times come in, decisions go out; no file is touched and no clock is read. The replay of recorded traffic
(tools/replay_trace.py) runs this very module; docs/admission.md has the reasons and the figures.

Warmth is a time. A node that was used once is as warm as that moment. Each further use adds to it, the more the closer
it follows the one before: warmth = time + TAU * ln(sum of exp((use - time) / TAU)) over all uses. So a conversation in
full swing is a little ahead of the clock, and one that rests stays where it was. Without anything known of a node, as
after a restart, its file's mtime is its warmth, and the order is least recently used.

A new node is admitted when it is warmer than the coldest leaf by MARGIN. With less between them, taking the one's place
for the other wins nothing: both will be wanted again about equally soon, and the write is for nothing.

TAU and MARGIN are multiples of the pace, the median time between two uses of the same prefix: agents come back within
seconds, people within minutes, and a slow machine makes both slower.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from statistics import median

from kvstore.context import FUTURE_NS
from kvstore.forks import renew_in_forks

__all__ = ["JUST_USED_NS", "Warmth"]

JUST_USED_NS = 10 * 10**9
"""What was written or looked up this recently does not go for something new, however warm that is: a request that found
a prefix reads it within seconds."""

_TAU = 1.6
"""How long a use counts, in paces."""

_MARGIN = 1.3
"""How much warmer than the coldest leaf a new node must be, in paces."""

_FIRST_PACE_NS = 20 * 10**9
"""The pace before anything was seen: that of a coding agent."""

_MIN_PACE_NS = 5 * 10**9
_MAX_PACE_NS = 300 * 10**9
"""Bounds of the pace: many clients at one system prompt are no reason to write all that they send, and one visit a
night is none to write nothing by day."""

_GAPS = 255
_PRIOR = 15
"""The pace is the median of so many last gaps, and _PRIOR times the first pace until they have been forgotten."""

_SAME_NS = 10**9
"""Uses closer together than this are one: a request may look up and publish the same node."""

_MAX_NAMES = 1 << 15
"""Nodes remembered, in the store or not: hundreds of long prompts, a few megabytes."""


class Warmth:
    """How warm nodes are, by name (any string that is one node's only). State of one process, lost with it.

    All times are nanoseconds of one clock. It may go back: by a little, and uses count as if they came at once; by more
    than FUTURE_NS, and what was noted ahead of it is forgotten, or it would be warmer than anything for as long.
    Requests are noted on an engine's thread while a writer's asks.
    """

    def __init__(self) -> None:
        self._uses: dict[str, tuple[int, int]] = {}  # when used last, and its warmth
        self._continued: set[str] = set()
        self._gaps: deque[int] = deque([_FIRST_PACE_NS] * _PRIOR, _GAPS)
        self._pace = _FIRST_PACE_NS
        self._latest = 0
        self._lock = threading.Lock()
        renew_in_forks(self)

    def forked(self) -> None:
        """See kvstore.forks."""
        self._lock = threading.Lock()

    @property
    def margin_ns(self) -> int:
        """How much warmer than the coldest leaf a new node must be: a part of the usual time between two uses."""
        return int(_MARGIN * self._pace)

    def used(self, path: Sequence[str], now_ns: int) -> None:
        """A request came for a prompt of these nodes, from the root on, whether they are in the store or not.

        The first continuation of a node inherits its warmth, being the same conversation; a branch starts afresh.
        """
        with self._lock:
            self._look_at_clock(now_ns)
            known = next((name for name in reversed(path) if name in self._uses), None)
            if known is not None:
                self._note_gap(now_ns - self._uses[known][0])
            parent = None
            for name in path:
                self._use(name, parent, now_ns)
                parent = name

    def wanted(self, name: str, parent: str | None, now_ns: int) -> int:
        """The warmth of a node that a request would write now. parent: the node that it continues, if any."""
        with self._lock:
            self._look_at_clock(now_ns)
            if name not in self._uses:
                self._use(name, parent, now_ns)
            return max(self._uses[name][1], now_ns)

    def of(self, name: str, mtime_ns: int) -> int:
        """The warmth of a node whose file was last touched then."""
        with self._lock:
            found = self._uses.get(name)
        return mtime_ns if found is None else max(found[1], mtime_ns)

    def _look_at_clock(self, now_ns: int) -> None:
        """Forget what was used after now, if that shows that the clock was set back."""
        if now_ns < self._latest - FUTURE_NS:
            self._uses = {name: use for name, use in self._uses.items() if max(use) <= now_ns + FUTURE_NS}
            self._continued.intersection_update(self._uses)
            self._latest = now_ns
        self._latest = max(self._latest, now_ns)

    def _use(self, name: str, parent: str | None, now_ns: int) -> None:
        if name in self._uses:
            last, warmth = self._uses[name]
            if now_ns - last >= _SAME_NS:
                tau = _TAU * self._pace
                apart = min(abs(warmth - now_ns) / tau, 50.0)
                warmth = max(warmth, now_ns) + int(tau * math.log1p(math.exp(-apart)))
            self._remember(name, max(last, now_ns), warmth)
            return
        warmth = now_ns
        if parent is not None and parent in self._uses and parent not in self._continued:
            self._continued.add(parent)
            warmth = max(now_ns, self._uses[parent][1])
        self._remember(name, now_ns, warmth)

    def _remember(self, name: str, now_ns: int, warmth: int) -> None:
        self._uses.pop(name, None)
        self._uses[name] = now_ns, warmth
        if len(self._uses) > _MAX_NAMES:
            for oldest in list(self._uses)[: _MAX_NAMES // 2]:
                del self._uses[oldest]
            self._continued.intersection_update(self._uses)

    def _note_gap(self, gap: int) -> None:
        if gap >= _SAME_NS:
            self._gaps.append(gap)
            self._pace = min(max(int(median(self._gaps)), _MIN_PACE_NS), _MAX_PACE_NS)
