"""Scatter the payloads of open blocks into the engine's memory, by several threads, hashed in file order.

The work is cut into units of about a mebibyte, so that the threads can share even a single block: the first touch of
memory costs more than reading, and two threads hide it. Where there are more blocks, each thread has its own. A block's
digest is over its whole file in order. Whichever thread has read the unit that comes next hashes it, and those after it
that are there, while they are still in the processor's cache; no thread waits for another's hash.

A block is good only when every unit of it was read and hashed and the digest is the one in its name. This module opens
and closes nothing, and knows neither manifests nor what a damaged block means to a restore.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from kvstore.blocks import TensorBuffer, TensorSpec
from kvstore.errors import DamagedBlockError
from kvstore.fs import preadv_full
from kvstore.interpreter import short_turns
from kvstore.manifest import BlockRef
from kvstore.populate import populate

__all__ = ["Allocate", "OpenBlock", "scatter"]

Allocate: TypeAlias = Callable[[tuple[TensorSpec, ...], int], Mapping[str, TensorBuffer]]
"""Given the tensors and the number of tokens they must hold at least, returns memory for each by name. Called on the
thread that called for the restore. ValueError refuses the tensors: see kvstore.restore.read."""

UNIT_BYTES = 1 << 20
"""What a thread reads between two looks at the list: larger units leave the last thread alone for longer and grow cold
before they are hashed (a whole tensor of 4 MiB is out of the nearest cache by then), smaller ones cost calls. A tensor
of a chunk is cut between its runs, those of a short span share a unit."""


@dataclass(frozen=True, slots=True)
class OpenBlock:
    """A block's file, its first ref.payload bytes, and the tensors that they describe."""

    ref: BlockRef
    fd: int
    head: bytes
    specs: tuple[TensorSpec, ...]


def scatter(blocks: Sequence[OpenBlock], memory: Mapping[str, TensorBuffer], threads: int) -> list[Exception | None]:
    """Read all blocks into checked memory (see TensorBuffer.check); for each, in order, what is wrong with it, or None.

    From the first token of a bad block on the memory holds bytes that must not be used. The calling thread is one of
    the readers. Whatever is not the fault of a block is raised, by whichever thread it happened to; no thread is left
    when this returns or raises.
    """
    work = _Work(blocks, memory)
    with short_turns():
        _run(work, threads)
    return work.outcome()


def _run(work: _Work, threads: int) -> None:
    """Run work on so many threads, and wait for all of them whatever happens."""
    helpers: list[_Helper] = []
    try:
        for _ in range(min(threads, work.most) - 1):
            helpers.append(_Helper(work))
            # No more threads can be started just now (or the interpreter is ending): fewer read, as well.
            with suppress(RuntimeError):
                helpers[-1].start()
        work.run()
    finally:
        _end(work, helpers)


