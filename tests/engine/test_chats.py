"""Chats as agents hold them: thinking blocks that a template strips later, tools and their results, edited messages.

On a model that is resumed at boundary states only, where a boundary in the wrong place would cost the whole prompt.
"""

from __future__ import annotations

import json

import pytest
from model_support import make_family
from pair_support import Pair

THINK = ("<think>", "</think>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call: {% for t in tools %}{{ t['function'] | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set text = m['content'] or '' %}"
    "{% if m['role'] == 'assistant' and '</think>' in text and not loop.last %}"
    "{{ text.split('</think>')[-1] }}{% else %}{{ text }}{% endif %}"
    "{% for call in m.get('tool_calls') or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name} and returns what came of it, as text, whatever that may be.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "grep")
]
SYSTEM = {"role": "system", "content": "You are a careful agent. Read before you write, and say what you did. " * 2}
QUESTION = {"role": "user", "content": "What does the function in kvstore/keys.py do, and who calls it? " * 2}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": "keys.py"})}}
    ],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    made = Pair(folder, str(make_family(folder / "thinker", "qwen3_5", template=TEMPLATE, special=THINK)))
    yield made
    made.close()


def test_a_thinking_block_is_stripped_in_the_next_turn(pair):
    first = [SYSTEM, QUESTION]
    written = pair.ask_and_wait(messages=first)
    # The answer was thought out loud, because the prompt ends with an open block.
    assert "reasoning" in written.choice["message"]
    answered = {"role": "assistant", "content": "<think>\nLet me see.</think>\n\nIt hashes tokens."}
    second = [*first, answered, {"role": "user", "content": "And how fast is it?"}]
    grown = pair.ask_and_wait(messages=second)
    # All of the first prompt but the block that it opened: <think> and a line break are two tokens.
    assert grown.cached_tokens == written.prompt_tokens - 2
    third = [*second, {"role": "assistant", "content": "Fast."}, {"role": "user", "content": "Thanks!"}]
    assert pair.ask_and_wait(messages=third).cached_tokens == grown.prompt_tokens - 2
    # Without thinking the same prompt has another end, and the same stable part.
    quiet = pair.ask(messages=second, chat_template_kwargs={"enable_thinking": False})
    assert quiet.cached_tokens >= written.prompt_tokens - 2


def test_an_edited_last_message_costs_itself(pair):
    first = pair.ask_and_wait(messages=[SYSTEM, QUESTION, {"role": "assistant", "content": "It hashes."}, QUESTION])
    other = {"role": "user", "content": "Never mind. What is in kvstore/gc.py?"}
    edited = pair.ask(messages=[SYSTEM, QUESTION, {"role": "assistant", "content": "It hashes."}, other])
    assert edited.prompt_tokens - edited.cached_tokens < 100
    assert first.prompt_tokens - edited.cached_tokens < 180


def test_tools_and_their_results(pair):
    first = [SYSTEM, QUESTION]
    written = pair.ask_and_wait(messages=first, tools=TOOLS)
    # Tools come before all else, so nothing of the prompts without them fits.
    assert written.cached_tokens < 40
    repeated = pair.ask(messages=first, tools=TOOLS)
    assert repeated.cached_tokens == repeated.prompt_tokens - 1
    called = [*first, CALL, {"role": "tool", "tool_call_id": "1", "content": "def node_key(parent, tokens): ..."}]
    grown = pair.ask_and_wait(messages=called, tools=TOOLS)
    assert grown.cached_tokens >= written.prompt_tokens - 2
    # A tool that answers something else costs its answer, not the conversation before it.
    changed = [*called[:-1], {**called[-1], "content": "No such file."}]
    again = pair.ask(messages=changed, tools=TOOLS)
    assert again.prompt_tokens - again.cached_tokens < 60
    # A call with other arguments costs itself and what came after it.
    other = {**CALL["tool_calls"][0], "function": {"name": "read", "arguments": json.dumps({"path": "gc.py"})}}
    recalled = [*first, {**CALL, "tool_calls": [other]}, called[-1]]
    answer = pair.ask_and_wait(messages=recalled, tools=TOOLS)
    assert answer.cached_tokens >= written.prompt_tokens - 2
    assert answer.prompt_tokens - answer.cached_tokens < 140
    # And back again: both are saved.
    back = pair.ask(messages=called, tools=TOOLS)
    assert back.cached_tokens == back.prompt_tokens - 1
    # Other tools are another prompt from the first characters on.
    assert pair.ask(messages=first, tools=TOOLS[:1]).cached_tokens < 300


def test_after_a_restart(pair):
    pair.restart()
    for request in ({"messages": [SYSTEM, QUESTION]}, {"messages": [SYSTEM, QUESTION], "tools": TOOLS}):
        answer = pair.ask(**request)
        assert answer.cached_tokens == answer.prompt_tokens - 1
