"""What fails of one sequence of a batch, or of a request that is served alone, and what of it the others notice."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from session_support import model_of, prompt_of

from families import build
from family_batch import KEY, tier_of
from kvstore import Durability, Store
from kvstore.keys import pack_tokens
from kvstore_mlx.engine import RecordingBatchGenerator, recording_stream_generate
from kvstore_mlx.explain import Explainer
from kvstore_mlx.padding import Padding
from kvstore_mlx.recording import Recording
from kvstore_mlx.restoring import find

SHORT, LONG = prompt_of(100, 1), prompt_of(1500, 2)
TIER = "TieredPromptCache"
WHY = "layers hold other tokens than were computed"


@pytest.fixture
def batch(tmp_path):
    """A tier and a generator that saves below it, its tier and its writer."""
    with Store.open(tmp_path / "cache", interval=64, durability=Durability.NONE) as store:
        tier, writer = tier_of(store, "llama", model_of("llama"))
        yield RecordingBatchGenerator(model_of("llama"), prefill_step_size=64, tier=tier), tier, writer
        writer.close(10)


def add(generator, tier, prompt, count):
    caches, rest = tier.fetch_nearest_cache(KEY, prompt)
    known = prompt[: len(prompt) - len(rest)]
    (uid,) = generator.insert_segments([[rest]], max_tokens=[count], caches=[caches], all_tokens=[known])
    return uid


def run(generator, tier, uids):
    """All steps until these are answered; their tokens, prompts included."""
    held = {}
    while len(held) < len(uids):
        for response in generator.next()[1]:
            if response.finish_reason:
                held[response.uid] = response.all_tokens[:]
                tier.insert_cache(KEY, held[response.uid], response.prompt_cache, cache_type="assistant")
    return [held[uid] for uid in uids]


@dataclass(frozen=True)
class Token:
    token: int
    prompt_tokens: int
    generation_tokens: int


def one_by_one(model, *, prompt, stream, **settings):
    """As mlx_lm.stream_generate, but for text."""
    steps = generate_step(mx.array(prompt), model, max_tokens=4, prefill_step_size=64, **settings)
    for number, (token, _) in enumerate(steps, 1):
        yield Token(token, len(prompt), number)


def saved(tier, tokens):
    return find(tier._spaces.of(KEY).forms[0], pack_tokens(tokens)).count


@pytest.mark.parametrize("kind", [ValueError, KeyError], ids=["refused", "a bug"])
@pytest.mark.parametrize("step", ["wants", "reached", "first_token"])
def test_a_sequence_that_cannot_be_saved_takes_nothing_from_the_others(batch, monkeypatch, caplog, step, kind):
    generator, tier, writer = batch
    plain = getattr(Recording, step)

    def failing(self, *args):
        if len(self.prompt) == len(LONG):
            raise kind(WHY)
        return plain(self, *args)

    monkeypatch.setattr(Recording, step, failing)
    first = add(generator, tier, SHORT, 6)
    for _ in range(4):
        generator.next()
    short, long = run(generator, tier, [first, add(generator, tier, LONG, 4)])
    assert writer.drain(20)
    assert caplog.text.count(WHY) == 1, "each step fails, which would fill the log"
    assert saved(tier, short) >= len(short) - 1
    assert not generator._recordings
    assert not tier._finishing
    del long


def test_where_padding_is_cannot_be_told_nothing_is_saved(batch, monkeypatch, caplog):
    generator, tier, writer = batch

    def failing(*_):
        raise RuntimeError("no idea")

    monkeypatch.setattr(Padding, "look", failing)
    short, long = run(generator, tier, [add(generator, tier, SHORT, 4), add(generator, tier, LONG, 4)])
    assert writer.drain(20)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]
    assert (saved(tier, short), saved(tier, long)) == (0, 0)
    assert [tier._from_memory(KEY, [*tokens, 7])[0] for tokens in (short, long)] == [None, None], "nor is it kept"


@pytest.mark.parametrize("kind", [ValueError, KeyError], ids=["refused", "a bug"])
@pytest.mark.parametrize("step", ["wants", "reached", "first_token"])
def test_a_request_that_is_served_alone_is_answered_whatever_fails_of_its_saving(
    batch, monkeypatch, caplog, step, kind
):
    _, tier, _ = batch

    def failing(*_):
        raise kind(WHY)

    def tokens(generate):
        caches = build("llama").make_cache()
        stream = mx.default_stream(mx.default_device())
        return [each.token for each in generate(model_of("llama"), prompt=LONG, prompt_cache=caches, stream=stream)]

    monkeypatch.setattr(Recording, step, failing)
    tier.fetch_nearest_cache(KEY, LONG)
    assert tokens(recording_stream_generate(one_by_one, tier, None)) == tokens(one_by_one)
    assert caplog.text.count(WHY) == 1


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("step", ["nearest_of", "Explainer.explain", f"{TIER}.prefilled", f"{TIER}.stepped"])
def test_a_bug_in_what_is_said_or_measured_of_a_request_fails_nothing_of_it(batch, monkeypatch, caplog, step, alone):
    generator, tier, writer = batch

    def failing(*_args, **_more):
        raise KeyError(WHY)

    monkeypatch.setattr(f"kvstore_mlx.tier.{step}", failing)
    tier.explainer = Explainer(lambda: str)
    if alone:
        tier.fetch_nearest_cache(KEY, SHORT)
        caches, stream = build("llama").make_cache(), mx.default_stream(mx.default_device())
        generate = recording_stream_generate(one_by_one, tier, None)
        assert len(list(generate(model_of("llama"), prompt=SHORT, prompt_cache=caches, stream=stream))) == 4
    else:
        run(generator, tier, [add(generator, tier, SHORT, 4)])
    assert writer.drain(20)
    assert saved(tier, SHORT) >= len(SHORT) - 1
    assert len(tier.fetch_nearest_cache(KEY, [*SHORT, *LONG])[1]) <= len(LONG) + 1, "what was restored is used"
    assert caplog.text.count(WHY) == 1


@pytest.mark.parametrize("prompt", [SHORT, SHORT[:20]], ids=["saved", "too short to be saved"])
def test_a_request_that_fails_lets_its_caches_go(batch, prompt):
    _, tier, writer = batch

    def failing(*_args, **_kwargs):
        raise RuntimeError("the engine failed")
        yield

    tier.fetch_nearest_cache(KEY, prompt)
    responses = recording_stream_generate(failing, tier, None)(
        model=model_of("llama"), prompt=prompt, prompt_cache=build("llama").make_cache(), stream=None
    )
    assert bool(tier._finishing) == (prompt is SHORT)
    assert writer._share() < 1.0
    with pytest.raises(RuntimeError, match="the engine failed"):
        next(responses)
    assert not tier._finishing
    assert writer._share() == 1.0


@pytest.mark.parametrize("how", ["cancelled", "too short to be saved", "padded"])
def test_a_request_that_ended_slows_no_writing_whatever_became_of_it(batch, how):
    """The engine is taken to be at work for half a minute after a piece of a prefill, unless it says that it is not."""
    generator, tier, writer = batch
    uid = add(generator, tier, SHORT[:20] if how == "too short to be saved" else SHORT, 1)
    generator.next()
    assert writer._share() < 1.0
    if how == "cancelled":
        generator.remove([uid])
    else:
        if how == "padded":
            generator._padding.give_up()
        run(generator, tier, [uid])
    assert writer._share() == 1.0


@pytest.mark.parametrize("alone", [False, True])
def test_a_request_that_saves_nothing_makes_itself_known_by_its_tokens_too(batch, alone):
    """The end of another one has the writer go at full speed, and it went on so beside this one's answer."""
    generator, tier, writer = batch

    def engine(*_args, **_kwargs):
        while True:
            yield [], [None]

    if alone:
        tier.fetch_nearest_cache(KEY, SHORT[:20])
        steps = recording_stream_generate(engine, tier, None)(prompt_cache=[])
    else:
        add(generator, tier, SHORT[:20], 8)
        steps = iter(generator.next, None)
    assert any(next(steps)[1] for _ in range(4))
    tier.ended()
    assert writer._share() == 1.0
    assert next(steps)[1]
    assert writer._share() < 1.0
