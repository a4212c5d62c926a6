"""What pays: a line through the restores, a median of the prefills, and neither before they were measured."""

from __future__ import annotations

import random

import pytest

from kvstore_mlx.breakeven import BreakEven

MIN = 64
KIB = 1024
GB = 1e9


def prefill(gate, rate, times=9, tokens=500, now=0.0):
    for _ in range(times):
        gate.observe_prefill(tokens, tokens / rate, now)


def restores(gate, fixed, bandwidth, per_token=100 * KIB, lengths=(200, 500, 900, 2000, 4000, 9000), now=0.0):
    for tokens in lengths:
        size = tokens * per_token
        gate.observe_restore(size, tokens, fixed + size / bandwidth, now)


def measured(rate=1000.0, fixed=0.05, bandwidth=2 * GB, **more):
    gate = BreakEven(rows=lambda tokens: tokens * 100 * KIB)
    prefill(gate, rate)
    restores(gate, fixed, bandwidth, **more)
    return gate


def test_before_anything_is_measured_a_constant_decides():
    gate = BreakEven()
    assert gate.min_tokens(0) == MIN
    assert gate.worth_restoring(MIN, 1 << 40, 0)
    assert gate.worth_saving(MIN, 0)
    assert not gate.worth_restoring(MIN - 1, 1, 0)
    assert not gate.worth_saving(MIN - 1, 0)


@pytest.mark.parametrize("known", ["prefills", "restores", "too few of both"])
def test_one_kind_of_measurement_or_a_few_of_both_change_nothing(known):
    gate = BreakEven()
    if known == "prefills":
        prefill(gate, 1e9)
    elif known == "restores":
        restores(gate, 10, 1)
    else:
        prefill(gate, 1e9, times=4)
        restores(gate, 10, 1)
    assert gate.min_tokens(0) == MIN
    assert gate.worth_restoring(MIN, 1 << 40, 0)


def test_the_break_even_length_is_where_both_cost_the_same():
    # 0.05 s and 100 KiB a token at 2 GB/s against 1 ms a token: 0.05 / (1e-3 - 51.2e-6) = 52.7; at half a second 527.
    assert measured(fixed=0.05).min_tokens(0) == MIN
    gate = measured(fixed=0.5)
    assert gate.min_tokens(0) == 527
    assert not gate.worth_restoring(526, 526 * 100 * KIB, 0)
    assert gate.worth_restoring(527, 527 * 100 * KIB, 0)
    assert not gate.worth_saving(526, 0)
    assert gate.worth_saving(527, 0)


def test_what_memory_has_already_is_read_for_nothing():
    gate = measured(fixed=0.01, bandwidth=0.2 * GB)
    size = 8000 * 100 * KIB  # 4.1 s
    assert gate.worth_restoring(8000, size, 0)
    assert not gate.worth_restoring(2000, size, 0)


def test_when_reading_costs_more_than_computing_nothing_pays():
    gate = measured(rate=50_000.0, bandwidth=1 * GB)
    assert not gate.worth_restoring(1 << 20, (1 << 20) * 100 * KIB, 0)
    assert not gate.worth_saving(1 << 20, 0)
    assert "does not pay" in gate.describe(0)


def test_a_few_tokens_out_of_large_blocks_do_not_make_all_tokens_dear():
    """An 8B model: 144 KiB a token, 1,500 tokens/s, 1.5 GB/s; each match of some tokens reads a chunk of 2,048."""
    gate = BreakEven(rows=lambda tokens: tokens * 144 * KIB)
    prefill(gate, 1500, tokens=4000)
    chunk = 2048 * 144 * KIB
    for tokens in (150, 300, 200, 400, 250, 350):
        gate.observe_restore(chunk, tokens, 0.01 + chunk / (1.5 * GB), 0)
    assert gate.min_tokens(0) == MIN
    assert gate.worth_saving(20_000, 0)
    assert gate.worth_restoring(2048, chunk, 0)
    assert gate.worth_restoring(400, chunk, 0)
    assert not gate.worth_restoring(150, chunk, 0), "0.1 s to compute, 0.2 s to read"


def test_a_large_state_is_a_cost_of_the_prompt_and_not_of_its_tokens():
    """A recurrent model without rows: 100 MB at 1 GB/s, whatever the length; at 1,000 tokens/s from 110 tokens on."""
    gate = BreakEven()
    prefill(gate, 1000)
    for tokens in (70, 80, 90, 200, 3000):
        gate.observe_restore(100_000_000, tokens, 0.1 + tokens * 1e-9, 0, state=100_000_000)
    assert 100 <= gate.min_tokens(0) <= 102
    assert not gate.worth_saving(90, 0)
    assert gate.worth_saving(20_000, 0)


