"""Where a prompt parts from what is saved: found, bounded, and said in words."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass, field

import pytest
from conftest import make_tokenizer
from core_support import INFO, node_files, open_store, prompt, spans
from gc_support import TENANT, state
from pty_support import plain, run_at
from upkeep_support import grow, invoke, invoke_json, snapshot

from kvstore import FileSystem, NamespaceInfo, Span, TensorSpec
from kvstore.keys import pack_tokens, unpack_tokens
from kvstore.nearest import MAX_OPENED, MAX_QUICK, MAX_STATS, nearest, nearest_of_all, quickly, saved_spaces

TOKENS = prompt(100)


def differ_at(tokens: list[int], at: int, seed: int = 1) -> list[int]:
    return [*tokens[:at], *prompt(len(tokens) - at, seed)]


def ask(space, tokens, **more):
    return nearest(space.lookup(tokens), **more)


def test_nothing_is_saved(space):
    found = ask(space, TOKENS)
    assert (found.end, found.matched, found.key, found.count) == ("empty", 0, "", 100)


@pytest.mark.parametrize("at", [0, 1, 5, 15, 16, 17, 31, 32, 33, 40])
def test_the_first_difference_is_found_wherever_it_is(space, at):
    """Also where a lookup does not look: within the first 64 tokens of a chunk."""
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    other = differ_at(TOKENS, at)
    found = ask(space, other)
    assert (found.end, found.matched) == ("differs", at)
    before, saved, new = found.windows(8, 8)
    assert list(before) == TOKENS[max(0, at - 8) : at]
    assert list(saved) == TOKENS[at : min(at + 8, at // 16 * 16 + 16)]
    assert list(new) == other[at : at + 8]


@pytest.mark.parametrize("end", [6, 16, 23, 32])
def test_a_saved_prompt_that_ends_is_not_one_that_differs(space, end):
    space.publish(TOKENS[:end], spans(TOKENS, 0, *range(16, end, 16), end))
    found = ask(space, TOKENS)
    assert (found.end, found.matched, found.saved) == ("ended", end, b"")
    assert found.key == space.lookup(TOKENS[:end]).steps[-1].name.key


@pytest.mark.parametrize("length", [4, 16, 20, 32])
def test_a_prompt_that_is_all_saved(space, length):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    found = ask(space, TOKENS[:length])
    assert (found.end, found.matched) == ("whole", length)


def test_one_that_goes_on_says_more_than_one_that_ends(space):
    """The end of the prompt, and the answer that followed it, which the next prompt renders differently."""
    grow(space, TOKENS, 10)
    answered = differ_at(TOKENS, 10, 2)[:14]
    space.publish(answered, spans(answered, 0, 14))
    found = ask(space, TOKENS)
    assert (found.end, found.matched) == ("differs", 10)
    assert list(unpack_tokens(found.saved)) == answered[10:]


def test_the_one_with_most_in_common_wins_among_many(space):
    for seed in range(2, 60):
        other = differ_at(TOKENS, 3, seed)[:12]
        space.publish(other, spans(other, 0, 12))
    near = differ_at(TOKENS, 9, 99)[:12]
    space.publish(near, spans(near, 0, 12))
    assert ask(space, TOKENS).matched == 9  # last used


def test_rungs_find_the_nearest_among_many_older(tmp_path):
    wide = open_store(tmp_path / "wide", interval=512).namespace(INFO)
    tokens = prompt(400)
    near = differ_at(tokens, 300, 99)
    wide.publish(near, spans(near, 0, 400))
    for seed in range(2, 30):
        other = differ_at(tokens, 3, seed)
        wide.publish(other, spans(other, 0, 400))
    assert ask(wide, tokens).matched == 300


def test_a_lookup_of_all_but_the_last_token_is_enough(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32))
    for length, end in ((32, "whole"), (20, "whole"), (33, "ended")):
        found = nearest(space.lookup(TOKENS[: length - 1]), pack_tokens(TOKENS[:length]))
        assert (found.end, found.matched) == (end, min(length, 32))


def test_more_of_the_saved_prompt_is_read_when_it_is_wanted(space):
    space.publish(TOKENS, spans(TOKENS, 0, 16, 32, 48))
    other = differ_at(TOKENS, 14)
    assert list(unpack_tokens(ask(space, other).saved)) == TOKENS[14:16]
    assert list(unpack_tokens(ask(space, other, further=10).saved)) == TOKENS[14:32]


def test_a_damaged_neighbour_is_passed_over(space, tmp_path):
    space.publish(TOKENS, spans(TOKENS, 0, 16))
    other = differ_at(TOKENS, 9)[:16]
    space.publish(other, spans(other, 0, 16))
    for path in node_files(tmp_path / "cache"):
        if space.lookup(TOKENS[:16]).steps[0].path == path:
            path.write_bytes(b"damaged")
    found = ask(space, differ_at(TOKENS, 12, 7))
    assert (found.end, found.matched) == ("differs", 9)


@dataclass(frozen=True)
class Counting(FileSystem):
    """Counts what a comparison costs."""

    calls: dict[str, int] = field(default_factory=dict)

    def _count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1

    def stat(self, path):
        self._count("stat")
        return super().stat(path)

    def list_dir(self, path):
        self._count("list")
        return super().list_dir(path)

    def read_file(self, path, limit):
        self._count("read")
        return super().read_file(path, limit)


def test_work_is_bounded_whatever_is_saved(tmp_path):
    fs = Counting()
    space = open_store(tmp_path / "many", fs=fs).namespace(INFO)
    for seed in range(200):
        other = prompt(12, seed + 1)
        space.publish(other, spans(other, 0, 12))
    match = space.lookup(TOKENS)
    fs.calls.clear()
    found = nearest(match)
    assert found.end == "differs"
    assert fs.calls == {"list": 1, "stat": MAX_STATS, "read": MAX_OPENED}


def test_a_quick_look_takes_less_than_a_millisecond(tmp_path):
    space = open_store(tmp_path / "cache", interval=2048).namespace(INFO)
    tokens = prompt(2048)
    for seed in range(100):
        space.publish(
            differ_at(tokens, 100, seed + 1), [Span(0, 2048, (TensorSpec("k", "U8", 1, (1,)),), [bytes(2048)])]
        )
    match = space.lookup(tokens)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        assert quickly(match, pack_tokens(tokens)) is not None
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


@pytest.mark.parametrize("at", [0, 5, 16, 17, 70, 90, 130, 140, 192, 200])
def test_a_quick_look_finds_the_same(tmp_path, at):
    space = open_store(tmp_path / "quick", interval=128).namespace(INFO)
    tokens = prompt(200)
    space.publish(tokens[:192], spans(tokens, 0, 128, 192))
    other = differ_at(tokens, at)
    match = space.lookup(other)
    assert quickly(match, pack_tokens(other)) == nearest(match)


def test_a_quick_look_gives_up_among_many(tmp_path):
    fs = Counting()
    space = open_store(tmp_path / "many", fs=fs, interval=128).namespace(INFO)
    for seed in range(MAX_QUICK + 1):
        other = prompt(2, seed + 1)
        space.publish(other, spans(other, 0, 2))
    tokens = prompt(120)
    match = space.lookup(tokens)
    fs.calls.clear()
    assert quickly(match, pack_tokens(tokens)) is None
    assert fs.calls == {"list": 1}
    space.publish(tokens, spans(tokens, 0, 120))
    part = differ_at(tokens, 80)
    match = space.lookup(part)
    fs.calls.clear()
    found = quickly(match, pack_tokens(part))
    assert (found.matched, found.end) == (80, "differs")
    assert fs.calls == {"read": 1}  # the lookup had found it
    next(path for path in node_files(tmp_path / "many") if "-120-" in path.name).unlink()
    assert quickly(match, pack_tokens(part)) is None


# Without an engine.


def test_all_namespaces_are_asked_and_the_nearest_is_shown(tmp_path):
    store = open_store(tmp_path / "s")
    far, near = store.namespace(INFO), store.namespace(TENANT)
    far.publish(TOKENS, spans(TOKENS, 0, 16))
    other = differ_at(TOKENS, 20)[:32]
    near.publish(other, spans(other, 0, 16, 32))
    spaces = saved_spaces(store.context)
    assert {each.id for each in spaces} == {far.id, near.id}
    found = nearest_of_all(spaces, pack_tokens(TOKENS))
    assert (found.space.id, found.matched, found.end) == (near.id, 20, "differs")
    assert [each.id for each in saved_spaces(store.context, far.id[:6])] == [far.id]
    # A salted namespace, and one whose description was lost, are known by a manifest.
    shutil.rmtree(store.path / "namespaces")
    assert {each.id: each.fingerprint for each in saved_spaces(store.context)} == {
        far.id: INFO.fingerprint,
        near.id: TENANT.fingerprint,
    }
    assert nearest_of_all([], pack_tokens(TOKENS)) is None


# The command.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte-level tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return folder


def encode(model, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids


def save(path, tokens, info=INFO, interval=64):
    with open_store(path, interval=interval) as store:
        space = store.namespace(info)
        space.publish(tokens, spans(tokens, 0, *range(interval, len(tokens), interval), len(tokens)))


SAVED = "<|im_start|>system\nYou are careful. Today is Monday, 3 March.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


def test_both_texts_are_shown_below_each_other(tmp_path, model):
    save(tmp_path / "s", encode(model, SAVED))
    (tmp_path / "prompt.txt").write_text(SAVED.replace("Monday, 3", "Tuesday, 14"))
    before = snapshot(tmp_path / "s")
    code, out, err = invoke("why", tmp_path / "s", "--prompt", tmp_path / "prompt.txt", "--model", model)
    assert code == 0, err
    lines = out.splitlines()
    assert "a test" in lines[0]
    assert f"of {len(encode(model, SAVED)) + 2} tokens match" in lines[0]
    assert lines[1].startswith("At token ")
    assert any(line.startswith("both ") and line.endswith("Today is ") for line in lines)
    (saved,) = [line for line in lines if line.startswith("saved ")]
    (given,) = [line for line in lines if line.startswith("prompt ")]
    assert saved.index("March") == given.index("March")  # aligned, although one is longer
    assert "14" in given
    assert "↵" in given
    assert "A date or a time differs" in out
    assert snapshot(tmp_path / "s") == before
    document = invoke_json("why", tmp_path / "s", "--prompt", tmp_path / "prompt.txt", "--tokenizer", model)
    at = len(encode(model, SAVED.partition("Monday")[0]))
    assert (document["matched"], document["end"], document["causes"]) == (at, "differs", ["date"])
    assert document["texts"]["saved"].startswith("Monday")
    assert document["texts"]["prompt"].startswith("Tuesday")
    assert document["window"]["before"] == encode(model, SAVED)[max(0, at - 48) : at]


@pytest.mark.parametrize(("terminal", "no_color"), [("out", ""), ("out", "1"), (None, "")])
def test_what_differs_is_coloured_on_a_terminal_and_marked_elsewhere(tmp_path, model, terminal, no_color):
    save(tmp_path / "s", encode(model, SAVED))
    (tmp_path / "prompt.txt").write_text(SAVED.replace("Monday, 3", "Tuesday, 14"))
    words = ["why", tmp_path / "s", "--prompt", tmp_path / "prompt.txt", "--model", model]
    seen = run_at(terminal, *words, env={"NO_COLOR": no_color})
    assert (seen.code, seen.err) == (0, "")
    lines = plain(seen.out).splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("saved ")]
    saved, given, below = lines[at : at + 3]
    assert saved.index("March") == given.index("March")
    if terminal is not None and not no_color:
        assert "\x1b[31mMon" in seen.out
        assert "\x1b[32mT" in seen.out
        assert "^" not in below
    else:
        assert "\x1b" not in seen.out
        # A mark below each column that differs, and below no other.
        wide = max(len(saved), len(given))
        differs = [a != b for a, b in zip(saved[8:].ljust(wide), given[8:].ljust(wide), strict=True)]
        marked = [mark == "^" for mark in below[8:].ljust(wide)]
        assert any(marked)
        assert not any(differ and not mark for differ, mark in zip(differs, marked, strict=False))
        assert not any(marked[given.index("March") - 8 :])


def test_a_chat_request_is_rendered_by_the_models_template(tmp_path, model):
    save(tmp_path / "s", encode(model, SAVED))
    request = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You are careful. Today is Monday, 3 March."}]},
            {"role": "user", "content": "Hello there"},
        ]
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    document = invoke_json("why", tmp_path / "s", "--prompt", tmp_path / "request.json", "--model", model)
    assert document["matched"] == len(encode(model, SAVED.partition("Hello")[0] + "Hello"))
    assert document["texts"]["prompt"].startswith(" there<|im_end|>")


def test_tools_in_another_order_are_recognised_however_long(tmp_path, model):
    tools = [
        {"name": f"tool_{i}", "description": f"It does thing {i}. " * 3, "parameters": {"path": "x"}} for i in range(12)
    ]
    head = "<|im_start|>system\nTools: "
    save(tmp_path / "s", encode(model, head + json.dumps(tools)), interval=2048)
    (tmp_path / "prompt").write_text(head + json.dumps(tools[::-1]))
    document = invoke_json("why", tmp_path / "s", "--prompt", tmp_path / "prompt", "--model", model)
    assert document["causes"] == ["tools"]
    (tmp_path / "prompt").write_text(head + json.dumps(tools, sort_keys=True))
    document = invoke_json("why", tmp_path / "s", "--prompt", tmp_path / "prompt", "--model", model)
    assert document["causes"] == ["tools"]


def test_tokens_need_no_tokenizer(tmp_path):
    save(tmp_path / "s", TOKENS)
    other = differ_at(TOKENS, 70)
    for text in (json.dumps(other), " ".join(map(str, other)), ", ".join(map(str, other))):
        (tmp_path / "tokens").write_text(text)
        document = invoke_json("why", tmp_path / "s", "--tokens", tmp_path / "tokens")
        assert (document["matched"], document["texts"], document["causes"]) == (70, None, [])
        assert document["window"]["prompt"] == other[70:100][:48]
    code, out, _ = invoke("why", tmp_path / "s", "--tokens", "-", given=json.dumps(other))
    assert code == 0
    assert f"prompt  {other[70]} " in out


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (TOKENS, "all 100 tokens are saved"),
        ([*TOKENS, 1, 2], "At token 100 the nearest saved prompt"),
        (prompt(40, 5), "none of 40 tokens match"),
    ],
)
def test_what_is_no_difference_is_said_as_such(tmp_path, tokens, said):
    save(tmp_path / "s", TOKENS)
    code, out, err = invoke("why", tmp_path / "s", "--tokens", "-", given=json.dumps(tokens))
    assert code == 0, err
    assert said in out


def test_a_missing_state_is_told_apart(tmp_path):
    save(tmp_path / "s", TOKENS)
    with open_store(tmp_path / "s", 64) as store:
        store.namespace(INFO).publish_state(TOKENS[:64], state(1))
    (tmp_path / "tokens").write_text(json.dumps(TOKENS))
    document = invoke_json("why", tmp_path / "s", "--tokens", tmp_path / "tokens")
    assert (document["reusable"], document["resumable"]) == (100, 64)


def test_mistakes_are_answered_with_one_sentence(tmp_path, model, monkeypatch):
    save(tmp_path / "s", TOKENS)
    (tmp_path / "text").write_text("some words")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "chat").write_text('{"messages": [{"role": "user"}, 5]}')
    (tmp_path / "half").write_text('{"prompt": "half of a smile: \\ud83d"}')
    store = tmp_path / "s"
    for arguments, said in (
        (("--tokens", tmp_path / "text"), "does not hold token ids"),
        (("--tokens", tmp_path / "empty"), "is empty"),
        (("--tokens", tmp_path / "nothing"), "cannot read"),
        (("--tokens", tmp_path / "binary"), "is not UTF-8"),
        (("--prompt", tmp_path / "text", "--model", tmp_path / "nothing"), "name the folder of the model"),
        (("--prompt", tmp_path / "chat", "--model", model), "cannot render this request"),
        (("--prompt", tmp_path / "half", "--model", model), "cannot encode this prompt"),
        (("--tokens", tmp_path / "text", "--namespace", "zz"), "does not hold token ids"),
    ):
        code, out, err = invoke("why", store, *arguments)
        assert (code, out) == (1, "")
        assert said in " ".join(err.split())
    code, _, err = invoke("why", store, "--tokens", "-", "--namespace", "00ff", given="1 2 3")
    assert code == 1
    assert "no namespace begins with '00ff'" in " ".join(err.split())
    code, _, err = invoke("why", store, "--tokens", "-", given="-1")
    assert code == 1
    assert "no token ids" in err
    for arguments in ((), ("--tokens", "a", "--prompt", "b"), ("--prompt", tmp_path / "text")):
        assert invoke("why", store, *arguments)[0] == 2
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = invoke("why", store, "--prompt", tmp_path / "text", "--model", model)
    assert code == 1
    assert "pip install tokenizers" in " ".join(err.split())
    with open_store(tmp_path / "new"):
        pass
    code, _, err = invoke("why", tmp_path / "new", "--tokens", "-", given="1 2 3")
    assert code == 1
    assert "nothing is saved there yet" in " ".join(err.split())


def test_a_namespace_of_a_hostile_name_is_printed_plainly(tmp_path):
    save(tmp_path / "s", TOKENS, NamespaceInfo({"a": 1}, label="\x1b[31mred"))
    code, out, _ = invoke("why", tmp_path / "s", "--tokens", "-", given="1 2")
    assert code == 0
    assert "\x1b" not in out
