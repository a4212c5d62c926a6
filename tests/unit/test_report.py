"""The page about a directory: its data, its structure, and what a real browser makes of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from core_support import INFO, open_store, prompt
from gc_support import TENANT, state
from upkeep_support import grow, invoke, invoke_json, memory_folder, snapshot

import make_big_store
from kvstore import NamespaceInfo
from kvstore.report import page, report
from kvstore.stats import StatsFile

TOKENS = prompt(80)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture
def root(tmp_path) -> Path:
    """Three conversations of which two share a chunk, another tenant's, and a server that counted."""
    with open_store(tmp_path / "s") as store:
        space = store.namespace(INFO)
        grow(space, TOKENS, 16, 32, 40)
        other = [*TOKENS[:16], *prompt(30, 1)]
        grow(space, other, 16, 32, 46)
        space.publish_state(other, state(1))
        grow(store.namespace(TENANT), prompt(20, 2), 16, 20)
        stats = StatsFile(store.context)
        stats.add(requests=3, prompt_tokens=100, disk_tokens=80)
        stats.close()
    return tmp_path / "s"


def data_of(text: str) -> dict:
    """The document in a page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


class Page(HTMLParser):
    """What a page has: elements by id, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: dict[str, str] = {}
        self.fetched: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "id" in found:
            assert found["id"] not in self.ids
            self.ids[found["id"]] = tag
        self.scripts += tag == "script"
        self.fetched += [value for name, value in attrs if name in {"src", "href", "action", "data", "poster"}]


def test_the_data_is_what_ls_says(root):
    before = snapshot(root)
    code, out, err = invoke("report", root, "-o", "-")
    assert (code, err) == (0, "")
    assert snapshot(root) == before
    found = data_of(out)
    listed = invoke_json("ls", root)["conversations"]
    ids = [each["id"] for each in found["namespaces"]]
    rows = found["conversations"]
    assert {len(column) for column in rows.values()} == {3}
    assert [
        (ids[rows["namespace"][i]], rows["key"][i], rows["tokens"][i], rows["bytes"][i], rows["own"][i])
        for i in range(3)
    ] == [(each["namespace"], each["key"], each["tokens"], each["bytes"], each["own_bytes"]) for each in listed]
    assert sorted(rows["resumable"]) == [0, 0, 1]
    branches = found["branches"]
    assert {len(column) for column in branches.values()} == {len(branches["key"])}
    assert all(parent < i for i, parent in enumerate(branches["parent"]))
    assert sum(branches["leaf"]) == 3
    shared = [i for i, leaf in enumerate(branches["leaf"]) if not leaf]
    assert [(branches["first"][i], branches["end"][i]) for i in shared] == [(0, 16)]
    (server,) = found["processes"]
    assert (server["requests"], server["rate"]) == (3, 0.8)
    assert ["tokens reused", "80.0 %"] in found["totals"]
    assert found["hidden"] == 0


