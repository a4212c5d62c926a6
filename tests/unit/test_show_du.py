"""Looking: one prefix with all that is known of it, and what the bytes of a directory are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import make_tokenizer
from core_support import INFO, SPECS, kv, open_store, prompt
from gc_support import TENANT, blocks, manifests, publish, state
from upkeep_support import grow, invoke, invoke_json, refs, snapshot

from kvstore import KVStoreError, Span, Store
from kvstore.breakdown import breakdown
from kvstore.context import this_process
from kvstore.gc import usage
from kvstore.manifest import decode
from kvstore.prefix import find_prefix

TOKENS = prompt(40)


@pytest.fixture
def talk(tmp_path) -> Store:
    """A conversation of three nodes, the last of which was decoded in part, with a state in the middle."""
    with open_store(tmp_path / "s") as store:
        space = store.namespace(INFO)
        grow(space, TOKENS, 16, 32, 37, 40, decode="...d")
        space.publish_state(TOKENS[:32], state(1))
        yield store


def key_of(store: Store, tokens: list[int], info=INFO) -> str:
    """The key of a prompt's last node, as ls shows it."""
    return store.namespace(info).lookup(tokens).steps[-1].name.key


# show


def test_a_prefix_is_shown_from_its_first_chunk(talk):
    before = snapshot(talk.path)
    found = find_prefix(talk.context, key_of(talk, TOKENS)[:10])
    assert (found.namespace, found.label, found.key) == (talk.namespace(INFO).id, "a test", key_of(talk, TOKENS))
    assert [(part.first, part.count, len(part.spans)) for part in found.parts] == [(0, 16, 1), (16, 16, 1), (32, 8, 2)]
    assert [span.decode for span in found.parts[2].spans] == [False, True]
    assert [(span.first, span.count) for span in found.parts[2].spans] == [(32, 5), (37, 3)]
    assert [part.state is not None for part in found.parts] == [False, True, False]
    assert (found.end, found.complete, list(found.tokens)) == (40, True, TOKENS)
    on_path = set(blocks(talk.path))
    assert found.size == sum(path.stat().st_size for path in on_path)
    seen = [path for path in manifests(talk.path) if "-5-" not in path.name]  # all but the tail of 37
    assert found.allocated == sum(path.stat().st_blocks * 512 for path in [*on_path, *seen])
    assert snapshot(talk.path) == before


def test_the_middle_of_a_path_and_a_tail_have_keys_too(talk):
    assert find_prefix(talk.context, key_of(talk, TOKENS[:16])).end == 16
    assert find_prefix(talk.context, key_of(talk, TOKENS[:37]).upper()).end == 37


def test_a_whole_key_of_64_digits_will_do(talk):
    manifest = next(decode(path.read_bytes()) for path in manifests(talk.path) if "-8-" in path.name)
    assert find_prefix(talk.context, manifest.key.hex()).end == 40


@pytest.mark.parametrize(
    ("key", "sentence"),
    [("", "is not a key"), ("xyz", "is not a key"), ("../..", "is not a key"), ("f" * 31, "no key begins with")],
)
def test_what_is_no_key(talk, key, sentence):
    with pytest.raises(KVStoreError, match=sentence):
        find_prefix(talk.context, key)


def test_a_beginning_of_several_keys_is_refused_but_not_of_one_with_two_files(talk):
    for seed in range(40):
        publish(talk.namespace(INFO), prompt(5, seed + 10))
    keys = {path.name.split("-")[2] for path in manifests(talk.path)}
    digit = max("0123456789abcdef", key=lambda digit: sum(key.startswith(digit) for key in keys))
    with pytest.raises(KVStoreError, match=r"\d keys begin with"):
        find_prefix(talk.context, digit)
    with_state = key_of(talk, TOKENS[:32])
    assert find_prefix(talk.context, with_state).parts[-1].state is not None


