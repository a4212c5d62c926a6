"""A real model in a real conversation, its server restarted after each turn: the tokens of a run without any cache.

Turns are answered, the last message is edited, one in the middle is, the conversation goes back a turn: each time
another prefix is left, and the answer must be the one that a prefill of the whole prompt gives.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).resolve().parents[2]
ANSWER = 16


def excerpts(words: int) -> list[str]:
    """English of about this many words a piece, the pages of this repository."""
    text = " ".join((ROOT / "docs" / name).read_text() for name in ("format.md", "architecture.md", "fsck.md"))
    pieces = text.replace("|", " ").split()
    return [" ".join(pieces[at : at + words]) for at in range(0, len(pieces) - words, words)]


class Talk:
    """The messages of a conversation, and the kinds of change that clients make to them."""

    def __init__(self, words: int) -> None:
        self._texts = iter(excerpts(words))
        self.messages = [{"role": "system", "content": "You review documentation. Be brief."}]

    def ask(self) -> None:
        self.messages.append({"role": "user", "content": f"{next(self._texts)}\nWhat is unclear here?"})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def edit_last(self) -> None:
        del self.messages[-1:]
        self.messages[-1]["content"] += " Answer in one word."

    def edit_middle(self) -> None:
        middle = self.messages[len(self.messages) // 4 * 2 + 1]
        assert middle["role"] == "user"
        middle["content"] = middle["content"].replace("unclear", "wrong")
        self.ask()

    def go_back(self) -> None:
        del self.messages[-2:]
        self.edit_last()


@pytest.fixture(scope="module")
def uncached(smollm2):
    """Greedy tokens of mlx-lm for messages, computed from nothing."""
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(smollm2))

    def answer(messages: list[dict]) -> tuple[list[int], int]:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return [each.token for each in stream_generate(model, tokenizer, prompt, max_tokens=ANSWER)], len(prompt)

    return answer


def converse(serve, smollm2, tmp_path, uncached, words: int, steps: list[str]) -> list[tuple[int, int]]:
    """Prompt and cached tokens of each turn; every turn has a server of its own."""
    talk = Talk(words)
    seen = []
    for step in steps:
        getattr(talk, step)()
        server = serve(smollm2, "--kv-cache-dir", str(tmp_path / "cache"), "--kv-cache-interval", "512")
        answer = server.chat(talk.messages, max_tokens=ANSWER, temperature=0, timeout=1200)
        assert server.stop() == 0
        wanted, prompt = uncached(talk.messages)
        assert answer.prompt_tokens == prompt
        turn = f"turn {len(seen)}, {answer.cached_tokens} of {prompt} tokens cached"
        assert answer.ids == wanted[: len(answer.ids)], turn
        assert len(answer.ids) in {len(wanted), len(wanted) - 1}  # the server does not show an end token
        seen.append((prompt, answer.cached_tokens))
        talk.answer(answer.text)
    return seen


def test_three_turns(serve, smollm2, tmp_path, uncached):
    (first, none), (second, one), (third, two) = converse(
        serve, smollm2, tmp_path, uncached, 60, ["ask", "ask", "edit_last"]
    )
    assert none == 0
    assert one >= first - 1
    assert two >= first - 1
    assert second < third < second + 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twelve_turns_of_six_thousand_tokens(serve, smollm2, tmp_path, uncached):
    steps = ["ask"] * 3 + ["edit_middle", "ask", "ask", "edit_last", "ask", "go_back", "ask", "edit_middle", "ask"]
    seen = converse(serve, smollm2, tmp_path, uncached, 420, steps)
    assert seen[-1][0] > 6000
    assert sum(cached for _, cached in seen) > 0.5 * sum(prompt for prompt, _ in seen)
