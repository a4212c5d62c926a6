"""`bench layers`: what handing layers over as they arrive could save between a restore and the first token.

Blocks lie layer after layer, so the first layer's KV is there long before the last one's, and the engine could compute
with it meanwhile. mlx-lm lets it: a model asks its caches one by one while it builds its graph, so a cache can have MLX
begin with the layers below (async_eval) and wait for its own. That is what is measured, beside the way kvstore goes:
all is read, then all is computed. Both read the same file with plain preadv on one thread, without digests, which
favours the early hand-over: a digest is known to be right when its block has been read whole, so a store would have to
throw computed layers away when it is not.

What it can save is at most the smaller of two times: reading all layers but the first, and computing the rest of the
prompt.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_breakeven import MODELS, blas_environment, model_folder
from bench_child import run_child
from bench_machine import OtherWork, conditions, data_folder, need_disk
from bench_plot import Line, Panel
from bench_report import Outcome, count_list, table
from bench_stats import Sample, interleaved, paired
from fast_blas import find

__all__ = ["HELP", "child", "configure", "panels", "run", "tables"]

HELP = "whether computing with the first layers while the last are read would be faster"

_WAYS = {"whole": "all read, then computed", "early": "layers handed over as they arrive"}
_ROOM = 256
_VOCABULARY = 250


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (default: both)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens whose KV is read (default: 2048)")
    parser.add_argument(
        "--rest", type=count_list, default=[1, 64, 256], help="tokens computed after them (default: 1,64,256)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure both ways with each model."""
    document: dict[str, Any] = {
        "command": "layers",
        "conditions": conditions(options.dir.parent),
        "page_cache": "warm",
        "blas": str(find() or "MLX's own"),
        "tokens": options.tokens,
        "rest": sorted(options.rest),
        "models": {},
    }
    for name in options.model or list(MODELS):
        with data_folder(options.dir, keep=options.keep) as folder:
            need_disk(folder, options.tokens << 16)
            job = {
                "model": str(model_folder(name, folder)),
                "file": str(folder / "kv"),
                "tokens": options.tokens,
                "rest": document["rest"],
                "rounds": options.rounds,
            }
            other = OtherWork()
            found = run_child("bench_layers", job, blas_environment())
        document["models"][name] = {
            "cores_used_by_others": other.cores(),
            "layers": found["layers"],
            "bytes": found["bytes"],
            "results": {rest: _summed(seconds) for rest, seconds in found["seconds"].items()},
        }
    return Outcome(document, tables(document))