def test_what_is_missing_or_damaged_is_said(talk):
    (ref,) = refs(talk.path)[16]
    talk.context.layout.block(ref.digest).unlink()
    found = find_prefix(talk.context, key_of(talk, TOKENS))
    assert (found.parts[0].spans[0].block, found.complete) == ("missing", False)
    first, second, third = sorted(
        (path for path in manifests(talk.path) if path.suffix == ".kv" and "-5-" not in path.name),
        key=lambda path: decode(path.read_bytes()).end,
    )
    key = third.name.split("-")[2]
    second.write_bytes(second.read_bytes()[:-1])
    found = find_prefix(talk.context, key)
    # The way up goes by names, so it goes on past a manifest that cannot be read.
    assert [bool(part.fault) for part in found.parts] == [False, True, False]
    assert list(found.tokens) == TOKENS[32:]
    first.unlink()
    second.unlink()
    found = find_prefix(talk.context, key)
    assert (len(found.parts), found.parts[0].first, found.complete, found.end) == (1, 32, False, 40)
    code, out, err = invoke("show", talk.path, key)
    assert code == 0
    assert "cannot be restored as a whole" in " ".join(err.split())
    assert "40 tokens in 1 node" in out


def test_a_state_that_lost_its_kv_is_found_by_its_key(talk):
    key = key_of(talk, TOKENS[:32])
    next(path for path in manifests(talk.path) if f"-{key}-" in path.name and path.suffix == ".kv").unlink()
    found = find_prefix(talk.context, key)
    assert found.parts[-1].fault == "its KV is missing"
    assert found.parts[-1].state.block == "there"
    assert not found.complete


def test_a_circle_of_forged_names_ends(talk):
    key = key_of(talk, TOKENS[:32])
    path = next(path for path in manifests(talk.path) if f"-{key}-" in path.name and path.suffix == ".kv")
    forged = path.parent.parent / key[:2] / f"{key}-16-{key}-{'0' * 18}.kv"
    forged.parent.mkdir(exist_ok=True)
    path.rename(forged)
    found = find_prefix(talk.context, key)
    assert len(found.parts) == 1
    assert not found.complete


def test_an_engine_that_keeps_nothing_per_token(talk):
    other = prompt(8, 5)
    talk.namespace(TENANT).publish(other, [Span(0, 8, (), [])])
    talk.namespace(TENANT).publish_state(other, state(2))
    code, out, _ = invoke("show", talk.path, key_of(talk, other, TENANT)[:12])
    assert code == 0
    assert "nothing per token" in out
    assert "state" in out


def test_the_command_shows_it(talk):
    code, out, err = invoke("show", talk.path, key_of(talk, TOKENS)[:12])
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"a test ({talk.namespace(INFO).id})"
    assert lines[1].startswith("40 tokens in 3 nodes, ")
    assert "last used now, by kvstore" in lines[1]
    rows = [line.split() for line in lines[3:]]
    kinds = [next(word for word in row if word in {"prefill", "decode", "state"}) for row in rows]
    assert kinds == ["prefill", "prefill", "state", "prefill", "decode"]


def test_the_command_in_json(talk):
    now = time.time()
    document = invoke_json("show", talk.path, key_of(talk, TOKENS)[:12])
    assert (document["tokens"], document["complete"], document["label"]) == (40, True, "a test")
    assert "text" not in document
    node = document["nodes"][2]
    assert (node["first"], node["count"], node["fault"], node["state"]) == (32, 8, "", None)
    assert [(span["first"], span["decode"], span["block"]) for span in node["spans"]] == [
        (32, False, "there"),
        (37, True, "there"),
    ]
    assert abs(node["created"] - now) < 600
    assert abs(node["used"] - now) < 600
    assert document["nodes"][1]["state"]["bytes"] > 0


