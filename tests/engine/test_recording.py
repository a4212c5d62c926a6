"""What of a request is saved when, and that saving never stands in the engine's way."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from recording_support import INTERVAL, SPECS, FakeLive, FakeSpace, fake_plan, spans, state_at

import kvstore_mlx.recording as recording_module
from kvstore import NamespaceInfo, TensorSpec, UnavailableError
from kvstore_mlx.forms import Form
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.jobs import Boundary, Job
from kvstore_mlx.live import Extras
from kvstore_mlx.recording import Recording
from kvstore_mlx.writer import Writer


@pytest.fixture
def stateful(store):
    return Form(fake_plan(stateful=True), store.namespace(NamespaceInfo({"model": "fake, stateful"})))


def record(form, writer, prompt, *, known=0, decoded=False, **more):
    return Recording(FakeSpace(form), writer, prompt, saved={form: 0}, known=known, decoded=decoded, **more)


def look(recording, *counts):
    """Steps of a prefill, as the engine's wrapper looks at them."""
    lives = [FakeLive(count) for count in counts]
    for live in lives:
        if recording.wants(live.count):
            recording.reached(live, None, live.count)
    return lives


def test_each_boundary_copies_only_what_is_new(form, writer):
    prompt = list(range(1, 301))
    recording = record(form, writer, prompt, phase=24)
    steps = look(recording, 100, 200, 299)
    assert [live.copied for live in steps] == [[], [(0, 128)], [(128, 256)]]
    assert recording.prompt_due
    first = FakeLive(301)
    recording.first_token(first, None, 301)
    # The prompt's last token is computed with the first decode step, so the boundary lies before it.
    assert first.copied == [(256, 299)]
    assert not recording.prompt_due
    end = FakeLive(310)
    recording.finished(end, 310, prompt + [9] * 10)
    assert end.copied == [(299, 310)]
    assert writer.drain(10)
    match = form.namespace.lookup(prompt + [9] * 10)
    assert (match.count, match.exact) == (310, True)
    # A model whose prefixes can be cut anywhere needs no state.
    assert all(not live.states for live in (*steps, first, end))


def test_a_form_that_is_off_is_neither_copied_nor_missed(stateful, writer):
    """What the lookup left out, because its writes read back otherwise, may still be what the caches have."""
    recording = Recording(
        FakeSpace(stateful), writer, range(1, 301), saved={}, known=0, decoded=False, boundaries=[128, 256]
    )
    lives = [*look(recording, 128, 256), FakeLive(301), FakeLive(310)]
    recording.first_token(lives[2], None, 301)
    recording.finished(lives[3], 310, range(1, 311))
    assert all(live.copied == [] and not live.states for live in lives)
    assert not recording._held
    assert writer.drain(10)
    assert stateful.namespace.lookup(range(1, 311)).count == 0


def test_decoded_tokens_are_marked(form, writer):
    prompt = list(range(1, 121))
    recording = record(form, writer, prompt)
    recording.finished(FakeLive(140), 140, prompt + [9] * 20)
    assert writer.drain(10)
    assert spans(form, prompt + [9] * 20) == [(0, 119, False), (119, 9, True), (128, 12, True)]


def test_what_came_from_elsewhere_is_not_called_prefill(form, writer):
    recording = record(form, writer, range(1, 128), known=70, decoded=True)
    recording.first_token(FakeLive(127), None, 127)
    assert writer.drain(10)
    assert spans(form, range(1, 128)) == [(0, 70, True), (70, 56, False)]


def test_what_is_known_to_be_prefilled_stays_so(form, writer):
    """With --kv-cache-exact nothing else is restored."""
    recording = record(form, writer, range(1, 128), known=70, decoded=False)
    recording.first_token(FakeLive(127), None, 127)
    assert writer.drain(10)
    assert spans(form, range(1, 128)) == [(0, 70, False), (70, 56, False)]


def test_what_is_saved_is_not_copied_again(form, writer):
    prompt = list(range(1, 301))
    record(form, writer, prompt).finished(FakeLive(300), 300, prompt)
    assert writer.drain(10)
    recording = Recording(FakeSpace(form), writer, prompt, saved={form: 300}, known=299, decoded=True)
    assert not recording.wants(300)
    assert not recording.prompt_due
    again = FakeLive(310)
    recording.finished(again, 310, prompt + [9] * 10)
    assert again.copied == [(300, 310)]


def test_short_prompts_are_left_alone(form, writer):
    recording = record(form, writer, range(1, 40))
    live = FakeLive(50)
    recording.finished(live, 50, range(1, 51))
    assert live.copied == []


