"""`bench tokens`: a long conversation tokenized, against the tokenization that was kept of it.

The tokenizer and the chat template are the real model's; a request that is seen again is the one a client sends after
a restart or a lost connection.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import make_smollm2
from bench_machine import BenchError, OtherWork, conditions, data_folder
from bench_plot import Panel
from bench_report import Outcome, table
from bench_stats import Sample, interleaved, paired
from demo import MODEL
from kvstore import Store

__all__ = ["HELP", "configure", "panels", "run", "tables"]

HELP = "a request seen before, with and without its tokenization kept"

_WORDS = 120
"""Words a message; the pages of this repository."""

_ARGUMENTS = {"add_generation_prompt": True, "tokenize": True, "tools": None}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of this subcommand."""
    parser.add_argument("--messages", type=int, default=100, help="messages of the conversation (default: 100)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each way (default: 15)")


def run(options: argparse.Namespace) -> Outcome:
    """Tokenize a conversation and read it back in turns."""
    from mlx_lm.tokenizer_utils import load  # noqa: PLC0415 - imports the engine

    from kvstore_mlx.tokenizing import TokenizingCache  # noqa: PLC0415 - as above

    document: dict[str, Any] = {"command": "tokens", "conditions": conditions(options.dir.parent), "page_cache": "warm"}
    try:
        make_smollm2.make(MODEL, None)
    except make_smollm2.ToolError as error:
        raise BenchError(str(error)) from None
    tokenizer = load(MODEL)
    messages = conversation(options.messages)
    with data_folder(options.dir, keep=options.keep) as folder, Store.open(folder / "store") as store:
        cache = TokenizingCache(store)
        kept = cache.wrap(tokenizer)
        tokens = kept.apply_chat_template(messages, **_ARGUMENTS)
        cache.close(60)

        def timed(one: Any) -> float:
            started = time.perf_counter()
            found = one.apply_chat_template(messages, **_ARGUMENTS)
            seconds = time.perf_counter() - started
            if found != tokens:
                raise AssertionError("the tokens are not the same")
            return seconds

        other = OtherWork()
        seconds = interleaved({"tokenized": lambda: timed(tokenizer), "kept": lambda: timed(kept)}, options.rounds)
    document |= {
        "cores_used_by_others": other.cores(),
        "messages": options.messages,
        "tokens": len(tokens),
        "results": {name: Sample.of(values).document() for name, values in seconds.items()},
        "ratio": paired(seconds["tokenized"], seconds["kept"]).document(),
    }
    return Outcome(document, tables(document))


def conversation(count: int) -> list[dict[str, str]]:
    """A system text and messages in turns, made of the pages of this repository."""
    pages = sorted((Path(__file__).resolve().parent.parent / "docs").glob("*.md"))
    words = " ".join(page.read_text() for page in pages).split()
    messages = [{"role": "system", "content": "You review documentation. Be brief."}]
    for number in range(count):
        at = number * _WORDS % (len(words) - _WORDS)
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": " ".join(words[at : at + _WORDS])})
    return messages


def tables(document: dict[str, Any]) -> list[Any]:
    """What the file says, for people."""
    results = document["results"]
    rows = [[name, Sample.of(results[name]["values"]).text(1e3)] for name in results]
    rows.append(["tokenized over kept", Sample.of(document["ratio"]["values"]).text(1, 1)])
    made = table(
        f"{document['messages']} messages, {document['tokens']} tokens, SmolLM2's tokenizer and template",
        ["way", "ms"],
        rows,
        f"n = {results['kept']['n']} in turns, median (min to max), page cache warm; the first line is what a server "
        "without a directory does",
    )
    return [made]


def panels(document: dict[str, Any]) -> list[Panel]:
    """Two bars."""
    samples = {name: Sample.of(each["values"]) for name, each in document["results"].items()}
    return [Panel.of_bars(f"{document['tokens']} tokens of messages", "ms", samples, 1e3)]