def test_hostile_labels_and_writers_do_not_reach_the_terminal(talk):
    path = talk.context.layout.namespace_file(talk.namespace(INFO).id)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "label": "\x1b[31m[red]evil\x07"}))
    for command in (["show", talk.path, key_of(talk, TOKENS)], ["du", talk.path]):
        _, out, _ = invoke(*command)
        assert "\x1b" not in out
        assert "\x07" not in out
        assert "[red]evil" in out


def says(store: Store, text: str) -> str:
    """Publish a text, a token a byte as the tests' tokenizer has it; the node's key."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = store.path.parent / "model"
    folder.mkdir(exist_ok=True)
    make_tokenizer(folder)
    tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    borders = [*range(0, len(tokens), 16), len(tokens)]
    spans = [Span(first, end - first, SPECS, kv(tokens, first, end)) for first, end in pairwise(borders) if end > first]
    store.namespace(INFO).publish(tokens, spans)
    return key_of(store, tokens)


@pytest.mark.parametrize("option", ["--model", "--tokenizer"])
def test_the_text_is_decoded_by_a_tokenizer(talk, option):
    text = "<|im_start|>user\nWhat is a KV cache? \x1b[2J é<|im_end|>\n"
    key = says(talk, text)
    code, out, _ = invoke("show", talk.path, key, "--text", option, talk.path.parent / "model")
    assert code == 0
    assert out.endswith(text.replace("\x1b", "?") + "\n")
    document = invoke_json("show", talk.path, key, "--text", option, talk.path.parent / "model" / "tokenizer.json")
    assert document["text"] == text


def test_text_without_the_package_a_file_or_an_option_is_one_sentence(talk, monkeypatch):
    key = key_of(talk, TOKENS)
    code, _, err = invoke("show", talk.path, key, "--model", talk.path)
    assert code == 2
    assert "goes with --text" in err
    code, out, err = invoke("show", talk.path, key, "--text", "--model", talk.path)
    assert (code, out) == (1, "")
    assert "name the folder of the model" in " ".join(err.split())
    (talk.path.parent / "tokenizer.json").write_text("{}")
    code, _, err = invoke("show", talk.path, key, "--text", "--model", talk.path.parent)
    assert code == 1
    assert "is it the right one?" in " ".join(err.split())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = invoke("show", talk.path, key, "--text", "--model", talk.path.parent)
    assert code == 1
    assert "pip install tokenizers" in " ".join(err.split())


@pytest.fixture
def hub(talk, monkeypatch):
    """An empty cache of the hub, and the directory's label a name that could be there."""
    path = talk.context.layout.namespace_file(talk.namespace(INFO).id)
    path.write_text(json.dumps({**json.loads(path.read_text()), "label": "Small-1B-4bit"}))
    hub = talk.path.parent / "huggingface" / "hub"
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(hub.parent))
    monkeypatch.chdir(talk.path.parent)
    return hub


def downloaded(hub: Path, folder: str, commit: str = "0123abcd", more: str = "") -> Path:
    """A model as a download leaves it: a snapshot of links, and which one is the newest."""
    snapshot = hub / folder / "snapshots" / commit
    (hub / folder / "blobs").mkdir(parents=True)
    (hub / folder / "refs").mkdir()
    snapshot.mkdir(parents=True)
    blob = hub / folder / "blobs" / "f00"
    blob.write_text((hub.parent.parent / "model" / "tokenizer.json").read_text() + more)
    (snapshot / "tokenizer.json").symlink_to(blob)
    (hub / folder / "refs" / "main").write_text(commit)
    return snapshot


