"""Paths and names: docs/format.md, sections 1 and 2.2."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvstore.keys import rungs
from kvstore.layout import FANOUT, Layout, NodeName

PARENT, KEY = bytes(range(32)), bytes(range(100, 132))
NAME = "000102030405060708090a0b0c0d0e0f-2048-6465666768696a6b6c6d6e6f70717273-0123456789abcdef01"
DIGEST = bytes.fromhex("ab" * 15 + "cd")


def test_a_manifest_name_is_parent_count_key_and_rungs():
    assert NodeName.of(PARENT, 2048, KEY, "0123456789abcdef01").file("kv") == f"{NAME}.kv"


def test_a_manifest_name_is_under_100_characters_at_its_longest():
    longest = NodeName.of(PARENT, 1 << 16, KEY, rungs(struct.pack("<1024I", *range(1024)), 1024)).file("state")
    assert len(longest) < 100


def test_a_manifest_name_parses_to_its_parts():
    assert NodeName.parse(f"{NAME}.state") == (
        NodeName("000102030405060708090a0b0c0d0e0f", 2048, "6465666768696a6b6c6d6e6f70717273", "0123456789abcdef01"),
        "state",
    )


@pytest.mark.parametrize(
    "foreign",
    [
        ".DS_Store",
        f"._{NAME}.kv",
        f".{NAME}.kv.aB3xQz",
        f"{NAME}.kv~",
        f"{NAME}.kv\n",
        f"{NAME} (conflicted copy).kv",
        f"{NAME}.KV",
        f"{NAME.upper()}.kv",
        NAME,
        f"{NAME}.tmp",
        f"{NAME.replace('-2048-', '-02048-')}.kv",
        f"{NAME.replace('-2048-', '-0-')}.kv",
        f"{NAME.replace('-2048-', '--1-')}.kv",
        f"{NAME.replace('-2048-', '-2０48-')}.kv",  # noqa: RUF001 - a full-width digit is the point
        f"{NAME.replace('-2048-', '-1234567890-')}.kv",
        f"{NAME[1:]}.kv",
        f"{NAME}0.kv",
        "",
    ],
)
def test_foreign_file_names_are_not_manifests(foreign):
    assert NodeName.parse(foreign) is None
    assert not NodeName.is_file_name(foreign)


def test_the_quick_check_agrees_with_parsing():
    assert NodeName.is_file_name(f"{NAME}.kv")
    assert NodeName.is_file_name(f"{NAME}.state")


OTHER = NAME.replace("-2048-", "-77-")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"{NAME}.kv"], True),
        ([f"{NAME}.kv", f"{OTHER}.state", f"{OTHER}.kv"] * 100, True),
        ([], False),
        ([f"{NAME}.kv", ".DS_Store", f"{OTHER}.kv"], False),
        ([f"{NAME}.kv", f"{OTHER}.KV"], False),
        ([f"{NAME}.kv", ""], False),
        # Two names of ours with a line's end between them are one that is not.
        ([f"{NAME}.kv\n{OTHER}.kv"], False),
        ([f"{NAME}.kv", f"ff{OTHER[2:]}.kv"], False),
        ([f"ff{NAME[2:]}.kv", f"ff{OTHER[2:]}.kv"], False),
    ],
)
def test_many_names_are_judged_as_one_is_and_by_the_folder_they_are_of(names, expected):
    assert NodeName.are_file_names(names, NAME[:2]) == expected


@pytest.mark.parametrize("before", [1, 2, 3])
def test_what_a_name_begins_with_is_none(before):
    """Python 3.11.2 took it for one where the pattern was possessive: `gc` would have removed a foreign file `ab`."""
    name = f"{OTHER}.kv"
    for end in range(len(name)):
        assert not NodeName.are_file_names([*[f"{NAME}.kv"] * before, name[:end]], NAME[:2])
    for end in range(32):
        assert not Layout.are_block_names([*["ab" * 16] * before, ("ab" * 16)[:end]], "ab")


def test_many_names_of_blocks_are_judged_by_the_folder_they_are_of():
    names = ["ab" * 16, "ab" + "0" * 30]
    assert Layout.are_block_names(names, "ab")
    assert not Layout.are_block_names(names, "ac")
    assert not Layout.are_block_names([*names, "ac" * 16], "ab")
    assert not Layout.are_block_names([*names, "ab" * 15], "ab")


def test_all_children_of_a_parent_lie_in_one_folder():
    layout = Layout(Path("/cache"))
    children = [NodeName.of(PARENT, count, KEY, "0" * 18) for count in (1, 2048)]
    folders = {layout.node("ff" * 16, name).parent for name in children}
    assert folders == {Path("/cache/objects/nodes") / ("ff" * 16) / "00"}


def test_paths_are_those_of_the_format_page():
    layout = Layout(Path("/c"))
    assert layout.config == Path("/c/kvstore.json")
    assert layout.tag == Path("/c/CACHEDIR.TAG")
    assert layout.namespace_file("ab" * 16) == Path("/c/namespaces") / ("ab" * 16 + ".json")
    assert layout.block(DIGEST) == Path("/c/objects/blocks/ab") / ("ab" * 15 + "cd")
    assert layout.lock("publish") == Path("/c/locks/publish.lock")
    assert layout.lock("gc") == Path("/c/locks/gc.lock")
    assert (layout.tmp, layout.quarantine) == (Path("/c/tmp"), Path("/c/quarantine"))


def test_folders_made_at_creation_come_after_their_parents():
    layout = Layout(Path("/c"))
    seen = {layout.root}
    for folder in layout.folders:
        assert folder.parent in seen
        seen.add(folder)


def test_the_fan_out_is_all_two_digit_hex_names():
    assert len(set(FANOUT)) == 256
    assert (FANOUT[0], FANOUT[10], FANOUT[255]) == ("00", "0a", "ff")


@pytest.mark.parametrize("name", ["ab" * 16, "0" * 32])
def test_block_and_namespace_names_are_32_hex_digits(name):
    assert Layout.is_block_name(name)
    assert Layout.is_namespace_id(name)


@pytest.mark.parametrize("name", ["", "ab" * 15, "ab" * 17, "AB" * 16, "ab" * 16 + "\n", "._" + "ab" * 15, "xy" * 16])
def test_other_names_are_neither_blocks_nor_namespaces(name):
    assert not Layout.is_block_name(name)
    assert not Layout.is_namespace_id(name)
