"""`bench decode`: how fast tokens come while a chunk is being published, over how fast they come without.

One process decodes with a small model; in every second turn a thread publishes a chunk of an 8B model's KV meanwhile,
as the adapter's writer does: no MLX call, system calls and hashing outside of the interpreter's lock. Only the steps
that were made while the publish ran are counted.
"""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_breakeven import MODELS, blas_environment, model_folder
from bench_child import run_child
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_named, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_report import Outcome, table
from bench_stats import Sample, paired
from fast_blas import find
from kvstore import Durability, FileSystem, Store
from kvstore.layout import FANOUT

__all__ = ["HELP", "child", "configure", "run", "tables"]

HELP = "decode speed while a chunk is being published"

_PROMPT = 512
_WARM_UP = 2
_VOCABULARY = 250


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (default: both)")
    parser.add_argument("--count", type=int, default=2048, help="tokens of the chunk (default: 2048)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")


def run(options: argparse.Namespace) -> Outcome:
    """Decode with each model."""
    shape = shape_of(options)
    size = shape.token_bytes * options.count
    document: dict[str, Any] = {
        "command": "decode",
        "conditions": conditions(options.dir.parent),
        "page_cache": "written files stay in it; each is removed before the next is written",
        "shape": shape.document(),
        "count": options.count,
        "payload_bytes": size,
        "blas": str(find() or "MLX's own"),
        "models": {},
    }
    for name in options.model or list(MODELS):
        with data_folder(options.dir, keep=options.keep) as folder:
            need_disk(folder, 2 * size)
            need_memory(3 * size)
            job = {
                "model": str(model_folder(name, folder)),
                "store": str(folder / "store"),
                "shape": shape.fields(),
                "count": options.count,
                "rounds": options.rounds,
            }
            other = OtherWork()
            found = run_child("bench_decode", job, blas_environment())
        speeds = {key: found[key] for key in ("alone", "publishing")}
        document["models"][name] = {
            "cores_used_by_others": other.cores(),
            "steps_during_a_publish": found["steps"],
            "tokens_a_second": {key: Sample.of(values).document() for key, values in speeds.items()},
            "publish_seconds": Sample.of(found["publish"]).document(),
            "over_alone": paired(speeds["publishing"], speeds["alone"]).document(),
        }
    return Outcome(document, tables(document))


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode while publishing, then as many steps of the same text alone, in turns."""
    decoder = _Decoder(job["model"])
    payload = Payload(Shape(**job["shape"]), job["count"])
    found: dict[str, list[float]] = {name: [] for name in ("alone", "publishing", "publish", "steps")}
    with Store.open(job["store"], interval=job["count"], fs=FileSystem(Durability.BARRIER)) as store:
        layout = store.context.layout
        for folder in FANOUT:
            (layout.blocks / folder).mkdir()
        for turn in range(-_WARM_UP, job["rounds"]):
            payload.renew()
            values = _turn(decoder, store, payload)
            if turn >= 0:
                for name, value in values.items():
                    found[name].append(value)
            for path in [*layout.blocks.rglob("*"), *layout.nodes.rglob("*.kv")]:
                if path.is_file():
                    path.unlink()
    shutil.rmtree(job["store"])
    return found


class _Decoder:
    """A model behind a prompt, which makes one token after the other."""

    def __init__(self, path: str) -> None:
        import mlx.core as mx  # noqa: PLC0415
        from mlx_lm import load  # noqa: PLC0415 - imports the engine
        from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - as above

        self._mx = mx
        self._model = load(path)[0]
        self._caches = make_prompt_cache(self._model)
        text = mx.arange(1, _PROMPT + 1)[None] % _VOCABULARY
        self._first = self._token = mx.argmax(self._model(text, cache=self._caches)[0, -1])
        mx.eval(self._token)

    def step(self) -> None:
        """One token."""
        self._token = self._mx.argmax(self._model(self._token[None, None], cache=self._caches)[0, -1])
        self._mx.eval(self._token)

    def begin(self) -> None:
        """Back to the end of the prompt: the next steps are the same ones again."""
        self._token = self._first
        for cache in self._caches:
            cache.trim(cache.offset - _PROMPT)


def _turn(decoder: _Decoder, store: Store, payload: Payload) -> dict[str, float]:
    span, text = payload.span(0), prompt(payload.count)
    thread = threading.Thread(target=store.namespace(INFO).publish, args=(text, [span]))
    decoder.begin()
    started = time.perf_counter()
    thread.start()
    steps, seconds = 0, 0.0
    while thread.is_alive():
        decoder.step()
        if thread.is_alive():
            steps, seconds = steps + 1, time.perf_counter() - started
    thread.join()
    published = time.perf_counter() - started
    if not steps:
        raise BenchError("not one token came while the chunk was published; publish a larger --count")
    decoder.begin()
    began = time.perf_counter()
    for _ in range(steps):
        decoder.step()
    alone = time.perf_counter() - began
    return {"alone": steps / alone, "publishing": steps / seconds, "publish": published, "steps": steps}


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    rows = []
    for name, found in document["models"].items():
        speeds = [Sample.of(found["tokens_a_second"][key]["values"]).text(1, 1) for key in ("alone", "publishing")]
        others = found["cores_used_by_others"]
        rows.append(
            [
                MODELS[name],
                *speeds,
                Sample.of(found["over_alone"]["values"]).text(1, 3),
                Sample.of(found["publish_seconds"]["values"]).text(1e3, 0),
                f"{Sample.of(found['steps_during_a_publish']).median:.0f}",
                "?" if others is None else f"{others:.2f}",
            ]
        )
    n = max(found["over_alone"]["n"] for found in document["models"].values())
    made = table(
        f"{document['payload_bytes'] / 1e6:.0f} MB published while decoding, {shape_named(document['shape']).text()}",
        [
            "model",
            "tokens/s alone",
            "tokens/s while publishing",
            "over alone, paired",
            "publish ms",
            "tokens meanwhile",
            "cores used by others",
        ],
        rows,
        f"n = {n} at most, in turns, median (min to max), durability barrier, BLAS: {Path(document['blas']).name}",
    )
    return [made]
