"""Mistakes that people make at the command line: each is answered by one sentence on stderr and the right exit code.

Nothing is changed by any of them. What only one command can get wrong is tested with that command.
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from core_support import open_store
from gc_support import TENANT, prompt, publish, space_of
from upkeep_support import invoke, snapshot

FILES = {
    "words.txt": b"not token ids",
    "strings.json": b'["a", "b"]',
    "float.json": b"[1e300, 2]",
    "huge.json": b"[99999999999]",
    "negative.json": b"[-4]",
    "object.json": b'{"tokens": [1, 2]}',
    "empty.json": b"",
    "binary": bytes(range(256)),
    "file": b"a file",
}

MISTAKES = [
    # the directory
    ("ls nowhere", 1, "there is no {}/nowhere (looked there because the command line names it)"),
    ("ls file", 1, "{}/file is a file; name a directory"),
    ("gc file/below", 1, "file"),
    ("du folder", 1, "{}/folder is not a cache directory"),
    ("stats s/objects", 1, "is not a cache directory"),
    ("fsck nowhere", 8, "there is no {}/nowhere"),
    ("ls s extra", 2, "unexpected extra argument"),
    ("merge s s", 1, "are the same directory; name two"),
    ("merge nowhere s", 1, "there is no {}/nowhere"),
    ("merge s file", 1, "is a file; name a directory"),
    ("merge s file/below", 1, "{}/file/below: a part of the path is a file; choose another directory"),
    ("merge", 2, "missing argument"),
    # sizes, ages, numbers
    ("gc s --size 20GG", 2, "'20GG' is not a size; write it like 20GiB, 500MB or 1048576"),
    ("gc s --size -5", 2, "'-5' is not a size"),
    ("gc s --size=-5GiB", 2, "'-5GiB' is not a size"),
    ("gc s --min-free 1e400", 2, "'1e400' is not a size"),
    ("gc s --older-than 5", 2, "'5' is not an age; write it like 30d, 12h, 90m or 45s"),
    ("gc s --older-than 99999999999999d", 2, "is not an age"),
    ("clear s --older-than -1d --yes", 2, "'-1d' is not an age"),
    ("ls s --limit -1", 2, "--limit: "),
    ("ls s --min-tokens many", 2, "--min-tokens: "),
    ("fsck s --jobs 0", 16, "--jobs: "),
    ("top --every 0", 2, "--every: "),
    ("quota s --namespace {ns} --size lots", 2, "'lots' is not a size"),
    # namespaces and keys
    ("ls s --namespace zz", 1, "no namespace begins with 'zz'; `kvstore ls` shows what there is"),
    ("ls s --namespace=", 1, "--namespace is empty"),
    ("tree s --namespace=", 1, "--namespace is empty"),
    ("why s --tokens ids.json --namespace=", 1, "--namespace is empty"),
    ("clear s --namespace ../.. --yes", 1, "no namespace begins with '../..'"),
    ("quota s --namespace zz --clear", 1, "no namespace begins with 'zz'"),
    ("show s {ns}", 1, "no key begins with"),
    ("show s nothex", 1, "'nothex' is not a key"),
    ("show s", 1, "'s' is not a key; name one, or a directory and one"),
    ("show", 2, "missing argument"),
    # options that belong together, or do not
    ("show s 00 --tokenizer folder", 2, "--model FOLDER goes with --text"),
    ("why s", 2, "name the prompt by --tokens FILE or by --prompt FILE"),
    ("why s --tokens ids.json --prompt words.txt", 2, "name the prompt by --tokens FILE or by --prompt FILE"),
    ("why s --prompt words.txt", 2, "--prompt needs --model FOLDER"),
    ("ls s --tree --by-namespace", 2, "--tree and --by-namespace exclude each other"),
    ("quota s --size 5GiB", 2, "--namespace ID goes with --size SIZE or with --clear"),
    ("quota s --namespace {ns} --size 5GiB --clear", 2, "--size and --clear exclude each other"),
    ("clear s", 2, "say what to delete"),
    ("clear s --all", 1, "nobody can be asked here; say --yes"),
    ("fsck s --resume record", 16, "--resume goes with --read-data"),
    ("top --json", 2, "--json goes with --once"),
    # words that are none
    ("lss", 2, "no such command 'lss'"),
    ("ls s --trees", 2, "no such option: --trees"),
    ("ls s --sort size", 2, "'size' is not one of 'tokens', 'bytes', 'age'"),
    ("ls s --older-than", 2, "option '--older-than' requires an argument; see `kvstore ls --help`"),
    # files of prompts
    ("why s --tokens nowhere", 1, "cannot read nowhere: No such file or directory"),
    ("why s --tokens folder", 1, "cannot read folder: Is a directory"),
    ("why s --tokens words.txt", 1, "words.txt does not hold token ids; write them as a JSON list"),
    ("why s --tokens strings.json", 1, "strings.json does not hold token ids"),
    ("why s --tokens float.json", 1, "float.json does not hold token ids"),
    ("why s --tokens object.json", 1, "object.json does not hold token ids"),
    ("why s --tokens huge.json", 1, "huge.json holds numbers that are no token ids; they are from 0 to 4294967295"),
    ("why s --tokens negative.json", 1, "negative.json holds numbers that are no token ids"),
    ("why s --tokens empty.json", 1, "the prompt is empty"),
    ("why s --tokens binary", 1, "binary is not UTF-8 text"),
    ("why s --prompt words.txt --model folder", 1, "there is no folder/tokenizer.json; name the folder of the model"),
    # servers
    (
        "top http://127.0.0.1:1 --once",
        1,
        "no server answers at http://127.0.0.1:1/health: Connection refused; start `kvstore serve`",
    ),
    ("top 99999 --once", 2, "'99999' is no address of a server; write it like http://127.0.0.1:8080"),
    ("top http:// --once", 2, "'http://' is no address of a server"),
    ("top http://[::1 --once", 2, "'http://[::1' is no address of a server"),
    ("top ftp://127.0.0.1 --once", 2, "'ftp://127.0.0.1' is no address of a server"),
    ("top {url} --once", 1, "what answers at {url} is not `kvstore serve`"),
    # where to write
    ("report s -o folder", 1, "cannot write folder: Is a directory"),
    ("report s -o nowhere/page.html", 1, "cannot write nowhere/page.html: No such file or directory"),
    ("report s -o file/page.html", 1, "cannot write file/page.html: Not a directory"),
    ("report s --output=", 2, "the name of the file is empty"),
]


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """A working directory with a store, and with much that is none."""
    monkeypatch.delenv("KVSTORE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with open_store(tmp_path / "s") as store:
        for info, seed in ((None, 1), (TENANT, 2)):
            space = space_of(store) if info is None else space_of(store, info)
            publish(space, prompt(36, seed))
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """The address of a web server that is not ours, and answers everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("line", "code", "said"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_one_sentence(desk, stranger, line, code, said):
    before = snapshot(desk / "s")
    words = [word.format(ns=TENANT.id, url=stranger) for word in line.split()]
    found, out, err = invoke(*words)
    assert found == code
    assert out == ""
    assert err.startswith("kvstore: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert (said.format(desk) if said.startswith(("{}", "there is no {}")) else said.format(url=stranger)) in err
    assert snapshot(desk / "s") == before


def test_an_ambiguous_beginning_is_not_guessed(desk):
    with open_store(desk / "s") as store:
        for seed in range(40):
            publish(space_of(store), prompt(5, seed + 10))
    found = [invoke("show", desk / "s", digit) for digit in "0123456789abcdef"]
    ambiguous = [err for code, _, err in found if code == 1 and "keys begin with" in err]
    assert ambiguous
    assert all("write more of the one you mean" in err and err.count("\n") == 1 for err in ambiguous)


def test_a_check_that_could_not_be_done_does_not_say_no_errors(desk):
    code, out, err = invoke("fsck", "s", "--read-data", "--resume", "folder")
    assert code == 8
    assert "The check was not completed." in out
    assert "No errors." not in out
    assert "cannot write folder (Is a directory); name another file to resume from" in err


@pytest.mark.parametrize("line", ["--nope", "one two", "--size"])
def test_doctor_answers_alike(capsys, line):
    """It has another parser than the store's commands have."""
    _, _, theirs = invoke("gc", *line.split())
    assert said_by_doctor(capsys, line) == theirs.replace("gc", "doctor")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--size 20GG", "--size: '20GG' is not a size; write it like 20GiB, 500MB or 1048576"),
        ("--size 0", "--size: 0 B tell no speed; give at least 1.0 MiB"),
        ("--json=3", "--json: ignored explicit argument '3'; see `kvstore doctor --help`"),
    ],
)
def test_doctor_says_what_is_wrong_with_a_value(capsys, line, said):
    assert said_by_doctor(capsys, line) == f"kvstore: {said}\n"


