"""What a server's cache does is told: in responses, at /metrics and /health, and in the directory over restarts."""

from __future__ import annotations

import errno
import gc
import io
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from itertools import count, islice, pairwise
from types import SimpleNamespace

import pytest
from core_support import open_store
from engine_support import conversation, wait_saved
from prometheus_client.parser import text_string_to_metric_families

import kvstore_mlx
from kvstore import KVStoreError, NamespaceInfo
from kvstore.commit import put_file
from kvstore.stats import read_stats
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.http import reporting_handler
from kvstore_mlx.metrics import BUCKETS, Fetched, Histogram, Metrics, Served
from kvstore_mlx.refusals import Refusal
from kvstore_mlx.tier import TieredPromptCache


@pytest.fixture
def metrics(tmp_path):
    """Metrics whose clock goes on by a second each time it is asked."""
    with open_store(tmp_path / "s") as store:
        seconds = count(100.0)
        metrics = Metrics(store, lambda: next(seconds))
        yield metrics
        metrics.close()


def scrape(text: str) -> dict[str, float]:
    """Samples by name and labels."""
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_histograms_are_cumulative_and_end_with_all():
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.002, 0.7, 1000.0):
        histogram.observe(seconds)
    rows, total = histogram.snapshot()
    assert total == pytest.approx(1000.703)
    assert [bound for bound, _ in rows] == [*map(str, BUCKETS), "+Inf"]
    assert all(a <= b for (_, a), (_, b) in pairwise(rows))
    assert (dict(rows)["0.001"], dict(rows)["0.0025"], dict(rows)["300.0"], rows[-1][1]) == (2, 3, 4, 5)


def test_a_request_is_counted_once_and_by_where_its_tokens_came_from(metrics):
    served = Served()
    metrics.begin(served)
    wrote = metrics.fetched(Fetched(100, 60, "disk", 4096, 0.01, 0.2, 60, differs=True))
    metrics.fetched(Fetched(50, 40, "memory", lookup_s=0.01))  # nobody told whose
    metrics.fetched(Fetched(30))
    assert list(metrics.watched(served, iter("abc"))) == ["a", "b", "c"]
    wrote(64, 1000, 0.5)
    wrote(36, 600, 0.25)
    assert served.document() == {
        "tier": "disk",
        "prompt_tokens": 100,
        "reused_tokens": 60,
        "restored_tokens": 60,
        "restored_bytes": 4096,
        "matched_tokens": 60,
        "differs_at": 60,
        "written_tokens": 100,
        "written_bytes": 1600,
        "lookup_seconds": 0.01,
        "restore_seconds": 0.2,
        "prefill_seconds": 3.0,
        "publish_seconds": 0.75,
    }
    body, content_type = metrics.exposition("", {"queued_bytes": ("What waits", 5.0)})
    assert content_type.startswith("text/plain")
    samples = scrape(body.decode())
    assert samples["kvstore_requests_total"] == 3
    assert samples["kvstore_prompt_tokens_total"] == 180
    assert samples["kvstore_reused_tokens_total{tier=disk}"] == 60
    assert samples["kvstore_reused_tokens_total{tier=memory}"] == 40
    assert samples["kvstore_generated_tokens_total"] == 3
    assert samples["kvstore_restore_seconds_count"] == 1
    assert samples["kvstore_publish_seconds_sum"] == 0.75
    assert samples["kvstore_prefill_seconds_bucket{le=5.0}"] == 1
    assert samples["kvstore_queued_bytes"] == 5
    assert samples["kvstore_damaged_total"] == 0
    openmetrics, content_type = metrics.exposition("application/openmetrics-text; version=1.0.0", {})
    assert content_type.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")


def test_what_is_refused_is_told_by_reason(metrics):
    """A write limit that was set too low, or a directory too small, shows nowhere else but in a line of the log."""
    nothing = dict.fromkeys(("full", "warm", "limit", "busy", "failed"), 0)
    assert metrics.refused() == nothing
    store = metrics._store
    space = store.namespace(NamespaceInfo({"model": "refused"}))
    house = Housekeeping(store, 1 << 30, 1000)
    assert house.make_room(1001, space, bytes(64)) is Refusal.LIMIT
    assert house.make_room(2000, space, bytes(64)) is Refusal.LIMIT
    assert metrics.refused() == {**nothing, "limit": 2}
    samples = scrape(metrics.exposition("", {})[0].decode())
    assert samples["kvstore_refused_prompts_total{reason=limit}"] == 2
    assert samples["kvstore_refused_prompts_total{reason=warm}"] == 0


