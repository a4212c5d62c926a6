r"""``kvstore top``: a running server's cache, looked at again and again: what comes and is reused, and the times.

Reads /metrics and /health of the server, so it works from another machine too. With ``--once --json`` one document:

    {"url": "http://127.0.0.1:8080", "status": "ok", "kv_cache": {"on": true, "why": "", "models": {"my-model": ""}, …},
     "samples": {"kvstore_requests_total": 12.0, "kvstore_reused_tokens_total{tier=\"disk\"}": 15000.0}}
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.cli.app import app, console, output, print_json, sentences
from kvstore.cli.common import plain
from kvstore.errors import KVStoreError
from kvstore.sizes import format_size
from kvstore.untrusted import JSON_ERRORS

__all__ = ["Look", "samples_of", "top"]

_TIMEOUT_S = 5.0
_LIMIT = 1 << 22
_SAMPLE = re.compile(r"(kvstore_\w+(?:\{[^}]*\})?) (\S+)")


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Where the server listens.", metavar="[URL]")] = "http://127.0.0.1:8080",
    *,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and print it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: print one JSON document on stdout.")] = False,
) -> None:
    """Watch the cache of a running server: requests, hit rate, times, writes. Ctrl-C ends it."""
    if as_json and not once:
        raise typer.BadParameter("--json goes with --once")
    address = _address(url)
    with sentences():
        now = look(address)
        if as_json:
            print_json({"url": address, "status": now.status, "kv_cache": now.cache, "samples": now.samples})
        elif once:
            output().print(_screen(address, now, None))
        else:
            _watch(address, now, every)


@dataclass(frozen=True)
class Look:
    """What a server said at one moment (time.monotonic)."""

    at: float
    status: str
    cache: dict[str, Any]
    samples: dict[str, float]

    def value(self, name: str) -> float:
        """A sample, by its name without the prefix."""
        return self.samples.get(f"kvstore_{name}", 0.0)

    def sum_of(self, name: str) -> float:
        """All samples of a name, whatever their labels."""
        prefix = f"kvstore_{name}{{"
        return sum(value for key, value in self.samples.items() if key.startswith(prefix))


def look(address: str) -> Look:
    """Ask a server. Raises KVStoreError with a sentence when it does not answer as one with a cache does."""
    health_text = _get(f"{address}/health")
    try:
        health = json.loads(health_text)
        status, cache = str(health["status"]), health.get("kv_cache")
    except JSON_ERRORS:
        raise KVStoreError(f"what answers at {address} is not `kvstore serve`") from None
    if not isinstance(cache, dict):
        raise KVStoreError(f"the server at {address} runs without a cache directory; start it with --kv-cache-dir")
    return Look(time.monotonic(), status, cache, samples_of(_get(f"{address}/metrics")))


def samples_of(text: str) -> dict[str, float]:
    """The samples of kvstore in Prometheus text, by name and labels."""
    found = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is not None:
            try:
                found[match[1]] = float(match[2])
            except ValueError:
                continue
    return found


def _address(given: str) -> str:
    url = given
    if url.isdecimal():
        url = f"127.0.0.1:{url}"
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
            raise ValueError(url)
    except ValueError:
        # urlsplit refuses brackets that do not close, and ports that are none.
        raise typer.BadParameter(
            f"{given!r} is no address of a server; write it like http://127.0.0.1:8080, or its port alone"
        ) from None
    return url.rstrip("/")


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - http or https, see _address
            return str(response.read(_LIMIT), "utf-8", "replace")
    except urllib.error.HTTPError as error:
        with error:
            text = str(error.read(_LIMIT), "utf-8", "replace")
        if error.code == 503 and url.endswith("/health"):
            return text
        reason = text.strip().splitlines()[0] if error.code == 503 and text.strip() else f"it answers {error.code}"
        raise KVStoreError(f"{url}: {reason}") from error
    except http.client.HTTPException as error:
        raise KVStoreError(f"what answers at {url} is not `kvstore serve`: it does not speak HTTP") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        said = getattr(why, "strerror", None) or why
        raise KVStoreError(f"no server answers at {url}: {said}; start `kvstore serve`, or name its address") from error


def _watch(address: str, first: Look, every: float) -> None:
    """Look again and again. A server that goes away is waited for."""
    before, now = None, first
    try:
        with Live(_screen(address, now, before), console=output(), auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(every)
                try:
                    before, now = now, look(address)
                    live.update(_screen(address, now, before), refresh=True)
                except KVStoreError as error:
                    live.update(Group(_screen(address, now, before), Text(plain(str(error)), "red")), refresh=True)
    except KeyboardInterrupt:
        console.print("")


def _screen(address: str, now: Look, before: Look | None) -> Group:
    # A server that was started anew counts from zero.
    if before is not None and now.value("requests_total") < before.value("requests_total"):
        before = None
    return Group(_head(address, now), Text(""), _counts(now, before), Text(""), _times(now, before))


def _head(address: str, now: Look) -> Group:
    on = Text("on", "green") if now.cache.get("on") else Text("off", "red")
    line = Text(f"{address}  ") + Text(plain(now.status), "bold") + Text("  cache ") + on
    models = now.cache.get("models")
    names = ", ".join(models) if isinstance(models, dict) else ""
    rows = [line, Text(f"models   {plain(names) or 'none yet'}")]
    if now.cache.get("why"):
        rows.append(Text(f"trouble  {plain(str(now.cache['why']))}", "yellow"))
    budget, used = now.cache.get("budget_bytes"), now.cache.get("used_bytes")
    if isinstance(budget, int) and budget > 0:
        share = f"{format_size(used)} of " if isinstance(used, int) else ""
        filled = round(30 * min(1.0, used / budget)) if isinstance(used, int) else 0
        queued = f", {format_size(now.value('queued_bytes'))} waiting" if now.value("queued_bytes") else ""
        rows.append(Text(f"budget   {'█' * filled}{'░' * (30 - filled)} {share}{format_size(budget)}{queued}"))
    return Group(*rows)


def _counts(now: Look, before: Look | None) -> Table:
    """Counters since the start of the server, and a second since the last look."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("since start", "a second"):
        table.add_column(heading, justify="right", no_wrap=True)

    def row(name: str, total: float, earlier: float | None, *, size: bool = False) -> None:
        seconds = now.at - before.at if before is not None else 0.0
        rate = (total - earlier) / seconds if earlier is not None and seconds > 0 else None
        shown = "" if rate is None else format_size(rate) if size else f"{rate:,.1f}"
        table.add_row(name, format_size(total) if size else f"{total:,.0f}", shown)

    for name, key, size in (
        ("requests", "requests_total", False),
        ("prompt tokens", "prompt_tokens_total", False),
        ("generated tokens", "generated_tokens_total", False),
        ("read", "restored_bytes_total", True),
        ("written", "written_bytes_total", True),
        ("failed writes", "failed_publishes_total", False),
        ("damaged files", "damaged_total", False),
    ):
        row(name, now.value(key), before.value(key) if before is not None else None, size=size)
    refused = "refused_prompts_total"
    row("refused prompts", now.sum_of(refused), before.sum_of(refused) if before is not None else None)
    table.add_row("hit rate", *(_rate(now, then) for then in (None, before)))
    for tier in ("memory", "disk"):
        key = f'reused_tokens_total{{tier="{tier}"}}'
        row(f"tokens from {tier}", now.value(key), before.value(key) if before is not None else None)
    return table


def _rate(now: Look, before: Look | None) -> str:
    prompt = now.value("prompt_tokens_total") - (before.value("prompt_tokens_total") if before is not None else 0)
    reused = now.sum_of("reused_tokens_total") - (before.sum_of("reused_tokens_total") if before is not None else 0)
    return f"{100 * reused / prompt:.1f} %" if prompt > 0 else ""


def _times(now: Look, before: Look | None) -> Table:
    """Mean seconds of each step, since the start and since the last look."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("times", "mean", "lately"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in ("lookup", "restore", "prefill", "publish"):
        name = f"{step}_seconds"
        count, total = now.value(f"{name}_count"), now.value(f"{name}_sum")
        lately = ""
        if before is not None and count > before.value(f"{name}_count"):
            lately = _seconds((total - before.value(f"{name}_sum")) / (count - before.value(f"{name}_count")))
        table.add_row(step, f"{count:,.0f}", _seconds(total / count) if count else "", lately)
    return table


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
