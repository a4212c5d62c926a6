"""Answers of an event loop: the loop goes on meanwhile, they take turns, and a cancelled one leaves a right cache."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing, suppress

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm import load
from mlx_lm.sample_utils import make_sampler
from model_support import make_family

import kvstore_mlx

PROMPTS = ["explain why a cache must never lie. " * 12, "a hash chain, link by link, from its root. " * 9]
STEP = 64
WAIT_S = 30


class Watched:
    """A model that tells of each piece of a prefill, and may wait in it."""

    def __init__(self, model) -> None:
        self._model = model
        self.pieces = 0
        self.calls = 0
        self.before = lambda: None

    def __call__(self, tokens, *args, **kwargs):
        self.calls += 1
        if tokens.shape[1] > 1:
            self.pieces += 1
            self.before()
        return self._model(tokens, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.fixture(scope="module", params=["attention", "delta nets"])
def folder(request, tiny_llama, tmp_path_factory):
    if request.param == "attention":
        return tiny_llama
    return make_family(tmp_path_factory.mktemp("async") / "delta", "qwen3_5")


@pytest.fixture(scope="module")
def loaded(folder):
    model, tokenizer = load(str(folder))
    return Watched(model), tokenizer


@pytest.fixture
def opened(loaded, folder, tmp_path):
    def start(directory="cache", **more):
        loaded[0].before = lambda: None  # opening looks at the model, too
        settings = {"path": str(folder), "interval": 128, "prefill_step": STEP, **more}
        return kvstore_mlx.open(None if directory is None else tmp_path / directory, *loaded, **settings)

    return start


@pytest.fixture(scope="module")
def expected(loaded, folder):
    """The tokens of each prompt's answer, computed with nothing saved."""
    with kvstore_mlx.open(None, *loaded, path=str(folder), interval=128, prefill_step=STEP) as session:
        return [[each.token for each in session.stream_generate(prompt, max_tokens=12)] for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("kvstore-answers")] == []


async def tokens_of(cache, prompt, count=12, **more) -> list[int]:
    return [each.token async for each in cache.astream_generate(prompt, max_tokens=count, **more)]


def assert_right(opened, expected) -> None:
    """What lies in the directory is a right cache: whoever goes on from it says what is said without."""
    for _ in range(2):
        with opened() as cache:
            answers = [[each.token for each in cache.stream_generate(prompt, max_tokens=12)] for prompt in PROMPTS]
        assert answers == expected


def test_the_loop_goes_on_within_a_piece_of_a_prefill(loaded, opened, expected):
    """Each piece waits for something that only the loop does."""
    reached, ticked = threading.Event(), threading.Event()

    def before() -> None:
        reached.set()
        assert ticked.wait(WAIT_S), "the loop stood still"
        ticked.clear()

    async def tick() -> None:
        while True:
            if reached.is_set():
                reached.clear()
                ticked.set()
            await asyncio.sleep(0.001)

    async def main(cache) -> list[int]:
        task = asyncio.create_task(tick())
        try:
            return await tokens_of(cache, PROMPTS[0])
        finally:
            task.cancel()

    with opened() as cache:
        loaded[0].pieces = 0
        loaded[0].before = before
        assert asyncio.run(main(cache)) == expected[0]
        assert loaded[0].pieces > 4
    with opened() as cache:
        # Restored, it says the same.
        loaded[0].pieces = 0
        assert asyncio.run(tokens_of(cache, PROMPTS[0])) == expected[0]
        assert loaded[0].pieces == 0


def test_answers_take_turns(opened, expected):
    async def main(cache) -> tuple[list[list[int]], list[int]]:
        order: list[int] = []

        async def one(number: int) -> list[int]:
            tokens = []
            async for each in cache.astream_generate(PROMPTS[number], max_tokens=12):
                tokens.append(each.token)
                order.append(number)
            return tokens

        return await asyncio.gather(one(0), one(1)), order

    for _ in range(2):
        with opened() as cache:
            answers, order = asyncio.run(main(cache))
        assert answers == expected
        # Neither waits for the other's end.
        assert order.index(0) < 23 - order[::-1].index(1)
        assert order.index(1) < 23 - order[::-1].index(0)
    assert_right(opened, expected)


