"""The line that says where a model's prompts go: right for any directory, and nobody waits for it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
from core_support import open_store, prompt
from engine_support import conversation, polls, wait_saved
from gc_support import publish

from kvstore import NamespaceInfo
from kvstore.glance import Glance
from kvstore_mlx import status
from kvstore_mlx.status import Status, sentence

GIB = 1 << 30
FLAGS = ("--kv-cache-interval", "256")
ID, OTHER = "6e21a1b9a046" + 20 * "0", "77aa00000000" + 20 * "1"


@pytest.mark.parametrize(
    ("found", "given", "expected"),
    [
        (
            Glance(GIB, 9, 950, 1),
            {"label": "m", "ids": [ID], "speed": 3.1 * GIB},
            "1.0 GiB of 20.0 GiB used; m saves into 6e21a1b9a046: 9 prefixes, 950 tokens; restored at 3.1 GiB/s so far",
        ),
        (
            Glance(61440, 0, 0, 1),
            {"label": "m", "ids": [ID]},
            "60.0 KiB of 20.0 GiB used; m saves into 6e21a1b9a046: nothing yet",
        ),
        (
            Glance(1 << 20, 1, 1, 2),
            {"label": "m", "ids": [ID, OTHER]},
            "1.0 MiB of 20.0 GiB used; m saves into 6e21a1b9a046 and 77aa00000000: 1 prefix, 1 token",
        ),
        (
            Glance(1 << 20, 0, 0, 0),
            {"label": "m", "ids": [], "why": "it uses OwnCache, which cannot be saved yet"},
            "1.0 MiB of 20.0 GiB used; m is served without it: it uses OwnCache, which cannot be saved yet",
        ),
        (
            Glance(1 << 20, 7, 900, 2),
            {"label": "", "ids": []},
            "1.0 MiB of 20.0 GiB used; it holds 7 prefixes, 900 tokens of 2 models",
        ),
        (Glance(1 << 20, 0, 0, 0), {"label": "", "ids": []}, "1.0 MiB of 20.0 GiB used; it holds nothing yet"),
    ],
)
def test_what_it_says(found, given, expected):
    assert sentence(found, 20 * GIB, **given) == expected


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "s") as opened:
        yield opened


@pytest.fixture
def lines(caplog):
    """Wait for lines in the log and take them."""
    caplog.set_level(logging.INFO, "kvstore")

    def take(count: int = 1) -> list[str]:
        for _ in polls(20):
            if len(caplog.records) >= count:
                break
        found = [f"{record.levelname} {record.message}" for record in caplog.records]
        caplog.clear()
        return found

    return take


def space_of(store, name: str):
    return SimpleNamespace(forms=[SimpleNamespace(namespace=store.namespace(NamespaceInfo({"model": name})))])


def test_a_model_and_one_without_a_place(store, lines):
    status = Status(store, GIB)
    space = space_of(store, "m")
    publish(space.forms[0].namespace, prompt(40))
    status.tell("m", space)
    (line,) = lines()
    assert line.startswith(f"INFO kvstore: {store.path}: ")
    assert re.search(r"KiB of 1\.0 GiB used; m saves into [0-9a-f]{12}: 3 prefixes, 40 tokens$", line)
    status.tell("other", None, "it is unknown")
    assert lines()[0].endswith("used; other is served without it: it is unknown")
    status.tell()
    assert lines()[0].endswith("used; it holds 3 prefixes, 40 tokens")


def test_a_directory_that_cannot_be_seen_is_a_sentence(store, lines):
    os.rename(store.path, store.path.with_name("away"))
    Status(store, GIB).tell("m", space_of(store, "m"))
    (line,) = lines()
    assert line.startswith("WARNING kvstore: it is not known how full the directory is: cannot use the cache directory")
    assert line.endswith("does not exist; create it or check that its volume is mounted")


def test_damage_of_every_kind_is_survived(store, lines):
    space = space_of(store, "m")
    publish(space.forms[0].namespace, prompt(40))
    for path in [path for path in store.path.rglob("*") if path.is_file()]:
        path.write_bytes(b"\xff" * 10)
    (store.path / "stats").mkdir()
    (store.path / "stats" / "folded.00000001.json").write_text("{")
    Status(store, GIB).tell("m", space)
    assert "3 prefixes, 40 tokens" in lines()[0]
    shutil.rmtree(store.path / "objects")
    (store.path / "objects").write_text("a file")
    Status(store, GIB).tell("m", space)
    assert "m saves into" in lines()[0]


def test_nobody_waits_and_a_stop_ends_the_look(store, lines, monkeypatch):
    looked = threading.Event()

    def endless(_context, _ids, rest):
        looked.set()
        while True:
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            rest()

    monkeypatch.setattr(status, "glance", endless)
    one = Status(store, GIB)
    started = time.thread_time()
    one.tell("m", space_of(store, "m"))
    one.tell("n", space_of(store, "n"))
    one.tell("n", space_of(store, "n"))  # the same again, while the first is under way
    assert time.thread_time() - started < 0.1
    assert looked.wait(10)
    threads = [each for each in threading.enumerate() if each.name == "kvstore-status"]
    assert len(threads) == 2
    assert all(each.daemon for each in threads)
    one.close()
    for each in threads:
        each.join(10)
        assert not each.is_alive()
    assert lines(0) == []


def test_the_look_works_a_fifth_of_the_time(monkeypatch):
    rests: list[float] = []
    clock = iter([0.0, 0.010, 0.011, 0.021, 0.022])
    monkeypatch.setattr("kvstore.pacing.time.thread_time", lambda: next(clock))
    rest = status._rests(rests.append)
    for _ in range(2):
        rest()
    assert sum(rests) == pytest.approx(2 * 4 * 0.010)


def test_a_server_says_it_for_each_model_and_after_a_restart(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS, "--kv-cache-size", "2GiB")
    line = rf"INFO - kvstore: {re.escape(str(directory))}: (\S+ \w+) of 2\.0 GiB used; (\S+) (.*)"
    server.wait_log(line)
    (name, rest) = re.search(line, server.log).groups()[1:]
    namespace = re.search(r"uses namespace (\w+)", server.log)[1]
    assert name == tiny_llama.name
    assert rest == f"saves into {namespace[:12]}: nothing yet"
    answer = server.chat(conversation(2))
    wait_saved(server, directory, answer.prompt_tokens + len(answer.ids) - 1)
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))
    # Too short to be saved, which could come before the line.
    server.chat([{"role": "user", "content": "hi"}], max_tokens=1, model=str(other))
    server.wait_log(r"used; other saves into [0-9a-f]{12}: nothing yet")
    server.kill()

    again = serve(tiny_llama, "--kv-cache-dir", str(directory))
    found = again.wait_log(rf"of 20\.0 GiB used; {name} saves into {namespace[:12]}: .*")
    assert re.search(r": \d+ prefixes, [\d,]+ tokens$", found)  # nothing was restored, so there is no speed
    assert again.chat(conversation(2)).cached_tokens > 0
    assert again.stop() == 0
    third = serve(tiny_llama, "--kv-cache-dir", str(directory))
    third.wait_log(rf"of 20\.0 GiB used; {name} saves into .* tokens; restored at \S+ [KMG]iB/s so far")


def test_a_server_without_a_model_says_what_there_is(serve, tiny_llama, tmp_path):
    directory = tmp_path / "cache"
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), *FLAGS)
    answer = server.chat(conversation(1))
    wait_saved(server, directory, answer.prompt_tokens)
    assert server.stop() == 0
    # Which model is loaded, each request says.
    server = serve(tiny_llama, "--kv-cache-dir", str(directory), with_model=False)
    server.wait_log(r"used; it holds \d+ prefixes, [\d,]+ tokens\n")
    assert server.chat(conversation(1), model=str(tiny_llama)).ids == answer.ids
    server.wait_log(r"used; tiny-llama saves into")
