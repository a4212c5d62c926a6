"""Does a mount keep the promises that kvstore needs? One verdict a line: ok, warn or FAIL, and what it means.

    python tools/verify_filesystem.py /mnt/nas/kv

Exit code 0 when nothing failed (warnings included), 1 when something did. It works in a folder of its own that it
removes again, and needs 20 MiB. Several machines on one volume are beyond it: run it on each, and keep in mind that it
cannot see whether locks hold between them.

With --json one document:

    {"directory": "/…", "usable": true, "checks": [{"name": "…", "status": "ok", "sentence": "…", "seconds": 0.012}]}
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from verify_checks import CHECKS, Check, Status, Verdict, fail
from verify_limits import LIMITS
from verify_processes import PROCESS_CHECKS

ALL: dict[str, Check] = {"location": LIMITS["location"], **CHECKS, **PROCESS_CHECKS, **LIMITS}


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report."""

    name: str
    status: Status
    sentence: str
    seconds: float


def run(directory: Path, checks: Iterable[tuple[str, Check]]) -> Iterator[Result]:
    """Each check in an empty folder of its own below the directory; all is removed afterwards."""
    place = Path(tempfile.mkdtemp(prefix=".kvstore-verify-", dir=directory))
    try:
        for number, (name, check) in enumerate(checks):
            started = time.perf_counter()
            verdict = _one(check, place / str(number))
            yield Result(name, verdict.status, verdict.sentence, round(time.perf_counter() - started, 4))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _one(check: Check, folder: Path) -> Verdict:
    try:
        os.mkdir(folder)
        return check(folder)
    except OSError as error:
        return fail(f"{error.strerror or error}: kvstore does the same in use")


def main(arguments: list[str] | None = None) -> int:
    """Run all checks and print their verdicts; the exit code."""
    parser = argparse.ArgumentParser(description="Say whether a mount keeps the promises that kvstore needs.")
    parser.add_argument("directory", type=Path, help="a folder on the mount; nothing in it is touched")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    if not given.directory.is_dir():
        parser.error(f"{given.directory} is not a folder; name an existing one on the mount")
    directory = given.directory.resolve()
    results = []
    width = max(map(len, ALL))
    try:
        for result in run(directory, ALL.items()):
            results.append(result)
            if not given.json:
                print(f"{result.status:4}  {result.name:{width}}  {result.sentence}", flush=True)
    except OSError as error:
        parser.error(f"{directory} cannot be written: {error.strerror}")
    failed = sum(result.status == "FAIL" for result in results)
    warned = sum(result.status == "warn" for result in results)
    if given.json:
        document = {"directory": str(directory), "usable": not failed, "checks": [asdict(each) for each in results]}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif failed:
        print(f"\nNot for kvstore: {failed} of {len(results)} promises are not kept. Use another file system.")
    else:
        print(f"\nkvstore can use it ({warned} warnings)." if warned else "\nkvstore can use it.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
