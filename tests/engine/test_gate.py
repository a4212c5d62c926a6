"""The break-even gate in use: what is measured of an engine at work, what a match costs, and what is said of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from session_support import INTERVAL, model_of, prompt_of, session_of

from kvstore import Durability, Store
from kvstore_mlx.boundaries import MIN_TOKENS, Saving
from kvstore_mlx.breakeven import BreakEven
from kvstore_mlx.buffers import address_phase
from kvstore_mlx.engine import RecordingBatchGenerator, recording_stream_generate
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.gate import Gate
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.refusals import Refusal
from kvstore_mlx.restoring import Restored
from kvstore_mlx.spaces import Settings, make_space
from kvstore_mlx.tier import TieredPromptCache
from kvstore_mlx.versions import check_versions

KEY = ("model", None, None)
CHUNK = 256


@dataclass
class Response:
    """What of mlx_lm's GenerationResponse the adapter looks at."""

    prompt_tokens: int
    generation_tokens: int


def form(token_bytes: int, least: int = 0) -> Form:
    plan: Any = SimpleNamespace(token_bytes=token_bytes, stateful=False)
    return Form(plan, SimpleNamespace(), least)  # type: ignore[arg-type]  # nothing is looked up


def restored(tokens: int, size: int, seconds: float) -> Restored:
    return Restored(tokens, [], tokens, size, seconds)


def teach(gate: Gate, *, token_s: float, byte_s: float, fixed_s: float = 0.0, token_bytes: int = 1000) -> None:
    """Measurements of a machine that computes and reads at these speeds."""
    for tokens in (100, 200, 400, 800, 1600, 3200) * 4:
        gate.prefilled(tokens, tokens * token_s)
        size = tokens * token_bytes
        gate.restored(restored(tokens, size, fixed_s + size * byte_s))


class TestWhatIsSaid:
    @pytest.fixture
    def now(self):
        return [100.0]

    @pytest.fixture
    def gate(self, now):
        return Gate(ModelSpace((form(1000),), "my-model"), None, lambda: now[0])

    @pytest.fixture
    def lines(self, caplog):
        caplog.set_level("INFO", "kvstore")
        return lambda: [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]

    def test_nothing_before_it_is_known(self, gate, lines):
        assert gate.worth_saving(MIN_TOKENS)
        assert lines() == []
        assert gate.text == f"prompts from {MIN_TOKENS} tokens on are saved and restored"

    def test_once_and_again_when_it_changed_by_more_than_a_factor_of_two(self, gate, lines):
        for fixed_s, said in ((0.5, 1), (0.5, 1), (0.7, 1), (2.5, 2), (1.5, 2), (0.6, 3)):
            teach(gate, token_s=1e-3, byte_s=1e-7, fixed_s=fixed_s)
            gate.worth_saving(1000)
            assert len(lines()) == said, fixed_s
        assert lines()[0].startswith("kvstore: my-model: prefill 1000 tokens/s, restore 500.0 ms and 9.5 MiB/s")
        assert lines()[0].endswith("it pays from 556 tokens on")
        assert gate.text in lines()[-1]

    def test_that_it_never_pays(self, gate, lines, now):
        teach(gate, token_s=1e-5, byte_s=1e-7)
        assert not gate.worth_saving(100_000)
        assert len(lines()) == 1
        assert "restoring does not pay" in gate.text
        now[0] += 3601
        assert gate.worth_saving(100_000), "an hour later it is measured again"
        assert "from 64 tokens on" in gate.text

    def test_nothing_of_a_length_of_the_users_own(self, lines):
        gate = Gate(ModelSpace((form(1000),), "my-model"), 300)
        teach(gate, token_s=1e-5, byte_s=1e-7)
        assert (gate.worth_saving(299), gate.worth_saving(300)) == (False, True)
        assert lines() == []