def test_beside_answers_of_other_threads(opened, expected):
    async def main(cache) -> list[list[int]]:
        def here() -> list[int]:
            return [each.token for each in cache.stream_generate(PROMPTS[1], max_tokens=12)]

        return await asyncio.gather(tokens_of(cache, PROMPTS[0]), asyncio.to_thread(here))

    with opened() as cache:
        assert asyncio.run(main(cache)) == expected
    assert_right(opened, expected)


@pytest.mark.parametrize("piece", [1, 3])
def test_cancelled_within_a_prefill(loaded, opened, expected, piece):
    """No more is computed than the piece under way, and beside it nothing changes for another answer."""
    model = loaded[0]
    within, go_on = threading.Event(), threading.Event()

    def before() -> None:
        if model.pieces == piece:
            within.set()
            assert go_on.wait(WAIT_S)

    async def main(cache) -> list[int]:
        task = asyncio.create_task(tokens_of(cache, PROMPTS[0]))
        await asyncio.to_thread(within.wait, WAIT_S)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.pieces == piece
        assert not cache._turns._open
        return await tokens_of(cache, PROMPTS[1])

    with opened() as cache:
        model.pieces = 0
        model.before = before
        assert asyncio.run(main(cache)) == expected[1]
    with opened() as cache:
        # What was saved of it is less than it, and right.
        restored = cache.restore(cache.tokens_of(PROMPTS[0]))
        assert (0 if restored is None else restored.tokens) == piece * STEP // 128 * 128
    assert_right(opened, expected)


def test_cancelled_twice_while_it_waits_for_its_turn(loaded, opened, expected):
    model = loaded[0]
    within, go_on = threading.Event(), threading.Event()

    def before() -> None:
        within.set()
        assert go_on.wait(WAIT_S)

    async def main(cache) -> list[int]:
        first = asyncio.create_task(tokens_of(cache, PROMPTS[0]))
        await asyncio.to_thread(within.wait, WAIT_S)
        second = asyncio.create_task(tokens_of(cache, PROMPTS[1]))
        await asyncio.sleep(0.01)
        for _ in range(2):
            second.cancel()
            await asyncio.sleep(0.01)
        # It does not wait for the other's piece after the second time.
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        return await first

    with opened() as cache:
        model.pieces = 0
        model.before = before
        assert asyncio.run(main(cache)) == expected[0]
        assert not cache._turns._open
    with opened() as cache:
        assert cache.restore(cache.tokens_of(PROMPTS[1])) is None
    assert_right(opened, expected)


async def given_up(answer) -> None:
    for _ in range(5):
        await anext(answer)


async def closed(answer) -> None:
    async with aclosing(answer):
        await given_up(answer)


async def left(answer) -> None:
    async for response in answer:
        if response.generation_tokens == 5:
            break


async def cancelled(answer) -> None:
    seen = asyncio.Event()

    async def take() -> None:
        async for response in answer:
            if response.generation_tokens == 5:
                seen.set()

    task = asyncio.create_task(take())
    await seen.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("ending", [cancelled, closed, left, given_up])
def test_ended_between_two_tokens(opened, expected, ending):
    """What was generated is saved, whatever of it was seen. (What nobody closes asyncio does.)"""
    with opened() as cache:

        async def main() -> None:
            await ending(cache.astream_generate(PROMPTS[0], max_tokens=12))

        asyncio.run(main())
        assert not cache._turns._open
    with opened() as cache:
        prompt = cache.tokens_of(PROMPTS[0])
        # More may have been made before a cancellation came, and then a prefix of it that is so short has no rung.
        said = [cache.restore([*prompt, *expected[0][:count]]).tokens - len(prompt) for count in range(5, 13)]
        assert max(said) >= 5
    assert_right(opened, expected)


