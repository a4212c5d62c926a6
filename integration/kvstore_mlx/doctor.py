"""``kvstore doctor``: whether this machine, this engine and this directory go together, and how fast.

With ``--json`` one document; speeds are bytes a second, and null when they were not measured:

    {"directory": "/…", "why": "it was given", "state": "ready", "used": 1208000000, "interval": 2048,
     "versions": {"kvstore-llm": "…", "python": "…", "mlx": "…", "mlx-lm": "…", …}, "system": "…",
     "engine": {"device": "…", "in_place": true, "donates": true, "reason": "", "milliseconds": 12.3, "phase": 24},
     "speeds": {"bytes_each": 268435456, "write": 1.1e9, "read": 6.2e9, "read_cold": 1.9e9, "publish": 1.0e9,
                "restore": 6.1e9},
     "warnings": ["…"], "problems": ["…"], "exit_code": 0}

state: ready, absent (it is made at first use) or unusable. Exit codes: 0 all is well; 1 it cannot be used, problems say
why; 2 the command line is wrong; 3 it works, and warnings say what speaks against it.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.table import Table

from kvstore.cli.app import complain, output, print_json
from kvstore.cli.common import warn
from kvstore.errors import KVStoreError
from kvstore.gc import usage
from kvstore.locations import place_of, warnings_for
from kvstore.sizes import format_size, parse_size
from kvstore.store import Store
from kvstore_mlx.versions import check_versions

__all__ = ["command", "parser"]

_MIN_SIZE = 1 << 20

_PACKAGES = ("kvstore-llm", "mlx", "mlx-lm", "numpy", "xxhash")


@dataclass
class Report:
    """What was found; see the module for the fields."""

    directory: str
    why: str
    state: str = "absent"
    used: int | None = None
    interval: int | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    system: str = ""
    engine: dict[str, Any] | None = None
    speeds: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """See the module."""
        return 1 if self.problems else 3 if self.warnings else 0


def command(argv: Sequence[str]) -> int:
    """Say whether this machine, engine and directory go together, and how fast; returns the exit code."""
    options = parser().parse_args(argv)
    place = place_of(options.directory)
    report = Report(str(place.path), place.why, warnings=warnings_for(place.path))
    with _without_log():
        _versions(report)
        _directory(report, place.path)
        _engine(report, again=options.again)
        if options.speed and report.engine is not None:
            _speeds(report, place.path, options.size)
    if options.json:
        print_json({**asdict(report), "exit_code": report.exit_code})
    else:
        _print(report)
    return report.exit_code


@contextmanager
def _without_log() -> Iterator[None]:
    """What would be logged as a warning is said at the end."""
    log = logging.getLogger("kvstore")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def parser(_command: str = "doctor", *, engine_flags: bool = True) -> argparse.ArgumentParser:
    """The parser of the command, which has no flags of an engine's; see kvstore.cli.adapters."""
    del engine_flags
    made = _Parser(
        prog="kvstore doctor",
        description="Say whether this machine, this engine and this cache directory go together, and how fast.",
        epilog="Exit codes: 0 all is well; 1 something cannot be used; 2 wrong command line; 3 works, with warnings.",
    )
    made.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=_named,
        help="the cache directory (default: $KVSTORE_DIR, or kvstore/kv among your caches)",
    )
    made.add_argument("--json", action="store_true", help="print one JSON document on stdout instead of tables")
    made.add_argument("--again", action="store_true", help="look at MLX's memory again, whatever is remembered")
    made.add_argument(
        "--no-speed", dest="speed", action="store_false", help="do not measure: nothing is written to the disk"
    )
    made.add_argument(
        "--size",
        type=_size,
        default="256MiB",
        help="bytes to measure speeds with (default: 256MiB, four times in memory)",
    )
    return made


class _Parser(argparse.ArgumentParser):
    """Argparse, but a mistake is answered as the store's commands answer theirs."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end."""
        said = _reworded(message)
        # What we say of a value ends with what to write.
        complain(said if "; " in said else f"{said}; see `{self.prog} --help`")
        raise typer.Exit(2)


