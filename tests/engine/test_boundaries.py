"""Where prompts are cut: at every n-th chunk border, at the ends of stable parts, before the last token."""

from __future__ import annotations

import itertools

import pytest
from conftest import TEMPLATE

from kvstore_mlx.boundaries import boundaries, cut_segments, stable_end
from kvstore_mlx.prefill import pieces


class TestThinning:
    @pytest.mark.parametrize(
        ("every", "expected"),
        [
            (1, (256, 512, 768, 999)),
            (2, (512, 999)),
            (3, (768, 999)),
            (4, (999,)),
            (0, (999,)),
        ],
    )
    def test_every_nth_border(self, every, expected):
        assert boundaries(1000, 256, every) == expected

    def test_stable_parts_are_never_thinned(self):
        assert boundaries(1000, 256, 0, [300, 700]) == (300, 700, 999)
        assert boundaries(1000, 256, 2, [512, 700]) == (512, 700, 999)

    def test_what_is_not_inside_the_prompt_is_left_out(self):
        assert boundaries(1000, 256, 0, [0, 10, 63, 64, 999, 1000, 1001]) == (64, 999)

    @pytest.mark.parametrize(("prompt", "expected"), [(1, ()), (64, ()), (65, (64,)), (256, (255,)), (257, (256,))])
    def test_short_prompts(self, prompt, expected):
        assert boundaries(prompt, 256, 1) == expected

    def test_a_border_at_the_end_is_not_one(self):
        """At least one token is left to compute."""
        assert boundaries(512, 256, 1) == (256, 511)


TOKENS = list(range(100))


class TestSegments:
    def cut(self, ends, reused, wanted):
        at = [reused, *ends]
        segments = [TOKENS[a:b] for a, b in itertools.pairwise(at)]
        pieces, added = cut_segments(segments, reused, wanted)
        # Whatever is cut, it is the same prompt.
        assert [token for piece in pieces for token in piece] == TOKENS[reused:]
        found = []
        for piece in pieces:
            reused += len(piece)
            found.append(reused)
        return found, added

    def test_one_segment(self):
        assert self.cut([100], 0, [30, 60]) == ([30, 60, 100], {30, 60})

    def test_after_a_reused_prefix(self):
        assert self.cut([100], 40, [30, 40, 60]) == ([60, 100], {60})

    def test_the_engine_s_own_ends_are_not_added(self):
        """The server counts its own segments, and keeps a cache in memory for each."""
        assert self.cut([30, 70, 100], 0, [30, 50, 80]) == ([30, 50, 70, 80, 100], {50, 80})

    def test_the_cut_before_the_last_token_is_the_engine_s(self):
        assert self.cut([100], 0, [98, 99, 100, 120]) == ([98, 100], {98})

    def test_nothing_to_cut(self):
        assert cut_segments([], 0, [5]) == ([], set())
        assert self.cut([100], 99, [50, 99]) == ([100], set())

    def test_segments_are_copies(self):
        """The engine takes tokens off the lists it is given."""
        segment = [1, 2, 3]
        made, _ = cut_segments([segment], 0, [])
        made[0].clear()
        assert segment == [1, 2, 3]


@pytest.mark.parametrize(
    ("first", "end", "step", "cuts", "expected"),
    [
        (0, 10, 4, [], [(0, 4), (4, 8), (8, 10)]),
        (0, 10, 4, [5], [(0, 4), (4, 5), (5, 9), (9, 10)]),
        (3, 10, 100, [2, 3, 10, 12], [(3, 10)]),
        (3, 10, 100, [9, 4, 4], [(3, 4), (4, 9), (9, 10)]),
        (7, 7, 4, [7], []),
    ],
)
def test_pieces_of_a_prefill(first, end, step, cuts, expected):
    assert pieces(first, end, step, cuts) == expected


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MERGING = (
    "{% for m in messages %}{% if not loop.first and m['role'] == messages[loop.index0 - 1]['role'] %} & "
    "{% else %}[{{ m['role'] }}]{% endif %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}|{% endfor %}"
)
LAST_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{% else %}"
    "{{ messages | length }}:{{ m['content'] }}\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from conftest import make_tokenizer
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "<think>hm</think>an answer"},
    {"role": "user", "content": "another"},
]


