"""What a model would have computed: KV and boundary states as a function of the tokens, and memory to restore into.

The bytes of a token depend on every token before it, as in a model: equal tokens after different prefixes have
different bytes, so a block that is served for the wrong prefix cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128

from kvstore.blocks import Span, TensorBuffer, TensorSpec
from kvstore.keys import TOKEN_BYTES, pack_tokens, unpack_tokens
from kvstore.states import Scalar, State, StateTensor

__all__ = ["FILL", "TENSORS", "Memory", "Oracle", "StateMemory", "random_tokens"]

TENSORS = (
    TensorSpec("0.keys", "BF16", 2, (4,)),
    TensorSpec("0.values", "U8", 3, (5,)),
    TensorSpec("1.keys", "F32", 1, (2, 2)),
)
"""Odd on purpose: dtypes, heads and inner shapes all differ, so that mixed-up strides show."""

FILL = 0xAA
"""What memory holds before a restore; no restored row may still be made of it."""

_DIGEST_BYTES = 16


@lru_cache(maxsize=1 << 16)
def _next(before: bytes, token: bytes, row_bytes: int) -> tuple[bytes, bytes]:
    """The digest of a prefix from that of the one before it, and all bytes of its last token."""
    made = shake_128(before + token).digest(_DIGEST_BYTES + row_bytes)
    return made[:_DIGEST_BYTES], made[_DIGEST_BYTES:]


def random_tokens(seed: int, count: int) -> bytes:
    """Some packed tokens, the same every time: those of different seeds differ from the first one on."""
    return shake_128(b"tokens %d" % seed).digest(count * TOKEN_BYTES)


class Oracle:
    """The model that computes these tensors. who: another model with equal tensors computes other bytes."""

    def __init__(self, tensors: Sequence[TensorSpec] = TENSORS, who: str = "") -> None:
        self.tensors = tuple(tensors)
        self._start = shake_128(b"model " + who.encode()).digest(_DIGEST_BYTES)
        self._row_bytes = sum(spec.span_bytes(1) for spec in self.tensors)

    def kv(self, tokens: Sequence[int] | bytes, first: int, end: int) -> list[bytes]:
        """The KV of tokens first .. end: one buffer a tensor, ``[outer][token][inner]``."""
        rows = self._rows(pack_tokens(tokens), end)[first:]
        buffers = []
        at = 0
        for spec in self.tensors:
            heads = []
            for _ in range(spec.outer):
                heads.append(b"".join(row[at : at + spec.row_bytes] for row in rows))
                at += spec.row_bytes
            buffers.append(b"".join(heads))
        return buffers

    def span(
        self, tokens: Sequence[int] | bytes, first: int, end: int, *, decode: bool = False, phase: int = 0
    ) -> Span:
        """The span of tokens first .. end, ready to publish."""
        return Span(first, end - first, self.tensors, self.kv(tokens, first, end), decode, phase)

    def state(self, tokens: Sequence[int] | bytes) -> State:
        """The boundary state at the end of these tokens: odd shapes, an empty tensor, a value of each type."""
        packed = pack_tokens(tokens)
        last = self._digest(packed, len(packed) // TOKEN_BYTES)
        made = shake_128(b"state " + last).digest(34)
        tensors = (
            StateTensor("conv", "F16", (1, 3, 2)),
            StateTensor("empty", "F32", (0, 7)),
            StateTensor("ssm", "U8", (22,)),
        )
        values: dict[str, Scalar] = {
            "text": last.hex(),
            "offset": len(packed) // TOKEN_BYTES,
            "ratio": last[0] / 3,
            "flag": last[1] % 2 == 0,
            "none": None,
        }
        return State(tensors, [made[:12], b"", made[12:]], values)

    def _rows(self, packed: bytes, end: int) -> list[bytes]:
        digest, rows = self._start, []
        for at in range(0, end * TOKEN_BYTES, TOKEN_BYTES):
            digest, row = _next(digest, packed[at : at + TOKEN_BYTES], self._row_bytes)
            rows.append(row)
        return rows

    def _digest(self, packed: bytes, end: int) -> bytes:
        digest = self._start
        for at in range(0, end * TOKEN_BYTES, TOKEN_BYTES):
            digest, _ = _next(digest, packed[at : at + TOKEN_BYTES], self._row_bytes)
        return digest

    def check(self, memory: Memory, tokens: Sequence[int] | bytes, count: int) -> None:
        """Fail unless the first count tokens in memory are, byte for byte, what this model computes."""
        if not count or not self.tensors:
            return
        assert memory.tensors == self.tensors, f"restored tensors are {memory.tensors}"
        for spec, expected in zip(self.tensors, self.kv(tokens, 0, count), strict=True):
            if memory.rows(spec, count) != expected:
                packed = pack_tokens(tokens)
                raise AssertionError(
                    f"WRONG BYTES in {spec.name} among the first {count} tokens of a prompt of "
                    f"{len(packed) // TOKEN_BYTES} that begins with {list(unpack_tokens(packed[:16]))}"
                )

    def check_state(self, memory: StateMemory, values: object, tokens: Sequence[int] | bytes) -> None:
        """Fail unless a restored boundary state is the one at the end of these tokens."""
        state = self.state(tokens)
        assert values == dict(state.values), f"WRONG VALUES {values} in a boundary state, not {dict(state.values)}"
        assert set(memory.tensors) == set(state.tensors), f"restored state tensors are {memory.tensors}"
        for tensor, expected in zip(state.tensors, state.data, strict=True):
            found = bytes(memory.data.get(tensor.name, b""))
            assert found == bytes(expected), f"WRONG BYTES in {tensor.name} of a boundary state"


class Memory:
    """An engine's buffers. Calling it is the allocate of a read; there is room for some tokens more than asked for."""

    def __init__(self, spare: int = 3) -> None:
        self._spare = spare
        self.tensors: tuple[TensorSpec, ...] = ()
        self.capacity = 0
        self.data: dict[str, bytearray] = {}

    def __call__(self, tensors: tuple[TensorSpec, ...], tokens: int) -> dict[str, TensorBuffer]:
        """Memory for these tensors, as kvstore.restore.Allocate wants it."""
        self.tensors, self.capacity = tensors, tokens + self._spare
        self.data = {spec.name: bytearray([FILL]) * spec.span_bytes(self.capacity) for spec in tensors}
        return {name: TensorBuffer(memoryview(data), self.capacity) for name, data in self.data.items()}

    def rows(self, spec: TensorSpec, end: int) -> bytes:
        """The first tokens of one tensor as ``[outer][token][inner]``, gathered from the strided buffer."""
        data, size = self.data[spec.name], end * spec.row_bytes
        starts = range(0, len(data), self.capacity * spec.row_bytes)
        return b"".join(bytes(data[at : at + size]) for at in starts)


class StateMemory:
    """Memory for a boundary state. Calling it is the allocate of a read_state."""

    def __init__(self) -> None:
        self.tensors: tuple[StateTensor, ...] = ()
        self.data: dict[str, bytearray] = {}

    def __call__(self, tensors: tuple[StateTensor, ...]) -> dict[str, memoryview]:
        """Memory for these tensors, as kvstore.states.AllocateState wants it."""
        self.tensors = tensors
        self.data = {tensor.name: bytearray([FILL]) * tensor.nbytes for tensor in tensors}
        return {name: memoryview(data) for name, data in self.data.items()}