def said_by_doctor(capsys: pytest.CaptureFixture[str], line: str) -> str:
    from kvstore_mlx.doctor import command

    with pytest.raises(typer.Exit) as stop:
        command(line.split())
    assert stop.value.exit_code == 2
    return capsys.readouterr().err


def run(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *map(str, words)],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"COLUMNS": "20"},
        {"COLUMNS": "0"},
        {"COLUMNS": "wide"},
        {"NO_COLOR": "1"},
        {"FORCE_COLOR": "", "TERM": ""},
        {"TERM": "dumb"},
        {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "no_such.locale"},
    ],
    ids=str,
)
def test_whatever_the_terminal_is_it_is_one_line(desk, environment):
    for words, code in ((["ls", "s", "--limit", "-1"], 2), (["ls", desk / "größe\n\x1b[31m"], 1)):
        done = run(*words, **environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
        assert "\x1b" not in done.stderr
    done = run("ls", "s", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize("home", [None, "", "/nonexistent"])
def test_without_a_home_it_says_where_it_looked(home):
    kept = {name: value for name, value in os.environ.items() if name not in {"HOME", "XDG_CACHE_HOME", "KVSTORE_DIR"}}
    environment = kept if home is None else {**kept, "HOME": home}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "ls"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "because it is the default" in done.stderr


@pytest.mark.parametrize(("name", "said"), [("/dev/null", "is a file"), ("not/there", "there is no ")])
def test_a_wrong_variable_is_named(desk, name, said):
    done = run("ls", KVSTORE_DIR=name)
    assert done.returncode == 1
    assert said in done.stderr
    assert "because KVSTORE_DIR names it" in done.stderr


@pytest.fixture
def read_only(desk) -> Iterator[Path]:
    """A copy of the store that somebody may read and nobody write, where a user that is not root can reach it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    store = folder / "s"
    shutil.copytree(desk / "s", store)
    for path in (store, *store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield store
    for path in (store, *store.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


def as_nobody(scratch: Path, *words: object) -> tuple[int, str, str]:
    """Run a command as a user for whom permissions count.

    Only the effective user changes, so everything is imported before: Python itself may lie where only root looks.
    """
    if os.geteuid() != 0:
        return invoke(*words)
    invoke(words[0], scratch, *words[2:])
    invoke(words[0], "nowhere", *words[2:])
    os.setegid(65534)
    os.seteuid(65534)
    try:
        return invoke(*words)
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.mark.parametrize(
    "line",
    [
        "gc {} --size 0",
        "clear {} --all --yes",
        "repack {} --older-than 0s",
        "quota {} --namespace {ns} --size 1GiB",
    ],
)
def test_a_directory_that_may_not_be_written_is_one_sentence(desk, read_only, line):
    before = snapshot(read_only)
    code, _, err = as_nobody(desk / "s", *(word.format(read_only, ns=TENANT.id) for word in line.split()))
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("kvstore: ")
    assert "ermission denied" in err
    assert snapshot(read_only) == before


@pytest.mark.parametrize("command", ["ls", "du", "stats", "tree", "fsck"])
def test_a_directory_that_may_only_be_read_can_be_looked_at(desk, read_only, command):
    assert as_nobody(desk / "s", command, read_only)[0] == 0


@pytest.mark.parametrize("command", ["ls", "du", "stats", "gc", "fsck"])
def test_a_directory_that_may_not_be_read_is_one_sentence(desk, read_only, command):
    read_only.chmod(0o000)
    code, out, err = as_nobody(desk / "s", command, read_only)
    assert (code, out, err.count("\n")) == (8 if command == "fsck" else 1, "", 1)
    assert "permission denied" in err
