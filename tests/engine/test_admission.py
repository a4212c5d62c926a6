"""A full directory and a recording: what is refused ends the saving of that prompt, and nothing else."""

from __future__ import annotations

import logging
import threading

from recording_support import INTERVAL, FakeLive, FakeSpace

from kvstore import Span, TensorSpec
from kvstore.gc import usage
from kvstore.keys import pack_tokens
from kvstore_mlx.forms import Form
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.jobs import Boundary, Job
from kvstore_mlx.recording import Recording
from kvstore_mlx.refusals import Refusal
from kvstore_mlx.writer import Writer

BIG = (TensorSpec("0.keys", "F32", 16, (64,)), TensorSpec("0.values", "F32", 16, (64,)))
CHUNK = INTERVAL * 2 * 16 * 64 * 4


def save(form: Form, writer: Writer, prompt: list[int], chunks: int) -> Recording:
    """A request's prefill, chunk by chunk."""
    match = form.namespace.lookup(pack_tokens(prompt))
    writer.asked(form, match)
    recording = Recording(FakeSpace(form), writer, prompt, saved={form: match.border}, known=0, decoded=False)
    for chunk in range(1, chunks + 1):
        recording.reached(FakeLive(chunk * INTERVAL, BIG), None, chunk * INTERVAL)
        assert writer.drain(30)
    return recording


def test_the_second_of_two_prompts_is_left_out_without_a_warning(store, form, caplog):
    caplog.set_level(logging.INFO, "kvstore")
    first, second = list(range(1, 600)), list(range(1001, 1600))
    house = Housekeeping(store, usage(store.context) + 5 * CHUNK)
    writer = Writer(house)
    save(form, writer, first, 4)
    recording = save(form, writer, second, 4)
    assert writer.close(30)
    assert form.namespace.lookup(first).count == 4 * INTERVAL
    assert form.namespace.lookup(second).count == 0
    assert not recording.wants(4 * INTERVAL), "nothing more is copied for it"
    assert set(house.refused) == {Refusal.WARM}
    assert usage(store.context) <= house.budget
    assert [record.levelname for record in caplog.records if "wanted as much" in record.message] == ["INFO"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_what_will_be_left_out_is_not_copied_first(store, form, monkeypatch):
    house = Housekeeping(store, usage(store.context) + 5 * CHUNK)
    writer = Writer(house)
    lent = []
    monkeypatch.setattr(writer, "lend", lambda size, lend=writer.lend: lent.append(size) or lend(size))
    save(form, writer, list(range(1, 600)), 4)
    save(form, writer, list(range(1001, 1600)), 4)
    assert len(lent) == 5, "the first that is refused was copied: how cold the coldest is was not known"
    recording = save(form, writer, list(range(2001, 2600)), 4)
    assert len(lent) == 5
    assert not recording.wants(4 * INTERVAL)
    assert house.refused == {Refusal.WARM: 2}
    assert store.context.counters.refused_prompts == 2
    assert writer.close(30)


def test_a_prompt_whose_chunks_are_queued_is_refused_once(store, form, monkeypatch):
    """Found by review: what stood behind the chunk that was refused was counted, too, and others could go for it."""
    house = Housekeeping(store, usage(store.context) + CHUNK // 2)
    writer = Writer(house)
    go, asked = threading.Event(), []
    make_room = house.make_room

    def looked(*args, **more):
        assert go.wait(30)
        asked.append(1)
        return make_room(*args, **more)

    monkeypatch.setattr(house, "make_room", looked)
    recording = Recording(FakeSpace(form), writer, range(1, 600), saved={form: 0}, known=0, decoded=False)
    for chunk in range(1, 4):
        recording.reached(FakeLive(chunk * INTERVAL, BIG), None, chunk * INTERVAL)
    go.set()
    assert writer.close(30)
    assert sum(house.refused.values()) == store.counters.refused_prompts == len(asked) == 1
    assert not recording.wants(4 * INTERVAL)


def test_of_two_samples_of_one_prompt_the_second_is_not_refused_what_the_first_saved(store, form):
    """Found by review: a full directory refused what it had just taken in, and all that was to come behind it."""
    prompt = list(range(1, 600))
    house = Housekeeping(store, usage(store.context) + 5 * CHUNK)
    writer = Writer(house)
    second = Recording(FakeSpace(form), writer, prompt, saved={form: 0}, known=0, decoded=False)
    save(form, writer, prompt, 4)
    save(form, writer, list(range(1001, 1600)), 1)
    refused = house.refused
    assert refused == {Refusal.WARM: 1}, "it is full"
    for chunk in range(1, 5):
        second.reached(FakeLive(chunk * INTERVAL, BIG), None, chunk * INTERVAL)
    assert writer.close(30)
    assert house.refused == refused
    assert second._saved[form] == 4 * INTERVAL
    assert not second._failed


def test_a_state_that_is_there_already_needs_no_room_and_another_does(store, form):
    house = Housekeeping(store, usage(store.context) + 5 * CHUNK)
    writer = Writer(house)

    def saved(first: int, *, state: bool) -> bool:
        live = FakeLive(INTERVAL, BIG)
        items: list[Span | Boundary] = [Span(0, INTERVAL, BIG, live.copy(0, INTERVAL))]
        items += [Boundary(INTERVAL, live.state(decode=False))] if state else []
        tokens = pack_tokens(range(first, first + INTERVAL))
        job = Job(form, tokens, items)
        assert writer.offer(job)
        assert writer.drain(30)
        return not job.fate.broken

    assert saved(1, state=True)
    assert saved(1001, state=False)
    house._budget = house.used
    assert saved(1, state=True)
    assert house.refused == {}
    assert not saved(1001, state=True)
    assert writer.close(30)


def test_a_write_limit_ends_the_saving_of_a_prompt_at_a_chunk(store, form):
    prompt = list(range(1, 600))
    house = Housekeeping(store, 1 << 40, write_limit=2 * CHUNK + CHUNK // 2)
    writer = Writer(house)
    save(form, writer, prompt, 4)
    assert writer.close(30)
    assert form.namespace.lookup(prompt).count == 2 * INTERVAL
    assert house.refused[Refusal.LIMIT] == 1
    counters = store.context.counters
    assert counters.saved_tokens == 2 * INTERVAL
    assert 1.0 <= counters.written_bytes / (counters.saved_tokens * CHUNK / INTERVAL) < 1.02