def _reworded(message: str) -> str:
    """What argparse says, in the words of the library that parses for the other commands."""
    if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
        words = unknown[1]
        return f"no such option: {words}" if words.startswith("-") else f"got unexpected extra argument(s) ({words})"
    if alone := re.fullmatch(r"argument (\S+): expected one argument", message):
        return f"option '{alone[1]}' requires an argument"
    return message.removeprefix("argument ")


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of the directory is empty")
    return text


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except KVStoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < _MIN_SIZE:
        raise argparse.ArgumentTypeError(f"{format_size(size)} tell no speed; give at least {format_size(_MIN_SIZE)}")
    return size


def _versions(report: Report) -> None:
    report.system = f"{platform.platform()}, {os.cpu_count()} cores"
    report.versions = {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    try:
        check_versions()
    except KVStoreError as error:
        report.problems.append(str(error))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _directory(report: Report, path: Path) -> None:
    """Open it as a server would, without creating anything."""
    if not os.path.lexists(path):
        return
    report.state = "unusable"
    try:
        with Store.open(path, create=False) as store:
            report.interval = store.interval
            report.used = usage(store.context)
            store.check_writable()
    except KVStoreError as error:
        report.problems.append(str(error))
    except OSError as error:
        report.problems.append(f"{path} cannot be read ({error.strerror})")
    else:
        report.state = "ready"


def _engine(report: Report, *, again: bool) -> None:
    try:
        from kvstore_mlx import selfcheck  # noqa: PLC0415 - imports MLX, which may not be there
        from kvstore_mlx.buffers import address_phase  # noqa: PLC0415
    except ImportError as error:
        report.problems.append(f"MLX cannot be imported ({error})")
        return
    if again:
        selfcheck.Notes().look(selfcheck.machine_key())
        selfcheck.answer.cache_clear()
    found = selfcheck.answer()
    report.engine = {"device": selfcheck.device(), **asdict(found), "phase": address_phase()}
    if not found.in_place:
        report.warnings.append(f"MLX's memory cannot be used in place here, so restores are slower: {found.reason}")
    elif not found.donates:
        report.warnings.append("MLX does not update arrays in place here, so each token copies the whole cache")


def _speeds(report: Report, path: Path, size: int) -> None:
    from kvstore_mlx.speeds import measure, scratch_parent  # noqa: PLC0415 - imports MLX

    try:
        report.speeds = asdict(measure(scratch_parent(path), size))
    except OSError as error:
        report.problems.append(f"speeds could not be measured: {error.filename or path}: {error.strerror or error}")
    except KVStoreError as error:
        report.problems.append(f"speeds could not be measured: {error}")


def _print(report: Report) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(report):
        table.add_row(name, text)
    output().print(table, highlight=False, markup=False)
    warn(report.warnings)
    for problem in report.problems:
        complain(problem)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "directory", f"{report.directory} ({report.why})"
    state = {"absent": "not there yet; made at first use", "ready": "ready"}.get(report.state, "cannot be used")
    if report.used is not None:
        state += f", {format_size(report.used)} used, chunks of {report.interval} tokens"
    yield "state", state
    yield "versions", ", ".join(f"{name} {number or 'missing'}" for name, number in report.versions.items())
    yield "system", report.system
    if report.engine is not None:
        found = report.engine
        yield "MLX device", found["device"]
        way = "filled and read in place" if found["in_place"] else "by copies (safe path)"
        yield "MLX memory", f"{way}; looking took {found['milliseconds']:.1f} ms; address phase {found['phase']}"
        yield "in-place updates", "yes" if found["donates"] else "no"
    if report.speeds is not None:
        speeds = report.speeds
        cold = "" if speeds["read_cold"] is None else f" ({format_size(speeds['read_cold'])}/s from the disk)"
        raw = f"write and sync {format_size(speeds['write'])}/s, read into new memory {format_size(speeds['read'])}/s"
        yield "disk", raw + cold
        publish, restore = format_size(speeds["publish"]), format_size(speeds["restore"])
        yield "store", f"publish {publish}/s, restore into new memory {restore}/s"