def test_the_page_is_one_file_that_fetches_nothing(root, tmp_path):
    code, out, _ = invoke("report", root, "--output", tmp_path / "cache.html")
    assert code == 0
    assert "3 conversations" in out
    text = (tmp_path / "cache.html").read_text(encoding="utf-8")
    found = Page(text)
    assert found.fetched == []
    assert found.scripts == 2
    assert {"icicle": "canvas", "timeline": "canvas", "rows": "tbody", "data": "script"}.items() <= found.ids.items()
    script = text.rpartition("<script>")[2]
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(found.ids)
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|import\(|innerHTML|eval\(", text)
    assert "default-src 'none'" in text


def test_what_two_tenants_share_is_saved_once(root):
    with open_store(root, None) as store:
        before = report(store.context)["totals"]
        grow(store.namespace(NamespaceInfo({}, salt=b"another")), TOKENS, 16, 32, 40)
        found = report(store.context)["totals"]
    assert ("models", "3") in found
    assert dict(found)["saved"] == dict(before)["saved"]


def test_nothing_in_a_label_gets_out_of_its_element(tmp_path):
    label = "</script><script>alert(1)</script> & <!-- \u2028 \"'"
    with open_store(tmp_path / "s") as store:
        grow(store.namespace(NamespaceInfo({"a": 1}, label=label)), TOKENS, 16)
        text = page(report(store.context))
    assert Page(text).scripts == 2
    assert data_of(text)["namespaces"][0]["label"] == label


def test_the_last_used_are_shown_when_there_are_too_many(root):
    listed = invoke_json("ls", root)["conversations"]
    code, out, _ = invoke("report", root, "-o", "-", "--limit", "1")
    assert code == 0
    found = data_of(out)
    assert found["conversations"]["key"] == [listed[0]["key"]]
    assert found["hidden"] == 2
    assert ["conversations", "3"] in found["totals"]


def test_an_empty_directory_has_a_page_too(tmp_path):
    with open_store(tmp_path / "s"):
        pass
    code, out, _ = invoke("report", tmp_path / "s", "-o", "-")
    assert code == 0
    assert data_of(out)["conversations"]["key"] == []


def test_mistakes_are_one_sentence(root, tmp_path):
    code, _, err = invoke("report", root, "-o", tmp_path / "no" / "such" / "page.html")
    assert code == 1
    assert "cannot write" in err
    assert invoke("report", tmp_path / "nothing")[0] == 1


def test_tree_is_the_tree_of_ls(root):
    assert invoke_json("tree", root) == invoke_json("ls", root, "--tree")
    code, out, err = invoke("tree", root)
    assert (code, err) == (0, "")
    assert out == invoke("ls", root, "--tree")[1]


# In a browser.


@pytest.fixture(scope="session")
def browser() -> str:
    """A Chromium, which CI and developers may have and a user needs not."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no Chromium is installed (looked for {', '.join(BROWSERS)})")
    return found


def look(browser: str, file: Path, profile: Path, *flags: str) -> str:
    """Open a page without a network; what it printed."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000"]
    command += ["--window-size=1280,1400", *flags, file.as_uri()]
    # What is preloaded for MLX is not for a browser.
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True, env=clean)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def pixels(image: Path) -> tuple[int, int, set[bytes]]:
    """Width, height and colours of a PNG as Chromium writes it: 8 bits a channel, not interlaced."""
    import zlib

    data = image.read_bytes()
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    channels = {2: 3, 6: 4}[data[25]]
    at, packed = 8, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += 12 + size
    rows, line, colours = zlib.decompress(packed), width * channels + 1, set()
    # Rows without a filter would be too much to hope for; the raw bytes of filtered rows differ where colours do.
    for row in range(height):
        colours.add(rows[row * line : (row + 1) * line])
    return width, height, colours


def test_a_browser_draws_it(root, tmp_path, browser):
    file = tmp_path / "cache.html"
    assert invoke("report", root, "-o", file)[0] == 0
    text = look(browser, file, tmp_path / "profile", "--dump-dom", "--enable-logging=stderr")
    assert 'data-items="' in text
    assert text.count("<tr class") + text.count("<tr>") >= 3
    assert "of 3" in text
    shot = tmp_path / "cache.png"
    look(browser, file, tmp_path / "profile", f"--screenshot={shot}")
    width, height, rows = pixels(shot)
    assert (width, height) == (1280, 1400)
    assert len(rows) > 100  # an empty page has a few different rows


CLICKS = """
const fire = (target, name, x, y) => {
  const box = target.getBoundingClientRect();
  target.dispatchEvent(new MouseEvent(name, {bubbles: true, clientX: box.left + x, clientY: box.top + y}));
};
const note = (name, text) => document.documentElement.setAttribute("data-" + name, text);
const first = column => document.querySelector("#rows tr").cells[column].textContent;
[...document.querySelectorAll("th button")].find(button => button.textContent === "tokens").click();
note("longest", first(2));
fire(document.querySelector("#icicle"), "mousemove", 30, 30);
note("tip", document.querySelector("#tip").textContent);
fire(document.querySelector("#icicle"), "click", 30, 30);
note("path", document.querySelector("#path").textContent);
document.querySelector("#rows tr").click();
note("chosen", document.querySelectorAll("tr.chosen").length);
document.querySelector("#filter").value = "another";
document.querySelector("#filter").dispatchEvent(new Event("input"));
note("filtered", document.querySelector("#count").textContent);
document.querySelector("#reset").click();
const bar = bins.find(bin => bin.n);
fire(document.querySelector("#timeline"), "click", bar.left + bar.wide / 2, 80);
note("in-bar", document.querySelector("#count").textContent);
"""


def test_a_click_looks_closer_sorts_and_filters(root, tmp_path, browser):
    code, out, _ = invoke("report", root, "-o", "-")
    assert code == 0
    labels = [each["label"] for each in data_of(out)["namespaces"]]
    label = max(labels, key=len)
    wanted = sum(label in labels[index] for index in data_of(out)["conversations"]["namespace"])
    assert wanted < 3
    file = tmp_path / "clicked.html"
    file.write_text(out.replace("</body>", f"<script>{CLICKS.replace('another', label)}</script></body>"))
    text = look(browser, file, tmp_path / "profile", "--dump-dom", "--enable-logging=stderr")
    found = dict(re.findall(r'data-([a-z-]+)="([^"]*)"', text))
    assert found["longest"] == "46"
    assert "tokens 0 to" in found["tip"]
    assert "\u203a" in found["path"]
    assert found["chosen"] == "1"
    assert found["filtered"] == f"{wanted} of 3"
    assert found["in-bar"].startswith("3 of 3, last used from")