@pytest.mark.parametrize("how", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "no owner", "two alike", "a folder"])
def test_the_tokenizer_is_found_by_the_model_s_name(talk, hub, monkeypatch, how):
    key = says(talk, "What is a KV cache?")
    if how == "a folder":
        (talk.path.parent / "model").rename(talk.path.parent / "Small-1B-4bit")
    else:
        downloaded(hub, "models--Small-1B-4bit" if how == "no owner" else "models--mlx-community--Small-1B-4bit")
        downloaded(hub, "models--mlx-community--Small-1B-4bit-more", more=" ")
        downloaded(hub, "datasets--mlx-community--Small-1B-4bit", more=" ")
    if how == "two alike":
        downloaded(hub, "models--another--Small-1B-4bit")
    elif how == "HF_HUB_CACHE":
        monkeypatch.setenv("HF_HOME", "/nowhere")
        monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    elif how == "XDG_CACHE_HOME":
        monkeypatch.delenv("HF_HOME")
        monkeypatch.setenv("XDG_CACHE_HOME", str(hub.parent.parent))
    code, out, err = invoke("show", talk.path, key, "--text")
    assert (code, err) == (0, "")
    assert out.endswith("What is a KV cache?\n")


def test_a_tokenizer_that_is_not_here_is_asked_for(talk, hub):
    key = says(talk, "What is a KV cache?")
    code, out, err = invoke("show", talk.path, key, "--text")
    assert (code, out) == (1, "")
    assert "no tokenizer of 'Small-1B-4bit'" in " ".join(err.split())
    assert "--model FOLDER" in " ".join(err.split())
    downloaded(hub, "models--one--Small-1B-4bit")
    downloaded(hub, "models--two--Small-1B-4bit", more=" ")
    code, _, err = invoke("show", talk.path, key, "--text")
    assert code == 1
    assert "different tokenizers" in err


@pytest.mark.parametrize("label", ["..", ".", "", "/etc", "../model", "a/../model", "mod\0el", "model\n"])
def test_a_label_is_no_path(talk, hub, label):
    """Whoever writes into the directory writes labels."""
    key = says(talk, "What is a KV cache?")
    (talk.path.parent / "tokenizer.json").write_text("{}")
    path = talk.context.layout.namespace_file(talk.namespace(INFO).id)
    path.write_text(json.dumps({**json.loads(path.read_text()), "label": label}))
    code, _, err = invoke("show", talk.path, key, "--text")
    assert code == 1
    assert "no tokenizer of" in err


