"""Every page of docs/ is in the site's navigation, every link leads somewhere, every public name is in the reference.

What mkdocs checks when the site is built is checked here without it, for the pages as GitHub shows them too; where
mkdocs is installed (by make test and make docs), the site is built as well, and a warning fails it.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import os
import plistlib
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

import kvstore
import kvstore.testing
from docs_hooks import ABOVE, rewritten
from kvstore_mlx.flags import CacheArguments

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ABOVE)]
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))

_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_HTML = re.compile(r"""<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=["']([^"'\s]+)""")
_DEFINED = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


def prose(text: str) -> str:
    """A page without its code and comments."""
    text = re.sub(r"^(```+|~~~+).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(?:(?<=\n\n)|\A)(?: {4}.*\n|\n(?= {4}))+", "", text)
    return re.sub(r"(`+)(?:(?!\1).)+?\1", "`", text, flags=re.DOTALL)


def links(text: str) -> list[str]:
    """What a page links to, pictures included, but for other sites."""
    found = [each for pattern in (_LINK, _HTML, _DEFINED) for each in pattern.findall(prose(text))]
    return [each for each in found if not re.match(r"(?:https?|mailto):", each)]


def anchors(text: str) -> set[str]:
    """The headings of a page as GitHub, and with it the site, names them in links."""
    found: dict[str, int] = {}
    text = re.sub(r"^(```+|~~~+).*?^\1\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
        kept = "".join(c for c in plain if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = kept.replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    repeated = {f"{slug}-{at}" for slug, last in found.items() for at in range(1, last + 1)}
    return set(found) | repeated | set(re.findall(r"""<a\s+(?:id|name)=["']([^"']+)""", text))


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """The links of a page that lead nowhere, or out of the repository."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        there = path.exists() and path.is_relative_to(root)
        if there and anchor and path.suffix == ".md":
            there = anchor in anchors(path.read_text(encoding="utf-8"))
        if not there:
            found.append(link)
    return found


def in_navigation() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.findall(r"^\s+- .*?:\s+(\S+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_the_check_of_links_finds_what_is_broken(tmp_path):
    (tmp_path / "other.md").write_text("# A title: `code` & more\n\n## Same\n\n## Same\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-title-code--more) [c](other.md#same-1) ![d](gone.svg) [e [f]](gone.md)\n"
        "[g](other.md#same-2) [h](#here) [i](#nowhere) [j](../out.md) `[k](code.md)` [l `m`](gone2.md)\n\n"
        '    [n](indented.md)\n\n```text\n[o](fenced.md)\n```\n\n<img src="gone.png"> [p](https://example.org)\n'
        "- an item\n    [q](gone3.md)\n\n[r]: gone4.md\n\n# Here\n"
    )
    (tmp_path.parent / "out.md").write_text("")
    expected = "gone.svg gone.md other.md#same-2 #nowhere ../out.md gone2.md gone3.md gone.png gone4.md"
    assert broken(page, tmp_path) == expected.split()


def test_every_page_is_in_the_navigation_once():
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(in_navigation()) == sorted([*pages, *ABOVE.values()])


def test_links_are_where_the_site_has_them():
    text = (
        "[a](../README.md) [b](format.md#x) [c](https://a.b/README.md) `[d](../README.md)`\n```\n[e](../README.md)\n```"
    )
    assert rewritten(text, "docs/page.md") == text.replace("(../README.md)", "(index.md)", 1)
    assert (
        rewritten("[a](docs/format.md#x) [`b`](SECURITY.md#y)", "README.md") == "[a](format.md#x) [`b`](security.md#y)"
    )


def test_the_readme_leads_to_every_page():
    linked = {link.partition("#")[0] for link in links((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} - linked == set()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_self_contained_and_shown(picture):
    text = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "<title>" in text
    assert re.findall(r"(?:href|src)=|url\((?!#)|@import", text) == []
    shown = {link for page in PAGES for link in links(page.read_text(encoding="utf-8"))}
    assert f"pictures/{picture.name}" in shown


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    tree = (ROOT / "integration" / "kvstore_mlx" / "__init__.py").read_text(encoding="utf-8")
    mlx = re.findall(r'"(\w+)"', re.findall(r"^__all__ = \[(.*?)\]", tree, re.MULTILINE | re.DOTALL)[0])
    public = [f"kvstore.{name}" for name in kvstore.__all__ if name != "__version__"]
    public += [f"kvstore.testing.{name}" for name in kvstore.testing.__all__] + [f"kvstore_mlx.{name}" for name in mlx]
    assert sorted(listed) == sorted(public)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make test does")
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "LD_PRELOAD": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {Path(page).stem for page in in_navigation()} <= pages
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=.(?:https?:)?//[^\"'>]*")
    for path in (tmp_path / "site").rglob("*.html"):
        assert fetched.findall(path.read_text(encoding="utf-8")) == [], path.name


@pytest.mark.parametrize("form", ["plist", "unit"])
def test_what_starts_a_server_with_the_machine_can_be_read(form):
    """That launchd and systemd would start it is for their machines; here they get what they can parse."""
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / "operations.md").read_text(), re.MULTILINE | re.DOTALL)
    if form == "plist":
        (text,) = (block for block in blocks if block.startswith("<?xml"))
        job = plistlib.loads(text.encode())
        words, patience = job["ProgramArguments"], job["ExitTimeOut"]
    else:
        (text,) = (block for block in blocks if block.startswith("[Unit]"))
        unit = configparser.ConfigParser(strict=True)
        unit.optionxform = str
        unit.read_string(text)
        words, patience = unit["Service"]["ExecStart"].split(), int(unit["Service"]["TimeoutStopSec"])
    assert words[1] == "serve"
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    CacheArguments.add_to(parser, "mlx_lm.server")
    assert parser.parse_args(words[2:]).kv_cache_directory
    # running.DRAIN_REQUESTS_S, DRAIN_WRITES_S and JOIN_S for three kinds of threads: what a stop may take.
    assert patience > 30 + 30 + 3 * 5
