"""A recording without an engine: caches that are only a number of tokens, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvstore import TensorSpec
from kvstore.keys import pack_tokens
from kvstore.manifest import decode
from kvstore.states import State, StateTensor
from kvstore_mlx.codecs import codec_of
from kvstore_mlx.forms import Form
from kvstore_mlx.plan import Leaf, Part, Plan

INTERVAL = 128
SPECS = (TensorSpec("0.keys", "F32", 2, (4,)), TensorSpec("0.values", "F32", 2, (4,)))


def fake_plan(stateful: bool = False) -> Plan:
    """A layer of attention, and a window beside it."""
    caches = [KVCache(), *([RotatingKVCache(8)] if stateful else [])]
    leaves = []
    for number, cache in enumerate(caches):
        codec = codec_of(cache)
        assert codec is not None
        leaves.append(Leaf(str(number), type(cache).__name__, codec, codec.config(cache)))
    return Plan(lambda: caches, tuple(leaves), tuple(Part(s.name, s.dtype, s.outer, s.inner) for s in SPECS))


class FakeLive:
    """An engine's caches of count tokens whose KV is the token's index, and whose state is their number."""

    def __init__(self, count: int, specs: Sequence[TensorSpec] = SPECS) -> None:
        self.count = count
        self.rows = self
        self.specs = tuple(specs)
        self.copied: list[tuple[int, int]] = []
        self.states: list[bool] = []

    def copy(self, first: int, end: int, into: Any = None) -> list[Any]:
        assert 0 <= first < end <= self.count
        self.copied.append((first, end))
        data = []
        for spec in self.specs:
            width = spec.span_bytes(1) // spec.outer // 4
            run = np.repeat(np.arange(first, end, dtype=np.float32), width)
            data.append(np.concatenate([run] * spec.outer).view(np.uint8))
        return data

    def state(self, *, decode: bool, phase: int = 0, logits: Any = None, extras: Any = None) -> State:
        self.states.append(decode)
        values: dict[str, Any] = {"tokens": self.count}
        if logits is not None:
            values["logits"] = logits
        if extras is not None:
            values.update(extras.values)
        data = np.full(4, self.count, np.float32).view(np.uint8)
        return State((StateTensor("1.keys", "F32", (1, 4)),), [data], values, phase, decode)


class FakeSpace:
    """What a recording looks at its caches through: these are FakeLive, as they were given."""

    def __init__(self, *forms: Form) -> None:
        self.forms = forms
        self.form = forms[0]

    def look(self, caches: Any, _index: int | None, _exactly: int | None) -> tuple[Form, Any]:
        return self.form, caches


def spans(form: Form, tokens: Sequence[int]) -> list[tuple[int, int, bool]]:
    """First token, count and whether it was decoded, of all blocks of a saved prompt."""
    match = form.namespace.lookup(pack_tokens(tokens))
    return [(ref.first, ref.count, ref.decode) for step in match.steps for ref in decode(step.path.read_bytes()).blocks]


def state_at(form: Form, tokens: Sequence[int]) -> dict[str, Any] | None:
    """The values of the state after exactly these tokens."""
    match = form.namespace.lookup(pack_tokens(tokens), trimmable=False)
    if match.count != len(tokens):
        return None
    memory: dict[str, bytearray] = {}

    def allocate(tensors: Any) -> dict[str, memoryview]:
        memory.update({tensor.name: bytearray(tensor.nbytes) for tensor in tensors})
        return {name: memoryview(data) for name, data in memory.items()}

    values = form.namespace.read_state(match, allocate)
    assert values is None or np.frombuffer(memory["1.keys"], np.float32).tolist() == [len(tokens)] * 4
    return values
