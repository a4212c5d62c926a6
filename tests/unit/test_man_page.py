"""docs/man/kvstore.1 is what its tool makes of the command line, and a man page that roff has nothing to say about."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import man_page
from kvstore.cli.adapters import adapter_commands, parser_of
from man_text import paragraphs, roff, tagged

ROOT = Path(__file__).resolve().parents[2]
MACROS = {"TH", "SH", "SS", "PP", "TP", "br", "RS", "RE", "EX", "EE"}


@pytest.fixture(scope="module")
def text() -> str:
    return man_page.PAGE.read_text(encoding="utf-8")


def options() -> list[tuple[str, str]]:
    """Each option of each command that is kvstore's own."""
    found = [
        (name, flag)
        for name, command in man_page._store_commands().items()
        for each in command.params
        for flag in each.opts
        if flag.startswith("-")
    ]
    for name in ("serve", "doctor"):
        parser = parser_of(name, engine_flags=False)
        assert parser is not None
        found += [(name, flag) for action in parser._actions for flag in action.option_strings]
    return [(name, flag) for name, flag in found if flag not in {"-h", "--help"}]


def sections(text: str) -> dict[str, str]:
    """What is said below each heading, as people read it."""
    parts = re.split(r'^\.S[SH] "?(.*?)"?$', text, flags=re.MULTILINE)
    return {parts[at]: plain(parts[at + 1]) for at in range(1, len(parts), 2)}


def plain(text: str) -> str:
    return re.sub(r"\\f[BIR]", "", text).replace(r"\-", "-")


def test_the_page_is_what_the_tool_makes(text):
    assert text == man_page.page(), "the command line changed: run `make man`"


def test_the_table_of_cache_flags_is_what_the_tool_makes():
    written = man_page.FLAGS.search(man_page.FLAGS_PAGE.read_text(encoding="utf-8"))
    assert written[0] == written[1] + man_page.flags_table() + written[2], "a cache flag changed: run `make man`"
    assert written[0].count("| `--kv-cache-") == 14


def test_every_command_has_a_section(text):
    headings = [heading.split()[1] for heading in sections(text) if heading.startswith("kvstore ")]
    assert headings[:14] == sorted(man_page._store_commands())
    assert headings[14:] == [entry.name for entry in adapter_commands()]


@pytest.mark.parametrize(("command", "flag"), options())
def test_every_option_stands_in_its_section(text, command, flag):
    found = sections(text)
    where = (
        "CACHE FLAGS"
        if command == "serve"
        else next(each for each in found if each.split()[:2] == ["kvstore", command])
    )
    assert re.search(rf"^(?:.*, )?{re.escape(flag)}(?:,? .*)?$", found[where], re.MULTILINE)


def test_environment_variables_are_named(text):
    code = "".join(path.read_text() for part in ("kvstore", "integration") for path in (ROOT / part).rglob("*.py"))
    named = set(re.findall(r'"(KVSTORE_[A-Z_]+)"', code))
    assert named
    assert named <= set(sections(text)["ENVIRONMENT"].split())


def test_only_known_macros_and_escapes_in_ascii(text):
    assert text.isascii()
    for line in text.splitlines():
        if line.startswith('.\\"'):
            continue
        assert line
        assert not line.startswith("'")
        if line.startswith("."):
            assert line[1:].split()[0] in MACROS
        assert not re.sub(r"\\(?:f[BIR]|-|&|\((?:rs|aq|ga|ti|ha|dq)|\[u[0-9A-F]{4,6}\])", "", line).count("\\"), line


CHECKERS = {
    "groff": ["groff", "-man", "-Tutf8", "-ww", "-z"],
    "man": ["man", "--warnings", "-l"],
    "mandoc": ["mandoc", "-Tlint", "-Wwarning"],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_formatters_have_no_warning(checker):
    if shutil.which(checker) is None:
        pytest.skip(f"{checker} is not installed")
    version = subprocess.run([checker, "--version"], capture_output=True, text=True, check=False).stdout
    if checker == "man" and "man 2" not in version:
        pytest.skip("only man-db's man has --warnings")
    done = subprocess.run([*CHECKERS[checker], man_page.PAGE], capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "missing date" not in line]  # it is older than its release
    assert (done.returncode, said) == (0, [])


def test_text_that_roff_would_obey_is_shown_as_it_is(tmp_path):
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    hostile = [".SH not a section", "'br", r"a\fBb \n(.x \" c", 'say "it" -- `x`', "~/a^b — …", "\\", "."]
    page = [".TH X 1", ".SH NAME", "x"]
    for each in hostile:
        page += [".PP", *(rf"\&{roff(each)}",)]
    page += [*paragraphs(".PP"), *tagged("tag", ".TP\n.SH")]
    (tmp_path / "x.1").write_text("\n".join(page) + "\n")
    command = ["groff", "-man", "-Tutf8", "-P-cbou", "-ww", str(tmp_path / "x.1")]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert done.stderr == b""
    shown = " ".join(done.stdout.decode().split())
    for each in [*hostile, ".PP", ".TP .SH"]:
        assert each in shown


def test_a_wheel_brings_it_where_man_looks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    assert shared == {"docs/man/kvstore.1": "share/man/man1/kvstore.1"}


def test_check_tells_an_old_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(man_page, "PAGE", tmp_path / "man" / "kvstore.1")
    monkeypatch.setattr(man_page, "FLAGS_PAGE", tmp_path / "commands.md")
    man_page.FLAGS_PAGE.write_text("<!-- cache-flags: begin -->\n<!-- cache-flags: end -->\n")
    monkeypatch.setattr("sys.argv", ["man_page.py"])
    assert man_page.main() == 0
    assert "--kv-cache-dir" in man_page.FLAGS_PAGE.read_text()
    monkeypatch.setattr("sys.argv", ["man_page.py", "--check"])
    assert man_page.main() == 0
    man_page.PAGE.write_text(man_page.PAGE.read_text() + ".PP\n")
    assert man_page.main() == 1
    assert "run make man" in capsys.readouterr().out