def test_only_forwarded_tokens_are_saved(form, writer):
    """The last token of an answer was chosen and never shown to the model."""
    prompt = list(range(1, 121))
    recording = record(form, writer, prompt)
    recording.finished(FakeLive(139), None, prompt + [9] * 20)
    assert writer.drain(10)
    assert form.namespace.lookup(prompt + [9] * 20).count == 139
    # And with a draft model the caches may hold tokens that were drafted and not kept.
    other = record(form, writer, [7, *prompt])
    other.finished(FakeLive(139), None, [7, *prompt, 9, 9])
    assert writer.drain(10)
    assert form.namespace.lookup([7, *prompt, 9, 9, 9, 9]).count == 123


class TestStates:
    def test_a_state_at_each_boundary(self, stateful, writer):
        prompt = list(range(1, 301))
        recording = record(stateful, writer, prompt, boundaries=(100, 128, 256, 299))
        assert recording.boundaries == [100, 128, 256, 299]
        assert [recording.wants(done) for done in (99, 100, 101)] == [False, True, False]
        steps = look(recording, 100, 128, 200, 256, 299)
        assert [live.states for live in steps] == [[False], [False], [], [False], [False]]
        assert [live.copied for live in steps] == [[(0, 100)], [(100, 128)], [], [(128, 256)], []]
        recording.first_token(FakeLive(301), None, 301)
        recording.finished(FakeLive(310), 310, prompt + [9] * 10)
        assert writer.drain(10)
        saved = prompt + [9] * 10
        for end in (100, 128, 256, 299, 310):
            assert state_at(stateful, saved[:end]) == {"tokens": end}
        for end in (99, 200, 300, 309):
            assert state_at(stateful, saved[:end]) is None

    def test_the_state_before_the_first_token_waits_with_its_rows(self, stateful, writer):
        """It is copied at once, because the next step changes it, and written later, because that takes time."""
        prompt = list(range(1, 101))
        recording = record(stateful, writer, prompt, boundaries=(99,))
        (live,) = look(recording, 99)
        assert (live.states, live.copied) == ([False], [])
        assert writer.drain(10)
        assert state_at(stateful, prompt[:99]) is None
        recording.first_token(FakeLive(101), None, 101)
        assert writer.drain(10)
        assert state_at(stateful, prompt[:99]) == {"tokens": 99}

    def test_a_cancelled_request_keeps_its_boundaries(self, stateful, writer):
        prompt = list(range(1, 601))
        look(record(stateful, writer, prompt, boundaries=(128, 256, 384, 512, 599)), 128, 256, 300)
        assert writer.drain(10)
        assert state_at(stateful, prompt[:256]) == {"tokens": 256}
        assert stateful.namespace.lookup(prompt, trimmable=False).count == 256

    def test_what_was_decoded_says_so(self, stateful, writer):
        prompt = list(range(1, 201))
        recording = record(stateful, writer, prompt, boundaries=(128, 199))
        (at_128, at_199) = look(recording, 128, 199)
        end = FakeLive(220)
        recording.finished(end, 220, prompt + [9] * 20)
        assert (at_128.states, at_199.states, end.states) == ([False], [False], [True])
        # On top of what may have been decoded nothing is a prefill's any more.
        later = record(stateful, writer, [*prompt, *[9] * 100], known=220, decoded=True, boundaries=(256,))
        (live,) = look(later, 256)
        assert live.states == [True]

    def test_boundaries_within_what_is_known_are_left_out(self, stateful, writer):
        recording = record(stateful, writer, range(300), known=128, boundaries=(100, 128, 256))
        assert recording.boundaries == [256]

    def test_a_state_is_saved_although_its_rows_are(self, stateful, writer):
        """Another server may have published the rows, or a state may have been thinned out."""
        prompt = list(range(1, 301))
        record(stateful, writer, prompt).finished(FakeLive(256), 256, prompt[:256])
        assert writer.drain(10)
        recording = Recording(
            FakeSpace(stateful), writer, prompt, saved={stateful: 256}, known=0, decoded=False, boundaries=(128,)
        )
        (live,) = look(recording, 128)
        assert (live.states, live.copied) == ([False], [])
        assert writer.drain(10)
        assert state_at(stateful, prompt[:128]) == {"tokens": 128}

    def test_logits_and_extras_are_part_of_it(self, stateful, writer):
        prompt = list(range(1, 101))
        asked = []

        def extras():
            asked.append(1)
            return Extras(values={"mine": len(asked)})

        recording = record(stateful, writer, prompt, boundaries=(80,), prompt_end=100, extras=extras)
        look(recording, 80)
        recording.finished(FakeLive(100), 100, prompt, logits="some")
        assert writer.drain(10)
        assert state_at(stateful, prompt[:80]) == {"tokens": 80, "mine": 1}
        assert state_at(stateful, prompt) == {"tokens": 100, "mine": 2, "logits": "some"}

    def test_an_answer_with_logits_of_a_model_without_states(self, form, writer):
        prompt = list(range(1, 101))
        recording = record(form, writer, prompt, prompt_end=100)
        recording.finished(FakeLive(100), 100, prompt, logits="some")
        assert writer.drain(10)
        assert state_at(form, prompt) == {"tokens": 100, "logits": "some"}


