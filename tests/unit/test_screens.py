"""The pictures of docs/screens.md: all there, small, asking no network, of a directory that is the same each time."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from upkeep_support import invoke_json

import screens
import screens_data
import screens_draw

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "screens.md").read_text(encoding="utf-8")
PICTURES = sorted((ROOT / "docs" / "screens").iterdir())
LIVE = {"serve", "top", "doctor"}


class Words:
    """A tokenizer for tests: a token a word."""

    def encode(self, text: str):
        return type("Encoding", (), {"ids": [len(word) * 1000 + sum(word.encode()) % 1000 for word in text.split()]})


def test_every_picture_is_on_the_page_and_says_what_it_shows():
    shown = re.findall(r"!\[([^\]]+)\]\(screens/([\w.]+)\)", PAGE)
    assert sorted(name for _, name in shown) == [path.name for path in PICTURES]
    assert {path.stem for path in PICTURES} == {each.name for each in screens.COMMANDS} | LIVE | {"report"}
    assert all(len(text) > 20 for text, _ in shown)
    for each in screens.COMMANDS:
        assert " ".join(each.line.split()[:2]) in PAGE


def test_pictures_are_small():
    assert sum(path.stat().st_size for path in PICTURES) < 600_000


@pytest.mark.parametrize("path", [path for path in PICTURES if path.suffix == ".svg"], ids=lambda path: path.name)
def test_a_picture_asks_no_network_and_names_no_machine(path):
    text = path.read_text(encoding="utf-8")
    drawing = re.sub(r">[^<>]+</text>", "></text>", text)  # what is written there may name an address
    assert set(re.findall(r"\w+://[^\"'\s<>)]+", drawing)) <= {"http://www.w3.org/2000/svg"}
    assert "font-face" not in text
    said = screens_draw.words(text)
    assert said.startswith("$ kvstore ")
    assert len(said.splitlines()) > 2
    assert "Traceback" not in said
    for name in (str(ROOT), "/root", "/tmp/"):
        assert name not in said


def test_the_directory_is_the_same_each_time(tmp_path):
    saved = [screens_data.fill(tmp_path / name, Words()) for name in ("a", "b")]
    assert saved[0] == saved[1]
    first, second = (invoke_json("ls", tmp_path / name)["conversations"] for name in ("a", "b"))
    assert first == second
    assert len(first) == 8
    ages = [screens_data.NOW_S - each["used"] for each in first]
    assert ages == sorted(ages)
    assert ages[0] == 330
    assert first[0]["key"] == saved[0].newest
    assert all(each["complete"] for each in first)
    # Once more into the same folder, which takes away what was there.
    assert screens_data.fill(tmp_path / "a", Words()) == saved[0]


def test_a_picture_stays_when_only_noise_differs(tmp_path):
    path = tmp_path / "x.svg"

    def draw(text: str, noise: str = r"in [\d.]+ s") -> bool:
        return screens_draw.draw(path, "x", "kvstore x", text, width=60, noise=noise)

    assert draw("\x1b[31mdone\x1b[0m in 1.0 s\nrow  two\n")
    before = path.read_bytes()
    assert screens_draw.words(before.decode()).splitlines()[0] == "$ kvstore x"
    assert "done" in screens_draw.words(before.decode())
    assert not draw("\x1b[31mdone\x1b[0m in 22.5 s\nrow  two\n")
    assert path.read_bytes() == before
    assert draw("\x1b[31mdone\x1b[0m in 22.5 s\nrow  three\n")
    assert draw("\x1b[31mdone\x1b[0m in 23.5 s\nrow  three\n", noise="")
    assert not draw("\x1b[31mdone\x1b[0m in 23.5 s\nrow  three\n", noise="")


@pytest.mark.parametrize(
    ("printed", "seen"),
    [
        ("plain\n\x1b[1mbold\x1b[0m", "plain\n\x1b[1mbold\x1b[0m"),
        ("working 1 %\rworking 99 %\r\x1b[2Kdone", "done"),
        ("\x1b[?25lbar one\n\x1b[1A\x1b[2Kbar two\n\x1b[1A\x1b[2K\x1b[?25hdone", "done"),
    ],
)
def test_what_was_drawn_over_is_gone(printed, seen):
    assert screens._settled(printed) == seen


def test_a_command_runs_on_a_terminal_whose_clock_stands(tmp_path):
    screens_data.fill(tmp_path / "kv", Words())
    before = os.stat(tmp_path / "kv").st_mtime
    printed = screens.run("kvstore ls kv", tmp_path, now=screens_data.NOW_S)
    assert "5 min" in printed
    assert "\x1b[1m" in printed  # as on a terminal
    assert str(tmp_path) not in screens.run("kvstore ls nowhere", tmp_path, now=screens_data.NOW_S)
    assert time.time() > screens_data.NOW_S
    assert os.stat(tmp_path / "kv").st_mtime == before
