"""``kvstore stats``: sums and shares, the ages of what is saved, and what a directory without either says."""

from __future__ import annotations

import json
import os
import time

import pytest
from core_support import INFO, node_files, open_store, prompt
from gc_support import TENANT, blocks
from upkeep_support import grow, invoke, invoke_json, snapshot

from kvstore.ages import LIMITS_S, Age, ages
from kvstore.stats import StatsFile

TOKENS = prompt(60)


def counted(path, **counts: int) -> None:
    with open_store(path) as store:
        stats = StatsFile(store.context)
        stats.add(**counts)
        stats.close()


def test_figures_over_all_processes(tmp_path):
    path = tmp_path / "s"
    counted(path, requests=3, prompt_tokens=1000, memory_tokens=300, disk_tokens=400, generated_tokens=50)
    counted(
        path,
        requests=1,
        prompt_tokens=1000,
        disk_tokens=900,
        read_bytes=4096,
        read_us=2000,
        written_tokens=10,
        written_bytes=1024,
    )
    document = invoke_json("stats", path)
    assert (document["processes"], document["unreadable"], document["hit_rate"]) == (2, 0, 0.8)
    assert document["written_per_read"] == 0.25
    assert document["written_bytes_per_token"] == 102.4
    assert document["counters"] == {
        "requests": 4,
        "prompt_tokens": 2000,
        "memory_tokens": 300,
        "disk_tokens": 1300,
        "generated_tokens": 50,
        "read_bytes": 4096,
        "read_us": 2000,
        "written_tokens": 10,
        "written_bytes": 1024,
        "failed_writes": 0,
    }
    assert time.time() - 60 < document["since"] <= document["until"] <= time.time()
    code, out, err = invoke("stats", path)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "requests 4 in" in text
    assert "by 2 processes" in text
    assert "reused 1,600 (80.0 %): 300 from memory, 1,300 from disk" in text
    assert "read 4.0 KiB, at 2.0 MiB/s" in text
    assert document["read_bytes_per_second"] == 2048000
    assert "written 1.0 KiB, 0.25 of what was read, for 10 new tokens: 102 B each" in text
    assert "last used" not in text  # nothing is saved
    assert "failed" not in text
    counted(path, failed_writes=3)
    assert "failed writes 3; the log of the server says why" in " ".join(invoke("stats", path)[1].split())


def test_a_directory_without_counters_or_prompts(tmp_path):
    with open_store(tmp_path / "s"):
        pass
    before = snapshot(tmp_path / "s")
    document = invoke_json("stats", tmp_path / "s")
    assert document["processes"] == 0
    for name in ("since", "until", "hit_rate", "written_per_read", "written_bytes_per_token"):
        assert document[name] is None
    assert all(row["nodes"] == 0 for row in document["ages"])
    code, out, _ = invoke("stats", tmp_path / "s")
    assert code == 0
    assert "Nothing was counted" in " ".join(out.split())
    assert snapshot(tmp_path / "s") == before


def test_ages_count_each_block_where_its_youngest_node_is(tmp_path):
    path = tmp_path / "s"
    now = time.time()
    with open_store(path, clock=lambda: int(now * 1e9)) as store:
        grow(store.namespace(INFO), TOKENS, 16, 32, 37, 40)
        grow(store.namespace(TENANT), TOKENS, 16)
        old = {16: 40 * 86400, 32: 8 * 86400, 37: 2 * 86400, 40: 10}
        for file in node_files(path):
            end = {16: 16, 5: 37, 8: 40}[int(file.name.split("-")[1])]
            if store.namespace(INFO).id not in str(file):
                age = 100.0
            elif end == 16 and store.namespace(INFO).lookup(TOKENS[:32]).steps[1].path == file:
                age = old[32]
            else:
                age = old[end]
            os.utime(file, (now - age, now - age))
        found = ages(store.context)
    assert [row.below_s for row in found] == [*LIMITS_S, None]
    assert [row.nodes for row in found] == [2, 0, 1, 1, 1]  # a tail, and the other namespace's; 37; 32; 16
    # The tail of 37 tokens has its block in common with that of 40, which is younger.
    assert found[2].size == 0
    # The first chunk's is that of the other namespace, too.
    assert found[4] == Age(None, 1, 0)
    assert found[0].size > found[3].size > 0
    assert sum(row.size for row in found) == sum(block.stat().st_size for block in blocks(path))
    code, out, _ = invoke("stats", path)
    assert code == 0
    assert "less than 1 h ago" in out
    assert "before" in out


@pytest.mark.parametrize("content", [b"\0", b"{}"])
def test_damaged_counters_are_said(tmp_path, content):
    counted(tmp_path / "s", requests=1, prompt_tokens=10)
    (file,) = (tmp_path / "s" / "stats").iterdir()
    file.with_name(file.name.replace(file.name[-13:-5], "00000001")).write_bytes(content)
    code, out, err = invoke("stats", tmp_path / "s")
    assert code == 0
    assert "requests" in out
    assert "Left out: 1 file of counters" in err
    assert json.loads(invoke("stats", tmp_path / "s", "--json")[1])["unreadable"] == 1