def _summed(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    bound = [
        min(read - first, whole - read) / whole
        for read, first, whole in zip(seconds["read"], seconds["first"], seconds["whole"], strict=True)
    ]
    return {
        "seconds": {name: Sample.of(values).document() for name, values in seconds.items()},
        "early_over_whole": paired(seconds["early"], seconds["whole"]).document(),
        "could_save_at_most": Sample.of(bound).document(),
    }


def child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds from the first byte read to the first token, and of the parts, for each number of tokens to compute."""
    import mlx.core as mx  # noqa: PLC0415
    from mlx_lm import load  # noqa: PLC0415 - imports the engine
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - as above

    from kvstore_mlx.buffers import DTYPES  # noqa: PLC0415 - as above

    model = load(job["model"])[0]
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=caches))
    _, heads, _, dim = caches[0].keys.shape
    dtype, count = caches[0].keys.dtype, job["tokens"]
    with Path(job["file"]).open("wb") as file:
        for _ in range(2 * len(caches)):
            made: Any = mx.random.normal((heads, count, dim)).astype(dtype)
            file.write(memoryview(made).cast("B"))
    kv = _Kv(Path(job["file"]), len(caches), heads, dim, dtype.size, count, DTYPES[dtype])
    found: dict[str, dict[str, list[float]]] = {}
    for rest in job["rest"]:
        tokens = mx.array([[1 + at % _VOCABULARY for at in range(rest)]])
        parts: dict[str, list[float]] = {"read": [], "first": []}
        answers: dict[str, int] = {}

        def whole(tokens: Any = tokens, parts: Any = parts, answers: Any = answers) -> float:
            started = time.perf_counter()
            arrived: list[float] = []
            caches = kv.caches(None)
            kv.read(caches, lambda _: arrived.append(time.perf_counter() - started))
            parts["read"].append(arrived[-1])
            parts["first"].append(arrived[0])
            answers["whole"] = mx.argmax(model(tokens, cache=caches)[0, -1]).item()
            return time.perf_counter() - started

        def early(tokens: Any = tokens, answers: Any = answers) -> float:
            started = time.perf_counter()
            events = [threading.Event() for _ in range(kv.layers)]
            caches = kv.caches(events)
            reader = threading.Thread(target=kv.read, args=(caches, lambda layer: events[layer].set()))
            reader.start()
            answers["early"] = mx.argmax(model(tokens, cache=caches)[0, -1]).item()
            seconds = time.perf_counter() - started
            reader.join()
            return seconds

        seconds = interleaved({"whole": whole, "early": early}, job["rounds"])
        if answers["whole"] != answers["early"]:
            raise AssertionError("the two ways do not compute the same token")
        rounds = job["rounds"]
        found[str(rest)] = {**seconds, **{name: values[-rounds:] for name, values in parts.items()}}
    return {"seconds": found, "layers": kv.layers, "bytes": Path(job["file"]).stat().st_size}


class _Kv:
    """Saved KV in a file, layer after layer, and the engine's buffers that it is read into."""

    def __init__(self, path: Path, layers: int, heads: int, dim: int, size: int, count: int, dtype: str) -> None:  # noqa: PLR0917
        self._path = path
        self.layers = layers
        self._heads = heads
        self._dim = dim
        self._row = dim * size
        self._count = count
        self._dtype = dtype

    def caches(self, events: Sequence[threading.Event] | None) -> list[Any]:
        """Caches whose buffers are to be filled; with events each waits for its own before it is used."""
        from mlx_lm.models.cache import KVCache  # noqa: PLC0415

        from kvstore_mlx.buffers import empty  # noqa: PLC0415

        shape = (1, self._heads, self._count + 2 * _ROOM, self._dim)
        names = [(layer, part) for layer in range(self.layers) for part in ("keys", "values")]
        arrays = empty({f"{layer}.{part}": (self._dtype, shape) for layer, part in names})
        made = [KVCache() for _ in range(self.layers)]
        for layer, cache in enumerate(made):
            cache.keys, cache.values = arrays.pop(f"{layer}.keys"), arrays.pop(f"{layer}.values")
            cache.offset = self._count
            if events is not None:
                _wait_in(cache, events[layer])
        return made

    def read(self, caches: Sequence[Any], arrived: Callable[[int], object]) -> None:
        """Read layer after layer; arrived is told of each. No view of a buffer is left when it is."""
        size = self._count * self._row
        fd = os.open(self._path, os.O_RDONLY)
        try:
            at = 0
            for layer, cache in enumerate(caches):
                for array in (cache.keys, cache.values):
                    view = memoryview(array).cast("B")
                    step = view.nbytes // self._heads
                    pieces = [view[head * step : head * step + size] for head in range(self._heads)]
                    if os.preadv(fd, pieces, at) != size * self._heads:
                        raise AssertionError("the file is too short")
                    at += size * self._heads
                    del view, pieces
                arrived(layer)
        finally:
            os.close(fd)


def _wait_in(cache: Any, event: threading.Event) -> None:
    """Let a cache have MLX compute the layers below it, and wait for its own KV, when its model asks for it."""
    import mlx.core as mx  # noqa: PLC0415

    begin: Any = mx.async_eval

    class Waiting(type(cache)):  # type: ignore[misc]
        def update_and_fetch(self, keys: Any, values: Any) -> Any:
            if not event.is_set():
                begin(keys, values)
                event.wait()
            return super().update_and_fetch(keys, values)

    cache.__class__ = Waiting


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    return [_table(document, name, found) for name, found in document["models"].items()]


def _table(document: dict[str, Any], name: str, found: dict[str, Any]) -> Any:
    rows = []
    for rest, result in found["results"].items():
        times = [Sample.of(result["seconds"][part]["values"]).text(1e3, 1) for part in ("first", "read", *_WAYS)]
        ratios = [Sample.of(result[key]["values"]).text(1, 3) for key in ("could_save_at_most", "early_over_whole")]
        rows.append([rest, *times, *ratios])
    others = found["cores_used_by_others"]
    first = next(iter(found["results"].values()))
    return table(
        f"{document['tokens']} tokens read ({found['bytes'] / 1e6:.0f} MB, {found['layers']} layers), {MODELS[name]}",
        [
            "tokens computed",
            "first layer there ms",
            "all there ms",
            "read, then computed ms",
            "handed over early ms",
            "part that could be saved",
            "early over whole, paired",
        ],
        rows,
        f"n = {first['early_over_whole']['n']} in turns, median (min to max), page cache {document['page_cache']}, "
        f"BLAS: {Path(document['blas']).name}, other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )


def panels(document: dict[str, Any]) -> list[Panel]:
    """The curves, a picture for each model."""
    rest = document["rest"]
    made = []
    for name, found in document["models"].items():
        results = [found["results"][str(count)] for count in rest]
        lines = [
            Line.of(label, rest, [Sample.of(result["seconds"][way]["values"]) for result in results], 1e3)
            for way, label in {**_WAYS, "read": "the reading alone"}.items()
        ]
        made.append(Panel(MODELS[name], "tokens computed", "ms to the first token", lines, log_x=True, log_y=True))
    return made
