"""What of a request is saved when, and that saving never stands in the engine's way."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvstore import NamespaceInfo, Store, TensorSpec, UnavailableError
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.recording import Recording
from kvstore_mlx.writer import Job, Writer

INTERVAL = 128
SPECS = (TensorSpec("0.keys", "F32", 2, (4,)), TensorSpec("0.values", "F32", 2, (4,)))


class FakeRows:
    """An engine's cache of count tokens whose KV is the token's index."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.copied: list[tuple[int, int]] = []

    def specs(self):
        return SPECS

    def copy(self, first: int, end: int):
        self.copied.append((first, end))
        run = np.repeat(np.arange(first, end, dtype=np.float32), 4)
        return [np.concatenate([run, run]).view(np.uint8) for _ in SPECS]


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "cache", interval=INTERVAL) as opened:
        yield opened


@pytest.fixture
def namespace(store):
    return store.namespace(NamespaceInfo({"model": "fake"}))


@pytest.fixture
def writer(store):
    made = Writer(Housekeeping(store, 1 << 30))
    yield made
    made.close(10)


def test_each_boundary_copies_only_what_is_new(namespace, writer):
    prompt = list(range(1, 301))
    recording = Recording(namespace, writer, prompt, saved=0, known=0, phase=24)
    steps = [FakeRows(100), FakeRows(200), FakeRows(299)]
    for rows in steps:
        if recording.completes_chunk(rows.count):
            recording.prefilled(rows)
    assert [rows.copied for rows in steps] == [[], [(0, 128)], [(128, 256)]]
    first = FakeRows(301)
    recording.first_token(first)
    # The prompt's last token is computed with the first decode step, so the boundary lies before it.
    assert first.copied == [(256, 299)]
    end = FakeRows(310)
    recording.finished(end, prompt + [9] * 10)
    assert end.copied == [(299, 310)]
    assert writer.drain(10)
    match = namespace.lookup(prompt + [9] * 10)
    assert (match.count, match.exact) == (310, True)


def test_decoded_tokens_are_marked(namespace, writer):
    prompt = list(range(1, 121))
    recording = Recording(namespace, writer, prompt, saved=0, known=0, phase=0)
    recording.finished(FakeRows(140), prompt + [9] * 20)
    assert writer.drain(10)
    (step, *_) = namespace.lookup(prompt + [9] * 8).steps
    from kvstore.manifest import decode

    blocks = decode(step.path.read_bytes()).blocks
    assert [(ref.first, ref.count, ref.decode) for ref in blocks] == [(0, 119, False), (119, 9, True)]


def test_what_came_from_elsewhere_is_not_called_prefill(namespace, writer):
    recording = Recording(namespace, writer, range(1, 128), saved=0, known=70, phase=0)
    recording.first_token(FakeRows(127))
    assert writer.drain(10)
    from kvstore.manifest import decode

    blocks = decode(namespace.lookup(range(1, 128)).steps[-1].path.read_bytes()).blocks
    assert [(ref.first, ref.count, ref.decode) for ref in blocks] == [(0, 70, True), (70, 56, False)]


def test_short_prompts_are_left_alone(namespace, writer):
    recording = Recording(namespace, writer, range(1, 40), saved=0, known=0, phase=0)
    rows = FakeRows(50)
    recording.finished(rows, range(1, 51))
    assert rows.copied == []


class Slow(Writer):
    """A writer whose disk waits for permission."""

    def __init__(self, *args, **kwargs) -> None:
        self.go = threading.Event()
        super().__init__(*args, **kwargs)

    def _write(self, job) -> None:
        self.go.wait(10)
        super()._write(job)


def test_a_full_queue_is_caught_up_later_without_a_hole(store, namespace):
    chunk = INTERVAL * 2 * 2 * 16
    writer = Slow(Housekeeping(store, 1 << 30), max_queued=chunk)
    prompt = list(range(1, 500))
    recording = Recording(namespace, writer, prompt, saved=0, known=0, phase=0)
    recording.prefilled(FakeRows(128))
    started = time.monotonic()
    refused = FakeRows(256)
    recording.prefilled(refused)
    assert time.monotonic() - started < 1  # an offer never waits
    assert recording.saved == 128
    writer.go.set()
    assert writer.drain(10)
    late = FakeRows(384)
    recording.prefilled(late)
    assert late.copied == [(128, 256), (256, 384)]
    assert writer.close(10)
    assert namespace.lookup(prompt).count == 384


def test_nan_is_not_saved(namespace, writer, caplog):
    class Bad(FakeRows):
        def copy(self, first: int, end: int):
            parts = super().copy(first, end)
            parts[1].view(np.float32)[3] = np.nan
            return parts

    recording = Recording(namespace, writer, range(1, 300), saved=0, known=0, phase=0)
    recording.prefilled(Bad(128))
    assert writer.drain(10)
    assert "NaN or infinity" in caplog.text
    assert namespace.lookup(range(1, 300)).count == 0
    after = FakeRows(256)
    recording.prefilled(after)
    assert after.copied == []  # nothing is saved after a hole


def test_a_failing_disk_is_one_warning_and_no_exception(namespace, writer, caplog, monkeypatch):
    def fail(*_):
        raise UnavailableError("cannot use the cache directory: the disk is full")

    monkeypatch.setattr(type(namespace), "publish", fail)
    for _ in range(3):
        recording = Recording(namespace, writer, range(1, 300), saved=0, known=0, phase=0)
        recording.prefilled(FakeRows(128))
        assert writer.drain(10)
    assert caplog.text.count("the disk is full") == 1


def test_a_closed_writer_takes_nothing(store, namespace):
    writer = Writer(Housekeeping(store, 1 << 30))
    assert writer.close(10)
    assert not writer.offer(Job(namespace, b"", []))


def test_a_budget_smaller_than_a_prompt_keeps_its_beginning(store, namespace, caplog):
    """2 MiB of KV into a directory of 1.5 MiB: the first chunks stay, and nothing is written and deleted in turn."""
    big = (TensorSpec("0.keys", "F32", 16, (64,)),)

    class Big(FakeRows):
        def specs(self):
            return big

        def copy(self, first: int, end: int):
            return [np.ones((16, end - first, 64), np.float32).view(np.uint8)]

    from kvstore.gc import usage

    budget = usage(store.context) + (3 << 19)
    writer = Writer(Housekeeping(store, budget))
    prompt = list(range(1, 600))
    recording = Recording(namespace, writer, prompt, saved=0, known=0, phase=0)
    for count in (128, 256, 384, 512):
        recording.prefilled(Big(count))
        assert writer.drain(10)
    assert writer.close(10)
    assert namespace.lookup(prompt).count == 256
    assert usage(store.context) <= budget
    assert caplog.text.count("the budget (--kv-cache-size) is used up") == 1
