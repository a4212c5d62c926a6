"""Every command and every block of code in README and docs is run, parsed, or says why it is not."""

from __future__ import annotations

import json
import re
import runpy
import urllib.request

import pytest
from desk_support import Desk, Stock, stocked
from document_support import (
    PAGES,
    PARSED,
    ROOT,
    RUN,
    SHOWN,
    Block,
    addresses,
    blocks_of,
    first_words,
    indented_code,
    keys,
    named_in,
    named_in_prose,
    parse,
    shown_in,
    unknown,
    unknown_to_tool,
)

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
LEFT_OUT = [block for block in BLOCKS if block.reason]
MAX_LEFT_OUT = 12
"""Blocks that are not run. Each has a reason; that there are more of them is one to think again."""


def name_of(block: Block) -> str:
    return block.name


@pytest.fixture(scope="module")
def stock(tmp_path_factory, tiny_llama):
    with stocked(tmp_path_factory.mktemp("stock"), tiny_llama) as made:
        yield made


@pytest.fixture(scope="module")
def desk_of(stock, tmp_path_factory):
    """The desk of a page: its blocks are run in order, and see what those before them did."""
    desks: dict[object, Desk] = {}

    def find(block: Block) -> Desk:
        if block.page not in desks:
            desks[block.page] = Desk(tmp_path_factory.mktemp(block.page.stem), stock)
        return desks[block.page]

    return find


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each block printed that was run."""
    return {}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.runs], ids=name_of)
def test_what_is_to_be_run_runs(block, desk_of, printed):
    printed[block.name] = desk_of(block).run(block)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.follows and not block.runs], ids=name_of)
def test_what_is_shown_below_is_what_it_prints(block, desk_of, printed):
    """In words, not in numbers: lines begin alike, documents have the same keys."""
    above = block.follows
    told = printed[above.name] if above.name in printed else desk_of(above).run(above)
    if block.language == "json":
        assert keys(parse(block)) <= keys(json.loads(told[told.index("{") : told.rindex("}") + 1]))
    elif block.language in SHOWN:
        assert first_words(block.code) <= first_words(told), told


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in PARSED], ids=name_of)
def test_data_is_what_it_says(block, stock):
    """And an address of a server in it is one that lists its models there."""
    for address in addresses(parse(block)):
        with urllib.request.urlopen(f"{address.replace('8080', str(stock.port))}/models", timeout=30) as answer:
            assert "data" in json.load(answer)


def test_every_block_says_what_it_is():
    assert [f"{block.name} {block.language!r}" for block in BLOCKS if block.language not in RUN | PARSED | SHOWN] == []
    assert [f"{page.name}:{line} is indented" for page in PAGES for line in indented_code(page)] == []


def test_what_is_not_run_has_a_reason_and_names_what_exists():
    for block in LEFT_OUT:
        print(f"{block.name}: {block.reason}")  # noqa: T201 - with -rP
    assert len(LEFT_OUT) <= MAX_LEFT_OUT
    assert [block.name for block in LEFT_OUT if len(block.reason.split()) < 4 or block.language not in RUN] == []
    wrong = [
        f"{block.name}: {said}"
        for block in LEFT_OUT
        if block.language == "sh"
        for words in named_in(block)
        if (said := unknown(words) if words[0] == "kvstore" else unknown_to_tool(words))
    ]
    assert wrong == []


def test_commands_and_flags_named_in_the_text_exist():
    named = [(page, line, words) for page in PAGES for line, words in named_in_prose(page)]
    assert len(named) > 30
    wrong = [f"{page.name}:{line}: {said}" for page, line, words in named if (said := unknown(words))]
    shown = [(block, words) for block in BLOCKS if block.language in SHOWN for words in shown_in(block)]
    wrong += [f"{block.name}: {said}" for block, words in shown if (said := unknown(words))]
    assert wrong == []


@pytest.mark.parametrize("example", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_can_be_imported(example):
    assert runpy.run_path(str(example))["__doc__"]


# The controls: a page with a mistake is found out.


@pytest.fixture(scope="module")
def desk(stock: Stock, tmp_path_factory) -> Desk:
    return Desk(tmp_path_factory.mktemp("control"), stock)


@pytest.mark.parametrize(
    "code",
    [
        "kvstore ls DIR --no-such-flag",
        "kvstore no-such-command",
        "kvstore serve --model path/to/model --kv-cache-dri DIR",
        "kvstore serve --model no/such/model --kv-cache-dir DIR --kv-cache-size 1",
        "kvstore gc no/such/directory",
        "make no-such-target",
        "pip install 'kvstore-llm[no-such-extra]'",
        "pip install no-such-package",
        "python tools/no_such.py",
        "aider --openai-api-base http://127.0.0.1:8080/v2/v1 --model openai/x",
        "curl --silent --fail http://127.0.0.1:8080/no-such-path",
        "false | true",
    ],
)
def test_a_command_that_fails_fails_the_test(desk, code):
    with pytest.raises(AssertionError, match="ends with"):
        desk.run(Block(ROOT / "README.md", 1, "sh", code))


def test_a_desk_has_what_documents_talk_of(desk):
    """Else commands that find nothing would do."""

    def run(code: str) -> str:
        return desk.run(Block(ROOT / "README.md", 1, "sh", code))

    assert run("kvstore ls DIR --json").count('"key"') >= 2
    for form in ("request.json", "prompt.txt"):
        assert "A date or a time differs." in run(f"kvstore why DIR --prompt {form} --model path/to/model")
    assert "all 200 tokens are saved" in run("kvstore why DIR --tokens tokens.json")
    assert json.loads(run("kvstore show KEY --json"))["complete"]
    told = run("rsync --archive studio:.cache/kv/ /srv/elsewhere/ && kvstore ls /srv/elsewhere --json")
    assert told.count('"key"') >= 2


def test_python_that_fails_fails_the_test(desk):
    desk.run(Block(ROOT / "README.md", 1, "python", "kept = 1\n"))
    desk.run(Block(ROOT / "README.md", 1, "python", "assert kept\n"))
    with pytest.raises(ZeroDivisionError):
        desk.run(Block(ROOT / "README.md", 1, "python", "1 / 0\n"))


def test_no_block_leaves_this_machine(desk):
    told = "curl --silent --max-time 5 https://example.org || echo closed"
    assert desk.run(Block(ROOT / "README.md", 1, "sh", told)).strip() == "closed"


PAGE = """# Page

