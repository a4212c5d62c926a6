"""SIGTERM and Ctrl-C finish what was begun and exit 0."""

from __future__ import annotations

import http.client
import signal
import threading
import time

import pytest
from engine_support import conversation, polls, wait_saved

FLAGS = ("--kv-cache-interval", "256")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_under_way_is_finished(serve, tiny_llama, tmp_path, number):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    answers = []
    client = threading.Thread(target=lambda: answers.append(server.chat(conversation(3), max_tokens=200)))
    client.start()
    server.wait_log("kvstore: reused")
    server.process.send_signal(number)
    assert server.process.wait(60) == 0
    client.join(10)
    (answer,) = answers
    assert len(answer.ids) == 200
    # What it computed was written before the process ended, and its staging folder is gone.
    restored = serve(tiny_llama, "--kv-cache-dir", str(directory)).chat(conversation(3), max_tokens=200)
    assert restored.cached_tokens == restored.prompt_tokens - 1
    assert restored.ids == answer.ids


def test_an_idle_server_stops_at_once(serve, tiny_llama, tmp_path):
    server = serve(tiny_llama, "--kv-cache-dir", str(tmp_path / "cache"))
    server.chat([{"role": "user", "content": "hi"}])
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 20  # It waits 30 s for a request.
    assert not list((tmp_path / "cache" / "tmp").iterdir())


def test_a_second_signal_does_not_wait(serve, tiny_llama, tmp_path):
    server = serve(tiny_llama, "--kv-cache-dir", str(tmp_path / "cache"), *FLAGS)
    client = threading.Thread(target=ask_and_be_cut_off, args=(server,))
    client.start()
    server.wait_log("kvstore: reused")
    for _ in polls(20):  # Two that come before the first is looked at are one.
        if server.process.poll() is not None:
            break
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert server.process.poll() == 1
    assert "stopped at once" in server.log
    client.join(10)


IMPATIENT = """
from kvstore.cli import main
from kvstore_mlx import running

running.DRAIN_REQUESTS_S = running.JOIN_S = 1.0
main()
"""


@pytest.mark.parametrize("more", [{}, {"seed": 1}], ids=["batched", "alone"])
def test_a_request_that_does_not_end_is_cut_off_and_what_was_saved_is_written(serve, tiny_llama, tmp_path, more):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS, command=("-c", IMPATIENT, "serve"))
    client = threading.Thread(target=ask_and_be_cut_off, args=(server,), kwargs=more)
    client.start()
    tokens = int(server.wait_log(r"kvstore: reused \d+ of \d+").split()[-1])
    wait_saved(server, directory, tokens - 1)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
    assert "were cut off" in server.log
    client.join(10)
    again = serve(tiny_llama, "--kv-cache-dir", str(directory)).chat(conversation(3), max_tokens=4)
    assert again.cached_tokens == again.prompt_tokens - 1


def ask_and_be_cut_off(server, **more) -> None:
    with pytest.raises((OSError, http.client.HTTPException)):
        server.chat(conversation(3), max_tokens=100_000, **more)
