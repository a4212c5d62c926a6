"""Other ways a request is computed: a draft model, a text completion, a LoRA adapter, cancelled streams, two models."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import time

import mlx.core as mx
import pytest
from conftest import TINY_LLAMA, make_model
from engine_support import conversation, wait_saved
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers

FLAGS = ("--kv-cache-interval", "256")


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory):
    """The shape of tiny_llama with other weights: nothing but the fingerprint tells them apart."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama", TINY_LLAMA, seed=1)


@pytest.mark.parametrize("drafting", ["another", "itself"])
def test_a_draft_model(serve, tiny_llama, other_llama, tmp_path, drafting):
    """One whose tokens are hardly ever taken, and one of which all are: the model's own."""
    directory = tmp_path / "cache"
    draft = ("--draft-model", str(tiny_llama if drafting == "itself" else other_llama), "--num-draft-tokens", "2")
    expected = serve(tiny_llama, *draft).chat(conversation(1))

    server = serve(tiny_llama, *draft, "--kv-cache-dir", str(directory), *FLAGS)
    written = server.chat(conversation(1))
    assert written.ids == expected.ids
    wait_saved(server, directory, written.prompt_tokens)
    assert server.stop() == 0

    again = serve(tiny_llama, *draft, "--kv-cache-dir", str(directory))
    restored = again.chat(conversation(1))
    assert restored.ids == expected.ids
    assert restored.cached_tokens == restored.prompt_tokens - 1
    assert again.chat(conversation(2)).ids == serve(tiny_llama, *draft).chat(conversation(2)).ids

    # The draft model's KV is in the same blocks, so without it nothing of this may be found.
    without = serve(tiny_llama, "--kv-cache-dir", str(directory)).chat(conversation(1))
    assert without.cached_tokens == 0
    assert without.ids == serve(tiny_llama).chat(conversation(1)).ids


def test_two_models_of_one_name_never_meet(serve, tiny_llama, other_llama, tmp_path):
    assert tiny_llama.name == other_llama.name
    directory = tmp_path / "cache"
    first = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    written = first.chat(conversation(1))
    wait_saved(first, directory, written.prompt_tokens)
    second = serve(other_llama, "--kv-cache-dir", str(directory))
    answer = second.chat(conversation(1))
    assert answer.cached_tokens == 0
    assert answer.ids == serve(other_llama).chat(conversation(1)).ids
    assert answer.logprobs != written.logprobs