<!-- not run: it would take an hour -->
```sh
sleep 3600
```

```sh
echo shown
```

```text
shown
```

- a list

    ```python
    indented = True
    ```

        of the list

=== "macOS"

    tab

Text

    code
"""


def test_blocks_are_found_as_they_are_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = blocks_of(page)
    assert [(block.line, block.language, block.code, block.reason) for block in found] == [
        (5, "sh", "sleep 3600\n", "it would take an hour"),
        (9, "sh", "echo shown\n", ""),
        (13, "text", "shown\n", ""),
        (19, "python", "indented = True\n", ""),
    ]
    assert [block.follows for block in found] == [None, None, found[1], None]
    assert indented_code(page) == [30]
    page.write_text("```sh\nnever ends\n")
    with pytest.raises(AssertionError, match="does not end"):
        blocks_of(page)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kvstore ls --tree", ""),
        ("kvstore ls --tree=1 | head --lines 3", ""),
        ("kvstore serve --port 1 --kv-cache-…", ""),
        ("kvstore --version", ""),
        ("kvstore ls --trees", "has no --trees"),
        ("kvstore look", "there is no `kvstore look`"),
        ("kvstore serve --kv-cache-dirs x", "has no --kv-cache-dirs"),
    ],
)
def test_unknown_commands_and_flags_are_told(line, said):
    assert re.search(said or "^$", unknown(line.split()))


def test_unknown_flags_of_tools_are_told():
    assert unknown_to_tool(["python", "tools/bench.py", "restore", "--help"]) == ""
    assert "has no --no-such" in unknown_to_tool(["python", "tools/bench.py", "restore", "--no-such"])
    assert "there is no tools/none.py" in unknown_to_tool(["python", "tools/none.py"])
