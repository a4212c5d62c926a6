"""Texts for commands that show what tokens say: a model's tokenizer, and prompts from files.

The store has no need of either, so the packages are imported only here, and asked for in a sentence when they are not
there.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvstore.errors import KVStoreError

__all__ = ["Words", "read_text", "read_tokens"]

MAX_PROMPT_BYTES = 1 << 28


class Words:
    """The tokenizer of a model's folder, or of a tokenizer.json. needed_for: what to name when a package is missing."""

    def __init__(self, folder: Path, needed_for: str) -> None:
        self._needed_for = needed_for
        self._folder = folder
        self._path = folder / "tokenizer.json" if folder.is_dir() else folder
        if not self._path.is_file():
            raise KVStoreError(f"there is no {self._path}; name the folder of the model that the prefix was made with")
        tokenizers = self._import("tokenizers")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:
            # The package raises bare Exception for whatever is wrong with the file.
            raise KVStoreError(f"{self._path} cannot be understood ({error}); is it the right one?") from error

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        try:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
        except Exception as error:
            raise KVStoreError(f"{self._path} cannot decode these tokens ({error}); is it the right one?") from error

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt as an engine sees it: a text, or a request as it is sent to a server, as JSON.

        A chat request (messages, tools, chat_template_kwargs) is rendered by the model's own chat template.
        """
        request = _request(text)
        if request is not None and isinstance(request.get("messages"), list):
            return self._chat(request)
        if request is not None and isinstance(request.get("prompt"), str):
            text = request["prompt"]
        return self._ids(text)

    def _chat(self, request: dict[str, Any]) -> list[int]:
        transformers = self._import("transformers")
        folder = self._folder if self._folder.is_dir() else self._folder.parent
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            rendered = tokenizer.apply_chat_template(
                [_message(message) for message in request["messages"]],
                tools=request.get("tools") or None,
                add_generation_prompt=True,
                tokenize=False,
                **(request.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # templates raise what they like
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise KVStoreError(f"the chat template of {folder} cannot render this request: {reason}") from error
        return self._ids(rendered, add_special_tokens=False)

    def _ids(self, text: str, **options: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, **options).ids)
        except Exception as error:  # JSON may hold half of a surrogate pair
            raise KVStoreError(f"{self._path} cannot encode this prompt ({error})") from error

    def _import(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise KVStoreError(
                f"{self._needed_for} needs the {name} package; install it with: pip install {name}"
            ) from error


def _request(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as servers hand it to a template: parts of text joined, arguments of tool calls as objects."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(str(part["text"]) for part in content)
    elif content is None:
        message["content"] = ""
    calls = []
    for call in message.get("tool_calls") or []:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def read_text(name: str) -> str:
    """The text of a file, or of stdin for "-"; raises KVStoreError."""
    try:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES) if name == "-" else Path(name).read_bytes()
        return data.decode()
    except OSError as error:
        raise KVStoreError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KVStoreError(f"{name} is not UTF-8 text") from error


def read_tokens(name: str) -> list[int]:
    """Token ids from a file, or from stdin for "-": a JSON list, or numbers with spaces or commas between them."""
    words = read_text(name).replace("[", " ").replace("]", " ").replace(",", " ").split()
    try:
        tokens = [int(word) for word in words]
    except ValueError:
        raise KVStoreError(
            f"{name} does not hold token ids; write them as a JSON list, or with spaces between"
        ) from None
    if not all(0 <= token < 1 << 32 for token in tokens):
        raise KVStoreError(f"{name} holds numbers that are no token ids; they are from 0 to 4294967295")
    return tokens