class TestTwoForms:
    """--kv-bits: plain caches until a length, then quantized ones; neither may end up in the other's namespace."""

    def test_each_form_gets_what_it_held(self, store, writer):
        forms = [Form(fake_plan(), store.namespace(NamespaceInfo({"form": name}))) for name in ("plain", "quantized")]
        space = FakeSpace(*forms)
        prompt = list(range(1, 601))
        recording = Recording(space, writer, prompt, saved=dict.fromkeys(forms, 0), known=0, decoded=False)
        recording.reached(FakeLive(128), None, 128)
        space.form = forms[1]
        later = FakeLive(512)
        recording.reached(later, None, 512)
        assert later.copied == [(0, 128), (128, 256), (256, 384), (384, 512)]
        assert writer.drain(10)
        assert [form.namespace.lookup(prompt).count for form in forms] == [128, 512]

    def test_a_state_of_the_other_form_is_not_saved_with_these_rows(self, store, writer):
        forms = [
            Form(fake_plan(stateful=True), store.namespace(NamespaceInfo({"form": name}))) for name in ("plain", "q")
        ]
        space = FakeSpace(*forms)
        prompt = list(range(1, 101))
        recording = Recording(
            space, writer, prompt, saved=dict.fromkeys(forms, 0), known=0, decoded=False, boundaries=(99,)
        )
        look(recording, 99)
        space.form = forms[1]
        recording.finished(FakeLive(110), 110, prompt + [9] * 10)
        assert writer.drain(10)
        assert state_at(forms[1], prompt[:99]) is None
        assert state_at(forms[1], prompt + [9] * 10) == {"tokens": 110}


class Slow(Writer):
    """A writer whose disk waits for permission."""

    def __init__(self, *args, **kwargs) -> None:
        self.go = threading.Event()
        super().__init__(*args, **kwargs)

    def _write(self, job) -> None:
        self.go.wait(10)
        super()._write(job)


def test_a_full_queue_is_caught_up_later_without_a_hole(store, form):
    chunk = INTERVAL * 2 * 2 * 16
    writer = Slow(Housekeeping(store, 1 << 30), max_queued=chunk)
    prompt = list(range(1, 500))
    recording = record(form, writer, prompt)
    look(recording, 128)
    started = time.monotonic()
    look(recording, 256)
    assert time.monotonic() - started < 1  # an offer never waits
    assert recording.wants(256)  # It was refused.
    writer.go.set()
    assert writer.drain(10)
    (late,) = look(recording, 384)
    assert late.copied == [(128, 256)]  # There is room for one at a time.
    assert writer.drain(10)
    (last,) = look(recording, 384)
    assert last.copied == [(256, 384)]
    assert writer.close(10)
    assert form.namespace.lookup(prompt).count == 384


def test_what_the_queue_has_no_room_for_is_not_copied_first(store, stateful):
    """At each step again, and more of it each time: memory came back for rows, and a state beside them was too much."""
    rows, state = INTERVAL * 2 * 2 * 16, 16
    writer = Slow(Housekeeping(store, 1 << 30), max_queued=2 * rows + state)
    prompt = list(range(1, 500))
    recording = record(stateful, writer, prompt, boundaries=(128, 256))
    look(recording, 128)
    assert writer.queued == rows + state
    assert [live.copied for live in look(recording, 256, 300)] == [[], []]
    writer.go.set()
    assert writer.drain(10)
    (last,) = look(recording, 384)
    assert last.copied == [(128, 256), (256, 384)]
    assert writer.close(10)
    assert state_at(stateful, prompt[:256]) == {"tokens": 256}


@pytest.mark.parametrize("room", ["for all", "for the last"])
def test_a_state_that_was_refused_is_caught_up_with_like_its_rows(store, stateful, monkeypatch, room):
    """It was copied when the caches held it. No more are kept than there is room for, and no hole is left."""
    if room == "for the last":
        monkeypatch.setattr(recording_module, "MAX_HELD_BYTES", 0)
    writer = Slow(Housekeeping(store, 1 << 30), max_queued=2 * INTERVAL * 2 * 2 * 16 + 64)
    prompt = list(range(1, 500))
    recording = record(stateful, writer, prompt, boundaries=(128, 256, 384, 448, 480))
    look(recording, 128, 256, 384, 448)
    writer.go.set()
    assert writer.drain(10)
    look(recording, 480)
    assert writer.close(10)
    states = [state_at(stateful, prompt[:end]) for end in (128, 256, 384, 448, 480)]
    third = {"tokens": 384} if room == "for all" else None
    assert states == [{"tokens": 128}, {"tokens": 256}, third, {"tokens": 448}, {"tokens": 480}]


