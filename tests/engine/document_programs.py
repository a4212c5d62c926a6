"""What documents call and a test cannot: each stands for a program of that name, and does of it what can be done here.

| program | what is done |
|---|---|
| kvstore serve | the real one on a free port, until it answers, and then stopped, which must end with 0 |
| kvstore chat | the real one, which is told one line and then q |
| kvstore top, doctor | the real ones: top looks once; doctor may warn, of a temporary folder |
| make | resolves the target and says what it would do |
| pip, pipx | looks whether the extras that are asked for exist; other packages are those of ``PACKAGES`` |
| rsync, ssh | the real rsync and a shell, with a folder for each other machine, which has a filled directory |
| programs of ``AGENTS`` | asks the server that they are pointed to for its models |

Everything else is the program itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60

PACKAGES = {"aider-chat", "openai", "pipx", "prometheus-client"}
"""What documents tell people to install beside kvstore."""

AGENTS = {"aider", "opencode", "pi", "claude", "codex"}

PROGRAMS = {"kvstore", "make", "pip", "pipx", "python", "python3", "rsync", "ssh", "open", "xdg-open", *AGENTS}


def main(name: str, words: list[str]) -> int:
    """Be a program; its exit code."""
    if name in {"python", "python3"}:
        os.execv(sys.executable, [sys.executable, *words])
    if name in AGENTS:
        return _agent(name, words)
    return {
        "kvstore": _kvstore,
        "make": _make,
        "pip": _pip,
        "pipx": _pip,
        "rsync": _rsync,
        "ssh": _ssh,
        "open": _open,
        "xdg-open": _open,
    }[name](words)


def until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until a server answers; AssertionError with its log when it does not."""
    for _ in range(READY_S * 20):
        if server.poll() is not None:
            raise AssertionError(f"the server ended with {server.returncode}:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    server.kill()
    raise AssertionError(f"the server did not answer within {READY_S} s:\n{log.read_text()}")


def _kvstore(words: list[str]) -> int:
    command = words[0] if words else ""
    if command == "serve" and "--help" not in words:
        return _serve(words)
    if command == "top" and "--once" not in words:
        words = [*words, "--once"]
    if command == "doctor" and not any(word.startswith("--size") for word in words):
        words = [*words, "--size", "1MiB"]
    if command not in {"chat", "doctor"}:
        from kvstore.cli import main as run  # as the console script does, which completion is told the name of

        sys.argv = ["kvstore", *words]
        run()
    told = "Hello\nq\n" if command == "chat" else None
    code = subprocess.run([sys.executable, "-m", "kvstore", *words], input=told, text=True, check=False).returncode
    return 0 if command == "doctor" and code == 3 else code


def _serve(words: list[str]) -> int:
    port = free_port()
    log = Path(os.environ["DESK"]) / "serve.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *words, "--port", str(port)], stdout=out, stderr=out
        )
    try:
        until_ready(server, port, log)
        server.send_signal(signal.SIGTERM)
        return server.wait(READY_S)
    except AssertionError as error:
        _say(str(error))
        return server.returncode or 1
    finally:
        server.kill()


def _make(words: list[str]) -> int:
    real = shutil.which("make", path=_path())
    assert real is not None, "documents tell people to use make"
    return subprocess.run([real, "--dry-run", "-C", ROOT, *words], stdout=subprocess.DEVNULL, check=False).returncode


def _pip(words: list[str]) -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if not words or words[0] not in {"install", "upgrade"}:
        _say(f"pip {' '.join(words)}: not known here")
        return 1
    for word in words[1:]:
        found = re.fullmatch(r"(kvstore-llm|\.)(?:\[([\w,-]+)\])?", word)
        wrong = [extra for extra in (found[2] or "").split(",") if extra and extra not in extras] if found else []
        if wrong or not (found or word in PACKAGES or word.startswith("-")):
            _say(f"{word}: there is no such extra, or the package is not in document_programs.PACKAGES")
            return 1
    return 0


def _rsync(words: list[str]) -> int:
    real = shutil.which("rsync", path=_path())
    words = [
        str(_machine(found[1]) / found[2].removeprefix("~/")) if (found := _remote(word)) else word for word in words
    ]
    if real is not None:
        return subprocess.run([real, *words], stdout=subprocess.DEVNULL, check=False).returncode
    source, target = (Path(word.rstrip("/")) for word in words if not word.startswith("-"))
    shutil.copytree(source, target, dirs_exist_ok=True)
    return 0


def _remote(word: str) -> re.Match[str] | None:
    return re.fullmatch(r"(?:\w+@)?([\w-][\w.-]*):(?!//)(.*)", word)


def _ssh(words: list[str]) -> int:
    host, *command = [word for word in words if not word.startswith("-")]
    home = _machine(host.rpartition("@")[2])
    return subprocess.run(
        ["bash", "-c", " ".join(command)], cwd=home, env={**os.environ, "HOME": str(home)}, check=False
    ).returncode


def _machine(name: str) -> Path:
    """The home of a user on another machine, who has a cache directory, too."""
    home = Path(os.environ["DESK"]) / "machines" / name
    if not home.exists():
        shutil.copytree(Path(os.environ["DESK"]) / "home" / ".cache" / "kv", home / ".cache" / "kv")
    return home


def _open(words: list[str]) -> int:
    return 0 if words and Path(words[-1]).is_file() else 1


def _agent(name: str, words: list[str]) -> int:
    """Whether what it is pointed to is a server that lists models."""
    told = " ".join(
        [*words, *(value for key, value in os.environ.items() if key.endswith(("_BASE", "_BASE_URL", "_HOST")))]
    )
    urls = re.findall(r"http://(?:127\.0\.0\.1|localhost):\d+[\w/]*", told)
    if not urls:
        _say(f"{name} is not told where the server is")
        return 1
    base = urls[0].rstrip("/")
    with urllib.request.urlopen(
        f"{base}/models" if base.endswith("/v1") else f"{base}/v1/models", timeout=30
    ) as answer:
        return 0 if "data" in json.load(answer) else 1


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _path() -> str:
    """Where programs are, without those that stand for them."""
    own = str(Path(os.environ["DESK"]) / "bin")
    return os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != own)
