"""Where blocks of documents are run: a checkout with a user's home beside it, a model and a filled cache directory.

Nothing in a block is changed but what cannot be the same everywhere: placeholders (DIR, KEY, the ids of examples), and
paths and a port that belong to somebody else. ``path/to/model`` and names of models on the hub are links in the working
directory to a tiny model; mlx-lm takes a path that exists for a path. document_programs stands for programs that would
fetch something, reach another machine, or never end.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from document_programs import PROGRAMS, until_ready
from document_support import ROOT, Block, python_of
from engine_support import polls

from kvstore.keys import unpack_tokens
from kvstore.manifest import decode
from ports import free_port

CHECKOUT = ("docs", "tools", "tests", "kvstore", "integration", "pyproject.toml", "Makefile")
HUB = re.compile(r"\b(?:mlx-community|Qwen|HuggingFaceTB)/[\w.-]+")
ELSEWHERE = re.compile(r"(?<![\w~/.])/(?:srv|mnt|data|Volumes)/[\w./-]+")
PORT = re.compile(r"(127\.0\.0\.1|localhost):8080\b")

SYSTEM = "You are careful. Today is {}. "
QUESTION = "Explain hash chains, and why they matter to a cache of prefixes. " * 12
MONDAY, TUESDAY = "Monday, 3 March", "Tuesday, 14 March"


@dataclass
class Stock:
    """What every desk has a copy of: a model, a directory that a server filled, and that server, still running."""

    model: Path
    directory: Path
    port: int
    namespace: str
    key: str
    tokens: list[int]


@contextlib.contextmanager
def stocked(folder: Path, model: Path) -> Iterator[Stock]:
    """Fill a directory, and keep the server that did it."""
    directory, port = folder / "filled", free_port()
    live = Desk.empty(folder / "live", model)
    command = ["kvstore", "serve", "--model", "path/to/model", "--kv-cache-dir", str(folder / "live-kv")]
    with (folder / "live.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port), "--kv-cache-report"],
            cwd=live.work,
            env=live.environment(),
            stdout=log,
            stderr=log,
        )
    try:
        until_ready(server, port, folder / "live.log")
        for question in (QUESTION, QUESTION.upper()):
            ask(port, [{"role": "system", "content": SYSTEM.format(MONDAY)}, {"role": "user", "content": question}])
        manifest = wait_filled(folder / "live-kv", 2)
        shutil.copytree(folder / "live-kv", directory)
        yield Stock(model, directory, port, *manifest)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def ask(port: int, messages: list[dict[str, str]]) -> None:
    body = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        json.load(response)


def wait_filled(directory: Path, conversations: int) -> tuple[str, str, list[int]]:
    """Namespace, key and tokens of the longest prefix, when so many conversations and their counters are on disk."""
    for _ in polls(60):
        manifests = list((directory / "objects" / "nodes").rglob("*.kv"))
        long = [path for path in manifests if decode(path.read_bytes()).end > len(QUESTION)]
        if len(long) >= conversations and any((directory / "stats").glob("*.json")):
            path = max(long, key=lambda path: decode(path.read_bytes()).end)
            return (
                path.parent.parent.name,
                path.name.split("-")[2],
                list(unpack_tokens(decode(path.read_bytes()).tokens)),
            )
    raise AssertionError(f"{directory} was not filled")


class Desk:
    """One page's working directory and home. The blocks of a page are run one after the other on the same desk."""

    def __init__(self, folder: Path, stock: Stock) -> None:
        self._folder, self._stock = folder, stock
        self.home, self.work = folder / "home", folder / "checkout"
        self.names: dict[str, object] = {"__name__": "__main__"}
        self._furnish(stock.model)
        for place in (self.home / ".cache" / "kv", self._default(), self.work / "another" / "kv"):
            self._copy(place)
        self._requests()

    @classmethod
    def empty(cls, folder: Path, model: Path) -> Desk:
        """Without a cache directory, to make one."""
        desk = cls.__new__(cls)
        desk._folder, desk.home, desk.work, desk.names = folder, folder / "home", folder / "checkout", {}
        desk._furnish(model)
        return desk

    def run(self, block: Block) -> str:
        """Run a block; what it printed. AssertionError when it fails."""
        code = self._own(block.code)
        if block.language == "python":
            return self._python(Block(block.page, block.line, block.language, code))
        for program in ("curl", "openssl"):
            if re.search(rf"\b{program} ", code) and shutil.which(program) is None:
                pytest.skip(f"{block.name} uses {program}, which is not installed")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=self.work,
            env=self.environment(),
            input="y\n" * 20,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{block.name} ends with {done.returncode}:\n{code}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def environment(self) -> dict[str, str]:
        """A user's own, with nothing of ours but the programs, and no way out of this machine."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "XDG_"))}
        closed = "http://127.0.0.1:9"
        return {
            **kept,
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "DESK": str(self._folder),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"), closed),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
        }

    def _python(self, block: Block) -> str:
        told = io.StringIO()
        before, where = dict(os.environ), os.getcwd()
        os.environ.update(self.environment())
        os.chdir(self.work)
        sys.path.insert(0, str(ROOT / "docs" / "examples"))
        try:
            with contextlib.redirect_stdout(told):
                exec(compile(python_of(block), block.name, "exec"), self.names)
        finally:
            sys.path.remove(str(ROOT / "docs" / "examples"))
            os.chdir(where)
            os.environ.clear()
            os.environ.update(before)
        return told.getvalue()

    def _own(self, code: str) -> str:
        """A block with what stands for something replaced by that."""
        stock = self._stock
        for name in set(HUB.findall(code)):
            self._link(name)
        for place in set(ELSEWHERE.findall(code)):
            self._copy(self._folder / place.lstrip("/"))
        code = ELSEWHERE.sub(lambda found: f"{self._folder}{found[0]}", code)
        code = PORT.sub(rf"\1:{stock.port}", code)
        for pattern, text in (
            (r"(?<![\w$/{])DIR\b(?!=)", str(self.home / ".cache" / "kv")),
            (r"\b(?:KEY|3c1f0d7f4a55|3c1f0d7f)\b", stock.key[:12]),
            (r"\b(?:ID|NAMESPACE|6e21a1b9a046|6e21a1b9)\b", stock.namespace[:12]),
            (r"\bSRC\b", "another/kv"),
            (r"\bDST\b", str(self.home / ".cache" / "kv")),
        ):
            code = re.sub(pattern, text, code)
        return code

    def _furnish(self, model: Path) -> None:
        (self._folder / "bin").mkdir(parents=True)
        (self.home / ".cache" / "huggingface" / "hub").mkdir(parents=True)  # which /v1/models of mlx_lm.server lists
        self.work.mkdir()
        self._model = model
        for name in CHECKOUT:
            (self.work / name).symlink_to(ROOT / name)
        self._link("path/to/model")
        for name in PROGRAMS:
            program = self._folder / "bin" / name
            folders = [str(Path(__file__).parent), str(ROOT / "tools")]
            program.write_text(
                f"#!{sys.executable}\nimport sys\nsys.path[:0] = {folders!r}\n"
                f"from document_programs import main\nsys.exit(main({name!r}, sys.argv[1:]))\n"
            )
            program.chmod(0o755)

    def _link(self, name: str) -> None:
        link = self.work / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(self._model)

    def _default(self) -> Path:
        caches = self.home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
        return caches / "kvstore" / "kv"

    def _copy(self, place: Path) -> None:
        if not place.exists() and place.suffix == "":
            shutil.copytree(self._stock.directory, place)

    def _requests(self) -> None:
        """Prompts in the ways that `kvstore why` takes them. The first two differ in a date from what is saved."""
        messages = [
            {"role": "system", "content": SYSTEM.format(TUESDAY)},
            {"role": "user", "content": QUESTION},
        ]
        text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
        (self.work / "prompt.txt").write_text(text)
        (self.work / "request.json").write_text(json.dumps({"model": "path/to/model", "messages": messages}))
        (self.work / "tokens.json").write_text(json.dumps(self._stock.tokens[:200]))
