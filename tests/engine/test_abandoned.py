"""Answers and sessions that nobody closes: freed on any thread, in the middle of anything, with no harm."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm import load
from model_support import make_family
from session_support import PROMPT, opener

import kvstore_mlx.writer
from kvstore import Namespace
from kvstore_mlx.recording import Recording
from kvstore_mlx.turns import Taking

WAIT_S = 20
OTHER = "a hash chain, link by link, from its root. " * 9


@pytest.fixture(scope="module", params=["attention", "delta nets"])
def folder(request, tiny_llama, tmp_path_factory):
    if request.param == "attention":
        return tiny_llama
    return make_family(tmp_path_factory.mktemp("abandoned") / "delta", "qwen3_5")


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder))


@pytest.fixture
def opened(loaded, folder, tmp_path):
    return opener(loaded, folder, tmp_path, interval=128)


@pytest.fixture(autouse=True)
def collector():
    """Nothing is collected before a test says so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(autouse=True)
def complaints(monkeypatch):
    """What finalizers raised."""
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: found.append(str(raised.exc_value)))
    return found


class Owner:
    """Something that refers to itself, so that only the collector frees it."""

    def __init__(self, **held) -> None:
        self.itself = self
        self.held = held


def abandoned(cache, count: int = 5, **more) -> list[int]:
    """The first tokens of an answer, which nobody can take any more and only the collector frees."""
    answer = cache.stream_generate(PROMPT, max_tokens=20)
    Owner(answer=answer, **more)
    return [next(answer).token for _ in range(count)]


def on_another_thread(call: Callable[[], object]) -> bool:
    """Whether a call on a thread of its own comes back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()


def assert_saved(opened, said: list[int]) -> None:
    """The prompt and what was said to it are in the directory, and nothing that was not said."""
    with opened() as cache:
        tokens = [*cache.tokens_of(PROMPT), *said]
        assert cache.restore([*tokens, 5, 6, 7]).tokens == len(tokens)


def interrupt(*_) -> None:
    raise KeyboardInterrupt


class Impatient:
    """A lock that fails its thread instead of having it wait for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=2), "it would wait for ever"

    def __exit__(self, *_) -> None:
        self._lock.release()


@pytest.mark.parametrize("within", ["nothing", "the writer's lock"])
def test_collected_on_another_thread(opened, complaints, within):
    """Found by review: copied by MLX there; or, while a step was taken here, both threads waited for ever."""

    def collect() -> None:
        if within == "nothing":
            gc.collect()
        else:
            with cache._writer._changed:
                gc.collect()

    def sampler(logprobs):
        if not came_back:
            came_back.append(on_another_thread(collect))
        return mx.argmax(logprobs, axis=-1)

    came_back: list[bool] = []
    stream = mx.default_stream(mx.default_device())
    with opened() as cache:
        said = abandoned(cache)
        assert not cache._turns._dropped
        answer = cache.stream_generate(OTHER, max_tokens=3, sampler=sampler)
        next(answer)
        assert came_back == [True]
        assert len(cache._turns._dropped) == 1
        list(answer)
        assert not cache._turns._dropped
        assert not cache._turns._begun
        assert mx.default_stream(mx.default_device()) == stream
        assert cache.failures == 0
    assert complaints == []
    assert_saved(opened, said)


def test_collected_within_a_lock_of_this_thread(opened, complaints):
    """Found by review: it waited for itself."""
    with opened() as cache:
        said = abandoned(cache)
        pool = cache._writer._pool
        settle, collected = pool._settle, []

        def collecting() -> None:
            if not collected:
                collected.append(gc.collect())
            settle()

        pool._lock, pool._settle = Impatient(), collecting
        list(cache.stream_generate(OTHER, max_tokens=3))
        assert collected
        assert cache.failures == 0
    assert complaints == []
    assert_saved(opened, said)


def test_collected_between_two_calls(opened, complaints):
    with opened() as cache:
        said = abandoned(cache)
        gc.collect()
        assert cache.flush()
        assert not cache._turns._dropped
        tokens = [*cache.tokens_of(PROMPT), *said]
        assert cache.restore([*tokens, 5]).tokens == len(tokens)
    assert complaints == []


