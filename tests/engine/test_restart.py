"""The main job: a server is killed and started anew, and the same conversation goes on with the same tokens."""

from __future__ import annotations

import pytest
from engine_support import conversation, wait_saved

INTERVAL = "256"


@pytest.mark.parametrize("path", ["batched", "sequential"])
def test_restart_gives_the_tokens_of_an_uncached_run(serve, tiny_llama, tmp_path, path):
    # A seed makes mlx_lm.server answer one request at a time, by another code path.
    more = {"seed": 7} if path == "sequential" else {}
    directory = tmp_path / "cache"
    first, second = conversation(1), conversation(2)

    plain = serve(tiny_llama)
    expected = [plain.chat(messages, **more) for messages in (first, second)]
    plain.kill()

    server = serve(tiny_llama, "--kv-cache-dir", str(directory), "--kv-cache-interval", INTERVAL)
    written = server.chat(first, **more)
    assert written.ids == expected[0].ids
    assert written.cached_tokens == 0
    wait_saved(server, directory, written.prompt_tokens - 1 + len(written.ids))
    server.kill()

    again = serve(tiny_llama, "--kv-cache-dir", str(directory))
    restored = again.chat(first, **more)
    assert restored.ids == expected[0].ids
    assert restored.cached_tokens == restored.prompt_tokens - 1
    # The same bytes led to the same numbers, not only to the same choice.
    assert restored.logprobs == written.logprobs
    assert "from disk" in again.log

    grown = again.chat(second, **more)
    assert grown.ids == expected[1].ids
    assert grown.cached_tokens >= 0.9 * written.prompt_tokens
    again.kill()


def test_a_changed_first_token_changes_the_answer(serve, tiny_llama):
    """The control: the model of these tests does look at its whole prompt, so a wrong restore would show."""
    server = serve(tiny_llama)
    messages = conversation(1)
    changed = [{**messages[0], "content": "Z" + messages[0]["content"][1:]}, *messages[1:]]
    assert server.chat(messages).logprobs != server.chat(changed, seed=1).logprobs


def test_memory_stays_the_first_tier(serve, tiny_llama, tmp_path):
    server = serve(tiny_llama, "--kv-cache-dir", str(tmp_path / "cache"), "--kv-cache-interval", INTERVAL)
    first = server.chat(conversation(1))
    again = server.chat(conversation(1))
    assert again.ids == first.ids
    assert again.cached_tokens == again.prompt_tokens - 1
    assert "from memory" in server.log
    assert "from disk" not in server.log


def test_a_branch_reuses_what_it_shares(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), "--kv-cache-interval", INTERVAL)
    written = server.chat(conversation(1))
    wait_saved(server, directory, written.prompt_tokens)
    server.kill()

    messages = conversation(1)
    messages[-1] = {"role": "user", "content": messages[-1]["content"][:-40] + "Now something else entirely, please."}
    expected = serve(tiny_llama).chat(messages)
    branch = serve(tiny_llama, "--kv-cache-dir", str(directory)).chat(messages)
    assert branch.ids == expected.ids
    # All but the last words are shared, and the share ends inside a chunk.
    assert branch.cached_tokens > 0.85 * branch.prompt_tokens
    assert branch.cached_tokens % int(INTERVAL)


def test_conversations_at_once_are_saved_apart(serve, tiny_llama, tmp_path):
    """A batch of unequal lengths is left-padded in the engine's buffers; none of the padding may be kept."""
    from concurrent.futures import ThreadPoolExecutor

    directory = tmp_path / "cache"
    prompts = [conversation(1, topic) for topic in ("a", "bb " * 30, "ccc " * 90, "dddd " * 50)]
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), "--kv-cache-interval", INTERVAL)
    with ThreadPoolExecutor(len(prompts)) as pool:
        written = list(pool.map(server.chat, prompts))
    for answer in written:
        wait_saved(server, directory, answer.prompt_tokens)
    assert server.stop() == 0

    again = serve(tiny_llama, "--kv-cache-dir", str(directory))
    plain = serve(tiny_llama)
    for prompt in prompts:
        restored = again.chat(prompt)
        assert restored.ids == plain.chat(prompt).ids
        assert restored.cached_tokens == restored.prompt_tokens - 1


@pytest.mark.real_model
def test_restart_of_a_real_model(serve, smollm2, tmp_path):
    directory = tmp_path / "cache"
    messages = [
        {"role": "system", "content": "You are a helpful assistant who answers in one short sentence. " * 6},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    expected = serve(smollm2).chat(messages)
    assert "Paris" in expected.text

    server = serve(smollm2, "--kv-cache-dir", str(directory))
    written = server.chat(messages)
    wait_saved(server, directory, written.prompt_tokens)
    server.kill()

    restored = serve(smollm2, "--kv-cache-dir", str(directory)).chat(messages)
    assert restored.ids == written.ids == expected.ids
    assert restored.cached_tokens == restored.prompt_tokens - 1
