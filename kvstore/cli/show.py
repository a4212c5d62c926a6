"""``kvstore show``: one saved prefix, from its first chunk to the node with this key.

With ``--json`` one document; sizes are of files, times seconds since the epoch, and "text" is there with --text:

    {"directory": "/…", "namespace": "<32 hex>", "label": "…", "key": "<32 hex>", "tokens": 2799, "complete": true,
     "bytes": 412876800, "allocated": 412901376,
     "nodes": [{"key": "<32 hex>", "first": 0, "count": 2048, "bytes": 9240, "created": 1764434520.5,
                "used": 1764434520.5, "writer": "kvstore 0.1", "fault": "",
                "spans": [{"digest": "<32 hex>", "first": 0, "count": 2048, "bytes": 301990016, "decode": false,
                           "block": "there"}],
                "state": {"bytes": 1024, "created": 0.0, "used": 0.0, "writer": "…", "block": "there", "fault": ""}}]}

block: "there", "missing" or "size differs". fault: why a manifest cannot be used, or empty. bytes of a node: its
manifest. complete: nothing on the way is missing or damaged, as far as can be told without reading blocks.
"""

from __future__ import annotations

import string
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvstore.cli.app import (
    DIRECTORY_DEFAULT,
    JsonOption,
    app,
    console,
    counted,
    named,
    opened,
    output,
    print_json,
    sentences,
)
from kvstore.cli.common import plain, say
from kvstore.cli.tokenizers import tokenizer_of
from kvstore.cli.words import Words
from kvstore.errors import KVStoreError
from kvstore.prefix import Part, Prefix, StateInfo, find_prefix
from kvstore.sizes import format_age, format_size
from kvstore.store import unavailable

__all__ = ["show"]

_SHORT_ID = 12


@app.command()
def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[DIR] KEY",
            help=f"The cache directory {DIRECTORY_DEFAULT}, and the key of the prefix's last node, or a unique "
            "beginning of it, as ls shows it.",
            show_default=False,
        ),
    ],
    *,
    text: Annotated[bool, typer.Option("--text", help="Print what its tokens say.")] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "--tokenizer",
            metavar="FOLDER",
            help="The model's folder, or its tokenizer.json, for --text. Without it the model's name is looked for "
            "here and among this machine's downloads from the Hugging Face hub.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one saved prefix: its nodes, their blocks and boundary states, and with --text its words."""
    if model is not None and not text:
        raise typer.BadParameter("--model FOLDER goes with --text")
    if len(names) > 2:
        raise typer.BadParameter("name a cache directory and a key, or a key alone")
    directory, key = (named(names[0]) if len(names) > 1 else None), names[-1]
    with sentences():
        if len(names) == 1 and not set(key) <= set(string.hexdigits):
            raise KVStoreError(f"{key!r} is not a key; name one, or a directory and one, as `kvstore ls` shows it")
    with opened(directory) as store:
        try:
            found = find_prefix(store.context, key)
        except OSError as error:
            raise unavailable(store.path, error) from error
        words = None
        if text:
            words = Words(model or tokenizer_of(found.label), "--text").decode(list(found.tokens))
        if as_json:
            document = {"directory": str(store.path), **_document(found)}
            print_json(document if words is None else {**document, "text": words})
            return
        _print(found)
        if words is not None:
            say(["", plain(words, keep="\n\t")])


def _document(found: Prefix) -> dict[str, Any]:
    return {
        "namespace": found.namespace,
        "label": found.label,
        "key": found.key,
        "tokens": found.end,
        "complete": found.complete,
        "bytes": found.size,
        "allocated": found.allocated,
        "nodes": [_node(part) for part in found.parts],
    }


def _node(part: Part) -> dict[str, Any]:
    return {
        "key": part.key,
        "first": part.first,
        "count": part.count,
        "bytes": part.manifest_size,
        "created": part.created_ns / 1e9,
        "used": part.used_ns / 1e9,
        "writer": part.writer,
        "fault": part.fault,
        "spans": [
            {
                "digest": span.digest,
                "first": span.first,
                "count": span.count,
                "bytes": span.size,
                "decode": span.decode,
                "block": span.block,
            }
            for span in part.spans
        ],
        "state": None if part.state is None else _state(part.state),
    }


def _state(state: StateInfo) -> dict[str, Any]:
    return {
        "bytes": state.size,
        "created": state.created_ns / 1e9,
        "used": state.used_ns / 1e9,
        "writer": state.writer,
        "block": state.block,
        "fault": state.fault,
    }


def _print(found: Prefix) -> None:
    last = found.parts[-1]
    now = time.time_ns()
    size = f"{counted(found.end, 'token')} in {counted(len(found.parts), 'node')}, {format_size(found.size)}"
    times = f"made {_ago(now, last.created_ns)}, last used {_ago(now, last.used_ns)}"
    writer = f", by {plain(last.writer)}" if last.writer else ""
    say([f"{plain(found.label[:200]) or 'no label'} ({found.namespace})", f"{size}; {times}{writer}"])
    output().print(_table(found))
    if not found.complete:
        console.print(
            "This prefix cannot be restored as a whole: something on the way is missing or damaged; "
            "`kvstore fsck --read-data` names it.",
            highlight=False,
            soft_wrap=True,
        )


def _ago(now: int, then: int) -> str:
    if not then:
        return "at an unknown time"
    age = format_age((now - then) / 1e9)
    return age if age in {"now", "in the future"} else f"{age} ago"


def _table(found: Prefix) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("node", no_wrap=True)
    for heading in ("first", "count", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("block", no_wrap=True)
    table.add_column("")
    for part in found.parts:
        key = part.key[:_SHORT_ID]
        if part.fault or not part.spans:
            what = part.fault or "nothing per token"
            table.add_row(key, f"{part.first:,}", f"{part.count:,}", "", Text(plain(what)), "", "")
        for number, span in enumerate(part.spans):
            table.add_row(
                key if not number else "",
                f"{span.first:,}",
                f"{span.count:,}",
                format_size(span.size),
                "decode" if span.decode else "prefill",
                span.digest[:_SHORT_ID],
                "" if span.block == "there" else span.block,
            )
        if part.state is not None:
            note = part.state.fault or ("" if part.state.block == "there" else part.state.block)
            table.add_row("", "", "", format_size(part.state.size), "state", "", Text(plain(note)))
    return table
