"""Any sequence of publishes, restores, losses and restarts against a model that is a set of prefixes.

The model knows what the rules promise: full chunks one after the other, then the longest exact tail, or the child that
shares most tokens if it shares at least 64. What lies on the disk decides which of it can be read.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import xxhash
from core_support import INFO, block_files, node_files, open_store, prompt, read_checked, spans
from format_support import Forged, pack, root_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from record_support import Tally, counted

from kvstore import Match, MissingParentError
from kvstore.manifest import BlockRef, decode

Prefix = tuple[int, ...]

FIRST_RUNG = 64
MAX_OPENED = 8


def common(a: Prefix, b: Prefix) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class StoreModel(RuleBasedStateMachine):
    """interval and the longest prompt are set by the variants below."""

    interval = 16
    longest = 70

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = tempfile.mkdtemp(prefix="kvstore-model-", dir=memory)
        self.root = Path(self.folder) / "cache"
        self.nodes: set[Prefix] = set()
        self.passed_by: set[Prefix] = set()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @initialize()
    def open(self) -> None:
        self.store = open_store(self.root, interval=self.interval)
        self.space = self.store.namespace(INFO)

    # What the model knows of the format: where a prefix lies, and which of its blocks are whole.

    def path(self, prefix: Prefix) -> Path:
        parent, first = root_of(INFO.fingerprint, self.interval), 0
        while first + self.interval < len(prefix):
            chunk = pack(prefix[first : first + self.interval])
            parent = Forged(INFO.fingerprint, parent, chunk, ()).node_key
            first += self.interval
        return Forged(INFO.fingerprint, parent, pack(prefix[first:]), ()).path(self.root)

    def whole(self, ref: BlockRef) -> bool:
        path = self.store.context.layout.block(ref.digest)
        return path.exists() and xxhash.xxh3_128(path.read_bytes()).digest() == ref.digest

    def all_blocks_whole(self) -> bool:
        return all(xxhash.xxh3_128(path.read_bytes()).hexdigest() == path.name for path in block_files(self.root))

    # What the rules promise.

    def start_of(self, count: int) -> int:
        """Index of the first token of the chunk that ends at, or holds, the count-th token."""
        return (count - 1) // self.interval * self.interval

    def expected(self, tokens: Prefix) -> tuple[int, int]:
        """The least and the most tokens that a lookup may find."""
        seen = self.nodes - self.passed_by
        at = 0
        while at + self.interval <= len(tokens) and tokens[: at + self.interval] in seen:
            at += self.interval
        end = min(at + self.interval, len(tokens))
        exact = max((n for n in range(at + 1, end + 1) if tokens[:n] in seen), default=at)
        shares = [common(node, tokens[:end]) for node in seen if self.start_of(len(node)) == at]
        near = [shared for shared in shares if shared - at >= FIRST_RUNG]
        best = max([exact, *near])
        return (best if len(near) <= MAX_OPENED else max(exact, at + FIRST_RUNG)), best

    def refs(self, match: Match) -> list[tuple[Prefix, BlockRef]]:
        """The blocks of a match, each with the prefix whose node names it."""
        found = []
        above: Prefix = ()
        for step in match.steps:
            manifest = decode(step.path.read_bytes())
            above = (*above[: step.first], *memoryview(manifest.tokens).cast("I"))
            found += [(above, ref) for ref in manifest.blocks if ref.first < match.count]
        return found

    def restore(self, tokens: Prefix) -> int:
        """Look up and read as an engine does, and check all of it; returns where a publish may go on."""
        match = self.space.lookup(tokens)
        least, most = self.expected(tokens)
        assert least <= match.count <= most
        readable = border = 0
        for prefix, ref in self.refs(match):
            if not self.whole(ref):
                self.passed_by.add(prefix)
                break
            readable = min(match.count, ref.first + ref.count)
            border = max(border, ref.first + ref.count if ref.first + ref.count <= match.count else 0)
        restored = read_checked(self.space, match, tokens)
        assert (restored.tokens, restored.border) == (readable, border)
        return border

    def publish(self, tokens: Prefix, first: int, cuts: set[int]) -> None:
        ends = {*range(self.interval, len(tokens), self.interval), len(tokens)} | cuts
        borders = [first, *sorted(end for end in ends if first < end <= len(tokens))]
        if len(borders) == 1:
            return
        published = self.space.publish(tokens, spans(tokens, *borders))
        assert published.end == len(tokens)
        for end in borders[1:]:
            self.nodes.add(tokens[:end])
            self.passed_by.discard(tokens[:end])

    # What happens.

    # One of two conversations up to a point, and from there on one of four others: parts of 1,000 of the longest.
    prompts = st.tuples(st.integers(0, 1), st.integers(0, 1000), st.integers(0, 3), st.integers(1, 1000))
    cuts = st.sets(st.integers(1, 300), max_size=4)

    def tokens_of(self, drawn: tuple[int, int, int, int]) -> Prefix:
        base, keep, other, length = drawn
        same = keep * self.longest // 1000
        both = (*prompt(self.longest, base)[:same], *prompt(self.longest, 10 + other)[same:])
        return both[: -(-length * self.longest // 1000)]

    @rule(drawn=prompts, cuts=cuts)
    def converse(self, drawn: tuple[int, int, int, int], cuts: set[int]) -> None:
        """What an engine does: restore, compute the rest, publish it from the border on; then it is all there."""
        tokens = self.tokens_of(drawn)
        whole = self.all_blocks_whole()
        self.publish(tokens, self.restore(tokens), cuts)
        if whole:
            # (Damage that nobody has read yet can lie in blocks that a publish builds upon.)
            assert self.space.lookup(tokens).count == len(tokens)
            assert self.restore(tokens) == len(tokens)

    @rule(drawn=prompts)
    def look(self, drawn: tuple[int, int, int, int]) -> None:
        self.restore(self.tokens_of(drawn))

    @rule(drawn=prompts, chunk=st.integers(1, 4))
    def publish_at_a_chunk(self, drawn: tuple[int, int, int, int], chunk: int) -> None:
        """A child is published onto its parent or not at all."""
        first = chunk * self.interval
        tokens = self.tokens_of(drawn)[: first + self.interval]
        if first >= len(tokens):
            return
        if tokens[:first] in self.nodes:
            self.publish(tokens, first, set())
        else:
            with pytest.raises(MissingParentError):
                self.space.publish(tokens, spans(tokens, first, len(tokens)))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def lose_a_manifest(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(sorted(self.nodes)))
        self.path(prefix).unlink()
        self.nodes.remove(prefix)

    @rule(data=st.data(), flip=st.booleans())
    def lose_a_block(self, data: st.DataObject, flip: bool) -> None:
        if not (blocks := block_files(self.root)):
            return
        path = blocks[data.draw(st.integers(0, len(blocks) - 1))]
        if flip:
            content = bytearray(path.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        else:
            path.unlink()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()
        self.passed_by.clear()

    @rule()
    def compare(self) -> None:
        """The manifests on the disk are those of the model, and nothing is left in staging."""
        assert {path.name for path in node_files(self.root)} == {self.path(prefix).name for prefix in self.nodes}
        assert [path for path in (self.root / "tmp").rglob("*") if path.is_file()] == []


class WideStoreModel(StoreModel):
    """Chunks long enough for rungs: prefixes are also found inside a chunk."""

    interval = 128
    longest = 300


SOAK_EXAMPLES = int(os.environ.get("KVSTORE_SOAK_EXAMPLES", "2600")) // 2

VARIANTS = {"chunks of 16": StoreModel, "chunks of 128": WideStoreModel}
QUICK = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_store_keeps_what_the_model_promises(variant):
    run_state_machine_as_test(VARIANTS[variant], settings=QUICK)


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_store_keeps_what_the_model_promises_for_long(variant, record_property):
    tally = Tally()
    record_property(
        "what", "Histories against a set of prefixes: publish, lose, flip, restart; the exact length of each match"
    )
    long = settings(QUICK, max_examples=SOAK_EXAMPLES, stateful_step_count=60, derandomize=False)
    try:
        run_state_machine_as_test(counted(VARIANTS[variant], tally), settings=long)
    finally:
        for each in tally.items():
            record_property(*each)
    assert tally["histories"] >= SOAK_EXAMPLES
