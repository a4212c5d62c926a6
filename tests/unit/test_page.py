"""A tool writes its own block of a page and nothing else."""

from __future__ import annotations

import pytest

from page import markers, put

PAGE = """before
<!-- one: begin (a tool) -->
old
<!-- one: end -->
between
<!-- two: begin -->
old
<!-- two: end -->
"""


@pytest.mark.parametrize("text", ["new\n", "", "with \\1 and a\\b\n"])
def test_only_the_block_changes(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert put(page, markers("two"), text)
    assert page.read_text() == PAGE.replace("begin -->\nold\n", f"begin -->\n{text}")


def test_a_page_without_it_is_left_and_told(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert not put(page, markers("three"), "new\n")
    assert page.read_text() == PAGE
    assert "has no markers" in capsys.readouterr().err
