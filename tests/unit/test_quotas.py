"""Quotas: a namespace over its own loses what it used least recently, and no other one loses anything for it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from core_support import FAST, INFO, open_store, restore
from gc_support import HOUR, TENANT, ahead, blocks, check_valid, manifests, prompt, publish, set_used, space_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upkeep_support import invoke, invoke_json, snapshot

from kvstore import Namespace, NamespaceInfo, Store
from kvstore.breakdown import breakdown
from kvstore.clear import clear
from kvstore.fsck import check
from kvstore.gc import GcReport, Policy, collect
from kvstore.merge import merge
from kvstore.quotas import read_quotas, remove_quota, write_quota
from kvstore.scan import scan
from kvstore.sizes import exact_size, parse_size

THIRD = replace(INFO, salt=b"a third one")
SPACES = (INFO, TENANT, THIRD)


def talk(store: Store, info: NamespaceInfo, seed: int, age: float, tokens: int = 40) -> None:
    """One conversation of a namespace, last used so many seconds ago. Its bytes are no other namespace's."""
    space = space_of(store, info)
    publish(space, told(info, seed, tokens))
    set_used(store, space, told(info, seed, tokens), age)


def told(info: NamespaceInfo, seed: int, tokens: int = 40) -> list[int]:
    return prompt(tokens, 100 * SPACES.index(info) + seed)


def left(store: Store, info: NamespaceInfo, seed: int, tokens: int = 40) -> int:
    space: Namespace = space_of(store, info)
    return restore(space, told(info, seed, tokens)).tokens


def taken(store: Store, info: NamespaceInfo) -> int:
    """What a namespace takes on disk."""
    return next((each.total for each in breakdown(store.context).namespaces if each.namespace == info.id), 0)


@pytest.fixture
def shared(tmp_path) -> Path:
    """Two tenants with four conversations each; everything of the second is older."""
    with open_store(tmp_path / "s") as store:
        for seed in range(4):
            talk(store, INFO, seed, 1000 - seed)
            talk(store, TENANT, seed, 5000 - seed)
    return tmp_path / "s"


def gc(path: Path, **policy) -> GcReport:
    """Collect an hour later, with the quotas that the directory has."""
    with ahead(path, HOUR) as store:
        return collect(store.context, Policy(quotas=read_quotas(store.context).sizes, **policy))


def test_a_namespace_over_its_quota_loses_its_oldest_and_no_other_one_anything(shared):
    with open_store(shared) as store:
        before = taken(store, INFO)
        write_quota(store.context, INFO.id, before * 2 // 3)
    report = gc(shared)
    check_valid(shared)
    with open_store(shared) as store:
        assert before * 4 // 10 < taken(store, INFO) <= before * 6 // 10
        assert [left(store, INFO, seed) for seed in range(4)] == [0, 16, 40, 40]
        assert [left(store, TENANT, seed) for seed in range(4)] == [40] * 4
    assert (report.over_quota_bytes, report.unmet_bytes, report.error) == (0, 0, "")
    assert report.freed_bytes == report.before_bytes - report.after_bytes > 0
    again = gc(shared)
    assert again.freed_bytes == 0


def test_tails_that_cost_nothing_go_first_here_as_well(tmp_path):
    with open_store(tmp_path / "s", 128) as store:
        space, old, new = space_of(store), prompt(100, 1), prompt(100, 2)
        publish(space, old, 0, 100)
        publish(space, new, 0, 70, 100)
        for tokens, age in ((old, 5000), (new[:70], 1001), (new, 1000)):
            set_used(store, space, tokens, age)
        write_quota(store.context, INFO.id, taken(store, INFO) - 1)
        assert gc(store.path).nodes == 1
        assert [restore(space, tokens).tokens for tokens in (old, new)] == [100, 100]


def test_a_quota_that_is_not_reached_changes_nothing(shared):
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, taken(store, INFO))
    before = manifests(shared)
    assert gc(shared).nodes == 0
    assert manifests(shared) == before


def test_a_budget_and_quotas_hold_at_once(shared):
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, taken(store, INFO) // 2)
        whole = taken(store, TENANT)
        size = scan(store.context).tally.allocated - taken(store, INFO)
    report = gc(shared, size=size)
    assert report.after_bytes <= size * 9 // 10
    with open_store(shared) as store:
        assert taken(store, INFO) * 2 <= whole
        # What the quota frees counts for the budget: the rest comes from the oldest, the other tenant.
        assert 0 < taken(store, TENANT) < whole
    check_valid(shared)