def test_a_prompt_is_judged_by_the_form_that_it_has_at_its_length():
    gate = Gate(ModelSpace((form(16_000), form(4_000, least=1000)), "quantized"), None)
    teach(gate, token_s=1e-3, byte_s=1e-7)
    assert [gate.worth_saving(tokens) for tokens in (100, 999, 1000, 5000)] == [False, False, True, True]


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_model_is_measured_whether_it_has_rows_or_a_state(tmp_path, monkeypatch, family):
    # Whatever it finds: beside other work a tiny model is computed as quickly as it is read.
    monkeypatch.setattr(BreakEven, "worth_restoring", lambda *_: True)
    prompts = [prompt_of(100, seed) for seed in range(6)]
    with session_of(tmp_path / "cache", family) as session:
        for prompt in prompts:
            session.prefill(prompt)
    with session_of(tmp_path / "cache", family, min_tokens=None) as session:
        for prompt in prompts:
            assert session.prefill([*prompt, *prompt_of(70, 9)]).cached_tokens == 100
        session.prefill(prompt_of(100, 10))
        assert "tokens/s" in session._gate.text


@pytest.mark.parametrize(("shared", "reused"), [(150, 0), (240, 240), (CHUNK, CHUNK)])
def test_a_part_of_a_block_costs_all_of_it(tmp_path, shared, reused):
    """To read the chunk takes as long as to compute 200 of its tokens."""
    prompt = prompt_of(CHUNK)
    with session_of(tmp_path / "cache", "llama", interval=CHUNK) as session:
        session.prefill(prompt)
    with session_of(tmp_path / "cache", "llama", interval=CHUNK, min_tokens=None) as session:
        token_bytes = session.plan.token_bytes
        teach(session._gate, token_s=1e-3, byte_s=0.2 / (CHUNK * token_bytes), token_bytes=token_bytes)
        assert session.prefill([*prompt[:shared], *prompt_of(50, 9)]).cached_tokens == reused


def test_a_prefill_goes_on_being_known_when_another_answer_ends(tmp_path):
    with session_of(tmp_path / "cache", "llama") as session:
        steps = session._prefilling(prompt_of(INTERVAL * 3), ())
        next(steps)
        session._writer.idle()
        assert session._writer._share() == 1.0
        next(steps)
        assert session._writer._share() < 0.5
        steps.close()