def test_a_request_that_never_got_to_its_lookup(metrics):
    document = Served().document()
    assert (document["tier"], document["prompt_tokens"], document["prefill_seconds"]) == ("none", 0, None)
    assert list(metrics.watched(Served(), iter([1]))) == [1]


def test_a_stream_that_is_cut_off_ends_what_it_came_from(metrics):
    ended = []

    def responses():
        try:
            yield from range(10)
        finally:
            ended.append(True)

    watched = metrics.watched(Served(), responses())
    next(watched)
    watched.close()
    assert ended == [True]
    assert metrics.totals.generated_tokens == 1


class Noting:
    """A lock that notes how often it is taken."""

    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *_) -> None: ...


def test_a_stream_that_nobody_closes_takes_no_lock_when_it_is_collected(metrics, monkeypatch):
    """Found by review: that may be on a thread that counts just then, which waited for itself."""
    watched = metrics.watched(Served(), iter([1, 2]))
    next(watched)
    held = [watched]
    held.append(held)
    lock = Noting()
    for each in (metrics, metrics._stats):
        monkeypatch.setattr(each, "_lock", lock)
    del watched, held
    gc.collect()
    assert lock.taken == 0
    assert metrics.totals.generated_tokens == 1


def test_a_session_counts_too(tiny_llama, loaded, tmp_path):
    prompt = "explain why a cache must never lie. " * 8
    for _ in range(2):
        with kvstore_mlx.open(tmp_path / "kv", *loaded, path=str(tiny_llama)) as cache:
            generated = len(list(cache.stream_generate(prompt, max_tokens=4)))
    with open_store(tmp_path / "kv", None) as store:
        found = read_stats(store.context)
    assert len(found.rows) == found.total("requests") == 2
    assert found.total("disk_tokens") > 0
    assert found.total("read_bytes") > 0
    assert found.total("written_tokens") >= found.total("disk_tokens")
    assert found.total("generated_tokens") == 2 * generated


def test_what_was_counted_is_in_the_directory_after_the_end(metrics):
    metrics.fetched(Fetched(100, 60, "disk", 4096))(10, 20, 0.1)
    metrics.close()
    found = read_stats(metrics._store.context)
    totals = {name: found.total(name) for name in ("requests", "disk_tokens", "read_bytes", "written_bytes")}
    assert totals == {"requests": 1, "disk_tokens": 60, "read_bytes": 4096, "written_bytes": 20}


def test_counters_come_to_the_directory_without_an_end(metrics, monkeypatch):
    monkeypatch.setattr("kvstore_mlx.metrics.FLUSH_S", 0.01)
    for tokens in (100, 50):
        metrics.fetched(Fetched(tokens))
        deadline = time.monotonic() + 10
        while read_stats(metrics._store.context).total("prompt_tokens") < tokens:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_disk_that_hangs_has_one_thread_wait_for_it(metrics, monkeypatch):
    """Every few seconds there was another, for as long as it hung."""
    go = threading.Event()

    def hanging(*args, **more):
        assert go.wait(30)
        put_file(*args, **more)

    monkeypatch.setattr("kvstore_mlx.metrics.FLUSH_S", 0.01)
    monkeypatch.setattr("kvstore.stats.put_file", hanging)
    for _ in range(20):
        metrics.generated(1)
        time.sleep(0.02)
    assert sum(getattr(thread, "function", None) == metrics._flush for thread in threading.enumerate()) == 1
    go.set()
    deadline = time.monotonic() + 10
    while read_stats(metrics._store.context).total("generated_tokens") < 20:
        assert time.monotonic() < deadline, "what was counted meanwhile is written, although nothing more is"
        time.sleep(0.01)


def test_a_flush_that_fails_is_not_the_last_one(metrics, monkeypatch):
    def failing():
        raise MemoryError

    metrics.generated(1)
    metrics._timer.cancel()
    with monkeypatch.context() as once:
        once.setattr(metrics._stats, "flush", failing)
        with pytest.raises(MemoryError):
            metrics._flush()
    monkeypatch.setattr("kvstore_mlx.metrics.FLUSH_S", 0.01)
    metrics.generated(1)
    deadline = time.monotonic() + 10
    while read_stats(metrics._store.context).total("generated_tokens") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_timer_that_cannot_be_started_is_no_error_of_the_request(metrics, monkeypatch):
    """A process may have no more threads for a while; what was counted meanwhile is written with the rest."""

    def no_threads(_self) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvstore_mlx.metrics.FLUSH_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Timer.start", no_threads)
        metrics.fetched(Fetched(100))(10, 20, 0.1)
        assert list(metrics.watched(Served(), iter([1, 2]))) == [1, 2]
    metrics.fetched(Fetched(50))
    deadline = time.monotonic() + 10
    while read_stats(metrics._store.context).total("prompt_tokens") < 150:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert read_stats(metrics._store.context).total("generated_tokens") == 2


