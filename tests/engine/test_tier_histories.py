"""Random histories of a conversation served as mlx_lm.server does it: memory first, then the directory.

The engine's own generation with its caches kept in memory, cut there, quantized on the way, computed in batches with a
longer or a shorter prompt, failing in a layer or a logits processor: after each of it the next prompt's
log-probabilities are those of a session without a directory (test_histories.py), and no caches are quantized that an
uninterrupted run would not have quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from history_support import TOLERANCE, Cancelled, History, damages, edits, hold, restarts, slow, turns
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from session_support import INTERVAL, array_of, assert_same, decode, model_of

from kvstore import Durability, Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.engine import RecordingBatchGenerator, recording_stream_generate
from kvstore_mlx.fingerprint import Quantization
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.spaces import Settings, make_space
from kvstore_mlx.tier import TieredPromptCache
from kvstore_mlx.versions import check_versions
from kvstore_mlx.writer import Writer

KEY = ("model", None, None)

fails = st.tuples(st.just("fail"), st.integers(1, 90), st.integers(1, 5), st.sampled_from(["layer", "processor"]))
leaves = st.tuples(st.just("leave"), st.integers(1, 90), st.integers(1, 4))
batches = st.tuples(st.just("batch"), st.integers(1, 90), st.integers(20, 300), st.integers(2, 6), st.booleans())
alone = st.lists(st.one_of(turns, turns, edits, fails, leaves, restarts, damages), min_size=2, max_size=7)
together = st.lists(st.one_of(turns, batches, edits, fails, leaves, restarts), min_size=2, max_size=7)


@dataclass
class Token:
    """What of mlx_lm's GenerationResponse the adapter looks at."""

    token: int
    logprobs: Any
    prompt_tokens: int
    generation_tokens: int


def generate(model: Any, *, prompt: list[int], stream: Any, max_tokens: int, **settings: Any) -> Iterator[Token]:
    """As mlx_lm.stream_generate, but for text."""
    del stream
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, **settings)
    for number, (token, logprobs) in enumerate(steps, 1):
        yield Token(token, logprobs, len(prompt), number)


class Served(History):
    """One that a tier serves, with so many prompts in memory; a restart forgets those."""

    def __init__(self, directory: Path, family: str, *, memory: int = 4, tolerance: float = TOLERANCE, **more: Any):
        super().__init__(directory, family, **more)
        self.model = model_of(family)
        self.memory, self.tolerance = memory, tolerance
        self.quantization = Quantization(*more.values()) if more else None
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.directory, interval=INTERVAL, durability=Durability.NONE)
        settings = Settings(check_versions(), quantization=self.quantization, prefill_step=INTERVAL)
        identity = {"family": self.family}
        self.space = make_space(
            self.store, self.model, None, identity=lambda: identity, label=self.family, settings=settings
        )
        self.writer = Writer(Housekeeping(self.store, 1 << 40))
        spaces: Any = SimpleNamespace(of=lambda _: self.space, phase=address_phase())
        self.tier = TieredPromptCache(self.memory, spaces, self.writer, Saving(min_tokens=1))

    def restart(self, orderly: bool) -> None:
        self.writer.close(60.0 if orderly else 0.0)
        self.store.close()
        self.open()

    def flush(self) -> bool:
        return self.writer.drain(60.0)

    def close(self) -> None:
        assert self.writer.close(60.0)
        self.store.close()

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        self.tier.announce(tokens, [len(self.tokens)])
        caches, rest = self.tier.fetch_nearest_cache(KEY, tokens)
        assert rest
        known = len(tokens) - len(rest)
        if caches is not None:
            assert self.tier._holds(self.space, caches, known)
        if caches is not None and self.quantization is not None:
            # An uninterrupted run quantizes all that it can as soon as it has so many tokens.
            quantized = [type(cache) is QuantizedKVCache for cache in caches if hasattr(cache, "offset")]
            assert set(quantized) <= {known >= self.quantization.start}
        self.reused += known
        return caches, rest

    def steps(self, tokens: list[int], count: int, **more: Any) -> tuple[int, list[Any], Iterator[Token]]:
        """What is known of a prompt, the list of caches, and its tokens as they come."""
        caches, rest = self.fetch(tokens)
        if caches is None:
            caches = make_prompt_cache(self.model)
        if self.quantization is not None:
            more |= {"kv_bits": self.quantization.bits, "kv_group_size": self.quantization.group_size}
            more["quantized_kv_start"] = self.quantization.start
        stream = recording_stream_generate(generate, self.tier, self.quantization)
        found = stream(
            model=self.model,
            prompt=rest,
            prompt_cache=caches,
            stream=mx.default_stream(mx.default_device()),
            max_tokens=count,
            prefill_step_size=INTERVAL,
            **more,
        )
        return len(tokens) - len(rest), caches, found

    def turn(self, count: int, answer: int, flush: bool) -> None:
        before, answer = len(self.tokens), max(answer, 1)
        self.tokens = [*self.tokens, *self.new(count)]
        known, caches, steps = self.steps(self.tokens, answer)
        found = [(step.token, array_of(step.logprobs)) for step in steps]
        self.tier.insert_cache(KEY, [*self.tokens, *(token for token, _ in found)], caches)
        expected = self.plain.prefill(self.tokens, [before, known])
        tokens, logits = decode(self.plain, expected, answer)
        logits[0] = logits[0] - np.logaddexp.reduce(logits[0].astype(np.float64))
        ours = [token for token, _ in found]
        same = next((n for n, (a, b) in enumerate(zip(ours, tokens, strict=True)) if a != b), answer)
        # Two tokens that are equally likely to the last bits may be chosen either way.
        assert_same([row for _, row in found[: same + 1]], logits[: same + 1], self.tolerance)
        self.tokens = [*self.tokens, *ours]
        if flush:
            assert self.flush()

    def leave(self, count: int, answer: int) -> None:
        """The client goes away: the server stops there and keeps what it has."""
        self.tokens = [*self.tokens, *self.new(count)]
        _, caches, steps = self.steps(self.tokens, answer + 5)
        for _ in range(answer):
            self.tokens.append(next(steps).token)
        self.tier.insert_cache(KEY, list(self.tokens), caches)
        del steps

    def fail(self, count: int, answer: int, where: str) -> None:
        """Something raises while a token is computed: the server keeps nothing of what was going on."""
        tokens = [*self.tokens, *self.new(count)]
        left = answer

        def processor(_: Any, logits: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and where == "processor":
                raise Cancelled
            return logits

        layer = self.model.layers[1]
        kind, real = type(layer), type(layer).__call__

        def broken(own: Any, *arguments: Any, **more: Any) -> Any:
            if left <= 0 and own is layer and where == "layer":
                raise Cancelled
            return real(own, *arguments, **more)

        kind.__call__ = broken
        try:
            with pytest.raises(Cancelled):
                for _ in self.steps(tokens, answer + 5, logits_processors=[processor])[2]:
                    pass
        finally:
            kind.__call__ = real

    def batch(self, count: int, other: int, answer: int, first: bool) -> None:
        """The next turn in a batch with a prompt of another length; what such a batch answers is mlx-lm's."""
        self.tokens = [*self.tokens, *self.new(count)]
        prompts = [self.tokens, self.new(other)]
        generator = RecordingBatchGenerator(
            self.model,
            prefill_step_size=INTERVAL,
            tier=self.tier,
            stream=mx.default_stream(mx.default_device()),
        )
        waiting = prompts if first else prompts[::-1]
        answers: dict[int, list[int]] = {}
        left = 2
        while left:
            # The second joins while the first is answered.
            if waiting and (not answers or min(map(len, answers.values()))):
                prompt, *waiting = waiting
                caches, rest = self.fetch(prompt)
                known = len(prompt) - len(rest)
                (uid,) = generator.insert_segments([[list(rest)]], [answer + 4], [caches], [prompt[:known]])
                answers[uid] = []
            for response in generator.next()[1]:
                answers[response.uid].append(int(response.token))
                if response.finish_reason is not None:
                    left -= 1
                    self.tier.insert_cache(KEY, response.all_tokens[:], response.prompt_cache)
        generator.close()
        self.tokens = [*self.tokens, *list(answers.values())[0 if first else 1]]


FEW = [
    ("bailing_moe_linear", together, {}),
    ("llama", alone, {}),
    ("lfm2", alone, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 128, "tolerance": 5e-3}),
    # A prompt is cut where it is resumed, which with quantized caches is more than rounding (docs/exactness.md).
    ("llama", alone, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 128, "tolerance": 0.2}),
]
MANY = [
    *FEW,
    ("gemma3_text", together, {}),
    ("qwen3_5_moe", together, {"memory": 0}),
    ("minimax_m3_vl", together, {}),
    ("llama4", alone, {"memory": 2}),
]