class TestServed:
    """mlx-lm's own batches of a tiny model, with a tier."""

    @pytest.fixture
    def store(self, tmp_path):
        with Store.open(tmp_path / "cache", interval=INTERVAL, durability=Durability.NONE) as opened:
            yield opened

    @pytest.fixture
    def tier(self, store, writer):
        space = make_space(
            store,
            model_of("llama"),
            None,
            identity=lambda: {"family": "llama"},
            label="llama",
            settings=Settings(check_versions(), prefill_step=INTERVAL),
        )
        spaces: Any = SimpleNamespace(of=lambda _: space, phase=address_phase())
        return TieredPromptCache(4, spaces, writer, Saving())

    @pytest.fixture
    def generator(self, tier):
        stream = mx.default_stream(mx.default_device())
        made = RecordingBatchGenerator(model_of("llama"), prefill_step_size=INTERVAL, tier=tier, stream=stream)
        yield made
        made.close()

    @staticmethod
    def insert(generator, tier, prompt, answer: int) -> None:
        caches, rest = tier.fetch_nearest_cache(KEY, prompt)
        known = len(prompt) - len(rest)
        generator.insert_segments([[list(rest)]], [answer], [caches], [prompt[:known]])

    @staticmethod
    def step(generator, tier) -> int:
        """One step, as the server takes it; answers that ended with it."""
        ended = 0
        for response in generator.next()[1]:
            if response.finish_reason is not None:
                tier.insert_cache(KEY, response.all_tokens[:], response.prompt_cache)
                ended += 1
        return ended

    @pytest.mark.parametrize(
        ("tokens", "least", "prepared"),
        [
            (INTERVAL * 3, 1, INTERVAL),
            (MIN_TOKENS + 1, 1, MIN_TOKENS),
            (MIN_TOKENS, 1, 0),
            (INTERVAL * 3, INTERVAL * 4, 0),
        ],
    )
    def test_memory_is_made_ready_for_what_will_be_saved(
        self, store, tier, writer, monkeypatch, tokens, least, prepared
    ):
        asked = []
        monkeypatch.setattr(writer, "expect", asked.append)
        tier._saving = Saving(min_tokens=least)
        tier.fetch_nearest_cache(KEY, prompt_of(tokens))
        (form,) = tier._spaces.of(KEY).forms
        assert asked == ([prepared * form.plan.token_bytes] if prepared else [])

    def test_no_memory_is_made_ready_for_what_would_be_refused(self, tier, writer, monkeypatch):
        asked = []
        monkeypatch.setattr(writer, "expect", asked.append)
        monkeypatch.setattr(Housekeeping, "outlook", lambda *_: Refusal.WARM)
        tier.fetch_nearest_cache(KEY, prompt_of(INTERVAL * 3))
        assert asked == []
        assert writer._housekeeping.refused == {}, "it is counted when it would be copied"

    def test_to_wait_for_others_is_no_part_of_a_prefill(self, generator, tier, monkeypatch):
        told = []
        monkeypatch.setattr(Gate, "prefilled", lambda _, tokens, seconds: told.append((tokens, seconds)))
        for seed in (1, 2):
            self.insert(generator, tier, prompt_of(INTERVAL * 3 + 1, seed), 3)
        left, engine = 2, 0.0
        while left:
            time.sleep(0.05)  # what the engine does meanwhile for others
            started = time.perf_counter()
            left -= self.step(generator, tier)
            engine += time.perf_counter() - started
        assert sum(tokens for tokens, _ in told) == 2 * 3 * INTERVAL
        assert sum(seconds for _, seconds in told) <= engine, "and not the waits before each step"

    def test_to_look_for_a_prompt_is_no_part_of_its_restore(self, generator, tier, writer, monkeypatch):
        told = []
        monkeypatch.setattr(Gate, "restored", lambda _, restored: told.append(restored.seconds))
        prompt = prompt_of(INTERVAL * 3 + 1)
        self.insert(generator, tier, prompt, 2)
        while not self.step(generator, tier):
            pass
        assert writer.drain(10)
        again = TieredPromptCache(4, tier._spaces, writer, Saving())
        monkeypatch.setattr(again, "_from_memory", lambda *_: time.sleep(0.3) or (None, prompt))
        started = time.perf_counter()
        assert len(again.fetch_nearest_cache(KEY, prompt)[1]) == 1
        assert len(told) == 1
        assert 0 < told[0] < time.perf_counter() - started - 0.3

    def test_a_request_that_is_served_alone_is_measured_to_its_first_token(self, tier, monkeypatch):
        told = []
        monkeypatch.setattr(Gate, "prefilled", lambda _, tokens, seconds: told.append((tokens, seconds)))

        def generate(*, prompt, **_):
            for number in range(1, 4):
                time.sleep(0.1)
                yield Response(len(prompt), number)

        _, rest = tier.fetch_nearest_cache(KEY, prompt_of(200))
        caches = make_prompt_cache(model_of("llama"))
        stream = recording_stream_generate(generate, tier, None)
        time.sleep(0.3)
        started = time.perf_counter()
        assert len(list(stream(prompt=rest, prompt_cache=caches))) == 3
        ((tokens, seconds),) = told
        assert tokens == 200
        assert 0.1 <= seconds < time.perf_counter() - started - 0.2

    def test_the_end_of_one_request_does_not_hide_the_prefill_of_another(self, generator, tier, writer, monkeypatch):
        shares = []
        real = PromptProcessingBatch.prompt
        monkeypatch.setattr(
            PromptProcessingBatch,
            "prompt",
            lambda self, tokens: shares.append(writer._share()) if tokens else None or real(self, tokens),
        )
        self.insert(generator, tier, prompt_of(INTERVAL + 1, 1), 2)
        self.insert(generator, tier, prompt_of(INTERVAL * 9 + 1, 2), 2)
        steps = next(number for number in count(1) if self.step(generator, tier))
        assert steps < 7, "the other one is still computed"
        assert writer._share() == 1.0
        del shares[:]
        self.step(generator, tier)
        assert shares
        assert max(shares) < 0.5
