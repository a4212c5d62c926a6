"""Start and stop mlx_lm.server around a cache directory.

mlx_lm.server stops by abandoning what it is doing, and goes on serving errors when its model cannot be loaded. Here
SIGTERM and Ctrl-C let requests finish and what is queued be written, within bounds, and a model that cannot be loaded
is one sentence and an exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.store import Store
from kvstore_mlx.boundaries import stable_end
from kvstore_mlx.engine import RecordingBatchGenerator, recording_stream_generate
from kvstore_mlx.explain import Explainer
from kvstore_mlx.flags import CacheArguments
from kvstore_mlx.housekeeping import Housekeeping
from kvstore_mlx.http import Gauges, observed_responses, reporting_handler
from kvstore_mlx.metrics import Metrics
from kvstore_mlx.spaces import Settings, Spaces
from kvstore_mlx.status import Status
from kvstore_mlx.tier import TieredPromptCache
from kvstore_mlx.tokenizing import TokenizingCache
from kvstore_mlx.writer import Writer

__all__ = ["RunningServer"]

log = logging.getLogger("kvstore")

DRAIN_REQUESTS_S = 30.0
"""How long a stop waits for requests under way. A second signal does not wait."""

DRAIN_WRITES_S = 30.0
"""How long a stop waits for the disk: a full queue of 1 GiB at 35 MB/s."""


JOIN_S = 5.0
"""How long a stop waits for the threads of requests that were answered or cut off."""


class CannotServeError(KVStoreError):
    """The model could not be loaded, or the port not be had."""


class Requests:
    """The HTTP requests under way and their threads, so that a stop can wait for both."""

    def __init__(self) -> None:
        self._active = 0
        self._threads: set[threading.Thread] = set()
        self._changed = threading.Condition()

    def begin(self) -> None:
        """A request was read, by this thread."""
        with self._changed:
            self._active += 1
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            self._threads.add(threading.current_thread())

    def end(self) -> None:
        """Its answer was sent, or its client is gone."""
        with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is under way; False when timeout seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._active == 0, timeout)

    def join(self, timeout: float) -> None:
        """Wait for the threads of all requests to close their connections, timeout seconds at most."""
        deadline = time.monotonic() + timeout
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))


def _handler(base: type[Any], requests: Requests) -> type[Any]:
    """The server's own request handler, with requests counted from when they were read to when they are answered.

    (Not from when a client connects: one that connects and says nothing must not hold up a stop.)
    """

    class Handler(base):  # type: ignore[misc]  # mlx-lm ships no types
        counted = False

        def parse_request(self) -> bool:
            read: bool = super().parse_request()
            if read and not self.counted:
                self.counted = True
                requests.begin()
            return read

        def finish(self) -> None:
            try:
                super().finish()
            finally:
                if self.counted:
                    requests.end()

    return Handler


class _HTTPServer(ThreadingHTTPServer):
    """The server's own, with room for more than five connections that nobody accepted yet: agents that ask at once,
    while the engine keeps Python busy, would be cut off.
    """

    request_queue_size = 128


class RunningServer:
    """One ``kvstore serve`` process from its start to its exit code."""

    def __init__(
        self, server: ModuleType, store: Store, cache: CacheArguments, provider: Any, *, settings: Settings
    ) -> None:
        self._server = server
        self._provider = provider
        self._quantization = settings.quantization
        self._housekeeping = Housekeeping(store, cache.size, cache.write_limit)
        self._writer = Writer(self._housekeeping)
        self._spaces = Spaces(store, provider, settings)
        self._status = Status(store, cache.size)
        self._spaces.made = self._status.tell
        self._tier = TieredPromptCache(provider.cli_args.prompt_cache_size, self._spaces, self._writer, cache.saving)
        if cache.explain:
            self._tier.explainer = Explainer(lambda: lambda tokens: str(provider.tokenizer.decode(tokens)))
        self._metrics = Metrics(store)
        self._tier.observe = self._metrics.fetched
        self._report = cache.report
        self._tokens = TokenizingCache(store, salt=settings.salt)
        self._requests = Requests()
        self._failure: KVStoreError | None = None
        self._stopping = False
        self._ending = False

    def batch_generator(self, *args: Any, **kwargs: Any) -> RecordingBatchGenerator:
        """What the server makes its batches with."""
        return RecordingBatchGenerator(*args, tier=self._tier, **kwargs)

    def stream_generate(self, generate: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        """What the server makes single responses with."""
        return recording_stream_generate(generate, self._tier, self._quantization)

    def serve(self, host: str, port: int) -> KVStoreError | None:
        """Serve until SIGTERM or Ctrl-C; the reason when it could not."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        responses: Any = None
        try:
            try:
                base = observed_responses(self._server.ResponseGenerator, self._metrics)
                responses = _responses(
                    base, self._provider, self._tier, self._requests, tokens=self._tokens, loaded=self._loaded
                )
                handler = reporting_handler(
                    self._server.APIHandler, self._metrics, self._health, self._gauges, report=self._report
                )
                handler = _handler(handler, self._requests)
                run = self._server._run_http_server  # noqa: SLF001 - its own run calls it
                run(host, port, responses, server_class=_HTTPServer, handler_class=handler)
            except OSError as error:
                reason = error.strerror or error
                flag = "--host" if isinstance(error, socket.gaierror) else "--port"
                self._failure = CannotServeError(
                    f"cannot listen on {host} port {port}: {reason}; choose another {flag}"
                )
        except KeyboardInterrupt:
            # While starting, or while a reason not to was noted.
            log.debug("kvstore: told to stop while starting")
        finally:
            self._ending = True
            self._status.close()
            if responses is not None:
                responses.stop_and_join()
            self._tokens.close(JOIN_S)
            self._writer.close(DRAIN_WRITES_S)
            # What their clients still take of answers that were cut off is counted, too.
            self._requests.join(JOIN_S)
            self._metrics.close()
            for number, action in before.items():
                signal.signal(number, action)
        return self._failure

    def _health(self) -> dict[str, Any]:
        """Whether prompts are kept, and if not, why."""
        models = self._spaces.models()
        why = self._writer.trouble or next((why for why in models.values() if why), "")
        off = bool(models) and all(models.values())
        return {
            "on": not off,
            "why": why,
            "models": models,
            "budget_bytes": self._housekeeping.budget,
            "used_bytes": self._housekeeping.used,
            "queued_bytes": self._writer.queued,
            "restoring": self._tier.restoring,
        }

    def _gauges(self) -> Gauges:
        health = self._health()
        gauges: Gauges = {
            "on": ("1 when the prompts of a loaded model are kept", float(health["on"])),
            "budget_bytes": ("What the directory may take", health["budget_bytes"]),
            "queued_bytes": ("Copies that wait to be written", health["queued_bytes"]),
        }
        if health["used_bytes"] is not None:
            gauges["used_bytes"] = ("What the directory takes, as of the last look", health["used_bytes"])
        return gauges

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """The first signal starts an orderly stop, which a second one cuts short."""
        if self._stopping:
            log.warning("kvstore: stopped at once; requests under way were cut off")
            logging.shutdown()
            os._exit(1)
        self._stopping = True
        if not self._ending:
            raise KeyboardInterrupt

    def _loaded(self, error: Exception | None) -> None:
        """Called on the generation thread when the model is loaded, or cannot be."""
        if error is None:
            if self._provider.model_key is not None:
                self._spaces.of(self._provider.model_key)
            else:
                self._status.tell()
            return
        model = self._provider.cli_args.model
        if model.startswith(("/", ".", "~")) and not Path(model).exists():
            reason = "there is no such folder"
        else:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        self._failure = self._failure or CannotServeError(f"cannot load the model {model}: {reason}")
        if not self._stopping and not self._ending:
            os.kill(os.getpid(), signal.SIGTERM)


