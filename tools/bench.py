"""Measure kvstore against the limit of this machine, and against what else one could use.

Methods take turns, a warm-up is thrown away, medians stand beside minimum and maximum, and the raw values go into a
JSON file with the conditions they were measured under. Without a subcommand all of them run but quick, which is a
selection, scale, which takes 17 GB of disk, and sustained, which needs recorded requests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import bench_amplification
import bench_blocks
import bench_breakeven
import bench_decode
import bench_fsync
import bench_gc
import bench_layers
import bench_lookup
import bench_peers
import bench_plot
import bench_publish
import bench_quick
import bench_restore
import bench_scale
import bench_sustained
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
    "break-even": bench_breakeven,
    "decode": bench_decode,
    "layers": bench_layers,
    "tokens": bench_tokens,
    "fsync": bench_fsync,
    "blocks": bench_blocks,
    "gc": bench_gc,
    "peers": bench_peers,
    "sustained": bench_sustained,
    "quick": bench_quick,
    "scale": bench_scale,
}


_ASKED_FOR = {"quick", "scale", "sustained"}


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
        if name not in _ASKED_FOR and (code := _run(made.parse_args([name]))):
            return code
    return 0


def _run(options: argparse.Namespace) -> int:
    options.dir = Path(options.dir).absolute()
    module = SUBCOMMANDS[options.command]
    try:
        outcome = module.run(options)
    except (BenchError, KVStoreError) as error:
        print(f"bench {options.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"bench {options.command}: {error.filename or options.dir}: {error.strerror}", file=sys.stderr)
        return 1
    path = options.out or RESULTS / f"{options.command}.json"
    emit(outcome, path)
    for kind in (".svg", ".png"):
        if line := bench_plot.draw(module.panels(outcome.document), path.with_suffix(kind)):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
