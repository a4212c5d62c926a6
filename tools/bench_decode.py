"""`bench decode`: how fast tokens come while a chunk is being published, over how fast they come without.

One process decodes with a small model; in every second turn the adapter's writer publishes a chunk of an 8B model's KV
meanwhile, at the pace it has beside an engine at work, or, to compare, at full speed. Only the steps that were made
while the publish ran are counted, and the same steps are made again alone.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_breakeven import MODELS, blas_environment, model_folder
from bench_child import run_child
from bench_kv import INFO, Payload, Shape, add_shape, prompt, shape_named, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Panel
from bench_report import Outcome, table
from bench_stats import Sample, paired, rotated
from fast_blas import find
from kvstore import Durability, FileSystem, Store
from kvstore.keys import pack_tokens
from kvstore.layout import FANOUT

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "decode speed while a chunk is being published"

_PROMPT = 512
_WARM_UP = 1
_WAYS = ("paced", "full speed")
"""paced: at the share of its time that the writer takes while the engine says that it is at work."""
_VOCABULARY = 250


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (default: both)")
    parser.add_argument("--count", type=int, default=2048, help="tokens of the chunk (default: 2048)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")


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
        document["models"][name] = {
            "cores_used_by_others": other.cores(),
            "ways": {
                way: {
                    "steps_during_a_publish": turns["steps"],
                    "tokens_a_second": {key: Sample.of(turns[key]).document() for key in ("alone", "publishing")},
                    "publish_seconds": Sample.of(turns["publish"]).document(),
                    "over_alone": paired(turns["publishing"], turns["alone"]).document(),
                }
                for way, turns in found.items()
            },
        }
    return Outcome(document, tables(document))


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode while publishing, then as many steps of the same text alone, in turns."""
    from kvstore_mlx.forms import Form  # noqa: PLC0415 - imports the engine
    from kvstore_mlx.housekeeping import Housekeeping  # noqa: PLC0415 - as above
    from kvstore_mlx.writer import Writer  # noqa: PLC0415 - as above

    decoder = _Decoder(job["model"])
    shape = Shape(**job["shape"])
    payload = Payload(shape, job["count"])
    found: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in ("alone", "publishing", "publish", "steps")} for way in _WAYS
    }
    with Store.open(job["store"], interval=job["count"], fs=FileSystem(Durability.BARRIER)) as store:
        layout = store.context.layout
        for folder in FANOUT:
            (layout.blocks / folder).mkdir()
        plan: Any = SimpleNamespace(stateful=False, token_bytes=shape.token_bytes)
        form = Form(plan, store.namespace(INFO))
        writer = Writer(Housekeeping(store, 1 << 50))
        for turn in range(-_WARM_UP, job["rounds"]):
            for way in rotated(_WAYS, turn):
                payload.renew()
                values = _turn(decoder, writer, form, payload, paced=way == "paced")
                if turn >= 0:
                    for name, value in values.items():
                        found[way][name].append(value)
                for path in [*layout.blocks.rglob("*"), *layout.nodes.rglob("*.kv")]:
                    if path.is_file():
                        path.unlink()
        writer.close(60)
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


def _turn(decoder: _Decoder, writer: Any, form: Any, payload: Payload, *, paced: bool) -> dict[str, float]:
    from kvstore_mlx.writer import Job  # noqa: PLC0415 - imports the engine

    def step() -> None:
        decoder.step()
        if paced:
            writer.stepped()

    job = Job(form, pack_tokens(prompt(payload.count)), [payload.span(0)])
    decoder.begin()
    step()
    started = time.perf_counter()
    writer.offer(job)
    steps, seconds = 0, 0.0
    while writer.queued:
        step()
        if writer.queued:
            steps, seconds = steps + 1, time.perf_counter() - started
    published = time.perf_counter() - started
    writer.idle()
    if writer.trouble:
        raise BenchError(f"the chunk was not published: {writer.trouble}")
    if not steps:
        raise BenchError("not one token came while the chunk was published; publish a larger --count")
    decoder.begin()
    decoder.step()
    began = time.perf_counter()
    for _ in range(steps):
        decoder.step()
    alone = time.perf_counter() - began
    return {"alone": steps / alone, "publishing": steps / seconds, "publish": published, "steps": steps}


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    rows = []
    for name, found in document["models"].items():
        others = found["cores_used_by_others"]
        for way, turns in found["ways"].items():
            speeds = [Sample.of(turns["tokens_a_second"][key]["values"]).text(1, 1) for key in ("alone", "publishing")]
            rows.append(
                [
                    MODELS[name],
                    way,
                    *speeds,
                    Sample.of(turns["over_alone"]["values"]).text(1, 3),
                    Sample.of(turns["publish_seconds"]["values"]).text(1e3, 0),
                    f"{Sample.of(turns['steps_during_a_publish']).median:.0f}",
                    "?" if others is None else f"{others:.2f}",
                ]
            )
    n = max(turns["over_alone"]["n"] for found in document["models"].values() for turns in found["ways"].values())
    made = table(
        f"{document['payload_bytes'] / 1e6:.0f} MB published while decoding, {shape_named(document['shape']).text()}",
        [
            "model",
            "writer",
            "tokens/s alone",
            "tokens/s while publishing",
            "over alone, paired",
            "publish ms",
            "tokens meanwhile",
            "cores used by others",
        ],
        rows,
        f"n = {n}, in turns, median (min to max), durability barrier, BLAS: {Path(document['blas']).name}",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """Bars of the ratio, a picture for each model."""
    return [
        Panel.of_bars(
            MODELS[name],
            "tokens a second, over alone",
            {way: Sample.of(turns["over_alone"]["values"]) for way, turns in found["ways"].items()},
            mark=1,
        )
        for name, found in document["models"].items()
    ]
