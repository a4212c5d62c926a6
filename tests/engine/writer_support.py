"""What the writer's tests share: jobs in the memory that it lends, for a namespace without a model."""

from __future__ import annotations

import time
from itertools import pairwise

from core_support import SPECS, prompt

from kvstore import Span
from kvstore.keys import pack_tokens
from kvstore_mlx.jobs import Job

TOKENS = prompt(64)
MIB = 1 << 20


class Form:
    """As much of a form as the writer looks at."""

    def __init__(self, namespace) -> None:
        self.namespace = namespace
        self.trouble = ""


def rows(spec, first: int, end: int) -> bytes:
    """Finite numbers that name the head and the token."""
    return b"".join(
        bytes([head * 7 + token % 50]) * spec.row_bytes for head in range(spec.outer) for token in range(first, end)
    )


def job_of(writer, form, *borders) -> Job:
    """Spans between borders, copied into the writer's memory."""
    items, loans = [], {}
    for first, end in pairwise(borders):
        loans[first] = writer.lend(sum(spec.span_bytes(end - first) for spec in SPECS))
        parts = []
        for spec in SPECS:
            parts.append(loans[first].take(spec.span_bytes(end - first)))
            parts[-1][:] = rows(spec, first, end)
        items.append(Span(first, end - first, SPECS, parts))
    return Job(form, pack_tokens(TOKENS[: borders[-1]]), items, loans)


def eventually(condition) -> bool:
    for _ in range(400):
        if condition():
            return True
        time.sleep(0.05)
    return False
