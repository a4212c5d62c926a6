"""Makes the golden directory of format 1. `python tests/compat/golden.py DIR`; compared byte for byte by test_golden.

Everything that could vary is fixed here: the clock, the writer's name, the payload's phase. The committed directory is
never made anew for the same format: when this script's output differs from it, the format has changed.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from pathlib import Path

from kvstore import NamespaceInfo, Span, State, StateTensor, Store, TensorSpec, pack_tokens
from kvstore.context import Space
from kvstore.renewal import Renewal
from kvstore.store import Namespace

INTERVAL = 64
NOW_NS = 1_750_000_000_000_000_000
INFO = NamespaceInfo({"engine": "golden", "model": {"layers": 2, "name": "tiny é"}}, label="golden model")
SALTED = NamespaceInfo({"engine": "golden"}, label="salted", salt=b"tenant 1")
SPECS = (
    TensorSpec("0.keys", "F32", 2, (2,)),
    TensorSpec("0.values", "F32", 2, (2,)),
    TensorSpec("1.keys", "BF16", 1, (3,)),
    TensorSpec("1.values", "BF16", 1, (1,)),
)
PROMPT = [(7 * i + 3) % 50_000 for i in range(200)]
BRANCH = [*PROMPT[:100], *[60_000 + i for i in range(40)]]
STATE = State(
    (StateTensor("conv", "F16", (1, 2, 2)), StateTensor("nothing", "F32", (0, 4))),
    [struct.pack("<4e", 1.5, -2.0, 0.25, 8.0), b""],
    {"cursor": 17, "keep": True, "name": "é", "none": None, "scale": 0.1},
)
SCOPE, REQUEST = b"golden tokenizer", b'{"messages":[]}'


def payload(spec: TensorSpec, tokens: list[int], first: int, end: int) -> bytes:
    """[outer][token][inner] of a span: numbers that name tensor, head, token and element."""
    out = bytearray()
    for head in range(spec.outer):
        for token in tokens[first:end]:
            for element in range(spec.inner[0]):
                number = float(token % 512 + 1000 * head + 4000 * element)
                bits = struct.pack("<f", number)
                out += bits if spec.dtype == "F32" else bits[2:]
    return bytes(out)


def span(tokens: list[int], first: int, end: int, *, decode: bool = False) -> Span:
    data = [payload(spec, tokens, first, end) for spec in SPECS]
    return Span(first, end - first, SPECS, data, decode, phase=24)


def build(root: Path) -> None:
    with Store.open(root, interval=INTERVAL, clock=lambda: NOW_NS) as store:
        context = dataclasses.replace(store.context, writer="golden 1")
        namespace = Namespace(Space(context, INFO), Renewal(context))
        namespace.publish(PROMPT, [span(PROMPT, 0, 64), span(PROMPT, 64, 128), span(PROMPT, 128, 150)])
        namespace.publish(PROMPT, [span(PROMPT, 150, 180, decode=True)])
        namespace.publish(BRANCH, [span(BRANCH, 64, 128)])
        namespace.publish_state(PROMPT[:128], STATE)
        Namespace(Space(context, SALTED), Renewal(context)).publish(PROMPT[:20], [Span(0, 20, (), [])])
        store.tokenizations(SCOPE).put(REQUEST, pack_tokens([1, 2, 2**32 - 1]))
        context.staging.close()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
