"""Texts around the token at which two prompts part: aligned for people, and what usually makes them part.

Pure functions of texts and tokens. How tokens become text is the caller's business: a function from ids to a string.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

from rich.cells import cell_len

__all__ = [
    "HINTS",
    "Cause",
    "Cell",
    "Decode",
    "Pair",
    "Texts",
    "aligned",
    "causes",
    "lines",
    "pieces",
    "shown",
    "texts_of",
]

Decode: TypeAlias = Callable[[list[int]], str]

Cause: TypeAlias = Literal["start", "date", "number", "tools", "thinking", "whitespace", "system"]

HINTS: dict[Cause, str] = {
    "start": "They differ from the first token on: another chat template, another model, or nothing in common.",
    "date": "A date or a time differs. Put it at the end of the prompt, or keep it for the whole conversation.",
    "number": "A number or an id differs (a counter, a request or session id, a billing header). Leave it out, or put "
    "it at the end.",
    "tools": "The same words in another order, as when tools or the keys of their JSON are not sorted. Send them in "
    "one fixed order.",
    "thinking": "One has the model's thinking and the other has not: the client, or the chat template, strips it from "
    "earlier answers.",
    "whitespace": "Only white space differs: a client that trims or re-indents what it sends.",
    "system": "The system text or the tools differ, before the first message of a user: another client, mode or "
    "folder.",
}
"""What may be done about each cause, for people."""

_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_SHORT_MONTHS = "jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
_DAYS = "monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_DATE = re.compile(
    rf"\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d\d(\d\d)?|\d\d?:\d\d(:\d\d)?|\b({_MONTHS}|{_DAYS})\b"
    rf"|\b({_SHORT_MONTHS})\b\.? \d|\d\.? \b({_SHORT_MONTHS})\b|\b(?:19|20)\d\d[/.年]",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?=.*\d)[0-9a-f._:-]+", re.IGNORECASE)
_WORD_BEFORE = re.compile(r"[\w.:-]*\Z")
_WORD_AFTER = re.compile(r"[\w.:-]*")
_THINKING = re.compile(r"</?think(ing)?>|<\|channel\|>analysis|<seed:think>|\[/?THINK\]|◁/?think▷", re.IGNORECASE)
_USER = re.compile(
    r"<\|im_start\|>user|<\|start_header_id\|>user|<start_of_turn>user|<\|user\|>|<\|start\|>user|\[INST\]|<\uff5cUser\uff5c>"
    r"|(^|\n)\s*(USER|User|Human):",
)
_SYSTEM = re.compile(
    r"<\|im_start\|>(system|developer)|<\|start_header_id\|>system|<\|system\|>|<\|start\|>(system|developer)"
    r"|<<SYS>>|\[SYSTEM_PROMPT\]|\[AVAILABLE_TOOLS\]|<tools>"
)
_WORD = re.compile(r"\w+")
_NEAR = 24
"""Characters before and after a difference in which a date is looked for."""

_LEAD = 4
"""Tokens before a text that is decoded; a character has no more."""

_SAME_WORDS = 0.9
"""Share of words that two texts have in common when they are the same in another order."""


@dataclass(frozen=True, slots=True)
class Texts:
    """before: what the two have in common, as much as is shown. saved, prompt: how each goes on. whole: all of the
    text that they have in common, where it is known.
    """

    before: str
    saved: str
    prompt: str
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of text in both, equal or not; either may be empty."""

    same: bool
    saved: str
    prompt: str


class Cell(NamedTuple):
    """One place of two lines below each other: what stands there in each, padded to the same width."""

    saved: str
    prompt: str
    same: bool


def texts_of(decode: Decode, before: Sequence[int], saved: Sequence[int], prompt: Sequence[int]) -> Texts:
    """The texts of three runs of tokens, each decoded after what comes before it."""
    left = decode(list(before))
    return Texts(left, _after(decode, before, saved), _after(decode, before, prompt))


def _after(decode: Decode, before: Sequence[int], tokens: Sequence[int]) -> str:
    lead = list(before)[-_LEAD:]
    return decode([*lead, *tokens])[len(decode(lead)) if lead else 0 :]