@pytest.mark.parametrize(("family", "histories", "more"), FEW)
def test_a_few_histories(family, histories, more):
    @given(histories)
    @settings(slow, max_examples=6, derandomize=True, phases=[Phase.explicit, Phase.generate])
    def few(history):
        hold(Served, family, history, **more)

    few()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("family", "histories", "more"), MANY)
def test_hundreds_of_histories(family, histories, more):
    @given(histories)
    @settings(slow, max_examples=200)
    def many(history):
        hold(Served, family, history, **more)

    many()


EVERYTHING: list[tuple[Any, ...]] = [
    ("turn", 60, 3, True),
    ("fail", 20, 2, "layer"),
    ("turn", 20, 3, True),
    ("leave", 10, 2),
    ("batch", 30, 200, 4, True),
    ("batch", 30, 250, 4, False),
    ("turn", 5, 2, True),
    ("edit", 60, 30),
    ("turn", 5, 2, True),
    ("fail", 30, 3, "processor"),
    ("turn", 40, 2, True),
    ("restart", False),
    ("damage", 3, "flip"),
    ("turn", 5, 2, True),
]


@pytest.mark.parametrize(("family", "memory"), [("bailing_moe_linear", 0), ("minimax_m3_vl", 4)])
def test_a_history_that_touches_everything(family, memory):
    assert hold(Served, family, EVERYTHING, memory=memory) > 500


def test_padding_that_is_kept_would_show(monkeypatch):
    """The control: with what the padding of a batch reached in memory, the next turn is another one."""
    monkeypatch.setattr("kvstore_mlx.padding.Padding.look", lambda *_: set())
    with pytest.raises(AssertionError, match=r"\(0, "):
        hold(Served, "minimax_m3_vl", EVERYTHING)


def test_what_is_cut_below_its_start_would_show(monkeypatch):
    """The control: mlx-lm's memory cuts quantized caches to where an uninterrupted run has plain ones."""
    history = [("turn", 90, 2, True), ("edit", 60, 5), ("turn", 5, 2, True)]
    more = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 128, "tolerance": 0.2}
    assert hold(Served, "llama", history, **more)
    monkeypatch.setattr("kvstore_mlx.tier.TieredPromptCache._holds", lambda *_: True)
    with pytest.raises(AssertionError):
        hold(Served, "llama", history, **more)
