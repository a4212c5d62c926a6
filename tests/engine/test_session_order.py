"""The end of a prompt is copied and queued before its first token is chosen, and written only afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from session_support import PROMPT, opener

import kvstore_mlx.writer
from kvstore_mlx.live import Extras
from kvstore_mlx.recording import Recording
from kvstore_mlx.writer import Writer


@pytest.fixture
def opened(loaded, tiny_llama, tmp_path):
    return opener(loaded, tiny_llama, tmp_path, interval=4096)


@pytest.fixture
def steps(monkeypatch):
    """What happens, in order."""
    seen: list[str] = []
    finished, write = Recording.finished, Writer._write
    monkeypatch.setattr(Writer, "_write", lambda self, job: seen.append("begun") or write(self, job))
    monkeypatch.setattr(
        Recording, "finished", lambda self, *args, **more: seen.append("copied") or finished(self, *args, **more)
    )
    return seen


class Hook:
    name = "hook/1"

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def capture(self) -> Extras:
        self._seen.append("captured")
        return Extras({}, {"at": 1})

    def restore(self, extras) -> None: ...


def eventually(condition: Callable[[], object]) -> None:
    """It comes true within some seconds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def found(opened) -> int:
    with opened() as cache:
        return cache.prefill([*cache.tokens_of(PROMPT), 5]).cached_tokens


def chosen(seen):
    def sampler(logprobs):
        seen.append("chosen")
        return logprobs.argmax(axis=-1)

    return sampler


@pytest.fixture
def patient(monkeypatch):
    """Nothing is begun before somebody says so."""
    monkeypatch.setattr(kvstore_mlx.writer, "_QUIET_S", 3600.0)


def test_first_copied_then_chosen_then_written(opened, steps, patient):
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=3, sampler=chosen(steps))
        next(answer)
        assert steps == ["copied", "chosen"]
        assert cache._writer.queued > 0
        list(answer)
        assert "begun" not in steps[: steps.index("chosen")]
        assert cache.flush()
    assert steps.count("copied") == 2, "and the answer at its end"


def test_whoever_stops_after_the_first_token_holds_nothing_up(opened, steps):
    """Neither this prompt nor the writer's memory: it is begun a moment later, whatever becomes of the answer."""
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=9)
        next(answer)
        eventually(lambda: not cache._writer.queued)
        assert "begun" in steps
        with opened() as other:
            assert other.prefill([*cache.tokens_of(PROMPT), 5]).cached_tokens == len(cache.tokens_of(PROMPT))
        answer.close()


def test_the_next_sample_of_a_prompt_finds_the_first_one_s(opened):
    with opened() as cache:
        first, second = (cache.stream_generate(PROMPT, max_tokens=3) for _ in range(2))
        next(first)
        eventually(lambda: not cache._writer.queued)
        next(second)
        length = len(cache.tokens_of(PROMPT))
        assert cache._store.counters.restored_tokens == length
        list(first), list(second)


def test_a_hook_is_asked_at_the_prompt_s_end(opened, steps):
    with opened(extras=Hook(steps)) as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=3, sampler=chosen(steps))
        next(answer)
        answer.close()
    first = steps.index("chosen")
    assert "captured" in steps[steps.index("copied") : first]
    assert "captured" not in steps[first:]


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("end", ["closed", "dropped", "thrown", "flushed", "session closed"])
def test_a_prompt_is_saved_however_the_first_response_is_left(opened, patient, end, limit):
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=limit)
        next(answer)
        if end == "closed":
            answer.close()
        elif end == "dropped":
            del answer
        elif end == "thrown":
            with pytest.raises(ZeroDivisionError):
                answer.throw(ZeroDivisionError)
        elif end == "flushed":
            assert cache.flush()
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_prompt_is_saved_when_an_answer_fails(opened, calls):
    left = iter(range(calls))

    def processor(_tokens, logits):
        if next(left, None) is None:
            raise ZeroDivisionError
        return logits

    with opened() as cache:
        with pytest.raises(ZeroDivisionError):
            list(cache.stream_generate(PROMPT, max_tokens=9, logits_processors=[processor]))
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


def test_an_answer_of_an_event_loop_that_is_left(opened):
    async def main(cache) -> None:
        answer = cache.astream_generate(PROMPT, max_tokens=9)
        await anext(answer)
        await answer.aclose()

    with opened() as cache:
        asyncio.run(main(cache))
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


def test_a_writer_at_work_is_not_waited_for(opened, steps, patient):
    """Many answers in turn would keep it from its work."""
    with opened() as cache:
        cache._writer._queued = 1
        cache.prefill(cache.tokens_of(PROMPT))
        eventually(lambda: "begun" in steps)


def test_the_end_of_a_request_ends_the_waiting(opened, steps, patient):
    with opened() as cache:
        list(cache.stream_generate(PROMPT, max_tokens=3))
        eventually(lambda: not cache._writer.queued)
        assert "begun" in steps


def test_a_prompt_is_saved_when_it_is_interrupted_then(opened, monkeypatch):
    finished = Recording.finished

    def interrupted(self, *args, **more) -> None:
        finished(self, *args, **more)
        raise KeyboardInterrupt

    with opened() as cache:
        with monkeypatch.context() as patch:
            patch.setattr(Recording, "finished", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(cache.stream_generate(PROMPT, max_tokens=9))
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


def test_what_the_queue_has_no_room_for_is_written_the_next_time(opened, monkeypatch):
    with opened() as cache:
        with monkeypatch.context() as full:
            full.setattr(Writer, "offer", lambda _, job: job.give_back())
            answer = cache.stream_generate(PROMPT, max_tokens=9)
            next(answer)
        list(answer)
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) >= length
