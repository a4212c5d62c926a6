"""The end of a prompt is copied before its first token is chosen, and written only when that is handed over."""

from __future__ import annotations

import asyncio

import pytest
from session_support import PROMPT, opener

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
    offer, finished = Writer.offer, Recording.finished
    monkeypatch.setattr(Writer, "offer", lambda self, job, **more: seen.append("queued") or offer(self, job, **more))
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


def found(opened) -> int:
    with opened() as cache:
        return cache.prefill([*cache.tokens_of(PROMPT), 5]).cached_tokens


def chosen(seen):
    def sampler(logprobs):
        seen.append("chosen")
        return logprobs.argmax(axis=-1)

    return sampler


def test_first_copied_then_chosen_then_queued(opened, steps):
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=3, sampler=chosen(steps))
        next(answer)
        assert steps == ["copied", "chosen"]
        next(answer)
        assert steps[2] == "queued"
        list(answer)
    assert steps.count("copied") == 2, "and the answer at its end"


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
def test_a_prompt_is_saved_however_the_first_response_is_left(opened, steps, end, limit):
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=limit)
        next(answer)
        assert ("queued" in steps) == (limit == 1)
        if end == "closed":
            answer.close()
        elif end == "dropped":
            del answer
        elif end == "thrown":
            with pytest.raises(ZeroDivisionError):
                answer.throw(ZeroDivisionError)
        elif end == "flushed":
            assert cache.flush()
        if end != "session closed":
            assert "queued" in steps
            assert not cache._held
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
        assert not cache._held
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


def test_an_answer_of_an_event_loop_that_is_left(opened):
    async def main(cache) -> None:
        answer = cache.astream_generate(PROMPT, max_tokens=9)
        await anext(answer)
        await answer.aclose()

    with opened() as cache:
        asyncio.run(main(cache))
        assert not cache._held
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


def test_a_writer_at_work_is_not_waited_for(opened, steps, monkeypatch):
    monkeypatch.setattr(Writer, "queued", 1 << 20)
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=3, sampler=chosen(steps))
        next(answer)
        assert steps == ["copied", "queued", "queued", "chosen"]


def test_what_was_held_is_not_refused_for_what_came_since(opened, monkeypatch):
    """It lies in memory already, and what follows it would be lost with it."""
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=9)
        next(answer)
        with monkeypatch.context() as full:
            full.setattr(cache._writer, "_queued", 1 << 40)
            next(answer)
            full.setattr(cache._writer, "_queued", cache._writer._queued - (1 << 40))
        list(answer)
        length = len(cache.tokens_of(PROMPT))
    assert found(opened) == length


def test_with_its_last_token_a_prompt_is_written(opened, steps):
    """Nobody may ever ask for more."""
    with opened() as cache:
        answer = cache.stream_generate(PROMPT, max_tokens=1)
        assert next(answer).finish_reason == "length"
        assert "queued" in steps
        assert not cache._held


def test_an_interrupt_while_it_is_saved_holds_nothing_back(opened, monkeypatch):
    finished = Recording.finished

    def interrupted(self, *args, **more) -> None:
        finished(self, *args, **more)
        raise KeyboardInterrupt

    with opened() as cache:
        monkeypatch.setattr(Recording, "finished", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(cache.stream_generate(PROMPT, max_tokens=9))
        assert not cache._held


def test_what_the_queue_has_no_room_for_is_a_hole(opened, monkeypatch):
    """And nothing is published after it."""
    with opened() as cache:
        with monkeypatch.context() as full:
            full.setattr(Writer, "offer", lambda _, job, **more: job.give_back())
            answer = cache.stream_generate(PROMPT, max_tokens=9)
            next(answer)
            recording = next(iter(cache._held))
            next(answer)
        list(answer)
        assert recording._failed
        assert not recording._waiting
    assert found(opened) == 0


def test_a_prefill_of_one_s_own_is_queued_at_once(opened, steps):
    with opened() as cache:
        cache.prefill(cache.tokens_of(PROMPT))
        assert steps == ["copied", "queued", "queued"], "rows, and logits"
