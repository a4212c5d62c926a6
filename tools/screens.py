"""Draw the pictures of docs/screens.md: what the commands print for a made-up directory, and for a real server.

    make screens
    tools/screens.py --only ls tree

The directory's conversations, keys and times are the same every time, and the commands see a clock that stands. What a
real server and this machine say differs each time; those pictures are drawn anew only when something else than numbers
changed. Needs a Chromium for the page, and for the server the model of the demo.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fast_blas import preload_env
from screens_draw import draw, photograph

__all__ = ["COMMANDS", "main"]

ROOT = Path(__file__).resolve().parent.parent
SCREENS = ROOT / "docs" / "screens"
MODEL = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
WIDTH = 100
HOME = "/home/me"
"""What the folder in which all of it runs is called in the pictures."""

_STANDING_CLOCK = """\
import sys, time
now = int(sys.argv.pop(1))
time.time, time.time_ns = (lambda: float(now)), (lambda: now * 10**9)
from kvstore.cli import main
sys.argv[0] = "kvstore"
main()
"""

NUMBERS = r"[\d.,:]+( ?(ms|s|B|[KMGT]iB)\b)?|[0-9a-f]{12}"


@dataclass(frozen=True)
class Command:
    """One command and its picture. {key}: the conversation used last. noise: what differs each time."""

    name: str
    line: str
    noise: str = ""
    width: int = WIDTH


COMMANDS = (
    Command("ls", "kvstore ls kv"),
    Command("tree", "kvstore tree kv"),
    Command("show", "kvstore show kv {key}"),
    Command("why", "kvstore why kv --prompt prompt.txt --model SmolLM2-135M-Instruct", width=120),
    Command("stats", "kvstore stats kv"),
    Command("du", "kvstore du kv"),
    Command("fsck", "kvstore fsck kv --read-data", noise=r"in [\d.]+ s"),
    Command("gc", "kvstore gc kv --size 20MiB --dry-run"),
)


def run(line: str, folder: Path, *, now: int | None = None, width: int = WIDTH) -> str:
    """What a command prints on a terminal of that width; now: where its clock stands (seconds since the epoch)."""
    command = line.split()[1:]
    program = ["-m", "kvstore"] if now is None else ["-c", _STANDING_CLOCK, str(now)]
    env = {**os.environ, "COLUMNS": str(width), "LINES": "60", "TERM": "xterm-256color", "TZ": "UTC"}
    env = {name: value for name, value in env.items() if name not in {"NO_COLOR", "KVSTORE_DIR", "KVSTORE_SALT"}}
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *program, *command], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave
    )
    os.close(slave)
    printed = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # how a terminal's other end says that it was closed
            break
        if not piece:
            break
        printed += piece
    os.close(master)
    process.wait()
    text = printed.decode().replace("\r\n", "\n")
    if "Traceback" in text:
        raise RuntimeError(f"{line} failed:\n{text}")
    return _settled(text).replace(str(folder), HOME)


def _settled(text: str) -> str:
    """What a terminal shows in the end: bars and spinners, which are drawn over, are gone."""
    text = re.sub(r"\x1b\[\?25[lh]", "", text)
    lines: list[str] = []
    for line in text.split("\n"):
        up = len(re.findall(r"\x1b\[1A", line))
        del lines[len(lines) - up :]
        lines.append(re.sub(r"\x1b\[(?:\d*[AK]|2K)", "", line.rpartition("\r")[2]))
    return "\n".join(lines)


def from_made_up(folder: Path, wanted: Callable[[str], bool], told: Callable[[str, bool], None]) -> None:
    """The pictures of a directory that is the same every time."""
    import tokenizers  # noqa: PLC0415 - of the demo's extra

    from screens_data import NOW_S, fill  # noqa: PLC0415 - as above

    saved = fill(folder / "kv", tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json")))
    (folder / "prompt.txt").write_text(saved.prompt, encoding="utf-8")
    (folder / MODEL.name).mkdir(exist_ok=True)
    shutil.copy(MODEL / "tokenizer.json", folder / MODEL.name)
    for each in COMMANDS:
        if wanted(each.name):
            line = each.line.format(key=saved.newest[:12])
            printed = run(line, folder, now=NOW_S, width=each.width)
            told(each.name, draw(SCREENS / f"{each.name}.svg", line, line, printed, width=each.width, noise=each.noise))
    if wanted("report"):
        run("kvstore report kv -o cache.html", folder, now=NOW_S)
        page = folder / "cache.html"
        page.write_text(page.read_text(encoding="utf-8").replace(str(folder), HOME), encoding="utf-8")
        told("report", photograph(page, SCREENS / "report.png", (1200, 940)))


def from_a_server(folder: Path, wanted: Callable[[str], bool], told: Callable[[str, bool], None]) -> None:
    """The pictures of a real server on a real model, which is started three times, and of this machine."""
    from demo_servers import Server  # noqa: PLC0415 - of the demo's extra

    cache, logs = folder / "cache", [folder / f"{start}.log" for start in ("first", "second", "third")]
    env = preload_env(os.environ)
    system = "You are a careful reviewer. Be brief, be right, cite the line. " * 20
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is a hash chain?"}]
    with Server(logs[0], MODEL, env, cache) as server:
        server.ask(messages, 16)
        _wait_saved(server.port)
        server.stop()
    with Server(logs[1], MODEL, env, cache) as server:
        answer = server.ask(messages, 16)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And a hash tree?"}]
        server.ask(messages, 16)
        _wait_saved(server.port)
        top = run(f"kvstore top {server.port} --once", folder)
        server.stop()
    with Server(logs[2], MODEL, env, cache) as server:
        server.stop()
    line = f"kvstore serve --model {MODEL.name} --kv-cache-dir cache"
    log = f"\n\x1b[1;92m$ {line}\x1b[0m\n".join(_told(each, folder) for each in logs)
    for name, command, printed, width in (
        ("serve", line, log, 130),
        ("top", "kvstore top --once", top, WIDTH),
        ("doctor", "kvstore doctor cache", run("kvstore doctor cache", folder) if wanted("doctor") else "", WIDTH),
    ):
        if wanted(name):
            told(name, draw(SCREENS / f"{name}.svg", command, command, printed, width=width, noise=NUMBERS))


def _told(log: Path, folder: Path) -> str:
    """What a server's log says of the cache, without the request that the tool only waited for its model with."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if "kvstore: " in line]
    text = "\n".join(line for line in lines if " of 1 tokens " not in line)
    return text.replace(str(folder), HOME).replace(str(MODEL.parent), HOME)


def _wait_saved(port: int) -> None:
    """Wait until nothing waits to be written."""
    import time  # noqa: PLC0415
    import urllib.request  # noqa: PLC0415

    quiet = 0
    while quiet < 3:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            health: Mapping[str, Mapping[str, int]] = json.load(answer)
        quiet = 0 if health["kv_cache"]["queued_bytes"] else quiet + 1
        time.sleep(0.3)


def main() -> int:
    """Draw all pictures, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    live = ("serve", "top", "doctor")
    names = [*(each.name for each in COMMANDS), "report", *live]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="draw these pictures only")
    wanted = parser.parse_args().only
    import make_smollm2  # noqa: PLC0415 - of the demo's extra

    try:
        make_smollm2.make(MODEL, None)
    except make_smollm2.ToolError as error:
        print(f"screens: {error}", file=sys.stderr)
        return 1
    folder = ROOT / "build" / "screens"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    SCREENS.mkdir(exist_ok=True)

    def told(name: str, changed: bool) -> None:
        print(f"{name}: {'drawn' if changed else 'as before'}")

    from_made_up(folder, wanted.__contains__, told)
    if set(live) & set(wanted):
        from_a_server(folder, wanted.__contains__, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