def test_closed_under_an_answer(opened, expected):
    """The session's end is that of its answers, for who takes them, too; what they said is saved."""

    async def main() -> None:
        with opened() as cache:
            answer = cache.astream_generate(PROMPTS[0], max_tokens=12)
            for _ in range(5):
                await anext(answer)
        assert [each async for each in answer] == []

    asyncio.run(main())
    with opened() as cache:
        said = [*cache.tokens_of(PROMPTS[0]), *expected[0][:5]]
        assert cache.restore(said).tokens == len(said)


def test_closed_by_another_thread_within_a_piece_of_a_prefill(loaded, opened, expected):
    """Whoever waits for it, or for its turn behind it, sees an answer without a token."""
    within, go_on = threading.Event(), threading.Event()

    def before() -> None:
        within.set()
        assert go_on.wait(WAIT_S)

    def begun(cache) -> None:
        while cache._turns._thread is not None:
            time.sleep(0.001)

    async def main(cache) -> list[list[int]]:
        answers = [asyncio.create_task(tokens_of(cache, PROMPTS[0]))]
        await asyncio.to_thread(within.wait, WAIT_S)
        answers.append(asyncio.create_task(tokens_of(cache, PROMPTS[1])))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(cache.close))
        await asyncio.to_thread(begun, cache)
        await asyncio.sleep(0.01)
        go_on.set()
        found = await asyncio.gather(*answers)
        await closing
        return found

    cache = opened()
    loaded[0].before = before
    assert asyncio.run(main(cache)) == [[], []]
    assert not cache._turns._open
    assert_right(opened, expected)


def test_an_error_is_the_caller_s(loaded, opened, expected):
    def failing(seen, logits):
        if len(seen) > len(loaded[1].encode(PROMPTS[0])) + 3:
            raise ZeroDivisionError
        return logits

    async def main(cache) -> list[int]:
        with pytest.raises(ZeroDivisionError):
            await tokens_of(cache, PROMPTS[0], logits_processors=[failing])
        return await tokens_of(cache, PROMPTS[0])

    with opened() as cache:
        assert asyncio.run(main(cache)) == expected[0]
    assert_right(opened, expected)


def test_draws_are_those_of_the_caller_s_random_numbers(opened):
    sampler = make_sampler(temp=1.5)

    async def main(cache) -> list[list[int]]:
        mx.random.seed(7)
        return [await tokens_of(cache, PROMPTS[0], sampler=sampler) for _ in range(2)]

    with opened(directory=None) as cache:
        mx.random.seed(7)
        here = [each.token for each in cache.stream_generate(PROMPTS[0], max_tokens=12, sampler=sampler)]
        apart, another = asyncio.run(main(cache))
    assert apart == here
    assert another != here


def test_the_loop_s_own_stream_stays_as_it_is(opened):
    async def main(cache) -> None:
        before = mx.default_stream(mx.default_device())
        async for each in cache.astream_generate(PROMPTS[0], max_tokens=3):
            assert mx.default_stream(mx.default_device()) == before
            # The response is usable here.
            assert int(mx.argmax(each.logprobs + 0)) == each.token

    with opened() as cache:
        asyncio.run(main(cache))


class Late(nn.Module):
    """A layer with something that is computed when it is needed, and is none of its parameters."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer
        self._one = mx.ones(1) * 1

    def __call__(self, *args):
        return self.layer(*args) * self._one


def test_a_model_that_was_loaded_lazily(folder, opened, expected):
    model, tokenizer = load(str(folder))
    with kvstore_mlx.open(None, model, tokenizer, path=str(folder), interval=128, prefill_step=STEP) as cache:
        # (The look at the model when it is opened has computed all of it.)
        model.update(load(str(folder), lazy=True)[0].parameters())
        for module in model.modules():
            if "norm" in module:
                module.norm = Late(module.norm)
        assert asyncio.run(tokens_of(cache, PROMPTS[0])) == expected[0]
