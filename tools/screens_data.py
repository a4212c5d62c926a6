"""A cache directory for pictures: conversations that nobody had, the same bytes each time, aged by a clock that stands.

Tokens are those of a real tokenizer, so that what shows texts has some; keys and values are random bytes, few a token.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvstore import Durability, FileSystem, Namespace, NamespaceInfo, Span, Store, TensorSpec
from kvstore.states import State, StateTensor
from kvstore.stats import StatsFile

__all__ = ["INTERVAL", "NOW_S", "PROMPT", "Saved", "Tokenizer", "fill"]

NOW_S = 1_772_443_800
"""When the pictures are: a Monday morning, 2026-03-02 09:30 UTC."""

INTERVAL = 256

Tokenizer = Any
"""Of the tokenizers package, which is there with the demo's extra only."""

_SPECS = (TensorSpec("0.keys", "U8", 2, (512,)), TensorSpec("0.values", "U8", 2, (512,)))
_STATE = (StateTensor("logits", "F16", (49152,)),)
_MINUTE, _HOUR, _DAY = 60, 3600, 86400

_AGENT = (
    "You are a coding agent. You read files, propose small patches and run the tests after each of them. "
    "Cite the file and the line. Never change a file that you have not read.\n{tools}Today is {today}. You work in "
    "the folder /home/me/project, whose tests run with `make test` and take two minutes. Do not wait for them twice.\n"
)
_TOOLS = ("read_file", "write_file", "run_tests", "search", "list_files", "git_diff")
_TASKS = (
    "the parser drops the last line of a file that does not end with a newline",
    "rename the option --quiet and keep the old name working",
    "the retry loop sleeps while it holds the lock",
    "write tests for the date arithmetic around leap years",
    "why is the import of the command line so slow?",
    "the cache key leaves out the locale",
)
_ANSWERS = (
    "The loop ends before it looks at what is left in the buffer. I would flush it behind the loop, and add a test.",
    "I read the module. Two callers depend on the old order, so the patch sorts a copy and leaves the argument alone.",
    "The tests pass now, 214 of them. One was wrong before: it compared a path with a string.",
    "There are three places. The second is the one that matters; the others follow from it.",
)
_STORY = "You write short stories for children. Simple words, one idea, a kind end.\n"

PROMPT = "Monday"
"""The day in the agent's system text in the prompt that `kvstore why` is asked about; the saved ones have Sunday."""


@dataclass(frozen=True)
class _Conversation:
    """system, task: what it begins with. turns: how many. age: seconds since it was used last."""

    label: str
    system: str
    task: str
    turns: int
    age: int


_BIG, _SMALL = "Qwen3-8B-4bit", "SmolLM2-135M-Instruct"
_CONVERSATIONS = (
    _Conversation(_BIG, "friday", _TASKS[0], 6, 2 * _DAY + 17 * _HOUR),
    _Conversation(_BIG, "friday", _TASKS[1], 14, 2 * _DAY + 15 * _HOUR),
    _Conversation(_SMALL, "story", "a hedgehog who was afraid of autumn", 3, 40 * _DAY),
    _Conversation(_SMALL, "story", "a lighthouse that wanted to travel", 8, 9 * _DAY),
    _Conversation(_BIG, "sunday", _TASKS[2], 9, 14 * _HOUR + 20 * _MINUTE),
    _Conversation(_BIG, "sunday", _TASKS[3], 22, 11 * _HOUR + 5 * _MINUTE),
    _Conversation(_BIG, "sunday", _TASKS[4], 3, 42 * _MINUTE + 30),
    _Conversation(_BIG, "sunday", _TASKS[5], 12, 5 * _MINUTE + 30),
)


@dataclass(frozen=True)
class Saved:
    """What was made. newest: key of the conversation that was used last. prompt: one that differs from it by a day."""

    newest: str
    prompt: str


