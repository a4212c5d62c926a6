"""Two texts side by side, and what made them part: typical misses of real clients, and texts that are no such thing."""

from __future__ import annotations

import json

import pytest
from rich.cells import cell_len

from kvstore.differences import HINTS, Texts, aligned, causes, lines, pieces, shown, texts_of

SYSTEM = "<|im_start|>system\n"
USER = "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"It can {name} a file", "parameters": {"path": 1}}}
    for name in ("read", "write", "search", "delete")
]


def decode(tokens: list[int]) -> str:
    """A token a character, so that any text can be made of tokens."""
    return "".join(map(chr, tokens))


def part(before: str, saved: str, prompt: str) -> list[str]:
    """The causes that are found for two texts with a common beginning."""
    window = [list(map(ord, text)) for text in (before, saved, prompt)]
    texts = texts_of(decode, *window)
    assert (texts.before, texts.saved, texts.prompt) == (before, saved, prompt)
    return causes(Texts(texts.before, texts.saved, texts.prompt, before), aligned(decode, *window))


@pytest.mark.parametrize(
    ("before", "saved", "prompt", "cause"),
    [
        (SYSTEM + "Today is ", "Monday, 3 March 2025. Be brief.", "Tuesday, 4 March 2025. Be brief.", "date"),
        (SYSTEM + "date: 2025-11-2", "8. Be brief.", "9. Be brief.", "date"),
        (SYSTEM + "Current time: 1", "0:15:22 UTC. Be brief.", "1:02:09 UTC. Be brief.", "date"),
        (SYSTEM + "Cutoff: Jun ", "3, 2024. Be brief.", "4, 2024. Be brief.", "date"),
        (SYSTEM + "session=", "7f3a9c-22. Be brief.", "81be01-9d. Be brief.", "number"),
        (SYSTEM + "x-billing: cch=a3", "f91; Be brief.", "b07; Be brief.", "number"),
        (SYSTEM + "Tools: ", json.dumps(TOOLS), json.dumps(TOOLS[::-1]), "tools"),
        (SYSTEM + "Tools: [{", json.dumps(TOOLS[0])[1:], json.dumps(TOOLS[0], sort_keys=True)[1:], "tools"),
        (SYSTEM + "Hi" + USER + "<|im_start|>assistant\n", "<think>\nHm.\n</think>\n\nYes.", "Yes.", "thinking"),
        (SYSTEM + "Hi" + USER + "<|im_start|>assistant\n", "Yes.", "<think>\n\n</think>\n\nYes.", "thinking"),
        (SYSTEM + "Be brief.", "\n\nUse tools.", " \nUse tools.", "whitespace"),
        (SYSTEM + "You are ", "a coding agent.", "an architect.", "system"),
    ],
)
def test_typical_causes_are_named(before, saved, prompt, cause):
    assert cause in part(before, saved, prompt)
    assert HINTS[cause]


@pytest.mark.parametrize(
    ("before", "saved", "prompt"),
    [
        (SYSTEM + "Hi" + USER + "<|im_start|>user\nWrite ", "a poem.", "the code."),
        (SYSTEM + "Hi" + USER + "<|im_start|>user\nOn Monday we ", "a poem, a face.", "bed and code."),
        (SYSTEM + "Hi" + USER + "<|im_start|>user\n", "", "more"),
        (SYSTEM + "Hi" + USER + "<|im_start|>user\n", '{"a": "apples"}', '{"b": "cherries"}'),
    ],
)
def test_other_texts_are_no_typical_cause(before, saved, prompt):
    assert part(before, saved, prompt) == []


def test_nothing_in_common():
    assert part("", "<s>Hello", "<|im_start|>Hello") == ["start"]


def test_what_is_inserted_does_not_shift_the_rest():
    pairs = aligned(decode, [], list(map(ord, "The old text ends.")), list(map(ord, "The very old text ends.")))
    assert [(pair.same, pair.saved, pair.prompt) for pair in pairs] == [
        (True, "The", "The"),
        (False, "", " very"),
        (True, " old text ends.", " old text ends."),
    ]


def test_a_character_of_several_tokens_comes_with_its_last():
    def by_bytes(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    assert pieces(by_bytes, list("a€b".encode())) == ["a", "", "", "€", "b"]
    assert pieces(by_bytes, list("a€".encode())[:3]) == ["a", "", "\ufffd"]


def test_a_space_at_the_beginning_is_kept():
    """Tokenizers of sentences drop it where a text begins."""

    def sentences(tokens: list[int]) -> str:
        return "".join(map(chr, tokens)).removeprefix(" ")

    texts = texts_of(sentences, list(map(ord, " Today is")), list(map(ord, " Monday")), list(map(ord, " Tuesday")))
    assert (texts.saved, texts.prompt) == (" Monday", " Tuesday")


def test_lines_are_as_wide_as_asked_and_stay_aligned():
    """Also where a sign takes two places on a screen."""
    saved, prompt = "Heute ist 月曜日.\nDann weiter", "Heute ist Dienstag.\nDann weiter"
    drawn = lines(aligned(decode, [], list(map(ord, saved)), list(map(ord, prompt))), 20)
    for line in drawn:
        widths = {sum(cell_len(part) for part in column) for column in list(zip(*line, strict=True))[:2]}
        assert len(widths) == 1
        assert widths.pop() <= 20
    flat = [cell for line in drawn for cell in line]
    assert "".join(cell.saved for cell in flat).replace(" ", "") == shown(saved).replace(" ", "")
    assert "".join(cell.prompt for cell in flat).replace(" ", "") == shown(prompt).replace(" ", "")
    assert all(cell.saved == cell.prompt for cell in flat if cell.same)
    assert shown("a\tb\x1b[31m\n") == "a→b?[31m↵"
    assert lines([], 20) == []
