"""Measure kvstore against the limit of this machine, and against what else one could use.

Methods take turns, a warm-up is thrown away, medians stand beside minimum and maximum, and the raw values go into a
JSON file with the conditions they were measured under. Without a subcommand all of them run but quick, which is a
selection, and scale, which takes 17 GB of disk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import bench_amplification
import bench_lookup
import bench_publish
import bench_quick
import bench_restore
import bench_scale
import bench_tokens
import bench_ttft
from bench_machine import BenchError
from bench_report import RESULTS, add_common, emit
from kvstore.errors import KVStoreError

SUBCOMMANDS: dict[str, ModuleType] = {
    "restore": bench_restore,
    "publish": bench_publish,
    "lookup": bench_lookup,
    "amplification": bench_amplification,
    "ttft": bench_ttft,
    "tokens": bench_tokens,
    "quick": bench_quick,
    "scale": bench_scale,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", metavar="SUBCOMMAND")
    for name, module in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        add_common(command)
        module.configure(command)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand, or all that one waits for."""
    made = parser()
    options = made.parse_args(arguments)
    if options.command:
        return _run(options)
    for name in SUBCOMMANDS:
        if name not in {"quick", "scale"} and (code := _run(made.parse_args([name]))):
            return code
    return 0


def _run(options: argparse.Namespace) -> int:
    options.dir = Path(options.dir).absolute()
    try:
        outcome = SUBCOMMANDS[options.command].run(options)
    except (BenchError, KVStoreError) as error:
        print(f"bench {options.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"bench {options.command}: {error.filename or options.dir}: {error.strerror}", file=sys.stderr)
        return 1
    emit(outcome, options.out or RESULTS / f"{options.command}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
