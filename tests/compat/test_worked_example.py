"""The worked example of docs/format.md, byte by byte: what the page says is what lies in the golden directory."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import golden
import pytest
import xxhash
from format_support import h, pack, root_of

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXAMPLE = PAGE[PAGE.index("## 9. Worked example") :]
GOLDEN = Path(__file__).parent / "golden-v1"
ROW = re.compile(r" *(\d+)  ([0-9a-f ]+?)(?:  +(\S.*))?")


def table(number: int) -> tuple[Path, list[tuple[int, bytes, str]]]:
    """One of the tables: the file that is named last before it, and its rows."""
    before, text = re.findall(r"(.*?)```text\n(.*?)```", EXAMPLE, re.DOTALL)[number]
    rows = []
    for line in text.splitlines():
        match = ROW.fullmatch(line)
        assert match, line
        rows.append((int(match[1]), bytes.fromhex(match[2]), match[3] or ""))
    return GOLDEN / re.findall(r"`(objects/\S+)`", before)[-1], rows


def test_the_manifest_is_shown_whole():
    path, rows = table(0)
    assert path.stat().st_size == 304
    assert b"".join(data for _, data, _ in rows) == path.read_bytes()


def test_the_block_is_shown_to_its_first_row():
    path, rows = table(1)
    shown = b"".join(data for _, data, _ in rows)
    data = path.read_bytes()
    assert len(data) == 1288
    assert data.startswith(shown)
    assert len(shown) == 408 + 8
    assert "128: 387.0, 4387.0" in rows[-1][2]
    assert struct.unpack("<2f", rows[-1][1]) == (387.0, 4387.0)
    assert 408 % 64 == 24
    assert json.loads(data[8:408])["0.keys"] == {"dtype": "F32", "shape": [2, 22, 2], "data_offsets": [0, 352]}


@pytest.mark.parametrize("number", [0, 1])
def test_offsets_and_meanings_are_those_of_the_bytes(number):
    _, rows = table(number)
    at = 0
    for offset, data, meaning in rows:
        assert offset == at, meaning
        at += len(data)
        if match := re.match(r"tokens = (.*)", meaning):
            assert data == pack([int(token) for token in match[1].split(", ")])
        elif match := re.match(r"[\w ]+ = (\d+)", meaning):
            assert int.from_bytes(data, "little") == int(match[1]), meaning
        elif match := re.search(r"""["|](.*)["|]$""", meaning):
            assert data == match[1].encode()


def test_the_fields_are_those_of_the_tables_of_the_page():
    """In section 3 every field of a manifest has an offset or follows; the example has them in that order."""
    section = PAGE[PAGE.index("## 3. Manifests") : PAGE.index("## 4. Blocks")]
    offsets = [int(offset) for offset in re.findall(r"^\| (\d+) \| \d+ \|", section, re.MULTILINE)]
    manifest, reference = offsets[: offsets.index(0, 1)], offsets[offsets.index(0, 1) :]
    _, rows = table(0)
    starts = {offset for offset, _, meaning in rows if meaning}
    assert set(manifest) <= starts
    assert {144 + 4 * 22 + offset for offset in reference} <= starts


def test_the_keys_are_those_of_the_prompt():
    values = dict(re.findall(r"^\| ([^|]+?) \| `([0-9a-f]{64})` \|$", EXAMPLE, re.MULTILINE))
    (description,) = re.findall(r"described as `(.*?)`", EXAMPLE)
    assert json.loads(description) == golden.INFO.description
    prompt = [7 * index + 3 for index in range(150)]
    assert prompt == golden.PROMPT[:150]
    fingerprint = h(b"kvstore/1 namespace", description.encode(), b"")
    keys = [root_of(fingerprint, 64)]
    for first, end in ((0, 64), (64, 128), (128, 150)):
        keys.append(h(b"kvstore/1 node", keys[-1], pack(prompt[first:end])))
    assert list(values.values()) == [key.hex() for key in (fingerprint, *keys)]
    path, rows = table(0)
    shown = {meaning.partition(";")[0]: at for at, (_, _, meaning) in enumerate(rows)}
    for meaning, key in (("fingerprint", fingerprint), ("the parent's key", keys[2]), ("the node's key", keys[3])):
        assert rows[shown[meaning]][1] + rows[shown[meaning] + 1][1] == key
    assert path.name == f"{keys[2][:16].hex()}-22-{keys[3][:16].hex()}-{'0' * 18}.kv"
    assert path.parent.name == path.name[:2]
    assert path.parent.parent.name == fingerprint[:16].hex()


def test_the_rung_is_that_of_the_first_chunk():
    """From its name's last field to the tokens: nothing of kvstore is used."""
    ((parent, key, rungs),) = re.findall(r"`objects/\S+/([0-9a-f]{32})-64-([0-9a-f]{32})-([0-9a-f]{18})\.kv`", EXAMPLE)
    (path,) = GOLDEN.glob(f"objects/nodes/*/{parent[:2]}/{parent}-64-{key}-{rungs}.kv")
    assert str(path.relative_to(GOLDEN)) in EXAMPLE
    ((first, second, last, digest),) = re.findall(
        r"the 256 bytes `([0-9a-f]{8}) ([0-9a-f]{8})` to `([0-9a-f]{8})`\) is\s+`([0-9a-f]{16})`", EXAMPLE
    )
    tokens = path.read_bytes()[144 : 144 + 256]
    assert tokens == pack([7 * index + 3 for index in range(64)])
    assert [tokens[:4].hex(), tokens[4:8].hex(), tokens[-4:].hex()] == [first, second, last]
    assert xxhash.xxh3_64_hexdigest(tokens) == digest
    assert rungs == digest[-6:] + "0" * 12
