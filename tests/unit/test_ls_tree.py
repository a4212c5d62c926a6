"""`kvstore ls` as people choose it: what is shared once, by namespace, some of it, and never more than asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from core_support import INFO, open_store, spans
from gc_support import TENANT, forge_circle, manifests, prompt, publish, set_used, space_of, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upkeep_support import invoke, invoke_json

import kvstore.cli.ls
from kvstore import Store
from kvstore.listing import Conversation, branches, by_namespace, listing
from kvstore.manifest import decode
from kvstore.quotas import write_quota

SHARED = prompt(32)
ONE = [*SHARED, *prompt(8, 1)]
TWO = [*SHARED, *prompt(20, 2)]
ALONE = prompt(9, 3)


@pytest.fixture
def store(tmp_path):
    """Two conversations that share two chunks, one alone, one of another namespace; from the newest to the oldest."""
    with open_store(tmp_path / "s") as store:
        space = space_of(store)
        for age, (tokens, of) in enumerate(
            ((ONE, space), (TWO, space), (ALONE, space), (ONE, space_of(store, TENANT)))
        ):
            publish(of, tokens)
            set_used(store, of, tokens, 3600 * (age + 1))
        yield store


def newest_first(store: Store) -> list[Conversation]:
    return sorted(listing(store.context).conversations, key=lambda each: -each.used_ns)


def test_what_is_shared_is_one_branch(store):
    found = listing(store.context)
    rows = branches(found, newest_first(store))
    assert [(each.parent, each.first, each.end, each.nodes, each.leaf) for each in rows] == [
        (None, 0, 32, 2, False),
        (0, 32, 40, 1, True),
        (0, 32, 52, 2, True),
        (None, 0, 9, 1, True),
        (None, 0, 40, 3, True),
    ]
    assert [each.label for each in rows] == ["a test"] * 4 + ["another"]
    blocks = {ref.digest: ref.size for path in manifests(store.path) for ref in decode(path.read_bytes()).blocks}
    assert sum(each.size for each in rows[:4]) == sum(blocks.values()), "the other namespace has the same bytes"


def test_only_the_chosen_conversations_fork(store):
    found = listing(store.context)
    (long,) = [each for each in found.conversations if each.tokens == 52]
    (row,) = branches(found, [long])
    assert (row.first, row.end, row.nodes, row.size) == (0, 52, 4, long.size)
    assert branches(found, []) == []


def test_states_and_holes_are_said(store):
    space = space_of(store)
    space.publish_state(TWO, state())
    steps = space.lookup(ONE).steps
    steps[1].path.unlink()
    rows = branches(listing(store.context), newest_first(store))
    ends = {(each.namespace, each.end): each for each in rows}
    assert ends[INFO.id, 52].resumable
    assert not ends[INFO.id, 52].complete
    assert not ends[INFO.id, 40].resumable
    assert ends[TENANT.id, 40].complete


def test_a_conversation_that_goes_on_from_the_end_of_a_shorter_one_is_one(store):
    publish(space_of(store), SHARED)
    assert len(branches(listing(store.context), newest_first(store))) == 5


def test_forged_circles_end(store):
    forge_circle(store.path)
    found = listing(store.context)
    assert len(branches(found, found.conversations)) == 5
    forged = found.forest.find(INFO.id, "a" * 32)
    assert found.forest.path(forged) == [forged]


def test_namespaces_are_added_up(store):
    found = listing(store.context)
    rows = {each.namespace: each for each in by_namespace(found, newest_first(store))}
    assert (rows[INFO.id].conversations, rows[INFO.id].tokens) == (3, 52)
    assert (rows[TENANT.id].conversations, rows[TENANT.id].tokens) == (1, 40)
    assert rows[TENANT.id].size == next(each.size for each in newest_first(store) if each.namespace == TENANT.id)
    own = sum(each.own for each in found.conversations if each.namespace == INFO.id)
    assert rows[INFO.id].size > own


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=7), st.integers(1, 16))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_conversation_is_the_sum_of_its_branches(tmp_path_factory, ways, last):
    """Conversations that choose between two chunks at every border."""
    with open_store(tmp_path_factory.mktemp("ways") / "s") as store:
        for way in ways:
            tokens = [token for at, choice in enumerate(way) for token in prompt(16, 10 * at + choice)]
            tokens = tokens[: len(tokens) - 16 + last]
            borders = [*range(0, len(tokens), 16), len(tokens)]
            space_of(store).publish(tokens, spans(tokens, *borders))
        found = listing(store.context)
        rows = branches(found, found.conversations)
    assert sum(row.leaf for row in rows) == len(found.conversations)
    assert sum(row.nodes for row in rows) == len({path for each in found.conversations for path in paths(found, each)})
    leaves = {row.key: at for at, row in enumerate(rows) if row.leaf}
    for each in found.conversations:
        at: int | None = leaves[each.key]
        assert rows[at].end == each.tokens
        size = nodes = 0
        first = each.tokens
        while at is not None:
            row = rows[at]
            assert row.end == first
            size, nodes, first = size + row.size, nodes + row.nodes, row.first
            assert row.parent is None or row.parent < at
            at = row.parent
        assert (size, nodes, first) == (each.size, each.nodes, 0)


def paths(found, each: Conversation) -> list[int]:
    return found.forest.path(found.forest.find(each.namespace, each.key))


# The command.


def tokens_of(store: Store, *options: str) -> list[int]:
    return [each["tokens"] for each in invoke_json("ls", store.path, *options)["conversations"]]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ([], [40, 52, 9, 40]),
        (["--older-than", "90m"], [52, 9, 40]),
        (["--newer-than", "150m"], [40, 52]),
        (["--older-than", "90m", "--newer-than", "150m"], [52]),
        (["--min-tokens", "40"], [40, 52, 40]),
        (["--min-tokens", "41", "--older-than", "1s"], [52]),
        (["--min-tokens", "53"], []),
        (["--limit", "2"], [40, 52]),
        (["--limit", "0"], [40, 52, 9, 40]),
        (["--limit", "1", "--sort", "tokens"], [52]),
    ],
)
def test_filters_and_limits(store, options, tokens):
    assert tokens_of(store, *options) == tokens


def test_what_is_hidden_is_said(store, monkeypatch):
    assert invoke_json("ls", store.path, "--limit", "1")["hidden"] == 3
    out = invoke("ls", store.path, "--limit", "1")[1].splitlines()
    assert len(out) == 3
    assert out[-1] == "… and 3 more conversations; --limit 0 shows all."
    assert "more conversation" not in invoke("ls", store.path)[1]
    assert "more conversation" not in invoke("ls", store.path, "--limit", "1", "--min-tokens", "50")[1]
    monkeypatch.setattr(kvstore.cli.ls, "_LIMIT", 3)
    for options in ([], ["--tree"]):
        assert invoke("ls", store.path, *options)[1].endswith("… and 1 more conversation; --limit 0 shows all.\n")
        assert "…" not in invoke("ls", store.path, *options, "--limit", "0")[1]
    assert invoke_json("ls", store.path)["hidden"] == 0
    assert "more conversation" not in invoke("ls", store.path, "--by-namespace")[1]


def test_by_namespace_a_limit_is_one_of_namespaces(store):
    out = invoke("ls", store.path, "--by-namespace", "--limit", "1")[1].splitlines()
    assert len(out) == 3
    assert out[-1] == "… and 1 more namespace; --limit 0 shows all."
    (row,) = invoke_json("ls", store.path, "--by-namespace", "--limit", "1", "--sort", "tokens")["namespaces"]
    assert (row["namespace"], row["conversations"]) == (INFO.id, 3)
    for limit in (0, 2):
        document = invoke_json("ls", store.path, "--by-namespace", "--limit", str(limit))
        assert (len(document["namespaces"]), document["hidden"]) == (2, 0)


def test_nothing_like_that(store):
    assert invoke("ls", store.path, "--min-tokens", "99")[1] == f"{store.path} holds no conversation like that.\n"
    assert "more" not in invoke("ls", store.path, "--tree", "--min-tokens", "99")[1]


def test_the_tree_for_people(store):
    lines = invoke("ls", store.path, "--tree")[1].splitlines()
    assert lines[0] == f"a test ({INFO.id[:12]})"
    assert lines[1].startswith("├── 0 to 32, 2 nodes, ")
    assert lines[2].startswith("│   ├── 32 to 40, 1 node, ")
    assert lines[3].startswith("│   └── 32 to 52, 2 nodes, ")
    assert ", 2 h, " in lines[3]
    assert lines[4].startswith("└── 0 to 9, 1 node, ")
    assert lines[5] == f"another ({TENANT.id[:12]})"
    assert lines[6].startswith("└── 0 to 40, 3 nodes, ")
    assert len(lines) == 7


def test_a_tree_that_forks_very_often_stays_on_the_screen(tmp_path):
    trunk: list[int] = []
    with open_store(tmp_path / "s") as store:
        for at in range(60):
            trunk += prompt(16, at)
            publish(space_of(store), [*trunk, *prompt(3, 100 + at)])
        publish(space_of(store), trunk)
    lines = invoke("ls", tmp_path / "s", "--tree")[1].splitlines()
    assert len(lines) == 1 + 60 + 60 - 1
    assert max(len(line) for line in lines) < 160
    assert len(invoke_json("ls", tmp_path / "s", "--tree")["branches"]) == len(lines) - 1


def test_documents_have_the_documented_shape(store):
    documented = Path(kvstore.cli.ls.__file__).read_text().split('"""')[1]
    for options, name in (([], "conversations"), (["--tree"], "branches"), (["--by-namespace"], "namespaces")):
        document = invoke_json("ls", store.path, *options)
        assert set(document) == {"directory", "damaged", "foreign", "hidden", "quotas", name}
        assert all(f'"{key}"' in documented for key in [*document, *document[name][0]])
        assert all(isinstance(row["used"], float) and row["bytes"] > 0 for row in document[name])