class TestStableEnd:
    """What stays of a chat prompt when its last message is rendered anew."""

    def ends(self, tokenizer, template, messages, **more):
        """Where the stable part ends, as text, and what follows."""
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, chat_template=template, return_dict=False, **more
        )
        end = stable_end(tokenizer, messages, prompt, chat_template=template, **more)
        return None if end is None else (tokenizer.decode(prompt[:end]), tokenizer.decode(prompt[end:]))

    def test_it_ends_before_the_last_message(self, tokenizer):
        stable, rest = self.ends(tokenizer, TEMPLATE, MESSAGES)
        assert stable.endswith("an answer<|im_end|>\n")
        assert rest == "<|im_start|>user\nanother<|im_end|>\n<|im_start|>assistant\n"

    def test_a_thinking_block_that_is_stripped_later(self, tokenizer):
        """The last answer still has its thinking; it goes when another message follows, so it is not stable."""
        stable, rest = self.ends(tokenizer, THINKING, MESSAGES[:3])
        assert "a question" in stable
        assert "<think>hm" in rest
        stable, rest = self.ends(tokenizer, THINKING, MESSAGES)
        assert "another" in rest
        assert "hm" not in stable + rest

    def test_the_stable_part_of_a_turn_begins_the_next(self, tokenizer):
        for template in (TEMPLATE, THINKING):
            stable, _ = self.ends(tokenizer, template, MESSAGES)
            longer = [*MESSAGES, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
            text = tokenizer.apply_chat_template(
                longer, add_generation_prompt=True, chat_template=template, tokenize=False
            )
            assert text.startswith(stable)
            edited = [*MESSAGES[:-1], {"role": "user", "content": "something else"}]
            text = tokenizer.apply_chat_template(
                edited, add_generation_prompt=True, chat_template=template, tokenize=False
            )
            assert text.startswith(stable)

    def test_messages_that_a_template_joins(self, tokenizer):
        messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
        assert self.ends(tokenizer, MERGING, messages) == ("[user]one", " & two>")

    def test_a_template_that_refuses(self, tokenizer):
        """Without the last message its roles are right; without the first they are not even tried."""
        assert self.ends(tokenizer, STRICT, [{"role": "user", "content": "one"}]) is None
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        assert self.ends(tokenizer, STRICT, messages) == ("one|", "two|")
        prompt = tokenizer.encode("one|three|")
        bad = [{"role": "user", "content": "one"}, {"role": "user", "content": "three"}]
        assert stable_end(tokenizer, bad, prompt, chat_template=STRICT) is None

    def test_a_template_that_counts_messages(self, tokenizer):
        """Nothing is stable when the first characters change with every message."""
        assert self.ends(tokenizer, LAST_ONLY, MESSAGES) is None

    def test_a_prompt_that_is_not_of_these_messages(self, tokenizer):
        prompt = tokenizer.encode("something else entirely")
        assert stable_end(tokenizer, MESSAGES, prompt, chat_template=TEMPLATE) is None

    def test_one_message_has_no_stable_part(self, tokenizer):
        assert self.ends(tokenizer, TEMPLATE, MESSAGES[:1]) is None

    def test_tools_and_template_settings_are_rendered_alike(self, tokenizer):
        template = "{% if tools %}T{{ tools | length }}{% endif %}{% if thinking %}!{% endif %}" + TEMPLATE
        stable, rest = self.ends(tokenizer, template, MESSAGES, tools=[{"name": "f"}], thinking=True)
        assert stable.startswith("T1!")
        assert "another" in rest
