"""Memory that copies are lent: never two at once in one place, never readable afterwards, never more than the limit."""

from __future__ import annotations

import mmap
import random
import threading

import pytest

from kvstore_mlx.pool import Pool

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def filled(loan, size: int, value: int) -> memoryview:
    part = loan.take(size)
    part[:] = bytes([value]) * size
    return part


def address(view: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_loans_do_not_share_memory():
    pool = Pool(4 * MIB)
    loans = [pool.lend(MIB) for _ in range(4)]
    parts = [filled(loan, MIB, number) for number, loan in enumerate(loans)]
    assert [set(part) for part in parts] == [{0}, {1}, {2}, {3}]
    assert pool.lent == 4 * MIB


def test_a_full_pool_lends_nothing_until_something_comes_back():
    pool = Pool(2 * MIB)
    first, second = pool.lend(MIB), pool.lend(MIB)
    assert pool.lend(1) is None
    first.give_back()
    assert pool.lend(MIB + 1) is None
    third = pool.lend(MIB)
    assert third is not None
    second.give_back()
    assert pool.lent == MIB


def test_memory_that_was_used_before_is_used_first():
    pool = Pool(64 * MIB)
    a, b = pool.lend(MIB), pool.lend(MIB)
    where = address(a.take(1))
    a.give_back()
    again = pool.lend(MIB)
    assert address(again.take(1)) == where
    assert pool.resident == 2 * MIB
    b.give_back()


@pytest.mark.parametrize("phase", [0, 16, 24, 63, 4096 + 24])
def test_every_loan_begins_at_the_phase(phase):
    pool = Pool(4 * MIB, phase)
    loans = [pool.lend(size) for size in (1, PAGE, 70_000)]
    assert {address(loan.take(1)) % 64 for loan in loans} == {phase % 64}


def test_parts_follow_each_other_and_end_with_the_loan():
    loan = Pool(MIB).lend(100)
    first, second = loan.take(60), loan.take(40)
    assert address(second) == address(first) + 60
    with pytest.raises(ValueError, match="1 bytes more than 100 of the 100"):
        loan.take(1)


def test_what_was_given_back_cannot_be_read():
    pool = Pool(MIB)
    loan = pool.lend(100)
    part = filled(loan, 100, 7)
    loan.give_back()
    filled(pool.lend(100), 100, 8)
    with pytest.raises(ValueError, match="released"):
        bytes(part)


def test_what_somebody_still_looks_at_is_not_lent_again():
    import numpy as np

    pool = Pool(MIB)
    loan = pool.lend(MIB)
    look = np.frombuffer(filled(loan, MIB, 7), np.uint8)
    again = memoryview(look[:5])
    loan.give_back()
    assert pool.lend(1) is None
    assert set(look.tolist()) == {7}
    del look
    assert pool.lend(1) is None
    again.release()
    assert pool.lent == 0


def test_memory_that_comes_back_while_the_pool_is_asked_is_noted_later():
    """A garbage collection may end a look in the middle of a lend, on the thread that holds the lock."""
    pool = Pool(MIB)
    loan = pool.lend(MIB)
    with pool._lock:
        loan.give_back()
    assert pool.lend(MIB) is not None


def test_loans_of_nothing_are_loans_too():
    pool = Pool(MIB)
    loans = [pool.lend(0), pool.lend(0), pool.lend(100)]
    assert [loan.take(0).nbytes for loan in loans] == [0, 0, 0]
    for loan in loans:
        loan.give_back()
    assert pool.lent == 0


def test_giving_back_twice_does_not_take_from_the_next():
    pool = Pool(MIB)
    loan = pool.lend(MIB)
    loan.give_back()
    other = pool.lend(MIB)
    loan.give_back()
    assert pool.lend(1) is None
    other.give_back()


def test_a_forgotten_loan_comes_back_by_itself():
    pool = Pool(MIB)
    part = filled(pool.lend(MIB), MIB, 7)
    assert pool.lent == 0
    with pytest.raises(ValueError, match="released"):
        bytes(part)


def test_more_than_the_limit_is_lent_alone_and_not_kept():
    pool = Pool(MIB)
    large = pool.lend(3 * MIB)
    filled(large, 3 * MIB, 9)
    assert pool.lend(1) is None
    large.give_back()
    assert (pool.lent, pool.resident) == (0, 0)
    small = pool.lend(1)
    assert pool.lend(3 * MIB) is None
    small.give_back()


def test_trim_gives_memory_back_unless_some_is_lent():
    pool = Pool(4 * MIB)
    loan = pool.lend(MIB)
    part = filled(loan, MIB, 7)
    pool.trim()
    assert pool.resident == MIB
    assert set(part) == {7}
    loan.give_back()
    pool.trim()
    assert pool.resident == 0
    assert set(pool.lend(MIB).take(MIB)) == {0}


def test_nobody_waits_while_memory_goes_back():
    """900 MiB take half a second, which the generation thread would wait to be lent some."""
    pool = Pool(MIB)
    pool.lend(MIB).give_back()
    free = []

    class Region:
        def __del__(self) -> None:
            free.append(not pool._lock.locked())

    pool._region = Region()
    pool.trim()
    assert free == [True]


def test_warming_touches_only_what_is_not_lent():
    pool = Pool(8 * MIB)
    loan = pool.lend(MIB + 5)
    part = filled(loan, MIB + 5, 7)
    pool.warm(6 * MIB)
    assert set(part) == {7}
    assert pool.resident == 6 * MIB
    pool.warm(100 * MIB)
    assert pool.resident == 8 * MIB


def test_warming_beside_copies_changes_none_of_them():
    """The writer's thread touches memory while the engine's copies."""
    pool = Pool(32 * MIB)
    done = threading.Event()

    def warm() -> None:
        while not done.is_set():
            pool.warm(32 * MIB)
            pool.trim()

    thread = threading.Thread(target=warm)
    thread.start()
    rng = random.Random(1)
    try:
        for turn in range(300):
            loans = [pool.lend(rng.randrange(1, 2 * MIB)) for _ in range(3)]
            sizes = [rng.randrange(1, 1000) for _ in loans]
            parts = [filled(loan, min(size, loan._size), turn % 256) for loan, size in zip(loans, sizes)]  # noqa: B905
            assert all(set(part) == {turn % 256} for part in parts)
            for loan in loans:
                loan.give_back()
    finally:
        done.set()
        thread.join()


def test_loans_of_any_sizes_in_any_order_never_overlap():
    rng = random.Random(7)
    pool = Pool(256 * PAGE, 24)
    held: list[tuple[object, memoryview, int]] = []
    for turn in range(3000):
        if held and rng.random() < 0.5:
            loan, part, value = held.pop(rng.randrange(len(held)))
            assert part[0] == part[-1] == value
            loan.give_back()
        elif (loan := pool.lend(rng.randrange(1, 40 * PAGE))) is not None:
            part = loan.take(loan._size)
            part[0] = part[-1] = turn % 256
            held.append((loan, part, turn % 256))
        assert pool.lent <= 256 * PAGE
    assert all(part[0] == part[-1] == value for _, part, value in held)