def fill(folder: Path, tokenizer: Tokenizer) -> Saved:
    """Make the directory anew."""
    shutil.rmtree(folder, ignore_errors=True)
    newest = ""
    for number, each in enumerate(_CONVERSATIONS):
        tokens = list(tokenizer.encode(_text(each, each.system.capitalize(), number)).ids)
        with _open(folder, NOW_S - each.age) as store:
            space = store.namespace(NamespaceInfo({"model": each.label, "made up": True}, label=each.label))
            newest = _publish(space, tokens, state=each.label == _SMALL)
            _age(folder, space, tokens, NOW_S - each.age)
    _count(folder)
    last = _CONVERSATIONS[-1]
    return Saved(newest, _text(last, PROMPT, len(_CONVERSATIONS) - 1))


def _open(folder: Path, now_s: int) -> Store:
    fs = FileSystem(durability=Durability.NONE)
    return Store.open(folder, interval=INTERVAL, fs=fs, clock=lambda: now_s * 10**9)


def _text(each: _Conversation, day: str, number: int) -> str:
    """All that was said, as a chat template writes it."""
    rng = random.Random(number)  # noqa: S311 - words, not secrets
    if each.system == "story":
        system = _STORY
    else:
        tools = "".join(
            f"- {name}(path: string, reason: string): use it {'often' if at % 2 else 'when nothing else will do'}, one "
            f"call at a time, and say in a sentence what you expect of {name}.\n"
            for at, name in enumerate(_TOOLS)
        )
        system = _AGENT.format(tools=tools * 2, today=day)
    parts = [f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{each.task}<|im_end|>\n"]
    for turn in range(each.turns):
        answer = " ".join(rng.choice(_ANSWERS) for _ in range(rng.randrange(1, 4)))
        lines = rng.sample(range(1, 900), 6)
        listing = "".join(f"{line:4}  def step_{line}(state, item): return state + item * {line}\n" for line in lines)
        parts.append(f"<|im_start|>assistant\n{answer}<|im_end|>\n")
        parts.append(f"<|im_start|>user\nGood. Turn {turn + 1}:\n{listing}<|im_end|>\n")
    return "".join(parts)


def _publish(space: Namespace, tokens: Sequence[int], *, state: bool) -> str:
    """Save a conversation as an engine does: chunk by chunk, and its end. The key of its last node."""
    border = space.lookup(tokens).border
    borders = [border, *range(border - border % INTERVAL + INTERVAL, len(tokens), INTERVAL), len(tokens)]
    for first, end in pairwise(borders):
        space.publish(tokens[:end], [Span(first, end - first, _SPECS, list(_bytes(tokens[:end], first)))])
    if state:
        made = State(_STATE, [shake_128(repr(tokens).encode()).digest(2 * 49152)], {})
        space.publish_state(tokens, made)
    return space.lookup(tokens).steps[-1].name.key


def _bytes(tokens: Sequence[int], first: int) -> Iterator[bytes]:
    seed = shake_128(repr(tokens).encode()).hexdigest(8)
    for spec in _SPECS:
        rng = random.Random(seed + spec.name)  # noqa: S311
        yield rng.randbytes(spec.span_bytes(len(tokens) - first))


def _age(folder: Path, space: Namespace, tokens: Sequence[int], used: int) -> None:
    """Give the nodes of a conversation the time of its last use, what it shares with older ones too; and all blocks,
    whose own time says when they were written, which was just now.
    """
    for step in space.lookup(tokens).steps:
        for path in (step.path, step.path.with_suffix(".state")):
            if path.exists():
                os.utime(path, (used, used))
    for path in (folder / "objects" / "blocks").rglob("*"):
        os.utime(path, (used, used))


def _count(folder: Path) -> None:
    """What three processes counted."""
    for began, requests in ((3 * _DAY, 61), (15 * _HOUR, 118), (_HOUR, 33)):
        with _open(folder, NOW_S - began) as store:
            stats = StatsFile(store.context)
            stats.add(
                requests=requests,
                prompt_tokens=requests * 2900,
                memory_tokens=requests * 1810,
                disk_tokens=requests * 860,
                generated_tokens=requests * 96,
                read_bytes=requests * (2 << 20),
                read_us=requests * 700,
                written_tokens=requests * 230,
                written_bytes=requests * (1 << 19),
            )
            stats.close()
