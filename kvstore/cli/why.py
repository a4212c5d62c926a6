"""``kvstore why``: where a prompt parts from the saved prompt that has most in common with it, and why.

With ``--json`` one document; texts are there with --model:

    {"directory": "/…", "namespace": "<32 hex>", "label": "…", "tokens": 1352, "matched": 1024, "reusable": 1024,
     "resumable": 0, "end": "differs", "key": "<32 hex>", "used": 1764434520.5,
     "window": {"before": [1, 2], "saved": [3], "prompt": [4]},
     "texts": {"before": "…", "saved": "…", "prompt": "…"}, "causes": ["date"]}

end: "differs" (at token number matched), "ended" (the saved prompt ends there), "whole" (all of it is saved), "empty"
(nothing is). reusable: tokens that an engine whose caches can be cut anywhere restores; resumable: one that needs a
boundary state. causes: start, date, number, tools, thinking, whitespace, system.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.cli.app import DirectoryArgument, JsonOption, app, opened, output, print_json
from kvstore.cli.common import PrefixOption, beginning, plain, say
from kvstore.cli.words import Words, read_text, read_tokens
from kvstore.differences import HINTS, Cause, Pair, Texts, aligned, causes, texts_of
from kvstore.drawing import drawn, has_colours
from kvstore.errors import KVStoreError
from kvstore.keys import pack_tokens, unpack_tokens
from kvstore.lookup import find
from kvstore.nearest import Nearest, nearest_of_all, saved_spaces
from kvstore.sizes import format_age
from kvstore.store import Store, unavailable

__all__ = ["why"]

_SHORT_ID = 12
_MAX_WIDTH = 120

WINDOW = 48
"""Tokens shown on each side of the difference."""

LOOKED_AT = 2048
"""Tokens after the difference in which causes are looked for: a dozen tools, or a whole thought."""


@app.command()
def why(
    directory: DirectoryArgument = None,
    *,
    tokens: Annotated[
        str | None, typer.Option(metavar="FILE", help="The prompt as token ids, in JSON or with spaces; - for stdin.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The prompt as a text, or a request as it is sent to a server (JSON with messages); - for stdin. "
            "Needs --model.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "--tokenizer", metavar="FOLDER", help="The model's folder, or its tokenizer.json, to show texts."
        ),
    ] = None,
    namespace: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why a miss? Show where a prompt first differs from the nearest saved one, with both texts around that token."""
    if (tokens is None) == (prompt is None):
        raise typer.BadParameter("name the prompt by --tokens FILE or by --prompt FILE")
    if prompt is not None and model is None:
        raise typer.BadParameter("--prompt needs --model FOLDER, whose tokenizer makes tokens of it")
    with opened(directory) as store:
        words = None if model is None else Words(model, "--model")
        packed = pack_tokens(_tokens(tokens, prompt, words))
        found = _nearest(store, packed, beginning(namespace))
        view = _View(found, words)
        if as_json:
            print_json({"directory": str(store.path), **_document(view)})
        else:
            _print(view)


def _tokens(tokens: str | None, prompt: str | None, words: Words | None) -> list[int]:
    if tokens is not None:
        found = read_tokens(tokens)
    else:
        assert prompt is not None
        assert words is not None
        found = words.encode(read_text(prompt))
    if not found:
        raise KVStoreError("the prompt is empty")
    return found


def _nearest(store: Store, packed: bytes, prefix: str) -> Nearest:
    try:
        spaces = saved_spaces(store.context, prefix)
    except OSError as error:
        raise unavailable(store.path, error) from error
    found = nearest_of_all(spaces, packed, further=LOOKED_AT)
    if found is None:
        which = f"no namespace begins with {prefix!r}" if prefix else "nothing is saved there yet"
        raise KVStoreError(f"{store.path}: {which}; `kvstore ls` shows what there is")
    return found


class _View:
    """A difference with its words, where there is a tokenizer."""

    def __init__(self, found: Nearest, words: Words | None) -> None:
        self.found = found
        self.resumable = find(found.space, found.tokens, trimmable=False).count
        self.before, self.saved, self.prompt = found.windows(WINDOW, WINDOW)
        self.texts: Texts | None = None
        self.pairs: list[Pair] = []
        self.causes: list[Cause] = []
        if found.end == "differs":
            decode = words.decode if words is not None else _as_numbers
            self.pairs = aligned(decode, self.before, self.saved, self.prompt)
        if words is not None:
            self.texts = texts_of(words.decode, self.before, self.saved, self.prompt)
            further = texts_of(words.decode, *found.windows(WINDOW, LOOKED_AT))
            whole = words.decode(list(unpack_tokens(found.tokens))[: found.matched])
            self.causes = causes(Texts(further.before, further.saved, further.prompt, whole), self.pairs)


def _as_numbers(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def _document(view: _View) -> dict[str, Any]:
    found, texts = view.found, view.texts
    return {
        "namespace": found.space.id,
        "label": found.space.info.label,
        "tokens": found.count,
        "matched": found.matched,
        "reusable": found.reusable,
        "resumable": view.resumable,
        "end": found.end,
        "key": found.key,
        "used": found.used_ns / 1e9,
        "window": {"before": list(view.before), "saved": list(view.saved), "prompt": list(view.prompt)},
        "texts": None if texts is None else {"before": texts.before, "saved": texts.saved, "prompt": texts.prompt},
        "causes": view.causes,
    }


def _print(view: _View) -> None:
    found = view.found
    label = plain(found.space.info.label[:200]) or "no label"
    say([f"{label} ({found.space.id[:_SHORT_ID]}): {_summary(view)}"])
    if found.end in {"whole", "empty"}:
        return
    used = format_age((time.time_ns() - found.used_ns) / 1e9)
    saved = f"the nearest saved prompt ({found.key[:_SHORT_ID]}, last used {used}{'' if used == 'now' else ' ago'})"
    if found.end == "ended":
        say([f"At token {found.matched:,} {saved} ends; what follows is new."])
        return
    say([f"At token {found.matched:,} it differs from {saved}:", ""])
    before = view.texts.before if view.texts is not None else _as_numbers(list(view.before))
    screen = output()
    for line in drawn(before, view.pairs, min(screen.width, _MAX_WIDTH), coloured=has_colours(screen)):
        screen.print(line, soft_wrap=True)
    say(["", *(HINTS[cause] for cause in view.causes)] if view.causes else [])


def _summary(view: _View) -> str:
    found = view.found
    if found.end == "whole":
        text = f"all {found.count:,} tokens are saved"
    elif found.end == "empty" or not found.matched:
        text = f"none of {found.count:,} tokens match"
    else:
        text = f"{found.matched:,} of {found.count:,} tokens match"
    if found.matched:
        text += f"; {found.reusable:,} can be reused"
        if view.resumable:
            text += f", or {view.resumable:,} by a model that needs a saved state"
    return text + "."
