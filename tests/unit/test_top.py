"""``kvstore top`` against a server that is only as much of one as it needs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer

import pytest
from rich.console import Console
from upkeep_support import invoke

from kvstore.cli.top import Look, _screen, _watch, look, samples_of

METRICS = """# HELP kvstore_requests_total Prompts
# TYPE kvstore_requests_total counter
kvstore_requests_total 12.0
kvstore_prompt_tokens_total 1000.0
kvstore_reused_tokens_total{tier="memory"} 300.0
kvstore_reused_tokens_total{tier="disk"} 500.0
kvstore_refused_prompts_total{reason="full"} 3.0
kvstore_refused_prompts_total{reason="limit"} 4.0
kvstore_restored_bytes_total 2.097152e+06
kvstore_lookup_seconds_count 12.0
kvstore_lookup_seconds_sum 0.024
kvstore_prefill_seconds_count 12.0
kvstore_prefill_seconds_sum 30.0
kvstore_queued_bytes 1024.0
python_gc_objects_collected_total{generation="0"} 5.0
kvstore_broken x
"""
CACHE = {
    "on": True,
    "why": "",
    "models": {"tiny": ""},
    "budget_bytes": 1 << 30,
    "used_bytes": 1 << 29,
    "queued_bytes": 1024,
}


@pytest.fixture
def server():
    """Answers with what .pages holds: status and text by path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = self.server.pages.get(self.path, (404, "Not Found"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.pages = {
        "/health": (200, json.dumps({"status": "ok", "kv_cache": CACHE})),
        "/metrics": (200, METRICS),
    }
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def printed(screen) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(screen)
    return " ".join(captured.get().split())


def test_samples_are_read_by_name_and_labels():
    found = samples_of(METRICS)
    assert found["kvstore_requests_total"] == 12
    assert found['kvstore_reused_tokens_total{tier="disk"}'] == 500
    assert found["kvstore_restored_bytes_total"] == 1 << 21
    assert not any(name.startswith("python") for name in found)
    assert "kvstore_broken" not in found


def test_one_look(server):
    for url in (f"http://127.0.0.1:{server.server_port}/", str(server.server_port)):
        code, out, err = invoke("top", url, "--once")
        assert (code, err) == (0, "")
        text = " ".join(out.split())
        assert "cache on" in text
        assert "models tiny" in text
        assert "512 MiB of 1.0 GiB, 1.0 KiB waiting" in text
        assert "requests 12" in text
        assert "refused prompts 7" in text
        assert "hit rate 80.0 %" in text
        assert "tokens from disk 500" in text
        assert "lookup 12 2.0 ms" in text
        assert "prefill 12 2.50 s" in text
    code, out, _ = invoke("top", str(server.server_port), "--once", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["kv_cache"] == CACHE
    assert document["samples"]["kvstore_requests_total"] == 12


def test_rates_are_of_the_time_between_two_looks():
    before = Look(10.0, "ok", CACHE, samples_of(METRICS))
    more = METRICS.replace("requests_total 12", "requests_total 16").replace(
        "prompt_tokens_total 1000", "prompt_tokens_total 1400"
    )
    more = more.replace('{tier="disk"} 500', '{tier="disk"} 600')
    more = more.replace("lookup_seconds_count 12", "lookup_seconds_count 16").replace("_sum 0.024", "_sum 0.064")
    text = printed(_screen("http://x", Look(12.0, "ok", CACHE, samples_of(more)), before))
    assert "requests 16 2.0" in text
    assert "prompt tokens 1,400 200.0" in text
    assert "hit rate 64.3 % 25.0 %" in text
    assert "lookup 16 4.0 ms 10.0 ms" in text
    anew = METRICS.replace("requests_total 12", "requests_total 1")
    assert "requests 1 prompt" in printed(_screen("http://x", Look(14.0, "ok", CACHE, samples_of(anew)), before))


def test_trouble_is_shown_and_nothing_in_it_is_obeyed():
    cache = {**CACHE, "on": False, "why": "the disk is full\x1b[2J", "models": {"\x1b[31m": "?"}, "used_bytes": None}
    screen = _screen("http://x", Look(0.0, "unavailable", cache, {}), None)
    text = printed(screen)
    assert "cache off" in text
    assert "trouble the disk is full?[2J" in text
    assert "1.0 GiB" in text


def test_a_server_that_goes_away_is_waited_for(server, monkeypatch):
    looks = []

    def sleep(_seconds):
        looks.append(1)
        if len(looks) == 2:
            server.pages = {}
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.cli.top.time.sleep", sleep)
    address = f"http://127.0.0.1:{server.server_port}"
    _watch(address, look(address), 1.0)
    assert len(looks) == 4


def test_mistakes_are_one_sentence(server):
    port = str(server.server_port)
    for pages, said in (
        ({"/health": (200, "<html>")}, "is not `kvstore serve`"),
        ({"/health": (200, "[]")}, "is not `kvstore serve`"),
        ({"/health": (200, "[" * 100_000)}, "is not `kvstore serve`"),
        ({}, "it answers 404"),
        ({"/health": (200, '{"status": "ok"}')}, "start it with --kv-cache-dir"),
        (
            {"/health": server.pages["/health"], "/metrics": (503, "/metrics needs the prometheus-client package")},
            "needs the prometheus-client package",
        ),
    ):
        server.pages = pages
        code, out, err = invoke("top", port, "--once")
        assert (code, out) == (1, "")
        assert said in " ".join(err.split())
    assert invoke("top", "ftp://host")[0] == 2
    assert invoke("top", port, "--json")[0] == 2
    code, _, err = invoke("top", "http://127.0.0.1:1", "--once")
    assert code == 1
    assert "no server answers" in " ".join(err.split())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"-ERR wrong number of arguments\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
    ids=["ssh", "redis", "cut", "headers"],
)
def test_a_port_of_something_else_is_one_sentence(answer):
    class Handler(BaseRequestHandler):
        def handle(self):
            self.request.recv(1024)
            self.request.sendall(answer)

    with TCPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        code, out, err = invoke("top", str(other.server_address[1]), "--once")
        thread.join()
    assert (code, out) == (1, "")
    assert "is not `kvstore serve`: it does not speak HTTP" in " ".join(err.split())
