"""The replay of recorded requests: its caches against a plain model, its traces, its table."""

from __future__ import annotations

import gzip
import json
import random

import pytest

import replay_trace
from replay_policies import POLICIES, SECOND, Recent, Request, replay
from replay_trace import AGENT, CONVERSATION, Paths, agents, conversation, main

INTERVAL = 2048


@pytest.fixture
def traces(tmp_path):
    """Two agents whose conversations grow by a chunk a request, and a chat service with one shared beginning."""
    folder = tmp_path / "traces"
    folder.mkdir()
    with gzip.open(folder / AGENT, "wt") as file:
        for session in range(2):
            requests = [
                [10.0 * turn, INTERVAL * (turn + 1), 100, 32 * turn, list(range(32 * turn, 32 * turn + 32))]
                for turn in range(8)
            ]
            file.write(json.dumps({"session": session, "block_tokens": 64, "requests": requests}) + "\n")
    with gzip.open(folder / CONVERSATION, "wt") as file:
        for number in range(12):
            ids = [0, 1, 2, 3, *range(100 * number + 4, 100 * number + 8), 9]
            line = {"timestamp": number * 1500, "input_length": 9 * 512, "output_length": 5, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return folder


def naive(requests, capacity, gate):
    """Least recently used with a gate, the slow and plain way; times must differ."""
    used, parent, hit, written = {}, {}, 0, 0
    for request in requests:
        path = request.path
        found = 0
        while found < len(path) and path[found] in used:
            found += 1
        hit += found
        used.update(dict.fromkeys(path[:found], request.now))
        for depth in range(found, len(path)):
            if len(used) >= capacity:
                leaves = [chunk for chunk in used if chunk not in parent.values() and chunk not in path]
                coldest = min(leaves, key=used.__getitem__, default=None)
                if coldest is None or request.now - used[coldest] < gate:
                    break
                del used[coldest], parent[coldest]
            used[path[depth]] = request.now
            parent[path[depth]] = path[depth - 1] if depth else None
            written += 1
    return hit, written


def some(seed: int, count: int = 300) -> list[Request]:
    """Requests of conversations that grow, branch and begin again, at times that all differ."""
    chance = random.Random(seed)
    paths = Paths(1)
    talks = [[talk] for talk in range(5)]
    requests, now = [], 0
    for _ in range(count):
        now += chance.randrange(1, 20 * SECOND)
        talk = chance.choice(talks)
        del talk[chance.randrange(1, len(talk) + 4) :]
        talk.extend(chance.randrange(3) for _ in range(chance.randrange(3)))
        requests.append(Request(now, len(talk), paths.of("all", talk, len(talk), 1)))
    return requests


@pytest.mark.parametrize("gate", [0, 30])
@pytest.mark.parametrize("seed", range(4))
def test_the_heap_of_leaves_does_what_looking_at_all_of_them_does(seed, gate):
    requests = some(seed)
    for capacity in (1, 5, 12):
        expected = naive(requests, capacity, gate * SECOND)
        result = replay(requests, capacity, Recent(gate * SECOND), 1)
        assert (round(result.hit * sum(request.tokens for request in requests)), result.written) == expected


@pytest.mark.parametrize("seed", range(4))
def test_nobody_hits_more_than_who_knows_the_future_and_all_is_found_when_there_is_room(seed):
    requests = some(seed)
    results = {name: replay(requests, 12, make(requests), 1) for name, make in POLICIES.items()}
    assert max(results, key=lambda name: results[name].hit) == "optimum"
    whole = {replay(requests, 10**6, make(requests), 1) for make in POLICIES.values()}
    assert len(whole) == 1, "with room for everything they all do the same"


def test_agents_follow_each_other_on_their_lanes(traces):
    one = agents(traces, 1, INTERVAL, 7)
    assert [request.now // SECOND for request in one] == [*range(0, 80, 10), *range(130, 210, 10)]
    two = agents(traces, 2, INTERVAL, 7)
    assert [request.now // SECOND for request in two] == [time for time in range(0, 80, 10) for _ in range(2)]
    assert [len(request.path) for request in one] == [1, 2, 3, 4, 5, 6, 7, 8] * 2
    assert len({request.path[0] for request in one}) == 2, "equal ids of two sessions are not equal tokens"


def test_equal_prefixes_of_a_conversation_are_one_and_only_whole_chunks_count(traces):
    requests = conversation(traces, INTERVAL)
    assert [request.now for request in requests[:3]] == [0, 1500 * 10**6, 3000 * 10**6]
    assert {len(request.path) for request in requests} == {2}
    assert len({request.path[0] for request in requests}) == 1
    assert len({request.path[1] for request in requests}) == 12


def test_a_table_is_printed_and_put_between_markers(traces, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- replay-table: begin (by a tool) -->\nold\n<!-- replay-table: end -->\nafter\n")
    monkeypatch.setenv("KVSTORE_TRACES", str(traces))
    options = ["--lanes", "2", "--capacities", "4", "16", "--conversation-capacities", "4"]
    assert main([*options, "--write", str(page)]) == 0
    printed = capsys.readouterr().out
    written = page.read_text()
    assert written == f"before\n<!-- replay-table: begin (by a tool) -->\n{printed}<!-- replay-table: end -->\nafter\n"
    assert len(printed.splitlines()) == 2 + 3
    # 72 chunks are asked for and 56 of them were there, of equally many tokens.
    assert "| coding agent, 2 at once | 16 | " + " | ".join(["0.778 / 16"] * 5) + " |" in printed


def test_what_is_missing_is_said(traces, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVSTORE_TRACES", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "give --traces DIR or set KVSTORE_TRACES" in capsys.readouterr().err
    assert main(["--traces", str(tmp_path)]) == 1
    assert "coding-agent-sessions.jsonl.gz is not there" in capsys.readouterr().err
    page = tmp_path / "page.md"
    page.write_text("no markers")
    quick = ["--traces", str(traces), "--lanes", "1", "--capacities", "4", "--conversation-capacities"]
    assert main([*quick, "--write", str(page)]) == 1
    assert page.read_text() == "no markers"


def test_the_page_has_markers():
    page = (replay_trace.Path(replay_trace.__file__).parent.parent / "docs" / "admission.md").read_text()
    assert replay_trace.MARKERS.search(page)
