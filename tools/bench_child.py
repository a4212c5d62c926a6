"""Run a part of a benchmark in a process of its own.

A child is `python bench_child.py MODULE JSON`: MODULE.child(JSON) is called, and what it returns is printed as JSON on
the last line. Memory that nobody has touched, and a peak of memory that is only its own, are what a new process has.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench_machine import BenchError

__all__ = ["clean_environment", "run_child"]

CHILD_S = 1800


def clean_environment() -> dict[str, str]:
    """This process's environment without a preloaded BLAS, whose threads would only be in the way."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run_child(module: str, job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The result of module.child(job), called in a new process, with some more variables in its environment."""
    command = [sys.executable, str(Path(__file__).resolve()), module, json.dumps(job)]
    try:
        run = subprocess.run(
            command,
            env={**clean_environment(), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"a measurement took more than {CHILD_S} s ({module}: {job})") from error
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"a measurement failed ({module}, exit code {run.returncode}): {reason}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


def main() -> None:
    """What a child does."""
    module, job = sys.argv[1:]
    result = importlib.import_module(module).child(json.loads(job))
    print(json.dumps(result), flush=True)
    # Not through the interpreter's end: MLX 0.32.4 aborts there now and then when a stream has been read just before.
    os._exit(0)


if __name__ == "__main__":
    main()
