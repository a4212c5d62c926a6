"""Servers for a benchmark: a tiny model with random weights, `kvstore serve` processes, and a client with a stopwatch.

The model's answers are random printable characters: every token is text, so that the first token is the first piece of
the stream, and none ends the answer.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench_child import clean_environment
from bench_machine import BenchError
from fast_blas import preload_env
from ports import free_port

__all__ = ["TINY_LLAMA", "Answer", "Server", "child"]

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "head_dim": 32,
    "max_position_embeddings": 1 << 17,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_HOST = "127.0.0.1"
_END = "<|endoftext|>"
_READY_S = 120.0
_STOP_S = 60.0
_ANSWER_S = 600.0


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Make the model's folder."""
    import mlx.core as mx  # noqa: PLC0415 - runs in a child: here MLX would stay in memory
    from mlx.utils import tree_flatten  # noqa: PLC0415
    from mlx_lm.utils import _get_classes  # noqa: PLC0415

    folder = Path(job["folder"])
    folder.mkdir(parents=True)
    printable = _make_tokenizer(folder)
    config = {**TINY_LLAMA, "vocab_size": len(printable), "eos_token_id": 0}
    mx.random.seed(0)
    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    # Rows of zeros make logits of zero, and the best of a hundred random ones is above.
    weights["lm_head.weight"] = weights["lm_head.weight"] * mx.array(printable, mx.float32)[:, None]
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return {"config": TINY_LLAMA}


def _make_tokenizer(folder: Path) -> list[bool]:
    """A byte-level tokenizer: every byte of a text is a token. Returns which ids are printable ASCII."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([_END, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return [False, *("!" <= token <= "~" for token in alphabet)]


@dataclass(frozen=True)
class Answer:
    """What a client saw: seconds to the first token and to the end, and how much of the prompt was not computed."""

    first_token: float
    whole: float
    prompt_tokens: int
    cached_tokens: int


class Server:
    """One `kvstore serve` process, ready inside of its ``with``. Without a cache directory it is mlx_lm.server."""

    def __init__(self, log: Path, model: Path, flags: Sequence[str] = ()) -> None:
        self._log = log
        self._command = [sys.executable, "-m", "kvstore", "serve", "--model", str(model), "--host", _HOST, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self._port = free_port(_HOST)
        env = preload_env({**clean_environment(), "PYTHONUNBUFFERED": "1"})
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self._port)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        try:
            self._wait_ready()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._kill()

    @property
    def process(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """Complete a prompt, and time the first token."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=_ANSWER_S)
        first: float | None = None
        usage: dict[str, Any] = {}
        try:
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    if first is None:
                        first = time.perf_counter() - started
                    usage = json.loads(line[6:]).get("usage") or usage
            whole = time.perf_counter() - started
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"a server did not answer ({error!r}); its log ends: {self._tail()}") from error
        finally:
            connection.close()
        if first is None or not usage:
            raise BenchError(f"a server answered without a token; its log ends: {self._tail()}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(first, whole, usage["prompt_tokens"], details.get("cached_tokens") or 0)

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self.ask("?", 1)
            except BenchError:
                time.sleep(0.1)
            else:
                return
        raise BenchError(f"a server did not start; its log ends: {self._tail()}")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "(empty)"
