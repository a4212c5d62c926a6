"""`bench peers`: the same KV saved and loaded by kvstore and by what else one could use, in the same run.

A conversation grows by --step tokens at a time and is saved after each: who can only save a whole prompt writes it
again. Then a new process loads all of it. Every peer starts from the same MLX arrays in an engine's layout, and ends
with the bytes of each tensor in one piece; two tensors are compared afterwards. Nobody syncs to the medium unless it
always does (durability none for kvstore). Files are warm in the page cache.

The peers are optional: pip install 'kvstore-llm[bench]'. LMCache needs versions of its own of much else, so it may live
in an environment of its own: --lmcache-python. Its index is in memory, so only the process that saved can load.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench_child import clean_environment, run_child
from bench_kv import Shape, add_shape, shape_named, shape_of
from bench_machine import BenchError, OtherWork, conditions, data_folder, need_disk, need_memory
from bench_plot import Line, Panel
from bench_report import Outcome, table
from bench_stats import Sample, paired, rotated

__all__ = ["HELP", "PEERS", "configure", "panels", "run", "tables"]

HELP = "the same bytes saved and loaded by kvstore, mlx-lm, safetensors, SQLite, diskcache and LMCache"

PEERS = {
    "kvstore": "kvstore",
    "raw": "pwrite, preadv: the limit",
    "mlx_lm": "mlx-lm save_prompt_cache",
    "safetensors_numpy": "safetensors, numpy",
    "safetensors_mlx": "safetensors, mlx",
    "sqlite": "SQLite index, blocks serialised again",
    "diskcache": "diskcache",
    "lmcache": "LMCache, local disk",
}
_NEEDS = {"safetensors_numpy": "safetensors", "safetensors_mlx": "safetensors", "diskcache": "diskcache"}
_VERIFIES = {"kvstore": "xxh3", "raw": "no"}
_LMCACHE_S = 600


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    add_shape(parser, Shape())
    parser.add_argument("--tokens", type=int, default=4096, help="the conversation in the end (default: 4096)")
    parser.add_argument("--step", type=int, default=1024, help="tokens between two saves (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--peer", choices=PEERS, action="append", help="only this one (default: all)")
    parser.add_argument("--lmcache-python", type=Path, help="interpreter that has LMCache (default: this one)")


def run(options: argparse.Namespace) -> Outcome:
    """Save and load with every peer in turns."""
    shape = shape_of(options)
    if options.tokens % options.step or options.step % 256:
        raise BenchError("--tokens must be a multiple of --step, and --step of 256, in which mlx-lm's caches grow")
    size = shape.token_bytes * options.tokens
    chosen = options.peer or list(PEERS)
    versions = {name: _version(name, options) for name in chosen}
    document: dict[str, Any] = {
        "command": "peers",
        "conditions": conditions(options.dir.parent),
        "page_cache": "warm",
        "shape": shape.document(),
        "tokens": options.tokens,
        "step": options.step,
        "payload_bytes": size,
        "versions": {name: found for name, found in versions.items() if found},
        "missing": [name for name, found in versions.items() if found is None],
        "results": {},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen if versions[name] is not None}
    with data_folder(options.dir, keep=options.keep) as folder:
        need_disk(folder, 3 * size)
        need_memory(4 * size)
        other = OtherWork()
        for turn in range(options.rounds):
            for name in rotated(list(found), turn):
                found[name].append(_once(name, folder / name, shape, options))
        document["cores_used_by_others"] = other.cores()
    for name, results in found.items():
        document["results"][name] = {
            key: Sample.of(each[key] for each in results).document() for key in results[0] if key != "digests"
        }
    first = found.get("kvstore")
    if first is not None:
        document["kvstore_faster"] = {
            key: {
                name: paired([each[key] for each in results], [each[key] for each in first]).document()
                for name, results in found.items()
                if name != "kvstore"
            }
            for key in ("save", "load")
        }
    return Outcome(document, tables(document))


def _version(name: str, options: argparse.Namespace) -> str | None:
    """The version of what a peer needs, empty when it needs nothing; None when it is not installed."""
    if name == "lmcache":
        python = str(options.lmcache_python or sys.executable)
        asked = "from importlib.metadata import version; import torch, lmcache; print(version('lmcache'))"
        run = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else None
    try:
        return version(_NEEDS[name]) if name in _NEEDS else ""
    except PackageNotFoundError:
        return None


def _once(name: str, place: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    job = {
        "peer": name,
        "folder": str(place),
        "shape": shape.fields(),
        "tokens": options.tokens,
        "step": options.step,
    }
    place.mkdir()
    try:
        if name == "lmcache":
            return _lmcache(job, options)
        saved = run_child("bench_peer_methods", {**job, "task": "save"})
        loaded = run_child("bench_peer_methods", {**job, "task": "load", "digests": saved["digests"]})
        return {**saved, **loaded}
    finally:
        shutil.rmtree(place)


def _lmcache(job: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    tool = Path(__file__).resolve().with_name("bench_peer_lmcache.py")
    command = [str(options.lmcache_python or sys.executable), str(tool), json.dumps(job)]
    run = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=_LMCACHE_S, check=False
    )
    if run.returncode:
        raise BenchError(f"LMCache failed: {(run.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    size, rows = document["payload_bytes"], []
    faster = document.get("kvstore_faster", {"save": {}, "load": {}})
    for name, result in document["results"].items():
        samples = {key: Sample.of(each["values"]) for key, each in result.items()}
        ratios = [
            Sample.of(faster[key][name]["values"]).text() if name in faster[key] else "" for key in ("save", "load")
        ]
        rows.append(
            [
                f"{PEERS[name]} {document['versions'].get(name, '')}".strip(),
                samples["save"].text(1e3, 0),
                ratios[0],
                f"{samples['written'].median / size:.2f}",
                f"{samples['save_extra'].median / 2**20:.0f}",
                samples["load"].text(1e3, 0),
                ratios[1],
                f"{samples['load_extra'].median / 2**20:.0f}",
                _VERIFIES.get(name, "no"),
            ]
        )
    rows += [[PEERS[name], "not installed", *[""] * 7] for name in document["missing"]]
    n = max((each["save"]["n"] for each in document["results"].values()), default=0)
    others = document["cores_used_by_others"]
    made = table(
        f"{document['tokens']} tokens saved {document['step']} at a time, then loaded, "
        f"{shape_named(document['shape']).text()}",
        [
            "peer",
            "all saves ms",
            "kvstore faster",
            "written / new",
            "extra peak MiB",
            "load ms",
            "kvstore faster",
            "extra peak MiB",
            "checked",
        ],
        rows,
        f"n = {n} in turns, median (min to max), page cache {document['page_cache']}, loads in a fresh process "
        "(LMCache: in the one that saved, because its index does not outlive it; its "
        "staging memory is made beforehand, kvstore's in its first save), "
        f"other processes used {'?' if others is None else f'{others:.2f}'} cores",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """Bars: seconds to save and to load, and bytes written."""
    names = list(document["results"])
    labels = [PEERS[name] for name in names]
    size = document["payload_bytes"]

    def bars(title: str, unit: str, key: str, scale: float) -> Panel:
        samples = [Sample.of(document["results"][name][key]["values"]) for name in names]
        return Panel(title, unit, "", [Line.of(title, range(len(names)), samples, scale)], bars=labels)

    return [
        bars("all saves", "ms", "save", 1e3),
        bars("load", "ms", "load", 1e3),
        bars("bytes written for each of new KV", "ratio", "written", 1 / size),
    ]