def pieces(decode: Decode, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """The text that each token adds to the one before it; empty where a character is not complete yet.

    Tokens are decoded behind a few others, because some tokenizers drop a space at the beginning.
    """
    lead = list(before)[-_LEAD:]
    done = decode(lead) if lead else ""
    found = []
    for end in range(1, len(tokens) + 1):
        text = decode([*lead, *tokens[:end]])
        if text.endswith("\ufffd") and end < len(tokens):
            found.append("")
            continue
        found.append(text[len(done) :])
        done = text
    return found


def aligned(decode: Decode, before: Sequence[int], saved: Sequence[int], prompt: Sequence[int]) -> list[Pair]:
    """Both continuations side by side, token by token: what was inserted or left out does not shift what follows."""
    a, b = pieces(decode, saved, before), pieces(decode, prompt, before)
    matcher = SequenceMatcher(None, list(saved), list(prompt), autojunk=False)
    return [
        Pair(kind == "equal", "".join(a[i:j]), "".join(b[k:m])) for kind, i, j, k, m in matcher.get_opcodes() if j + m
    ]


def lines(pairs: Sequence[Pair], width: int) -> list[list[Cell]]:
    """Two texts below each other, in lines of some width on a screen; see shown for the signs in them."""
    found: list[list[Cell]] = [[]]
    used = 0
    for pair in pairs:
        for saved, prompt in zip_longest(shown(pair.saved), shown(pair.prompt), fillvalue=""):
            wide = max(cell_len(saved), cell_len(prompt))
            if used + wide > width and found[-1]:
                found.append([])
                used = 0
            saved, prompt = (char + " " * (wide - cell_len(char)) for char in (saved, prompt))  # noqa: PLW2901
            found[-1].append(Cell(saved, prompt, pair.same))
            used += wide
    return [line for line in found if line]


def shown(text: str) -> str:
    """A text on one line: what ends a line or would move a cursor is shown as a sign."""
    return "".join({"\n": "↵", "\t": "→"}.get(char, char if char.isprintable() else "?") for char in text)


def causes(texts: Texts, pairs: Sequence[Pair]) -> list[Cause]:
    """What probably made two prompts part, likeliest first; empty when nothing is typical."""
    first = next((pair for pair in pairs if not pair.same), None)
    if first is None or not (texts.saved and texts.prompt):
        return []
    if not texts.before:
        return ["start"]
    found: list[Cause] = []
    near = [
        texts.before[-_NEAR:] + first.saved + texts.saved[len(first.saved) :][:_NEAR],
        texts.before[-_NEAR:] + first.prompt + texts.prompt[len(first.prompt) :][:_NEAR],
    ]
    opening = _NEAR * 2
    if "".join(texts.saved.split()) == "".join(texts.prompt.split()) or not (first.saved + first.prompt).strip():
        found.append("whitespace")
    if all(_touches(_DATE, text, len(texts.before[-_NEAR:])) for text in near):
        found.append("date")
    elif _numbers(texts):
        found.append("number")
    thinking = [bool(_THINKING.search(texts.before[-_NEAR:] + text[:opening])) for text in (texts.saved, texts.prompt)]
    if thinking[0] != thinking[1]:
        found.append("thinking")
    if not found and _reordered(texts):
        found.append("tools")
    common = texts.whole or texts.before
    if not found and not _USER.search(common) and _SYSTEM.search(common):
        found.append("system")
    return found


def _touches(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Whether a match of the pattern holds the character at which two texts part, or ends or begins beside it."""
    return any(match.start() <= at + 1 and at <= match.end() for match in pattern.finditer(text))


def _numbers(texts: Texts) -> bool:
    """Whether the words in which two texts part are numbers or ids."""
    left = _WORD_BEFORE.search(texts.before)
    rights = [_WORD_AFTER.match(text) for text in (texts.saved, texts.prompt)]
    words = [(left[0] if left else "") + (right[0] if right else "") for right in rights]
    return any(right and right[0] for right in rights) and all(_NUMBER.fullmatch(word.strip(".:-")) for word in words)


def _reordered(texts: Texts) -> bool:
    """Whether two texts that look like JSON have nearly the same words, in another order."""
    if '"' not in texts.saved or '"' not in texts.prompt:
        return False
    a, b = (Counter(_WORD.findall(text)) for text in (texts.saved, texts.prompt))
    longer = max(a.total(), b.total())
    return longer >= 4 and (a & b).total() >= _SAME_WORDS * longer