def test_a_state_that_grows_is_taken_to_be_as_large_as_at_the_nearest_length():
    gate = BreakEven()
    prefill(gate, 1000)
    for tokens in (100, 200, 400, 2000, 8000, 8000, 8000, 8000):
        size = tokens * 100 * KIB
        gate.observe_restore(size, tokens, 0.02 + size / (1 * GB), 0, state=size)
    assert gate.worth_saving(100, 0), "30 ms, and not the 840 that a long one takes"
    assert gate.worth_saving(8000, 0)


def test_outliers_change_little():
    gate = measured(fixed=0.5)
    for _ in range(3):
        gate.observe_prefill(500, 300.0, 0)
        gate.observe_restore(1000 * 100 * KIB, 1000, 60.0, 0)
    assert 400 < gate.min_tokens(0) < 700


def test_noise_changes_little():
    random.seed(3)
    gate = BreakEven(rows=lambda tokens: tokens * 100 * KIB)
    for _ in range(24):
        gate.observe_prefill(500, 0.5 * random.uniform(0.7, 1.3), 0)
        tokens = random.choice((300, 1000, 3000, 8000))
        gate.observe_restore(tokens * 100 * KIB, tokens, (0.5 + tokens * 51.2e-6) * random.uniform(0.9, 1.1), 0)
    assert 400 < gate.min_tokens(0) < 700


def test_restores_of_one_size_say_nothing_of_larger_ones():
    """A fast small model: 80 tokens are computed in 8 ms and read in 10, hardly any of which is for their bytes."""
    gate = BreakEven(rows=lambda tokens: tokens * 12 * KIB)
    prefill(gate, 10_000)
    restores(gate, 0.0099, 10 * GB, per_token=12 * KIB, lengths=(80,) * 9)
    assert not gate.worth_restoring(80, 80 * 12 * KIB, 0)
    assert gate.worth_restoring(200, 200 * 12 * KIB, 0)
    assert gate.worth_saving(20_000, 0)
    assert 90 < gate.min_tokens(0) < 110
    assert "restore 10.0 ms for 960 KiB" in gate.describe(0)


def test_restores_of_one_size_are_put_down_to_their_bytes_for_smaller_ones():
    gate = BreakEven(rows=lambda tokens: tokens * 100 * KIB)
    prefill(gate, 1000)
    restores(gate, 0.1, 2 * GB, lengths=(1000,) * 9)
    assert gate.min_tokens(0) == MIN, "nothing is known of a fixed cost, so nothing short is refused for it"
    assert gate.worth_restoring(1000, 1000 * 100 * KIB, 0)


def test_measurements_are_forgotten_so_that_a_shut_gate_opens_again():
    gate = measured(rate=50_000.0, bandwidth=0.1 * GB)
    assert not gate.worth_restoring(4000, 4000 * 100 * KIB, 3599)
    assert gate.known(3600)
    assert not gate.known(3601)
    assert gate.worth_restoring(4000, 4000 * 100 * KIB, 3601)
    assert gate.min_tokens(3601) == MIN


def test_what_cannot_have_happened_is_left_out():
    gate = measured(fixed=0.5)
    for _ in range(24):
        gate.observe_prefill(500, 0.0, 0)
        gate.observe_prefill(500, float("inf"), 0)
        gate.observe_prefill(MIN - 1, 1e-9, 0)
        gate.observe_restore(0, 500, 1.0, 0)
        gate.observe_restore(500, 0, 1.0, 0)
        gate.observe_restore(500, 500, float("nan"), 0)
    assert gate.min_tokens(0) == 527


def test_a_length_of_the_users_own_is_what_decides():
    gate = BreakEven(200)
    prefill(gate, 1e9)
    restores(gate, 10, 1)
    assert gate.min_tokens(0) == 200
    assert gate.worth_restoring(200, 1 << 40, 0)
    assert not gate.worth_restoring(199, 1, 0)
    assert BreakEven(0).worth_restoring(1, 1, 0)
    assert not gate.known(0)
    assert "from 200 tokens" in gate.describe(0)


def test_what_is_known_can_be_said():
    said = measured(fixed=0.5).describe(0)
    assert "1000 tokens/s" in said
    assert "500.0 ms and 1.9 GiB/s" in said
    assert "from 527 tokens" in said