def _end(work: _Work, helpers: Sequence[_Helper]) -> None:
    """No thread reads any more when this ends, and nothing holds memory in a cycle.

    Also when the user interrupts meanwhile, which is raised then: the caller closes the files.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            work.stop()
            for helper in helpers:
                helper.wait()
            work.close()
        except KeyboardInterrupt as error:
            interrupt = error.with_traceback(None)
        else:
            break
    try:
        if interrupt is not None:
            raise interrupt
    finally:
        del interrupt


class _Helper:
    """A thread that reads along.

    Whether it still does is not asked of the thread: before Python 3.13 one counts as ended once somebody was
    interrupted while joining it. Nor is it kept under a lock, because the caller can be interrupted between any two
    steps: either the caller sees that it began, or it sees that all was stopped, and reads nothing.
    """

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._began = False
        self._reading = threading.Lock()
        self._reading.acquire()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises RuntimeError when there can be no more threads."""
        thread = threading.Thread(target=self._run, name="kvstore-read")
        thread.start()
        # Not before: one that was never started keeps what it would have run, and that keeps it.
        self._thread = thread

    def _run(self) -> None:
        self._began = True
        try:
            self._work.run()
        finally:
            self._reading.release()

    def wait(self) -> None:
        """Until it reads no more, and if nobody interrupts until its thread is gone. To be called after work.stop."""
        if self._began:
            with self._reading:
                pass
        # Also one that had no turn yet: it reads nothing any more, but holds the engine's memory until it ends.
        if self._thread is not None:
            self._thread.join()


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tensors begin .. end of a block, whose bytes begin at offset in its file; of a single one, some of its runs.

    number: its place in the block.
    """

    block: _Reading
    number: int
    begin: int
    end: int
    offset: int
    runs: slice


class _Reading:
    """What became of one block so far: the units that nobody has taken, the hash of its leading ones, and those that
    wait for an earlier one to be hashed.

    Units are cut as they are taken: two milliseconds for a chunk of an 8B model in which nobody would read yet.
    """

    def __init__(self, block: OpenBlock) -> None:
        self.block = block
        self.error: Exception | None = None
        self.left = True
        self._taken = 0
        self._cuts = self._cut()
        self._state = xxhash.xxh3_128(block.head)
        self._waiting: dict[int, list[memoryview]] = {}
        self._hashed = 0
        self._hashing = False
        self._lock = threading.Lock()

    def take(self) -> _Unit | None:
        """The next unit in file order; None when there is no more. For one thread at a time."""
        unit = next(self._cuts, None)
        if unit is None:
            self.left = False
        else:
            self._taken += 1
        return unit

    def close(self) -> None:
        """Nobody takes any more."""
        self._cuts.close()

    def _cut(self) -> Generator[_Unit, None, None]:
        """The block's units, in file order."""
        specs, count, offset, begin = self.block.specs, self.block.ref.count, self.block.ref.payload, 0
        while begin < len(specs):
            spec = specs[begin]
            if (whole := spec.span_bytes(count)) > UNIT_BYTES:
                run = whole // spec.outer
                some = max(1, UNIT_BYTES // run)
                for first in range(0, spec.outer, some):
                    yield self._unit(begin, begin + 1, offset + first * run, slice(first, first + some))
                offset += whole
                begin += 1
                continue
            end, size = begin, 0
            while end < len(specs) and size + specs[end].span_bytes(count) <= UNIT_BYTES:
                size += specs[end].span_bytes(count)
                end += 1
            yield self._unit(begin, end, offset)
            offset += size
            begin = end

    def _unit(self, begin: int, end: int, offset: int, runs: slice = slice(None)) -> _Unit:
        return _Unit(self, self._taken, begin, end, offset, runs)

    def read(self, unit: _Unit, memory: Mapping[str, TensorBuffer]) -> None:
        """Read one unit and hash what can be hashed now. A block that is known to be bad is read no further."""
        if self.error is not None:
            return
        ref = self.block.ref
        specs = self.block.specs[unit.begin : unit.end]
        runs = [run for spec in specs for run in memory[spec.name].runs(spec, ref.first, ref.count, unit.runs)]
        populate(runs)
        try:
            preadv_full(self.block.fd, runs, unit.offset)
        except EOFError as error:
            self.error = DamagedBlockError(str(error))
        except OSError as error:
            # Its traceback would hold the engine's memory, in a cycle, for longer than this call.
            self.error = error.with_traceback(None)
        else:
            self._hash(unit.number, runs)

    def _hash(self, number: int, runs: list[memoryview]) -> None:
        with self._lock:
            self._waiting[number] = runs
            if self._hashing:
                return  # That thread finds it when it comes to it.
            self._hashing = True
        while True:
            with self._lock:
                ready = self._waiting.pop(self._hashed, None)
                if ready is None:
                    self._hashing = False
                    return
                self._hashed += 1
            for run in ready:
                self._state.update(run)

    def outcome(self) -> Exception | None:
        """What is wrong with the block; asked when no thread reads any more."""
        if self.error is not None:
            return self.error
        if self.left or self._hashed != self._taken or self._hashing or self._state.digest() != self.block.ref.digest:
            return DamagedBlockError("digest does not match its bytes")
        return None


class _Work:
    """The units of all blocks, taken one by one by any number of threads.

    A thread takes those of one block after the other, so that it hashes what it has read itself; only when no block is
    without a reader it helps with one that has.
    """

    def __init__(self, blocks: Sequence[OpenBlock], memory: Mapping[str, TensorBuffer]) -> None:
        self._readings = [_Reading(block) for block in blocks]
        size = sum(block.ref.size - block.ref.payload for block in blocks)
        self.most = max(len(blocks), -(-size // UNIT_BYTES))
        self._memory = memory
        self._unread = deque(self._readings)
        self._stopped = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Read units until there are no more. An error that is not a block's ends all threads' work."""
        try:
            own: _Reading | None = None
            while (unit := self._take(own)) is not None:
                own = unit.block
                own.read(unit, self._memory)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self.stop()

    def stop(self) -> None:
        """Let every thread end after the unit that it reads."""
        self._stopped = True

    def close(self) -> None:
        """When no thread reads any more. What cuts the units refers to its block: memory in a cycle lives longer."""
        for reading in self._readings:
            reading.close()

    def outcome(self) -> list[Exception | None]:
        """What is wrong with each block; raises what was not the fault of one."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure
        return [reading.outcome() for reading in self._readings]

    def _take(self, own: _Reading | None) -> _Unit | None:
        with self._lock:
            while not self._stopped:
                if own is None or not own.left:
                    helped = (reading for reading in self._readings if reading.left)
                    own = self._unread.popleft() if self._unread else next(helped, None)
                if own is None:
                    break
                if (unit := own.take()) is not None:
                    return unit
            return None