def test_a_quota_is_kept_by_the_warm_as_well(shared):
    """What is too warm to go for something new is not too warm for its own tenant's quota."""
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, taken(store, INFO) // 2)
        whole = taken(store, TENANT)
    report = gc(shared, size=1 << 40, warm_ns=1)
    assert (report.nodes > 0, report.over_quota_bytes) == (True, 0)
    with open_store(shared) as store:
        assert taken(store, TENANT) == whole


def test_one_namespace_only(shared):
    with open_store(shared) as store:
        for info in (INFO, TENANT):
            write_quota(store.context, info.id, 9000)
        before = taken(store, INFO)
    gc(shared, namespace=TENANT.id)
    with open_store(shared) as store:
        assert taken(store, INFO) == before
        assert taken(store, TENANT) <= 9000
    # An explicit limit counts instead of the quota.
    assert gc(shared, namespace=INFO.id, size=before).nodes == 0


def test_what_is_young_stays_and_is_said(shared):
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, 10_000)
        over = taken(store, INFO) - 10_000
        report = collect(store.context, Policy(quotas=read_quotas(store.context).sizes))
        assert (report.nodes, report.over_quota_bytes) == (0, over)
        alone = collect(store.context, Policy(namespace=INFO.id, quotas=read_quotas(store.context).sizes))
        assert (alone.over_quota_bytes, alone.unmet_bytes) == (over, 0)
        write_quota(store.context, TENANT.id, 10_000)
        both = collect(store.context, Policy(quotas=read_quotas(store.context).sizes))
        assert both.over_quota_bytes == over + taken(store, TENANT) - 10_000


def test_a_dry_run_says_the_same(shared):
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, taken(store, INFO) // 2)
    before = snapshot(shared)
    would = gc(shared, dry_run=True)
    assert snapshot(shared) == before
    did = gc(shared)
    assert (would.nodes, would.blocks, would.freed_bytes) == (did.nodes, did.blocks, did.freed_bytes)
    assert would.nodes > 0


def test_a_block_that_both_name_stays_for_the_one_within_its_quota(tmp_path):
    with open_store(tmp_path / "s") as store:
        for info in (INFO, TENANT):
            publish(space_of(store, info), prompt(40))
            set_used(store, space_of(store, info), prompt(40), 100)
        assert len(blocks(store.path)) == 3
        write_quota(store.context, INFO.id, 0)
    report = gc(tmp_path / "s")
    assert (report.nodes, report.blocks, report.over_quota_bytes) == (3, 0, 0)
    with open_store(tmp_path / "s") as store:
        assert restore(space_of(store, TENANT), prompt(40)).tokens == 40