def test_forgotten_is_ended_at_once(opened, complaints):
    with opened() as cache:
        said = []
        for response in cache.stream_generate(PROMPT, max_tokens=20):
            said.append(response.token)
            if len(said) == 5:
                break
        del response
        assert not cache._turns._begun
        assert cache._writer.drain(WAIT_S)
        tokens = [*cache.tokens_of(PROMPT), *said]
        assert cache.restore([*tokens, 5]).tokens == len(tokens)
    assert complaints == []


def test_forgotten_within_a_step_of_another(opened, complaints):
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=20)
        held = [answer]
        said = [next(answer).token for _ in range(5)]
        del answer

        def sampler(logprobs):
            held.clear()
            return mx.argmax(logprobs, axis=-1)

        list(cache.stream_generate(OTHER, max_tokens=3, sampler=sampler))
        assert not cache._turns._begun
    assert complaints == []
    assert_saved(opened, said)


@pytest.mark.parametrize("close", [True, False])
def test_ended_by_another_thread(opened, complaints, close):
    """By the thread that it belongs to, when that comes again: no other can end MLX's streams."""
    stream = mx.default_stream(mx.default_device())
    with opened() as cache:
        held = [cache.stream_generate(PROMPT, max_tokens=20)]
        said = [next(held[0]).token for _ in range(5)]
        assert on_another_thread((lambda: held.pop().close()) if close else held.clear)
        assert not held
        assert cache.restore([1, 2, 3]) is None
        assert mx.default_stream(mx.default_device()) == stream
        assert not cache._turns._begun
    assert complaints == []
    assert_saved(opened, said)


def test_of_a_thread_that_is_gone(opened):
    """What it generated is not saved, and not kept in memory either."""
    with opened() as cache:
        held = []

        def begin() -> None:
            held.append(cache.stream_generate(PROMPT, max_tokens=20))
            for _ in range(5):
                next(held[0])

        assert on_another_thread(begin)
        held.clear()
        assert len(cache._turns._begun) == 1
        assert cache.restore([1, 2, 3]) is None
        assert not cache._turns._begun
        assert cache.failures == 0
    assert_saved(opened, [])


def test_of_a_thread_that_does_not_come_again(opened):
    with opened() as cache:
        begun, go_on = threading.Event(), threading.Event()

        def begin() -> None:
            abandoned(cache)
            begun.set()
            go_on.wait(WAIT_S)

        thread = threading.Thread(target=begin)
        thread.start()
        assert begun.wait(WAIT_S)
        gc.collect()
        assert cache.restore([1, 2, 3]) is None
        assert len(cache._turns._dropped) == 1
        cache.close()
        assert not cache._turns._begun
        go_on.set()
        thread.join()
    assert_saved(opened, [])


@pytest.mark.parametrize("begin", [lambda call: call(), on_another_thread], ids=["here", "elsewhere"])
def test_collected_together_with_its_session(opened, monkeypatch, begin):
    """Its generators are finalized one by one, the innermost first maybe; here with a lock of theirs taken."""
    finished: list[int] = []
    cache = opened()
    begin(partial(abandoned, cache, session=cache))
    assert cache.flush()
    counted = cache._metrics
    counted._lock = Impatient()
    monkeypatch.setattr(Recording, "finished", lambda *_args, **_more: finished.append(1))
    del cache
    with counted._lock:
        assert gc.collect() > 0
    assert finished == []
    assert_saved(opened, [])


