"""What the README shows is run, and the flags it names are there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_library_example_runs(tmp_path, monkeypatch):
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "from kvstore import" in each)
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert out.getvalue().startswith("100 of 103 tokens restored, ")
    assert (tmp_path / "demo-cache" / "kvstore.json").is_file()


def test_its_two_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_its_links_lead_somewhere():
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/architecture.md",
        "docs/format.md",
        "docs/exactness.md",
        "docs/extras.md",
    ):
        for link in re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / link).exists(), f"{page} links to {link}"