@pytest.mark.parametrize("explicit", [True, False], ids=["size", "quota"])
@pytest.mark.parametrize("just_touched", [True, False], ids=["used by the other", "unused"])
def test_of_blocks_that_both_name_no_more_goes_than_of_ones_own(tmp_path, explicit, just_touched):
    """Two tenants with one model and the same prompts: their KV is equal, so its blocks are one file each."""
    with open_store(tmp_path / "s") as store:
        for seed in range(8):
            for info in (INFO, THIRD):
                publish(space_of(store, info), prompt(40, seed))
                set_used(store, space_of(store, info), prompt(40, seed), 1000 - seed)
        used = 2 * sum(path.stat().st_blocks * 512 for path in blocks(store.path))  # each manifest is as large
        assert breakdown(store.context).shared == used // 2
        if not explicit:
            write_quota(store.context, INFO.id, used // 2)
    if just_touched:
        now = time.time_ns() + HOUR
        for path in blocks(tmp_path / "s"):
            os.utime(path, ns=(now, now))
    report = gc(tmp_path / "s", **({"namespace": INFO.id, "size": used // 2} if explicit else {}))
    assert (report.blocks, report.unmet_bytes, report.over_quota_bytes, report.error) == (0, 0, 0, "")
    with open_store(tmp_path / "s") as store:
        assert [restore(space_of(store), prompt(40, seed)).tokens for seed in range(8)] == [0] * 4 + [16] + [40] * 3
        assert [restore(space_of(store, THIRD), prompt(40, seed)).tokens for seed in range(8)] == [40] * 8
    check_valid(tmp_path / "s")


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 1), st.integers(0, 120_000), max_size=2),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_saved_quotas_are_met_and_touch_nobody_else(tmp_path_factory, conversations, quotas):
    root = tmp_path_factory.mktemp("quotas") / "s"
    with open_store(root) as store:
        for age, (of, seed, tokens) in enumerate(conversations):
            talk(store, SPACES[of], seed, 9000 - age, tokens)
        before = [taken(store, info) for info in SPACES]
    with ahead(root, HOUR, FAST) as store:
        report = collect(store.context, Policy(quotas={SPACES[of].id: size for of, size in quotas.items()}))
    check_valid(root)
    assert (report.over_quota_bytes, report.error) == (0, "")
    with open_store(root) as store:
        for of, info in enumerate(SPACES):
            if before[of] <= quotas.get(of, before[of]):
                assert taken(store, info) == before[of]
                assert all(
                    left(store, info, seed, tokens) == tokens for own, seed, tokens in conversations if own == of
                )
            else:
                assert taken(store, info) <= quotas[of] * 9 // 10


# The files.


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5 << 30, 20 * 10**9, 3 << 40, (1 << 40) + 1])
def test_a_quota_is_read_as_it_was_written(tmp_path, size):
    with open_store(tmp_path / "s") as store:
        write_quota(store.context, INFO.id, size)
        assert read_quotas(store.context).sizes == {INFO.id: size}
        text = (store.path / "namespaces" / f"{INFO.id}.quota").read_text()
        assert text == f"{exact_size(size)}\n"
        assert parse_size(text) == size
        write_quota(store.context, INFO.id, 7)
        assert read_quotas(store.context).sizes == {INFO.id: 7}
        assert remove_quota(store.context, INFO.id)
        assert not remove_quota(store.context, INFO.id)
        assert read_quotas(store.context).sizes == {}


def test_an_editor_may_write_it(tmp_path):
    with open_store(tmp_path / "s") as store:
        store.context.layout.quota_file(INFO.id).write_text(" 1.5 GiB \r\n")
        assert read_quotas(store.context).sizes == {INFO.id: 3 << 29}


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"much\xff\n"),
        lambda path: path.write_bytes(b"-5GiB"),
        lambda path: path.write_bytes(b"5GiB\n" * 5000),
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("/etc/hostname"),
    ],
)
def test_what_holds_no_size_limits_nothing_and_is_said(shared, harm: Callable[[Path], object]):
    with open_store(shared) as store:
        harm(store.context.layout.quota_file(INFO.id))
        found = read_quotas(store.context)
        assert found.sizes == {}
        (problem,) = found.problems
        assert f"{INFO.id}.quota" in problem
    assert gc(shared).nodes == 0
    assert INFO.id in " ".join(invoke("gc", shared)[2].split())


def test_other_files_beside_it_are_no_quotas(tmp_path):
    with open_store(tmp_path / "s") as store:
        for name in ("x.quota", f"{INFO.id}.quota.bak", f".{INFO.id}.quota", f"{INFO.id}.QUOTA"):
            (store.path / "namespaces" / name).write_text("5GiB")
        assert (read_quotas(store.context).sizes, read_quotas(store.context).problems) == ({}, ())


def test_a_quota_is_no_foreign_file_and_survives_a_clear(shared):
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, 5 << 30)
        assert scan(store.context).tally.foreign == 0
        found = check(store.context)
        assert (found.exit_code, found.counts.foreign, found.findings) == (0, 0, ())
        clear(store.context)
        assert read_quotas(store.context).sizes == {INFO.id: 5 << 30}


def test_a_merge_brings_the_prefixes_and_leaves_the_quotas(shared, tmp_path):
    with open_store(shared) as source, open_store(tmp_path / "t") as target:
        write_quota(source.context, INFO.id, 1)
        write_quota(target.context, INFO.id, 5 << 30)
        assert merge(source.context, target.context).foreign == 0
        assert read_quotas(target.context).sizes == {INFO.id: 5 << 30}


# The command.