def test_what_is_counted_after_the_end_is_written_and_leaves_nothing(metrics, monkeypatch):
    """Found by review: a timer made a staging folder that nobody removed, or came too late."""
    monkeypatch.setattr("threading.Timer.start", lambda _: pytest.fail("a timer"))
    metrics.close()
    store = metrics._store
    store.close()
    assert list(metrics.watched(Served(), iter([1, 2]))) == [1, 2]
    assert read_stats(store.context).total("generated_tokens") == 2
    assert list(store.context.layout.tmp.iterdir()) == []


def test_a_session_that_is_closed_before_its_answer_counts_all_of_it(tiny_llama, loaded, tmp_path):
    cache = kvstore_mlx.open(tmp_path / "kv", *loaded, path=str(tiny_llama))
    answer = cache.stream_generate("explain why a cache must never lie. " * 8, max_tokens=8)
    taken = list(islice(answer, 3))
    cache.close()
    answer.close()
    with open_store(tmp_path / "kv", None) as store:
        assert read_stats(store.context).total("generated_tokens") == len(taken)
        assert list(store.context.layout.tmp.iterdir()) == []


def test_without_the_package_there_is_one_sentence(metrics, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(KVStoreError, match="pip install prometheus-client"):
        metrics.exposition("", {})


class _Gone(io.BytesIO):
    """The client's end when it is closed already."""

    def write(self, _data) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("path", ["/metrics", "/health"])
def test_whoever_leaves_before_the_answer_is_no_error(metrics, path):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.handle_health_check()

        def _set_completion_headers(self, status: int) -> None:
            self.send_response(status)

    made = reporting_handler(Handler, metrics, lambda: {"on": True}, dict, report=False)
    handler = made.__new__(made)
    handler.response_generator = SimpleNamespace(is_healthy=True)
    handler.path, handler.headers, handler.requestline, handler.request_version = path, {}, "", "HTTP/1.1"
    handler.client_address, handler.wfile = ("127.0.0.1", 1), _Gone()
    handler.do_GET()


# A server.


def get(server, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def stream(server, **more) -> list[dict]:
    """All events of a stream but [DONE]."""
    body = {"messages": conversation(1), "max_tokens": 3, "stream": True, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line.decode().strip() for line in response]
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line.startswith("data: ")]


def test_a_server_tells_what_its_cache_does(serve, tiny_llama, tmp_path):
    directory = tmp_path / "kv"
    flags = ("--kv-cache-dir", str(directory), "--kv-cache-min-tokens", "64")
    server = serve(tiny_llama, *flags, "--kv-cache-report")
    first = server.chat(conversation(1), max_tokens=3)
    told = first.body["kv_cache"]
    assert (told["tier"], told["prompt_tokens"], told["reused_tokens"]) == ("none", first.prompt_tokens, 0)
    assert told["prefill_seconds"] > 0
    wait_saved(server, directory, first.prompt_tokens)
    status, text = get(server, "/health")
    health = json.loads(text)
    assert (status, health["status"]) == (200, "ok")
    assert health["kv_cache"] | {"used_bytes": 0, "queued_bytes": 0} == {
        "on": True,
        "why": "",
        "models": {"tiny-llama": ""},
        "budget_bytes": 20 << 30,
        "used_bytes": 0,
        "queued_bytes": 0,
        "refused": dict.fromkeys(("full", "warm", "limit", "busy", "failed"), 0),
        "restoring": {"tiny-llama": "prompts from 64 tokens on are saved and restored"},
    }
    again = server.chat(conversation(1), max_tokens=3).body["kv_cache"]
    assert (again["tier"], again["reused_tokens"], again["restored_bytes"]) == ("memory", first.prompt_tokens - 1, 0)
    # Only in the last event of a stream, whichever that is.
    events = stream(server)
    assert [("kv_cache" in event) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    events = stream(server, stream_options={"include_usage": True})
    assert [("kv_cache" in event) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == events[-1]["kv_cache"]["reused_tokens"]
    # Alone, too: a seed takes the request out of the batch.
    alone = server.chat(conversation(1), max_tokens=3, seed=1).body["kv_cache"]
    assert (alone["tier"], alone["prefill_seconds"] > 0) == ("memory", True)

    status, text = get(server, "/metrics")
    samples = scrape(text)
    assert status == 200
    assert samples["kvstore_requests_total"] == 5
    assert samples["kvstore_generated_tokens_total"] == 15
    assert samples["kvstore_reused_tokens_total{tier=memory}"] == 4 * (first.prompt_tokens - 1)
    assert samples["kvstore_saved_tokens_total"] >= first.prompt_tokens
    assert samples["kvstore_prefill_seconds_count"] == 5
    assert samples["kvstore_on"] == 1
    assert get(server, "/nothing")[0] == 404


def test_counts_survive_a_kill_and_a_restart(serve, tiny_llama, tmp_path):
    directory = tmp_path / "kv"
    flags = ("--kv-cache-dir", str(directory), "--kv-cache-min-tokens", "64")
    server = serve(tiny_llama, *flags)
    first = server.chat(conversation(1), max_tokens=3)
    wait_saved(server, directory, first.prompt_tokens)
    deadline = time.monotonic() + 30
    while not list(directory.glob("stats/*.json")):  # within seconds, without an end
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.kill()
    with open_store(directory, None) as store:
        assert read_stats(store.context).total("requests") >= 1

    server = serve(tiny_llama, *flags)
    restored = server.chat(conversation(1), max_tokens=3)
    assert restored.cached_tokens == first.prompt_tokens - 1
    assert "kv_cache" not in restored.body
    assert all("kv_cache" not in event for event in stream(server, stream_options={"include_usage": True}))
    assert server.stop() == 0
    with open_store(directory, None) as store:
        found = read_stats(store.context)
        assert found.total("disk_tokens") == first.prompt_tokens - 1
        assert found.total("read_bytes") > 0
        assert len(found.rows) == 2


def test_requests_at_once_get_their_own_figures(serve, tiny_llama, tmp_path):
    flags = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64", "--kv-cache-report")
    server = serve(tiny_llama, *flags)
    texts = ["why must a cache never lie? " * (3 + 2 * number) for number in range(6)]

    def ask(text):
        return server.chat([{"role": "user", "content": text}], max_tokens=4).body

    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            for body in pool.map(ask, texts):
                assert body["kv_cache"]["prompt_tokens"] == body["usage"]["prompt_tokens"]
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert body["kv_cache"]["reused_tokens"] == cached
                assert body["kv_cache"]["prefill_seconds"] > 0
    assert len({len(text) for text in texts}) == 6


def test_a_prompt_with_images_is_counted_by_its_tokens(tmp_path):
    class OneModel:
        phase = 0

        def of(self, _model):
            return SimpleNamespace(usable=[], stateful=False, most=None, ids=())

    told = []
    tier = TieredPromptCache(10, OneModel(), None, Saving())
    tier.observe = told.append
    assert tier.fetch_nearest_cache(("model", None, None), [5, -7, -7, 6]) == (None, [5, -7, -7, 6])
    ((only),) = told
    assert (only.tokens, only.reused, only.tier) == (4, 0, "none")


def test_a_counter_that_fails_is_no_error_of_the_request(tmp_path):
    class NoModel:
        phase = 0

        def of(self, _model):
            return None

    def broken(_fetched):
        raise ZeroDivisionError

    tier = TieredPromptCache(10, NoModel(), None, Saving())
    tier.observe = broken
    assert tier.fetch_nearest_cache(("model", None, None), [1, 2, 3]) == (None, [1, 2, 3])


def test_health_says_why_a_cache_is_off(serve, tiny_llama, tmp_path):
    server = serve(
        tiny_llama, "--kv-cache-dir", str(tmp_path / "kv"), "--draft-model", str(tiny_llama), "--kv-bits", "8"
    )
    server.chat(conversation(1), max_tokens=2)
    _, text = get(server, "/health")
    health = json.loads(text)["kv_cache"]
    assert health["on"] is False
    assert "--kv-bits" in health["why"]
    assert scrape(get(server, "/metrics")[1])["kvstore_on"] == 0


def test_without_a_directory_nothing_is_added(serve, tiny_llama):
    server = serve(tiny_llama)
    assert json.loads(get(server, "/health")[1]) == {"status": "ok"}
    assert get(server, "/metrics")[0] == 404
    assert "kv_cache" not in server.chat(conversation(1), max_tokens=2).body