def _responses(
    base: type[Any],
    provider: Any,
    tier: TieredPromptCache,
    requests: Requests,
    *,
    tokens: TokenizingCache,
    loaded: Callable[[Exception | None], None],
) -> Any:
    """The server's own ResponseGenerator, telling when its model is loaded and finishing what it began."""

    class ResponseGenerator(base):  # type: ignore[misc]  # mlx-lm ships no types
        def _generate(self) -> None:
            try:
                self.model_provider.load_default()
            except Exception as error:
                self._generation_failed = True
                loaded(error)
                return
            loaded(None)
            super()._generate()

        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            tokenized = super()._tokenize(tokens.wrap(tokenizer), request, args)
            tier.failures.guarded(
                lambda: _announce(tier, provider, tokenized, tokenizer=tokenizer, request=request, args=args)
            )
            return tokenized

        _stop: bool
        _generation_thread: threading.Thread

        def stop_and_join(self) -> None:
            """Once: what does not end in time (a request that is served alone never looks, a model that is being
            loaded) ends with the process.
            """
            if self._stop:
                return
            if self.generation_available() and not requests.wait_idle(DRAIN_REQUESTS_S):
                log.warning("kvstore: requests were still running after %.0f s and were cut off", DRAIN_REQUESTS_S)
            self._stop = True
            self._generation_thread.join(JOIN_S)

    return ResponseGenerator(provider, tier)


def _announce(
    tier: TieredPromptCache, provider: Any, tokenized: Any, *, tokenizer: Any, request: Any, args: Any
) -> None:
    """Tell the tier where the stable parts of a prompt end: the server's own segments, and all but the last message."""
    prompt, segments, _, _, vision = tokenized
    if vision is not None or not tier.needs_boundaries(provider.model_key):
        return
    ends = []
    at = 0
    for segment in segments[:-1]:
        at += len(segment)
        ends.append(at)
    if request.request_type == "chat" and tokenizer.has_chat_template:
        template = {**provider.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        end = stable_end(tokenizer, request.messages, prompt, tools=request.tools, **template)
        ends += [] if end is None else [end]
    tier.announce(prompt, ends)