def test_the_command_sets_shows_and_clears(shared):
    assert invoke("quota", shared)[1] == f"No namespace of {shared} has a quota.\n"
    code, out, err = invoke("quota", shared, "--namespace", INFO.id[:8], "--size", "5GiB")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == ["a", "test", INFO.id, "5GiB"]
    assert invoke_json("quota", shared) == {
        "directory": str(shared),
        "quotas": [{"namespace": INFO.id, "label": "a test", "bytes": 5 << 30}],
        "problems": [],
    }
    assert invoke("quota", shared, "--namespace", INFO.id[:8], "--clear")[0] == 0
    code, out, err = invoke("quota", shared, "--namespace", INFO.id, "--clear")
    assert (code, out) == (1, "")
    assert "has no quota" in err


def test_a_namespace_to_come_can_have_a_quota_by_its_whole_id(tmp_path):
    open_store(tmp_path / "s").close()
    assert invoke("quota", tmp_path / "s", "--namespace", INFO.id, "--size", "1MiB")[0] == 0
    assert "no namespace begins with" in invoke("quota", tmp_path / "s", "--namespace", "ab", "--size", "1MiB")[2]
    assert invoke("quota", tmp_path / "s", "--namespace", INFO.id[:6], "--clear")[0] == 0


@pytest.mark.parametrize(
    "options",
    [["--size", "5GiB"], ["--clear"], ["--namespace", "ab"], ["--namespace", "ab", "--size", "1MiB", "--clear"]],
)
def test_half_a_wish_is_a_wrong_command_line(tmp_path, options):
    assert invoke("quota", tmp_path, *options)[0] == 2


def test_a_size_that_is_none_is_one_sentence(shared):
    code, out, err = invoke("quota", shared, "--namespace", INFO.id, "--size", "much")
    assert (code, out) == (2, "")
    assert "is not a size" in err
    with open_store(shared) as store:
        assert read_quotas(store.context).sizes == {}


def test_gc_keeps_to_quotas(shared, monkeypatch):
    monkeypatch.setattr("kvstore.cli.gc.Policy", partial(Policy, protect_ns=0))
    with open_store(shared) as store:
        assert "No limit was given" in invoke("gc", shared)[1]
        write_quota(store.context, INFO.id, taken(store, INFO) // 2)
        out = invoke("gc", shared)[1]
        assert "No limit was given" not in out
        assert out.startswith("Removed 7 nodes, 7 blocks")
        assert [left(store, INFO, seed) for seed in range(4)] == [0, 0, 32, 40]
        assert [left(store, TENANT, seed) for seed in range(4)] == [40] * 4


def test_gc_says_when_a_quota_cannot_be_met(shared):
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, 0)
    assert "more would have to go for the quotas" in invoke("gc", shared)[1]
    assert invoke_json("gc", shared)["over_quota_bytes"] > 0


def test_a_quota_is_kept_where_a_copy_left_out_folders(shared):
    """As rsync --prune-empty-dirs does, or a copy that knows no folders."""
    for name in ("namespaces", "tmp"):
        shutil.rmtree(shared / name)
    code, _, err = invoke("quota", shared, "--namespace", INFO.id, "--size", "5GiB")
    assert (code, err) == (0, "")
    with open_store(shared) as store:
        assert read_quotas(store.context).sizes == {INFO.id: 5 << 30}


def test_du_shows_quotas(shared):
    assert "quota" not in invoke("du", shared)[1]
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, 5 << 30)
    (row,) = [line for line in invoke("du", shared)[1].splitlines() if INFO.id[:12] in line]
    assert row.split()[-1] == "5GiB"
    quotas = {each["namespace"]: each["quota"] for each in invoke_json("du", shared)["namespaces"]}
    assert quotas == {INFO.id: 5 << 30, TENANT.id: None}


def test_an_evil_label_is_no_trouble_for_anybody(shared):
    """Half of a surrogate pair, which JSON may hold and no output can encode."""
    with open_store(shared) as store:
        write_quota(store.context, INFO.id, 5 << 30)
        key = space_of(store).lookup(told(INFO, 0)).steps[-1].name.key
    (shared / "namespaces" / f"{INFO.id}.json").write_text(json.dumps({"label": "\ud800\x1b"}))
    for command in (["du"], ["quota"], ["ls"], ["show", key]):
        arguments = [command[0], shared, *command[1:]]
        assert "\x1b" not in invoke(*arguments)[1]
        assert "?" in json.dumps(invoke_json(*arguments))