DRAWN_MS = 3000
"""What is feared takes with the square of the rows, and ten times as long."""

REPORT_S = 1.5
"""Of one processor: what else runs on the machine is no finding."""


def drawn_in(browser: str, file: Path, profile: Path) -> tuple[int, str]:
    """Milliseconds that a page took to draw all of it, and the page: the best of three, as a machine may be busy."""
    best = 1 << 30
    for _ in range(3):
        text = look(browser, file, profile, "--dump-dom", "--enable-logging=stderr")
        (milliseconds,) = re.findall(r'data-milliseconds="(\d+)"', text)
        best = min(best, int(milliseconds))
        if best < DRAWN_MS:
            break
    return best, text


@pytest.fixture(scope="module")
def ten_thousand(tmp_path_factory):
    """A directory of 10,000 nodes, each a conversation of its own: the most rows that so many can make."""
    with memory_folder(tmp_path_factory.mktemp("big")) as folder:
        make_big_store.make(folder / "s", 10_000, 1, 64, 7 * 86400, quiet=True)
        yield folder / "s"


def test_a_directory_of_ten_thousand_nodes_is_read_fast(ten_thousand):
    """0.5 s of a processor, 1.3 s for the command with its start (docs/seeing.md); three times that is a regression."""
    took = []
    with open_store(ten_thousand, None) as store:
        while len(took) < 3 and min(took, default=REPORT_S) >= REPORT_S:
            before = time.thread_time()
            text = page(report(store.context))
            took.append(time.thread_time() - before)
    assert min(took) < REPORT_S
    assert len(data_of(text)["conversations"]["key"]) == len(data_of(text)["branches"]["key"]) == 10_000


def test_a_directory_of_ten_thousand_nodes_is_drawn_fast(ten_thousand, tmp_path, browser):
    """0.15 s in a quiet moment, less than three in any."""
    file = tmp_path / "real.html"
    code, out, _ = invoke("report", ten_thousand, "-o", file)
    assert code == 0
    assert "10,000 conversations" in out
    milliseconds, text = drawn_in(browser, file, tmp_path / "profile")
    assert milliseconds < DRAWN_MS
    assert 'data-items="10001"' in text


def test_ten_thousand_branches_are_drawn_fast(tmp_path, browser):
    """A tree of them, of three models, from a document as report makes it; drawing it takes less than a second."""
    count, spaces = 10_000, 3
    parents = [-1 if i < 30 else (i - 30) // 4 for i in range(count)]
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    inner = set(parents)
    leaves = [i for i in range(count) if i not in inner]
    namespace: list[int] = []
    for i, parent in enumerate(parents):
        namespace.append(i % spaces if parent < 0 else namespace[parent])
    now = int(time.time())
    keys = [f"{i:032x}" for i in range(count)]
    used = [now - (i * 7919) % (40 * 86400) for i in range(count)]
    document = {
        "version": "test",
        "directory": "/cache",
        "made": now,
        "hidden": 0,
        "totals": [["conversations", str(len(leaves))]],
        "namespaces": [{"id": f"{i:032x}", "label": f"model {i}"} for i in range(spaces)],
        "branches": {
            "parent": parents,
            "namespace": namespace,
            "key": keys,
            "first": [2048 * level for level in depth],
            "end": [2048 * (level + 1) for level in depth],
            "nodes": [1] * count,
            "bytes": [1 << 20] * count,
            "used": used,
            "leaf": [int(i not in inner) for i in range(count)],
            "complete": [1] * count,
        },
        "conversations": {
            "namespace": [namespace[i] for i in leaves],
            "key": [keys[i] for i in leaves],
            "tokens": [2048 * (depth[i] + 1) for i in leaves],
            "nodes": [depth[i] + 1 for i in leaves],
            "bytes": [(depth[i] + 1) << 20 for i in leaves],
            "own": [1 << 20] * len(leaves),
            "used": [used[i] for i in leaves],
            "resumable": [0] * len(leaves),
            "complete": [1] * len(leaves),
        },
        "processes": [
            {"began": a, "updated": z, "requests": 5, "tokens": 1000, "rate": 0.5}
            for a, z in pairwise(range(now - 30 * 86400, now, 43200))
        ],
    }
    file = tmp_path / "big.html"
    file.write_text(page(document))
    assert os.stat(file).st_size < 3 << 20
    milliseconds, text = drawn_in(browser, file, tmp_path / "profile")
    assert milliseconds < DRAWN_MS
    assert f'data-items="{count + spaces}"' in text
    assert text.count("<td") == 8 * 100
