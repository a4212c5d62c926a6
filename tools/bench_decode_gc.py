"""The part of `bench decode` that measures tokens beside a collection: a directory of many nodes, over its budget.

The writer of a server saves a few tokens, finds the directory a twentieth over its budget, and collects: it looks at
every file, reads every manifest, and removes what was used longest ago. Blocks are of a few bytes, because it is the
number of files that costs. Paced: at the share that the writer takes while the engine makes tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_decoder import Decoder
from bench_kv import INFO, Payload, Shape, prompt
from bench_machine import BenchError
from bench_stats import Sample, paired, rotated
from kvstore import DEFAULT_INTERVAL, Durability, FileSystem, Store
from kvstore.gc import usage
from kvstore.keys import pack_tokens

__all__ = ["child", "document", "rows"]

_WAYS = ("paced", "full speed")
_DEPTH = 16
_AGE_S = 7 * 86400
_SETTLED_NS = 7200 * 10**9
"""What was just made is protected for a minute; so the clock is ahead."""
_TRIES = 5
_OVER = 0.95
_PAGE = 4096
_TOKENS = 64


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode alone, while the writer collects, and alone again, in turns with and without its rests."""
    from kvstore_mlx.forms import Form  # noqa: PLC0415 - imports the engine
    from make_big_store import make  # noqa: PLC0415 - made once, here

    make(Path(job["store"]), job["nodes"], _DEPTH, DEFAULT_INTERVAL, _AGE_S, quiet=True)
    decoder = Decoder(job["model"])
    payload = Payload(Shape(1, 1, 2), _TOKENS)
    names = ("alone", "collecting", "seconds", "steps", "nodes")
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in names} for way in _WAYS}
    now = time.time_ns() + _SETTLED_NS
    fs = FileSystem(Durability.BARRIER)
    with Store.open(job["store"], fs=fs, clock=lambda: now) as store:
        plan: Any = SimpleNamespace(stateful=False, token_bytes=payload.shape.token_bytes)
        form = Form(plan, store.namespace(INFO))
        for turn in range(job["rounds"]):
            for way in rotated(_WAYS, turn):
                for name, value in _turn(decoder, store, form, payload, job["alone"], paced=way == "paced").items():
                    found[way][name].append(value)
    return found


def _turn(
    decoder: Decoder, store: Store, form: Any, payload: Payload, alone_s: float, *, paced: bool
) -> dict[str, float]:
    """One collection in which at least one token came: on a busy machine that needs another try now and then."""
    from kvstore_mlx.housekeeping import Housekeeping  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.jobs import Job  # noqa: PLC0415 - as above
    from kvstore_mlx.writer import Writer  # noqa: PLC0415 - as above

    for _ in range(_TRIES):
        # Not a multiple of what files take, so that what is saved fits in beside the last one removed.
        budget = int(usage(store.context) * _OVER) // _PAGE * _PAGE + _PAGE // 2
        writer = Writer(Housekeeping(store, budget))
        payload.renew()
        before = store.counters.snapshot()["collected_nodes"]
        alone = decoder.alone(alone_s)
        started = time.perf_counter()
        writer.offer(Job(form, pack_tokens(prompt(payload.count)), [payload.span(0)]))
        steps, spent = _beside(decoder, writer, paced=paced)
        seconds = time.perf_counter() - started
        removed = store.counters.snapshot()["collected_nodes"] - before
        writer.close(60)
        if writer.trouble:
            raise BenchError(f"nothing was collected: {writer.trouble}")
        if steps and removed:
            alone = (alone + decoder.alone(alone_s)) / 2
            return {
                "alone": alone,
                "collecting": steps / spent,
                "seconds": seconds,
                "steps": steps,
                "nodes": removed,
            }
    raise BenchError("nothing was collected while tokens came; take more --nodes")


def _beside(decoder: Decoder, writer: Any, *, paced: bool) -> tuple[int, float]:
    """Steps and seconds while the writer has something to do; paced: it is told of each."""
    return decoder.speed(lambda: writer.queued > 0, writer.stepped if paced else lambda: None)


def document(found: Mapping[str, Any], nodes: int, cores: float | None) -> dict[str, Any]:
    """What goes into the JSON file."""
    return {
        "nodes": nodes,
        "cores_used_by_others": cores,
        "ways": {
            way: {
                "steps_during_a_collection": turns["steps"],
                "removed_nodes": turns["nodes"],
                "tokens_a_second": {key: Sample.of(turns[key]).document() for key in ("alone", "collecting")},
                "collection_seconds": Sample.of(turns["seconds"]).document(),
                "over_alone": paired(turns["collecting"], turns["alone"]).document(),
            }
            for way, turns in found.items()
        },
    }


def rows(model: str, found: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table."""
    others = found["cores_used_by_others"]
    return [
        [
            model,
            way,
            *(Sample.of(turns["tokens_a_second"][key]["values"]).text(1, 1) for key in ("alone", "collecting")),
            Sample.of(turns["over_alone"]["values"]).text(1, 3),
            Sample.of(turns["collection_seconds"]["values"]).text(1, 1),
            f"{Sample.of(turns['removed_nodes']).median:.0f}",
            "?" if others is None else f"{others:.2f}",
        ]
        for way, turns in found["ways"].items()
    ]
