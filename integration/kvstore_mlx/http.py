"""What a server with a cache directory answers beyond mlx_lm.server: /metrics, more in /health, ``kv_cache`` objects.

Everything else is the server's own. Responses get their object only with ``--kv-cache-report``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeAlias

from kvstore.errors import KVStoreError
from kvstore_mlx.metrics import Metrics, Served

__all__ = ["Gauges", "observed_responses", "reporting_handler"]

Gauges: TypeAlias = dict[str, tuple[str, float]]
"""Values of the moment by name, each with its help."""

_ATTRIBUTE = "kvstore_served"


class _Reporting(BaseHTTPRequestHandler):
    """What is put before the server's own request handler.

    The kv_cache object is in a whole response, and of a stream in the last event before [DONE]: the one with usage, if
    that was asked for, or else the one with finish_reason.
    """

    metrics: Metrics
    health: Callable[[], dict[str, Any]]
    gauges: Callable[[], Gauges]
    report: bool
    served: Served | None = None
    # The server's own:
    response_generator: Any
    stream: bool
    stream_options: Any

    def do_GET(self) -> None:
        # Whoever looks often does not always wait for the answer; the server would print a traceback each time.
        with suppress(ConnectionError):
            if self.path.partition("?")[0] == "/metrics":
                self._metrics()
            else:
                self._above().do_GET()

    def _metrics(self) -> None:
        try:
            body, content_type = self.metrics.exposition(self.headers.get("Accept") or "", self.gauges())
            status = 200
        except KVStoreError as error:
            body, content_type, status = f"{error}\n".encode(), "text/plain; charset=utf-8", 503
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_health_check(self) -> None:
        healthy = self.response_generator.is_healthy
        self._above()._set_completion_headers(200 if healthy else 503)  # noqa: SLF001 - as the server's own does
        self.end_headers()
        cache = {**self.health(), "refused": self.metrics.refused()}
        document = {"status": "ok" if healthy else "unavailable", "kv_cache": cache}
        self.wfile.write(json.dumps(document).encode())
        self.wfile.flush()

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        self.served = _served_by(request)
        self._above().handle_completion(request, stop_words)

    def generate_response(self, text: str, finish_reason: str | None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        response: dict[str, Any] = self._above().generate_response(text, finish_reason, *args, **kwargs)
        usage_follows = self.stream and self.stream_options is not None and self.stream_options.get("include_usage")
        return self._reported(response) if finish_reason is not None and not usage_follows else response

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._reported(self._above().completion_usage_response(*args, **kwargs))

    def _reported(self, response: dict[str, Any]) -> dict[str, Any]:
        return {**response, "kv_cache": self.served.document()} if self.report and self.served else response

    def _above(self) -> Any:
        """The server's own handler, whose types nobody wrote down."""
        return super()


def reporting_handler(
    base: type[Any],
    metrics: Metrics,
    health: Callable[[], dict[str, Any]],
    gauges: Callable[[], Gauges],
    *,
    report: bool,
) -> type[Any]:
    """The server's request handler with /metrics and /health, and with kv_cache objects when report is set."""
    functions = {"metrics": metrics, "health": staticmethod(health), "gauges": staticmethod(gauges), "report": report}
    return type("Handler", (_Reporting, base), functions)


def observed_responses(base: type[Any], metrics: Metrics) -> type[Any]:
    """The server's ResponseGenerator, telling which request a prompt is of and when its first token came."""

    class ResponseGenerator(base):  # type: ignore[misc]  # mlx-lm ships no types
        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            metrics.begin(_served_by(request))
            return super()._tokenize(tokenizer, request, args)

        def generate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            context, responses = super().generate(request, *args, **kwargs)
            return context, metrics.watched(_served_by(request), responses)

    return ResponseGenerator


def _served_by(request: Any) -> Served:
    """What is recorded of a request, which carries it from its HTTP thread to the generation thread and back."""
    served = getattr(request, _ATTRIBUTE, None)
    if served is None:
        served = Served()
        setattr(request, _ATTRIBUTE, served)
    return served
