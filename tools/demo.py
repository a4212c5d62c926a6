"""Show on a real model what a cache directory is good for, and measure it.

A coding-review conversation is held with real ``kvstore serve`` processes: without a cache directory, with a new one,
again, with another turn, with another last message, after the server was killed, and after the system forgot the
directory's contents as well. The demo fails if any of it changes the answer, or if a restart does not pay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

import demo_conversation
import fast_blas
import make_smollm2
from demo_files import directory_bytes, drop_page_cache, saved_tokens, wait_written
from demo_report import CASES, Case, Problem, Run, check, document
from demo_servers import WARM_UP, Answer, DemoError, Server
from demo_terminal import Steps, show, steps, tell

BUILD = Path(__file__).resolve().parent.parent / "build"
MODEL = BUILD / "models" / "SmolLM2-135M-Instruct"
WRITTEN_WITHIN_S = 120.0

Tokenizer = Any
"""One of transformers', which has no types that could be named without importing it."""


class Demo:
    """The servers, the measurements and what went wrong."""

    def __init__(
        self, options: argparse.Namespace, tokenizer: Tokenizer, env: Mapping[str, str], work: Path, progress: Steps
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._env = env
        self._work = work
        self._progress = progress
        self._servers = 0
        self._runs: dict[str, list[Run]] = {name: [] for name in CASES}
        self.problems: list[Problem] = []

    def repeat(self, cache: Path, *, disabled_first: bool = True) -> None:
        """Every case once, with a cache directory that does not exist yet."""
        if disabled_first:
            self._disabled()
        self._cached(cache)
        if not disabled_first:
            self._disabled()

    def _disabled(self) -> None:
        with self._server(None) as server:
            self._measure("disabled", server, demo_conversation.first_request(), None)

    def _cached(self, cache: Path) -> None:
        request = demo_conversation.first_request()
        with self._server(cache) as server:
            answer = self._measure("first_write", server, request, cache)
            self._measure("repeat", server, request, cache)
            self._measure("appended_turn", server, demo_conversation.appended_turn(answer.text), cache)
            self._measure("branch", server, demo_conversation.branch(), cache)
            # SIGKILL: the server is told nothing and can save nothing any more.
            server.kill()
        with self._server(cache) as server:
            self._measure("restart", server, request, cache)
            self._stop(server)
        page_cache = drop_page_cache(cache)
        with self._server(cache) as server:
            self._measure("restart_cold", server, request, cache, page_cache)
            self._stop(server)

    def cases(self) -> dict[str, Case]:
        """What was measured."""
        return {name: Case(name, runs) for name, runs in self._runs.items()}

    @contextmanager
    def _server(self, cache: Path | None) -> Iterator[Server]:
        self._servers += 1
        self._progress.begin("starting a server")
        log = self._work / f"server-{self._servers}.log"
        with Server(log, self._options.model, self._env, cache) as server:
            yield server
        if "Traceback (most recent call last)" in log.read_text(encoding="utf-8", errors="replace"):
            self.problems.append(Problem("there is a traceback in the log of a server.", log))

    def _measure(
        self,
        name: str,
        server: Server,
        messages: Sequence[Mapping[str, str]],
        cache: Path | None,
        page_cache: str | None = None,
    ) -> Answer:
        self._progress.begin(f"{name} ({len(self._runs[name]) + 1} of {self._options.repeats})")
        before = directory_bytes(cache) if cache else 0
        answer = server.ask(messages, self._options.max_tokens)
        if cache and not wait_written(cache, answer.prompt_tokens - 1, WRITTEN_WITHIN_S):
            raise DemoError(
                f"{name}: {WRITTEN_WITHIN_S:.0f} s after the answer, {saved_tokens(cache)} of the prompt's "
                f"{answer.prompt_tokens} tokens were on disk.",
                server.log,
            )
        run = Run(
            ttft_s=answer.ttft_s,
            wall_s=answer.wall_s,
            prompt_tokens=answer.prompt_tokens,
            reused_tokens=answer.cached_tokens,
            restore_ms=answer.reuse.ms if answer.reuse else None,
            written_mib=(directory_bytes(cache) - before) / (1 << 20) if cache else 0.0,
            peak_memory_mib=server.peak_memory_mib(),
            output_ids=encode(self._tokenizer, answer.text),
            source=answer.reuse.source if answer.reuse else None,
            read=answer.reuse.read if answer.reuse else None,
            page_cache=page_cache,
            log=server.log,
        )
        self._runs[name].append(run)
        self._progress.done(f"{name}: first token after {run.ttft_s:.3f} s, {run.reused_tokens} tokens reused")
        return answer

    def _stop(self, server: Server) -> None:
        if code := server.stop():
            self.problems.append(Problem(f"a server ended with exit code {code} on SIGTERM instead of 0.", server.log))


def load_tokenizer(model: Path) -> Tokenizer:
    """The model's tokenizer, without the remark that this machine has no PyTorch."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second; `--help` does not need it

    try:
        return AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except (OSError, ValueError) as error:
        raise DemoError(f"{model} has no usable tokenizer: {next(iter(str(error).splitlines()), error)}") from error


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as token ids."""
    return [int(number) for number in tokenizer.encode(text, add_special_tokens=False)]


def check_prompt(tokenizer: Tokenizer) -> int:
    """Tokens of the first request as the server renders it; an error when they are not what the demo is made for."""
    messages = demo_conversation.first_request()
    count = len(encode(tokenizer, tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)))
    lowest, highest = demo_conversation.MIN_PROMPT_TOKENS, demo_conversation.MAX_PROMPT_TOKENS
    if not lowest <= count <= highest:
        raise DemoError(f"the conversation has {count} tokens with this tokenizer; {lowest} to {highest} are needed.")
    return count