def test_by_namespace_for_people_shows_quotas(store):
    write_quota(store.context, TENANT.id, 5 << 30)
    lines = invoke("ls", store.path, "--by-namespace")[1].splitlines()
    assert lines[0].split() == ["model", "namespace", "conversations", "longest", "size", "quota", "last", "used"]
    assert [line.split()[:4] for line in lines[1:]] == [
        ["a", "test", INFO.id[:12], "3"],
        ["another", TENANT.id[:12], "1", "40"],
    ]
    assert lines[2].split()[6] == "5GiB"
    assert invoke_json("ls", store.path)["quotas"] == {TENANT.id: 5 << 30}


def test_a_tree_obeys_no_label(store):
    evil = json.dumps({"label": "[red]\x1b[2J\ud800\n" + "x" * 5000})
    (store.path / "namespaces" / f"{INFO.id}.json").write_text(evil)
    for option in ("--tree", "--by-namespace"):
        out = invoke("ls", store.path, option)[1]
        assert "\x1b" not in out
        assert "[red]?[2J??" in out
        assert all(len(line) <= 240 for line in out.splitlines())


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--tree", "--by-namespace"], 2), (["--limit", "-1"], 2), (["--older-than", "5"], 2), (["--newer-than", "x"], 2)],
)
def test_mistakes(store, options, code):
    found, out, err = invoke("ls", store.path, *options)
    assert (found, out) == (code, "")
    assert err