def test_interrupted_before_a_step(opened, monkeypatch):
    """Nothing of the answer had to do with it, so what was generated is saved as ever."""
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=20)
        said = [next(answer).token for _ in range(5)]
        with monkeypatch.context() as patch:
            patch.setattr(Taking, "__enter__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(answer)
        del answer
        assert not cache._turns._begun
    assert_saved(opened, said)


def test_an_iteration_is_as_a_generator(opened):
    with opened() as cache:
        said = [each.token for each in cache.stream_generate(PROMPT, max_tokens=6)]
        unstarted = cache.stream_generate(PROMPT, max_tokens=6)
        unstarted.close()
        assert list(unstarted) == []
        with closing(cache.stream_generate(PROMPT, max_tokens=6)) as answer:
            assert [next(answer).token, next(answer).token] == said[:2]
        assert list(answer) == []
        answer = cache.stream_generate(PROMPT, max_tokens=6)
        next(answer)
        with pytest.raises(ZeroDivisionError):
            answer.throw(ZeroDivisionError("no"))
        with pytest.raises(StopIteration):
            next(answer)
        # Closed in a step of its own: the mistake is told, and the answer ends with it.
        answers = []

        def sampler(logprobs):
            answers[0].close()
            return mx.argmax(logprobs, axis=-1)

        answers.append(cache.stream_generate(PROMPT, max_tokens=6, sampler=sampler))
        with pytest.raises(ValueError, match="already executing"):
            next(answers[0])
        assert not cache._turns._begun


def writers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "kvstore-writer"]


def eventually(condition: Callable[[], object]) -> None:
    """It comes true within some seconds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def staging(tmp_path) -> list[str]:
    return [each.name for each in (tmp_path / "cache" / "tmp").iterdir()]


@pytest.mark.parametrize("within", ["nothing", "the writer's lock", "a lock of threading's"])
def test_a_session_that_is_dropped_writes_what_is_queued_and_lets_go(opened, tmp_path, monkeypatch, within):
    """Found by review: its thread, its store and its staging folder stayed for the life of the process."""
    monkeypatch.setattr(kvstore_mlx.writer, "_QUIET_S", 3600.0)
    before = writers()
    cache = opened()
    said = [each.token for each in islice(cache.stream_generate(PROMPT, max_tokens=1), 1)]
    writer, store, length = cache._writer, cache._store, len(cache.tokens_of(PROMPT))
    assert len(said) == 1
    assert writer.queued
    locks = {
        "nothing": nullcontext(),
        "the writer's lock": writer._changed,
        "a lock of threading's": threading._active_limbo_lock,
    }
    with locks[within]:
        del cache
    eventually(lambda: set(writers()) <= set(before))
    assert not writer.queued
    assert writer._pool.resident == 0
    assert staging(tmp_path) == []
    assert store.context.counters.saved_tokens == length
    assert_saved(opened, [])


def test_a_closed_session_is_dropped_without_a_word(opened):
    with opened() as cache:
        dropped = cache._dropped
        cache.prefill(cache.tokens_of(PROMPT))
        assert dropped.alive
    cache.close()
    assert not dropped.alive


def test_a_session_whose_close_gives_up_leaves_nothing_when_its_node_is_written(opened, tmp_path, monkeypatch, caplog):
    """Found by review: what was written after the store was closed made a staging folder that nobody removed."""
    begun, go_on, publish = threading.Event(), threading.Event(), Namespace.publish

    def slow(*args):
        begun.set()
        assert go_on.wait(WAIT_S)
        return publish(*args)

    before = writers()
    with opened() as cache:
        monkeypatch.setattr(Namespace, "publish", slow)
        cache.prefill(cache.tokens_of(PROMPT))
        assert begun.wait(WAIT_S)
        cache.close(0)
        cache.close(0)
        go_on.set()
        eventually(lambda: writers() == before)
        assert staging(tmp_path) == []
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [
        "kvstore: stopped before everything was written; what is missing will be computed again"
    ]


@pytest.mark.parametrize("dropped", [True, False])
def test_a_session_outlives_its_answers(opened, dropped):
    """Who holds an answer holds the session."""
    cache = opened()
    answer = cache.stream_generate(PROMPT, max_tokens=5)
    said = [next(answer).token]
    thread = cache._writer._thread
    del cache
    if not dropped:
        said += [each.token for each in answer]
        assert thread.is_alive()
    del answer
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with opened() as again:
        assert [each.token for each in again.stream_generate(PROMPT, max_tokens=5)][: len(said)] == said
