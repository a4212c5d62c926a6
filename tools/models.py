"""`make models`: every model family of mlx-lm, tiny, through a cache directory; writes docs/models.md.

    tools/models.py                      all families, two at a time (about 15 minutes of two idle cores)
    tools/models.py llama qwen3_5        some of them; the document is left alone

Each family runs in processes of its own, so that a crash is a row of the table and not its end: one writes, another one
restores. Exits 1 when a result differs from an uninterrupted run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "integration"), str(ROOT / "tools")]

from family_arguments import UNBUILDABLE  # noqa: E402 - after the path
from family_report import Row, document, table  # noqa: E402

TIMEOUT_S = 900
"""For one process of one family, on a machine that does other things too."""

_ENGINE = ["families", "family_batch", "family_runs", "family_scenarios"]
"""Imported once, before the processes of families are forked: no array is made by that, and it takes seconds."""


def main() -> int:
    """Run the families and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only these, and no document")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time (2)")
    arguments = parser.parse_args()
    # Several threads for products this small only wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from families import rows  # noqa: PLC0415 - after the environment

    names = arguments.families or [name for name in rows() if name not in UNBUILDABLE]
    multiprocessing.get_context("forkserver").set_forkserver_preload(_ENGINE)
    began = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(_family, names))
    print(table(found))
    minutes = (time.monotonic() - began) / 60
    wrong = [row for row in found if row.problems]
    print(f"{sum(row.right for row in found)} of {len(found)} rows are as an uninterrupted run ({minutes:.0f} minutes)")
    for row in wrong:
        print(f"{row.name}: {'; '.join(row.problems)}")
    if not arguments.families:
        versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
        (ROOT / "docs" / "models.md").write_text(document(found, UNBUILDABLE, versions), encoding="utf-8")
    return 0 if all(row.right for row in found) else 1


def _family(name: str) -> Row:
    """One family's row, from two processes."""
    began = time.monotonic()
    row = Row(name)
    with tempfile.TemporaryDirectory(prefix="kvstore-models-") as directory:
        for phase in ("write", "resume"):
            if row.refused or not _phase(row, phase, Path(directory)):
                break
    problems = "; ".join(row.problems) or row.refused or "ok"
    print(f"{name:24s} {time.monotonic() - began:5.1f} s  {problems}", file=sys.stderr, flush=True)
    return row


def _phase(row: Row, phase: str, directory: Path) -> bool:
    """Run one process and add what it found; False when it did not come to its end."""
    report = directory / f"{phase}.json"
    process = multiprocessing.get_context("forkserver").Process(target=run_phase, args=(row.name, phase, directory))
    process.start()
    process.join(TIMEOUT_S)
    ended = "" if process.exitcode == 0 else f"ended with {process.exitcode}"
    if process.is_alive():
        process.kill()
        process.join()
        ended = f"took more than {TIMEOUT_S} s"
    if report.exists():
        row.add(Row(**json.loads(report.read_text())))
    if ended and not row.problems:
        row.checks[f"process that {phase}s"] = ended
    return not ended


def run_phase(name: str, phase: str, directory: Path) -> None:
    """One process of one family; what it has found so far is in a file at any time."""
    report = directory / f"{phase}.json"
    row = Row(name)
    try:
        _run_phase(row, phase, directory, report)
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        row.checks[phase] = f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
        _write(row, report)
        raise


def _run_phase(row: Row, phase: str, directory: Path, report: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415

    from families import build  # noqa: PLC0415 - the engine is for these processes only
    from family_batch import FAILS, batch, batchable, kept  # noqa: PLC0415
    from family_runs import classes, quantizes  # noqa: PLC0415
    from family_scenarios import resume, stateful_of, write  # noqa: PLC0415
    from kvstore_mlx.spaces import UnsupportedModelError  # noqa: PLC0415

    model = build(row.name)
    counted = classes(make_prompt_cache(model))
    row.caches = ", ".join(f"{count} {kind}" for kind, count in counted.items())
    try:
        row.stateful = stateful_of(model, row.name)
    except UnsupportedModelError as error:
        row.refused = str(error)
        _write(row, report)
        return
    scenarios = partial(write if phase == "write" else resume, row.name, model)
    row.found("", scenarios(directory / "plain"))
    _write(row, report)
    # mlx-lm quantizes what is a KVCache, leaves lists and states as they are, and cannot quantize a window.
    if "KVCache" in counted and "RotatingKVCache" not in counted:
        for bits in (4, 8):
            if problem := quantizes(model, bits):
                row.notes.append(f"with --kv-bits mlx-lm itself fails ({problem})")
            else:
                row.found(f"kv-bits {bits}, ", scenarios(directory / f"bits-{bits}", (bits, 32)))
            _write(row, report)
    if phase == "write":
        if batchable(model):
            row.found("", batch(row.name, model, directory / "batch"))
            if not any(note.startswith(FAILS) for note in row.notes):
                row.found("", kept(row.name, model, directory / "kept"))
        else:
            row.notes.append("mlx-lm serves it one request at a time")
        _write(row, report)


def _write(row: Row, path: Path) -> None:
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(asdict(row)))
    os.replace(staged, path)


if __name__ == "__main__":
    sys.exit(main())
