"""Say why a prompt was not reused further, in a server's log: one clause always, both texts when asked for.

The clause comes from what the lookup found, and a few manifests more (below a millisecond). The texts need the model's
tokenizer and some milliseconds, so they are for looking into a miss: ``--kv-cache-explain``. They are coloured as those
of `kvstore why` are, where the log is a terminal.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from kvstore.context import Counters, Space
from kvstore.differences import HINTS, Decode, aligned, causes, texts_of
from kvstore.drawing import drawn, has_colours
from kvstore.keys import unpack_tokens
from kvstore.lookup import Match
from kvstore.lookup import find as find_prefix
from kvstore.nearest import Nearest, nearest, quickly
from kvstore_mlx.restoring import Found

__all__ = ["Explainer", "clause", "nearest_of"]

log = logging.getLogger("kvstore")

_WINDOW = 40
_LOOKED_AT = 2048
_WIDTH = 110
_INDENT = "  "

_ENDS = 2048
"""Tokens at either end of what matched, of which the text is looked at for the roles in it."""


def nearest_of(
    found: Sequence[Found], packed: bytes, *, prefill_only: bool = False, quick: bool = True
) -> Nearest | None:
    """What of everything saved has most in common with a packed prompt; found are the answers of its lookups.

    quick: None rather than more than a millisecond.
    """
    compare = quickly if quick else nearest
    answers = (compare(_cuttable(one, prefill_only=prefill_only), packed) for one in found)
    compared = [near for near in answers if near is not None]
    return max(compared, key=lambda each: (each.matched, each.used_ns), default=None)


def _cuttable(found: Found, *, prefill_only: bool) -> Match:
    """The match as it were for caches that can be cut anywhere; another lookup where they cannot, which counts not."""
    if not found.form.stateful and not prefill_only:
        return found.match
    space = found.match.space
    return find_prefix(Space(replace(space.context, counters=Counters()), space.info), found.match.tokens)


def clause(
    near: Nearest | None, reused: int, *, tried: bool = True, stateful: bool = False, prefill_only: bool = False
) -> str:
    """What follows the log line of a request of which less than all was reused; empty when there is nothing to say.

    tried: whether anything was read from the directory for it.
    """
    if near is None or near.end == "whole" or near.matched < reused:
        return ""
    if near.end == "empty":
        return "; nothing of this model is saved yet"
    if near.reusable > reused:
        why = "not all of them could be read"
        if stateful:
            why = f"no state to go on from is saved after token {reused}"
        elif prefill_only:
            why = "the others were decoded (--kv-cache-exact)"
        elif not tried:
            why = "to compute the others is quicker than to read them"
        return f"; {near.matched} tokens match, but {why}"
    if near.end == "differs":
        return f"; it differs from the nearest saved prompt at token {near.matched}"
    return "; the rest is new" if near.matched == reused else f"; the nearest saved prompt ends at token {near.matched}"


class Explainer:
    """Logs both texts around a difference. decode is asked for at each use, because a server may load another model."""

    def __init__(self, decode: Callable[[], Decode]) -> None:
        self._decode = decode

    def explain(self, near: Nearest | None) -> None:
        """Log where a prompt differs from the nearest saved one; nothing when it only goes on."""
        if near is None or near.end != "differs":
            return
        decode = self._decode()
        before, saved, prompt = near.windows(_WINDOW, _WINDOW)
        pairs = aligned(decode, before, saved, prompt)
        screen = _screen()
        width = min(screen.width, _WIDTH) - len(_INDENT)
        found = drawn(decode(list(before)), pairs, width, coloured=has_colours(screen))
        rows = [_written(row, screen) for row in found]
        texts = texts_of(decode, *near.windows(_WINDOW, _LOOKED_AT))
        matched = list(unpack_tokens(near.tokens)[: near.matched])
        ends = matched if len(matched) <= 2 * _ENDS else [*matched[:_ENDS], *matched[-_ENDS:]]
        hints = [HINTS[cause] for cause in causes(replace(texts, whole=decode(ends)), pairs)]
        rows += hints
        log.info(
            "kvstore: at token %d of %d the prompt differs from the nearest saved one (%s):\n%s",
            near.matched,
            near.count,
            near.key[:12],
            "\n".join(f"{_INDENT}{row}".rstrip() for row in rows),
        )


def _screen() -> Console:
    """Where the log is read: a terminal only if it goes to nothing else, because a message is one for all."""
    streams = [getattr(handler, "stream", None) for handler in _handlers()]
    if streams and all(stream is not None and stream.isatty() for stream in streams):
        return Console(file=streams[0])
    return Console(file=io.StringIO(), force_terminal=False, width=_WIDTH)


def _handlers() -> Iterator[logging.Handler]:
    """What gets the messages of this log."""
    at: logging.Logger | None = log
    while at is not None:
        yield from (handler for handler in at.handlers if handler.level <= logging.INFO)
        at = at.parent if at.propagate else None


def _written(row: Text, screen: Console) -> str:
    """A row as it is written there, with the escapes of its colours."""
    with screen.capture() as written:
        screen.print(row, soft_wrap=True, end="")
    return written.get()
