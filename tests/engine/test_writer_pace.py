"""How much of its time the writer takes."""

from __future__ import annotations

import time

import pytest
from core_support import open_store
from writer_support import MIB, TOKENS, Form, job_of

from kvstore import NamespaceInfo
from kvstore_mlx import writer as writer_module
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.writer import Writer


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "cache", interval=32) as made:
        yield made


@pytest.fixture
def form(store):
    return Form(store.namespace(NamespaceInfo({"model": "writer"})))


class TestPace:
    """Beside an engine at work the thread takes a small part of its time, unless somebody waits for it."""

    @pytest.fixture
    def now(self):
        return [100.0]

    @pytest.fixture
    def writer(self, store, now):
        made = Writer(Housekeeping(store, 1 << 30), max_queued=8 * MIB, monotonic=lambda: now[0])
        yield made
        made.close(10)

    def test_beside_nothing_it_never_rests(self, writer):
        assert writer._share() == 1.0

    def test_beside_a_token_and_a_while_after(self, writer, now):
        writer.stepped()
        assert writer._share() == writer_module.BUSY_SHARE
        now[0] += 1.1
        assert writer._share() == 1.0

    def test_beside_a_prefill_until_the_request_ends(self, writer, now, monkeypatch):
        writer.prefilling()
        now[0] += 20
        assert writer._share() == writer_module.BUSY_SHARE, "a little can wait until the first token is out"
        monkeypatch.setattr(writer_module, "PREFILL_BYTES", MIB)
        writer._queued = MIB
        assert writer._share() == pytest.approx(writer_module.PREFILL_SHARE)
        writer.stepped()
        assert writer._share() == writer_module.BUSY_SHARE, "tokens come more often"
        now[0] += 5
        assert writer._share() == pytest.approx(writer_module.PREFILL_SHARE)
        writer._queued = 0
        writer.idle()
        assert writer._share() == 1.0

    def test_a_request_that_never_ends_does_not_slow_it_for_ever(self, writer, now):
        writer.prefilling()
        now[0] += 31
        assert writer._share() == 1.0

    @pytest.mark.parametrize(("filled", "least", "most"), [(0.3, 0.0, 0.02), (0.6, 0.2, 0.6), (0.95, 0.8, 1.0)])
    def test_a_fuller_queue_is_written_faster(self, writer, filled, least, most):
        writer.stepped()
        writer._queued = int(filled * 8 * MIB)
        assert least < writer._share() <= most
        writer._queued = 0

    def test_who_waits_for_it_does_not_wait_for_its_rests(self, writer, form, monkeypatch):
        monkeypatch.setattr(writer_module, "BUSY_SHARE", 1e-9)
        monkeypatch.setattr("kvstore.pacing._WORTH_A_REST_S", 0.0)
        monkeypatch.setattr("kvstore.pacing._LONGEST_REST_S", 1e9)
        writer.stepped()
        writer.offer(job_of(writer, form, 0, 32, 64))
        time.sleep(0.3)
        assert writer.queued, "it would take years"
        started = time.monotonic()
        assert writer.drain(10)
        assert time.monotonic() - started < 5
        assert form.namespace.lookup(TOKENS).count == 64

    def test_an_interrupt_while_it_is_waited_for_does_not_hurry_it_for_good(self, writer, monkeypatch):
        """Found by review: what is put back in the end was changed before the try."""

        def interrupted():
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(writer._changed, "notify_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.drain(1)
        writer.stepped()
        assert writer._share() == writer_module.BUSY_SHARE
