"""Pictures of a terminal and of a page: an SVG by rich of what a command printed, a PNG by a headless Chromium.

A picture that is there stays as it is when the new one would differ in nothing but what is said to be noise (times that
something took), so that a commit shows what changed.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from hashlib import sha256
from html import unescape
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

__all__ = ["BROWSERS", "draw", "photograph", "words"]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

# Rich's own asks a font server for Fira Code. A picture asks nobody; each system has a font of fixed width.
_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*|<!--.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
)
_SAID = b"kvstore-source"


def draw(path: Path, title: str, command: str, printed: str, *, width: int, noise: str = "") -> bool:
    """Draw a command and what it printed, ANSI colours and all; False when the picture that is there shows the same.

    noise: a pattern of what may differ.
    """
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", "bold green"))
    console.print(Text.from_ansi(printed.rstrip("\n")))
    picture = console.export_svg(title=title, theme=MONOKAI, code_format=_FORMAT, unique_id=f"kv-{path.stem}")
    picture = "\n".join(line.rstrip() for line in picture.splitlines()).rstrip() + "\n"
    if path.exists() and _silent(words(path.read_text(encoding="utf-8")), noise) == _silent(words(picture), noise):
        return False
    path.write_text(picture, encoding="utf-8")
    return True


def words(picture: str) -> str:
    """What a picture of a terminal says: its texts, row by row, without the space between columns."""
    rows: dict[float, str] = {}
    body = picture[picture.index('-matrix">') :]
    for y, text in re.findall(r'<text [^>]*? y="([\d.]+)"[^>]*>(.*?)</text>', body):
        rows[float(y)] = rows.get(float(y), "") + unescape(text).replace("\xa0", " ")
    return "\n".join(rows[y].rstrip() for y in sorted(rows))


def _silent(text: str, noise: str) -> str:
    """A text without its noise; the space that a table leaves for longer numbers is noise too."""
    return re.sub(r"\s+", "", re.sub(noise, "#", text)) if noise else text


def photograph(page: Path, path: Path, size: tuple[int, int]) -> bool:
    """Draw a page as a browser does, without a network; False when the picture that is there is of this page."""
    said = sha256(page.read_bytes() + repr(size).encode()).hexdigest().encode()
    if path.exists() and said in path.read_bytes():
        return False
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"no Chromium is installed (looked for {', '.join(BROWSERS)})")
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--lang=en-US"]
        command += ["--virtual-time-budget=20000", f"--window-size={size[0]},{size[1]}", f"--screenshot={path}"]
        subprocess.run(
            [*command, page.absolute().as_uri()],
            env={**env, "TZ": "UTC", "LC_ALL": "C.UTF-8"},
            check=True,
            capture_output=True,
            timeout=180,
        )
    data = path.read_bytes()
    # What it was made of, as a note in the PNG.
    body = b"tEXt" + _SAID + b"\0" + said
    note = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    path.write_bytes(data[:-12] + note + data[-12:])
    return True