def test_a_renamed_model_folder_still_hits(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    written = server.chat(conversation(1))
    wait_saved(server, directory, written.prompt_tokens)
    renamed = tmp_path / "another-name"
    renamed.symlink_to(tiny_llama)
    assert serve(renamed, "--kv-cache-dir", str(directory)).chat(conversation(1)).cached_tokens > 0


def test_models_swapped_within_one_server(serve, tiny_llama, other_llama, tmp_path):
    directory = tmp_path / "cache"
    plain = serve(tiny_llama)
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    for model in (tiny_llama, other_llama, tiny_llama):
        request = {"model": str(model)}
        assert server.chat(conversation(1), **request).ids == plain.chat(conversation(1), **request).ids
    # A model that comes back was loaded anew: it is looked at again, and has the namespace it had.
    first, other, again = re.findall(r"uses namespace (\w+)", server.log)
    assert first == again != other
    assert "Traceback" not in server.log


def lora(folder, model, seed):
    """An adapter with random weights, as mlx_lm.lora saves one."""
    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.k_proj", "self_attn.v_proj"]}
    loaded, _ = load(str(model))
    linear_to_lora_layers(loaded, 2, settings)
    weights = {name: array for name, array in tree_flatten(loaded.parameters()) if ".lora_" in name}
    keys = mx.random.split(mx.random.key(seed), len(weights))
    weights = {
        name: mx.random.normal(array.shape, key=key) for (name, array), key in zip(weights.items(), keys, strict=True)
    }
    folder.mkdir(exist_ok=True)
    (folder / "adapters.safetensors").unlink(missing_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("what", ["weights", "adapter"])
def test_a_model_that_is_replaced_in_place_is_another_one(serve, tiny_llama, other_llama, tmp_path, what):
    """In memory as in the directory: mlx-lm's prompt cache knows it by its path, and would hand out the old one's KV,
    which the new one's namespace would then hold for ever.
    """
    live, directory = tmp_path / "live", tmp_path / "cache"
    if what == "weights":
        shutil.copytree(tiny_llama, live)
        request = {"model": str(live)}
    else:
        lora(live, tiny_llama, 1)
        request = {"model": str(tiny_llama), "adapters": str(live)}
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    before = server.chat(conversation(2), **request)
    if what == "weights":
        (live / "model.safetensors").unlink()
        shutil.copy(other_llama / "model.safetensors", live / "model.safetensors")
    else:
        lora(live, tiny_llama, 2)
    # It is loaded again when another one was asked for meanwhile.
    server.chat(conversation(1), model=str(tiny_llama))
    fresh = serve(tiny_llama)
    expected = fresh.chat(conversation(3), **request)
    assert fresh.chat(conversation(2), **request).ids != before.ids, "it was replaced by one that says the same"
    replaced = server.chat(conversation(3), **request)
    assert replaced.ids == expected.ids
    assert replaced.cached_tokens == 0
    wait_saved(server, directory, replaced.prompt_tokens)
    assert server.stop() == 0
    again = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS).chat(conversation(3), **request)
    assert again.ids == expected.ids
    assert again.cached_tokens == again.prompt_tokens - 1


def test_a_text_completion(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    body = {"prompt": "once upon a time, " * 40, "max_tokens": 10}
    expected = serve(tiny_llama).post("/v1/completions", body)["choices"]
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    written = server.post("/v1/completions", body)
    assert written["choices"] == expected
    wait_saved(server, directory, written["usage"]["prompt_tokens"])
    server.kill()
    restored = serve(tiny_llama, "--kv-cache-dir", str(directory)).post("/v1/completions", body)
    assert restored["choices"] == expected
    assert restored["usage"]["prompt_tokens_details"]["cached_tokens"] == restored["usage"]["prompt_tokens"] - 1


def test_a_cancelled_request_keeps_what_it_published(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), "--prefill-step-size", "256", *FLAGS)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"messages": conversation(3), "max_tokens": 5000, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    while b"data: " not in response.readline():
        pass
    response.close()
    connection.close()
    wait_saved(server, directory, 1024)
    # The server goes on, and what was saved of the cancelled prompt is there for the next process.
    deadline = time.monotonic() + 30
    while "Broken pipe" not in server.log and "ConnectionReset" not in server.log and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.chat(conversation(1)).ids == serve(tiny_llama).chat(conversation(1)).ids
    assert server.stop() == 0
    restored = serve(tiny_llama, "--kv-cache-dir", str(directory)).chat(conversation(3))
    assert restored.cached_tokens >= 1024
    assert restored.ids == serve(tiny_llama).chat(conversation(3)).ids


def test_an_adapter_has_a_namespace_of_its_own(serve, tiny_llama, tmp_path):
    import mlx.core as mx

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "fine_tune_type": "lora",
                "num_layers": 3,
                "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
            }
        )
    )
    mx.random.seed(5)
    weights = {}
    for layer in range(3):
        weights[f"model.layers.{layer}.self_attn.q_proj.lora_a"] = mx.random.normal((64, 2))
        weights[f"model.layers.{layer}.self_attn.q_proj.lora_b"] = mx.random.normal((2, 64))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)

    directory = tmp_path / "cache"
    plain = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    without = plain.chat(conversation(1))
    wait_saved(plain, directory, without.prompt_tokens)
    server = serve(tiny_llama, "--adapter-path", str(adapter), "--kv-cache-dir", str(directory))
    adapted = server.chat(conversation(1))
    assert adapted.cached_tokens == 0
    assert adapted.logprobs != without.logprobs
    assert server.stop() == 0
    again = serve(tiny_llama, "--adapter-path", str(adapter), "--kv-cache-dir", str(directory)).chat(conversation(1))
    assert again.ids == adapted.ids
    assert again.cached_tokens == again.prompt_tokens - 1
