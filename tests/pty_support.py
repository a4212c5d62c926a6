"""Commands with a terminal: one stream of a real process is a pseudo terminal, the other one a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

KVSTORE = ("-m", "kvstore")


def after(*lines: str) -> tuple[str, str]:
    """The same program, behind a few lines that change what a test cannot wait for."""
    return "-c", "; ".join((*lines, "from kvstore.cli.app import main", "main()"))


ON_A_TERMINAL = after(
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})",
    "import pty_support; pty_support.stderr_to_terminal()",
)
"""The same with stderr a terminal, for processes that run_at does not start."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DECIDING = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "KVSTORE_DIR")


class Seen(NamedTuple):
    """What a command wrote. The stream that was a terminal has its escapes, and \\r\\n for a line's end."""

    code: int
    out: str
    err: str


def run_at(
    terminal: str | None,
    *arguments: object,
    program: tuple[str, ...] = KVSTORE,
    env: Mapping[str, str] | None = None,
    columns: int = 110,
) -> Seen:
    """Run a command whose stdout or stderr is a terminal ("out", "err"), or neither (None)."""
    kept = {name: value for name, value in os.environ.items() if name not in _DECIDING}
    environment = {**kept, "TERM": "xterm-256color", **(env or {})}
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    streams = {"out": subprocess.PIPE, "err": subprocess.PIPE}
    if terminal is not None:
        streams[terminal] = slave
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=streams["out"],
        stderr=streams["err"],
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    drawn: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(master, drawn))
    reader.start()
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        reader.join()
        os.close(master)
    piped = {"out": out, "err": err}
    if terminal is not None:
        piped[terminal] = b"".join(drawn)
    return Seen(process.returncode, *((piped[name] or b"").decode() for name in ("out", "err")))


def _drain(master: int, into: list[bytes]) -> None:
    """Until nobody has the other end any more, which Linux tells by EIO."""
    while True:
        try:
            data = os.read(master, 1 << 16)
        except OSError:
            return
        if not data:
            return
        into.append(data)


def stderr_to_terminal() -> None:
    """In a process that has just begun: its stderr becomes a terminal, and what is written there goes where it went."""
    was = os.dup(2)
    master, slave = pty.openpty()
    os.dup2(slave, 2)

    def copy() -> None:
        while data := os.read(master, 1 << 16):
            os.write(was, data)

    threading.Thread(target=copy, daemon=True).start()


def plain(text: str) -> str:
    """A terminal's text without what moves the cursor or colours."""
    return _ESCAPE.sub("", text)