def prepare_model(model: Path) -> None:
    """Make the default model where it is missing. A folder that somebody named must be there."""
    if (model / "config.json").is_file():
        return
    if model.resolve() != MODEL:
        raise DemoError(f"{model} is not a model folder: it has no config.json.")
    try:
        make_smollm2.make(model, None)
    except make_smollm2.ToolError as error:
        raise DemoError(f"the model could not be made: {error}") from error


def describe(options: argparse.Namespace, cases: Mapping[str, Case], seconds: float) -> dict[str, Any]:
    """The conditions that the numbers depend on."""
    page_cache = sorted({run.page_cache for run in cases["restart_cold"].runs if run.page_cache})
    blas = fast_blas.find()
    linux = sys.platform == "linux"
    return {
        "repeats": options.repeats,
        "max_tokens": options.max_tokens,
        "values": "medians of the repeats; each goes through all cases, disabled first in odd and last in even ones",
        "model": str(options.model),
        "model_load": "not timed",
        "warm_up": f"every server process completes {WARM_UP!r} by one token before its first timed request",
        "blas": str(blas) if blas is not None else None,
        "page_cache": "; ".join(page_cache),
        "peak_memory": "high-water mark of the server process from its start to the end of the case (VmHWM)"
        if linux
        else "resident memory of the server process at the end of the case (ps)",
        "written": "growth of the files of the cache directory, in allocated blocks",
        "output_ids": "the streamed text, encoded with the model's tokenizer",
        "cores": len(os.sched_getaffinity(0)) if linux else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("kvstore-llm", "mlx", "mlx-lm", "openai")},
        "seconds": round(seconds, 1),
    }


def run(options: argparse.Namespace, console: Console, work: Path) -> list[Problem]:
    """Measure everything, show it and write it down; what went wrong."""
    started = time.monotonic()
    env = fast_blas.preload_env(os.environ)
    with steps(console, options.repeats * len(CASES)) as progress:
        progress.begin("preparing the model")
        prepare_model(options.model)
        tokenizer = load_tokenizer(options.model)
        check_prompt(tokenizer)
        demo = Demo(options, tokenizer, env, work, progress)
        for number in range(1, options.repeats + 1):
            kept = options.keep is not None and number == options.repeats
            cache = options.keep.absolute() if kept else work / f"cache-{number}"
            # In turns, so that a machine which gets warmer or busier does not always slow the same one.
            demo.repeat(cache, disabled_first=number % 2 == 1)
            if not kept:
                shutil.rmtree(cache)
    cases = demo.cases()
    problems = [*demo.problems, *check(cases)]
    result = document(cases, describe(options, cases, time.monotonic() - started), problems)
    show(result, cases, as_json=options.json)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return problems


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder for logs and caches: in build/, because /tmp may be memory. It goes at the end."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=BUILD, ignore_cleanup_errors=True) as work:
        yield Path(work)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure on a real model what a cache directory gains: first request, repeat, restart.",
        epilog="Exit code 1 if the cache changes an answer, a restart reuses less than 95 % of the prompt or takes "
        "more than 1/40 of the uncached time to the first token, or the first write costs more than 5 % of it.",
    )
    parser.add_argument(
        "--model", metavar="DIR", type=Path, default=MODEL, help="made if missing (default: %(default)s)"
    )
    parser.add_argument("--repeats", metavar="N", type=_positive, help="default: 3, or 1 on Linux without a fast BLAS")
    parser.add_argument("--max-tokens", metavar="N", type=_positive, default=24, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout instead of the table")
    parser.add_argument("--output", metavar="FILE", type=Path, default=BUILD / "demo.json", help="default: %(default)s")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep the last repeat's cache directory as DIR")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or default_repeats()
    keep = options.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        parser.error(f"--keep {keep}: name a new or an empty folder")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def default_repeats() -> int:
    """Three; one where MLX has nothing but a reference BLAS, with which a repeat takes a quarter of an hour."""
    return 3 if sys.platform != "linux" or fast_blas.find() is not None else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse(arguments)
    console = Console(stderr=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # So that a polite kill leaves no server behind either.
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))
    try:
        with workspace() as work:
            try:
                problems = run(options, console, work)
            except DemoError as error:
                problems = [Problem(str(error), error.log)]
            except OSError as error:
                problems = [Problem(f"{error.filename or 'a file'}: {error.strerror or error}.", None)]
            tell(problems, console)
    except KeyboardInterrupt:
        console.print("demo: stopped")
        return 130
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