def test_the_states_that_wait_have_one_bound_for_all_recordings(store, stateful, monkeypatch):
    """Each has its last one beside that; the room of one that is over goes to the others."""
    size = Boundary(1, FakeLive(1).state(decode=False)).payload_bytes
    monkeypatch.setattr(recording_module, "MAX_HELD_BYTES", 5 * size)
    writer = Slow(Housekeeping(store, 1 << 30), max_queued=1)
    borders = (128, 192, 256, 320, 384)
    prompts = [list(range(seed, seed + 500)) for seed in range(1, 33)]
    recordings = [record(stateful, writer, prompt, boundaries=borders) for prompt in prompts]
    look(record(stateful, writer, list(range(900, 1200))), 128)  # it fills the queue
    for recording in recordings:
        look(recording, *borders)
    held = [sorted(recording._held) for recording in recordings]
    assert held == [[*borders], [320, 384], *[[384]] * 30]
    del recording, recordings[0]
    late = record(stateful, writer, list(range(700, 1200)), boundaries=borders)
    look(late, *borders)
    assert sorted(late._held) == [*borders]
    writer.go.set()
    assert writer.close(10)


def test_a_recording_that_is_gone_holds_nothing_although_its_job_is_queued_still(store, stateful, monkeypatch):
    """While the disk is slow, the states of a request that is over took the room of those that are not."""
    size = Boundary(1, FakeLive(1).state(decode=False)).payload_bytes
    monkeypatch.setattr(recording_module, "MAX_HELD_BYTES", 4 * size)
    borders = (128, 192, 256, 320, 384)
    over = list(range(1, 501))
    rows = sum(spec.span_bytes(INTERVAL) for spec in SPECS)
    writer = Slow(Housekeeping(store, 1 << 30), max_queued=rows + size)
    recording = record(stateful, writer, over, boundaries=borders)
    look(recording, *borders)
    assert writer.queued > 0
    assert len(recording._held) > 1
    del recording
    late = record(stateful, writer, list(range(700, 1200)), boundaries=borders)
    look(late, *borders)
    assert sorted(late._held) == [*borders]
    writer.go.set()
    assert writer.close(10)


def test_nan_is_not_saved(form, writer, caplog):
    class Bad(FakeLive):
        def copy(self, first: int, end: int, into=None):
            parts = super().copy(first, end)
            parts[1].view(np.float32)[3] = np.nan
            return parts

    recording = record(form, writer, range(1, 300))
    recording.reached(Bad(128), None, 128)
    assert writer.drain(10)
    assert "NaN or infinity" in caplog.text
    assert form.namespace.lookup(range(1, 300)).count == 0
    (after,) = look(recording, 256)
    assert after.copied == []  # nothing is saved after a hole
    assert not recording.prompt_due


def test_a_failing_disk_is_one_warning_and_no_exception(form, writer, caplog, monkeypatch):
    def fail(*_):
        raise UnavailableError("cannot use the cache directory: the disk is full")

    monkeypatch.setattr(type(form.namespace), "publish", fail)
    for _ in range(3):
        look(record(form, writer, range(1, 300)), 128)
        assert writer.drain(10)
    assert caplog.text.count("the disk is full") == 1


def test_a_closed_writer_takes_nothing(store, form):
    writer = Writer(Housekeeping(store, 1 << 30))
    assert writer.close(10)
    assert not writer.offer(Job(form, b"", []))


def test_a_budget_smaller_than_a_prompt_keeps_its_beginning(store, form, caplog):
    """2 MiB of KV into a directory of 1.5 MiB: the first chunks stay, and nothing is written and deleted in turn."""
    big = (TensorSpec("0.keys", "F32", 16, (64,)),)

    from kvstore.gc import usage

    budget = usage(store.context) + (3 << 19)
    writer = Writer(Housekeeping(store, budget))
    prompt = list(range(1, 600))
    recording = record(form, writer, prompt)
    for count in (128, 256, 384, 512):
        recording.reached(FakeLive(count, big), None, count)
        assert writer.drain(10)
    assert writer.close(10)
    assert form.namespace.lookup(prompt).count == 256
    assert usage(store.context) <= budget
    assert caplog.text.count("the budget (--kv-cache-size) is used up") == 1


def test_the_fake_is_like_the_real_thing():
    """FakeLive has what Recording uses of Live and Rows."""
    from kvstore_mlx.live import Live, Rows

    assert {"count", "rows", "state"} <= set(vars(Live))
    assert {"specs", "count"} <= set(Rows.__dataclass_fields__)
    assert FakeLive(9).specs == SPECS