def test_the_package_is_not_imported_without_text(talk):
    """Nor anything else heavy: the command line answers at once."""
    code = (
        "import sys; sys.argv = ['kvstore', 'show', sys.argv[1], sys.argv[2]]\n"
        "from kvstore.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print(sorted({'numpy', 'mlx', 'tokenizers', 'mlx_lm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(talk.path), key_of(talk, TOKENS)], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("a test (")
    assert done.stdout.endswith("[]\n")


def test_what_cannot_be_shown_is_one_sentence(talk, tmp_path):
    for arguments, sentence in (
        ((talk.path, "ffffffffffff"), "no key begins with 'ffffffffffff'"),
        ((tmp_path, "ab"), "is not a cache directory"),
    ):
        code, out, err = invoke("show", *arguments)
        assert (code, out) == (1, "")
        assert sentence in " ".join(err.split())


# du


@pytest.fixture
def full(talk) -> Store:
    """The conversation, and some of everything else."""
    publish(talk.namespace(TENANT), prompt(50, 3))
    publish(talk.namespace(TENANT), TOKENS[:16])  # equal bytes: a block of both namespaces
    talk.tokenizations(b"scope").put(b"request", bytes(9000))
    publish(talk.namespace(INFO), prompt(9, 8))
    talk.namespace(INFO).lookup(prompt(9, 8)).steps[0].path.unlink()
    layout, me = talk.context.layout, this_process()
    (layout.quarantine / f"1.{blocks(talk.path)[0].name}").write_bytes(b"?" * 20_000)
    staging = layout.tmp / f"{me.host}.{me.boot}.{os.getpid()}.0badf00d"
    staging.mkdir()
    (staging / "1").write_bytes(b"?" * 30_000)
    (talk.path / "notes").mkdir()
    (talk.path / "notes" / ".DS_Store").write_bytes(b"?" * 40_000)
    return talk


def on_disk(*paths: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


def test_everything_adds_up_to_what_the_directory_takes(full):
    before = snapshot(full.path)
    found = breakdown(full.context)
    assert found.total == usage(full.context)
    parts = (found.shared, found.unreferenced, found.tokenizations, found.tmp, found.quarantine, found.other)
    assert sum(each.total for each in found.namespaces) + sum(parts) == found.total
    assert sum(found.kinds.values()) == found.total
    assert min(found.kinds.values()) > 0
    assert found.foreign >= 1
    assert found.quarantine == on_disk(*full.context.layout.quarantine.iterdir())
    assert found.tmp >= 30_000
    assert found.other >= 40_000
    assert found.shared == on_disk(full.context.layout.block(refs_of_first(full).digest))
    assert snapshot(full.path) == before


def refs_of_first(store: Store):
    """The block of the first chunk of the conversation."""
    return decode(store.namespace(INFO).lookup(TOKENS).steps[0].path.read_bytes()).blocks[0]


def test_each_namespace_by_its_own_files(full):
    found = {each.namespace: each for each in breakdown(full.context).namespaces}
    assert found.keys() == {full.namespace(INFO).id, full.namespace(TENANT).id}
    for info in (INFO, TENANT):
        own = [path for path in manifests(full.path) if path.parent.parent.name == full.namespace(info).id]
        each = found[full.namespace(info).id]
        assert each.label == info.label
        assert each.manifests == on_disk(*own)
        assert each.nodes == sum(path.suffix == ".kv" for path in own)
        names = {
            suffix: {ref.digest for path in own if path.suffix == suffix for ref in decode(path.read_bytes()).blocks}
            for suffix in (".kv", ".state")
        }
        names[".kv"].discard(refs_of_first(full).digest)
        assert each.kv == on_disk(*(full.context.layout.block(digest) for digest in names[".kv"]))
        assert each.states == on_disk(*(full.context.layout.block(digest) for digest in names[".state"]))


def test_what_a_damaged_manifest_names_counts_as_unreferenced_and_that_is_said(full):
    before = breakdown(full.context)
    leaf = next(path for path in manifests(full.path) if "-2-" in path.name)
    (ref,) = decode(leaf.read_bytes()).blocks
    leaf.write_bytes(leaf.read_bytes()[:-1])
    found = breakdown(full.context)
    assert found.damaged == 1
    assert found.unreferenced - before.unreferenced == on_disk(full.context.layout.block(ref.digest))
    assert found.total == usage(full.context) == sum(found.kinds.values())
    code, _, err = invoke("du", full.path)
    assert code == 0
    assert "1 manifest cannot be read" in " ".join(err.split())


def test_an_empty_directory(tmp_path):
    with open_store(tmp_path / "s") as store:
        found = breakdown(store.context)
        assert found.namespaces == []
        assert found.kinds == {**dict.fromkeys(found.kinds, 0), "other": found.total}
    assert invoke("du", tmp_path / "s")[0] == 0


def test_the_command_prints_both_tables(full):
    code, out, err = invoke("du", full.path)
    assert (code, err) == (0, "")
    for text in ("a test", "another", "shared by several", "kv blocks", "unreferenced", "total"):
        assert text in out
    assert full.namespace(INFO).id[:12] in out


def test_du_in_json(full):
    document = invoke_json("du", full.path)
    assert document["total"] == usage(full.context) == sum(document["kinds"].values())
    kinds = document["kinds"]
    assert sum(each["total"] for each in document["namespaces"]) + document["shared"] == sum(
        kinds[kind] for kind in ("kv blocks", "state blocks", "manifests")
    )


def test_du_of_something_else_is_one_sentence(tmp_path):
    code, out, err = invoke("du", tmp_path)
    assert (code, out) == (1, "")
    assert "is not a cache directory" in " ".join(err.split())
