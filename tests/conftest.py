"""Fixtures shared by every kind of test: models small enough to make, and the one real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from record_support import record

ROOT = Path(__file__).resolve().parent.parent

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C works in what tests start, also where a shell had it ignored, as it does in the background.

    Hypothesis looks at no clock, and finds the same in each run but a soak's: what is new is found there.
    """
    settings.register_profile("kvstore", deadline=None, derandomize=config.option.markexpr != "soak", print_blob=True)
    settings.load_profile("kvstore")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(), "kvstore-record")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Recorder:
    """See record_support. Not in the workers of a run: the process that started them gets all reports."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record(report)


def make_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer without merges: every byte of a text is a token. Returns the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)


def make_model(folder: Path, config: dict, seed: int = 0) -> Path:
    """A model folder with random weights, built from mlx-lm's own classes for config['model_type']."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    folder.mkdir(parents=True)
    config = {**config, "vocab_size": make_tokenizer(folder), "eos_token_id": SPECIAL.index("<|im_end|>")}
    mx.random.seed(seed)
    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict(config))
    # Twice the usual scale: with small random weights every prompt gets nearly the same answer, and a wrong restore
    # would go unnoticed.
    weights = {name: array * 2 if array.ndim > 1 else array for name, array in tree_flatten(model.parameters())}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """What kvstore remembers of weights goes into a folder of the test run's, not the user's (servers inherit it)."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("xdg-cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A three-layer llama with random weights and a byte tokenizer."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama", TINY_LLAMA)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, made by the tool that the README names; the result stays in build/ for the next run."""
    folder = ROOT / "build" / "models" / "SmolLM2-135M-Instruct"
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_smollm2.py"), str(folder)],
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return folder
