"""The state machine: hypothesis makes up histories of a store, and a plain dict says what must come of them.

What every step checks, whatever happened before:

- A lookup finds what the model promises and never more than a prefix that was saved once.
- Every restored byte is the one that a model would compute for these tokens in this namespace.
- What can be restored can be continued: a publish from a restored border succeeds.
- After damage less may be found, but publishing again heals within as many tries as there are nodes.
- After a collection what is left is whole, and check() finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ClassVar, Concatenate, ParamSpec, TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from kvstore.blocks import TensorSpec
from kvstore.errors import KVStoreError
from kvstore.keys import TOKEN_BYTES
from kvstore.testing.oracle import TENSORS, Oracle, random_tokens
from kvstore.testing.session import HARMS, MakeSubject, Session

__all__ = ["store_machine"]

_MAX_CUTS = 4

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LENGTHS = st.runner().flatmap(lambda machine: _lengths(machine.interval))
_SEEDS = st.integers(0, 5)
_HANDLES = st.integers(0, 1)
_SPACES = st.sampled_from([0, 0, 0, 1])


def _lengths(interval: int) -> st.SearchStrategy[int]:
    """Numbers of tokens, those around borders more often."""
    near = [1, 63, 64, 65, interval - 1, interval, interval + 1, 2 * interval, 3 * interval]
    return st.one_of(st.integers(1, interval * 7 // 2), st.sampled_from(near))


def _step(does: Callable[Concatenate[_Machine, _P], _T]) -> Callable[Concatenate[_Machine, _P], _T]:
    """A rule that fails is the finding: what a last look at the store then says would only hide it."""

    @wraps(does)
    def run(self: _Machine, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self.failed = True
        result = does(self, *args, **kwargs)
        self.failed = False
        return result

    return run


class _Machine(RuleBasedStateMachine):
    """The rules; what they consist of is in Session. Seeds name other tokens in every rule that draws one."""

    make: ClassVar[MakeSubject]
    interval: ClassVar[int]
    tensors: ClassVar[tuple[TensorSpec, ...]]
    overlaps: ClassVar[bool]

    prompts: Bundle[bytes] = Bundle("prompts")

    def __init__(self) -> None:
        super().__init__()
        self.failed = False
        kind = type(self)
        self.session = Session(kind.make, kind.interval, kind.tensors, overlaps=kind.overlaps)

    def teardown(self) -> None:
        """The last step of every history."""
        self.session.finish(look=not self.failed)

    @initialize(target=prompts, seed=_SEEDS, count=_LENGTHS)
    @_step
    def first_prompt(self, seed: int, count: int) -> bytes:
        """Something to begin with."""
        return random_tokens(seed, count)

    @rule(target=prompts, base=prompts, cut=_LENGTHS, seed=_SEEDS, count=_LENGTHS)
    @_step
    def branch(self, base: bytes, cut: int, seed: int, count: int) -> bytes:
        """A prompt that begins like another one: longer than it, or different from somewhere on."""
        return base[: cut * TOKEN_BYTES] + random_tokens(1000 + seed, count)

    @rule(
        at=_HANDLES,
        space=_SPACES,
        prompt=prompts,
        end=_LENGTHS,
        cuts=st.lists(_LENGTHS, max_size=_MAX_CUTS),
        start=st.sampled_from(["restored", "restored", "nothing", "border"]),
        decode=st.booleans(),
        phase=st.integers(0, 63),
    )
    @_step
    def publish(
        self, *, at: int, space: int, prompt: bytes, end: int, cuts: list[int], start: str, decode: bool, phase: int
    ) -> None:
        """Save a prompt up to a length: from where a restore ended as engines do, or from another good start."""
        session = self.session
        handle = session.handles[at]
        end = min(end, len(prompt) // TOKEN_BYTES)
        tokens = prompt[: end * TOKEN_BYTES]
        first = 0
        if start == "restored":
            _, first = session.look(handle, space, tokens)
        elif start == "border" and self.tensors:
            good = [border for border in session.models[space].borders(tokens, handle.number) if border < end]
            first = good[sum(cuts) % len(good)]
        if first < end:
            whole = range((first // self.interval + 1) * self.interval, end, self.interval)
            borders = sorted({*whole, end} | {cut for cut in cuts if first < cut < end})
            session.save(handle, space, prompt, first, borders, decode=decode, phase=phase)

    @rule(at=_HANDLES, space=_SPACES, prompt=prompts, which=st.integers(0, 9))
    @_step
    def publish_state(self, at: int, space: int, prompt: bytes, which: int) -> None:
        """Save the boundary state at one of the nodes of a prompt."""
        handle = self.session.handles[at]
        ends = self.session.models[space].ends(prompt, handle.number)
        if ends:
            self.session.save_state(handle, space, prompt[: ends[which % len(ends)] * TOKEN_BYTES])

    @rule(at=_HANDLES, space=_SPACES, seed=_SEEDS, count=_LENGTHS)
    @_step
    def publish_a_hole(self, at: int, space: int, seed: int, count: int) -> None:
        """What comes after something that is not there must be refused."""
        handle, oracle, interval = self.session.handles[at], self.session.oracles[space], self.interval
        target = handle.spaces[space]
        tokens = random_tokens(2000 + seed, interval + count)
        end = min(2 * interval, interval + count)
        attempts: list[Callable[[], object]] = [
            lambda: target.publish(tokens, [oracle.span(tokens, interval, end)]),
            lambda: target.publish(tokens, [oracle.span(tokens, interval // 2, interval)]),
            lambda: target.publish_state(tokens, oracle.state(tokens)),
        ]
        for attempt in attempts:
            try:
                attempt()
            except KVStoreError:
                continue
            raise AssertionError("a node was published without what comes before it")
        self.session.look(handle, space, tokens)

    @rule(at=_HANDLES, space=_SPACES, prompt=prompts, seed=_SEEDS, count=_LENGTHS)
    @_step
    def publish_half(self, at: int, space: int, prompt: bytes, seed: int, count: int) -> None:
        """A prompt has tensors everywhere or nowhere: what was never saved must not come between what was."""
        handle, interval = self.session.handles[at], self.interval
        ends = self.session.models[space].ends(prompt, handle.number)
        chunks = [end for end in ends if end % interval == 0]
        if not chunks:
            return
        first = chunks[-1]
        tokens = prompt[: first * TOKEN_BYTES] + random_tokens(4000 + seed, interval)
        other = Oracle(() if self.tensors else TENSORS)
        try:
            handle.spaces[space].publish(tokens, [other.span(tokens, first, first + min(count, interval))])
        except KVStoreError:
            self.session.look(handle, space, tokens)
            return
        raise AssertionError("a prompt was saved with tensors in one part and without in another")

    @rule(at=_HANDLES, space=_SPACES, prompt=prompts, end=_LENGTHS, seed=_SEEDS, more=st.integers(0, 200))
    @_step
    def look_up(self, *, at: int, space: int, prompt: bytes, end: int, seed: int, more: int) -> None:
        """Look for the beginning of a prompt, gone on with differently or not."""
        handle = self.session.handles[at]
        tokens = prompt[: end * TOKEN_BYTES] + random_tokens(3000 + seed, more)
        self.session.look(handle, space, tokens)
        self.session.look_for_state(handle, space, tokens)

    @rule(at=_HANDLES)
    @_step
    def reopen(self, at: int) -> None:
        """A restart."""
        self.session.reopen(at)

    @precondition(lambda self: self.session.can("files"))
    @rule(which=st.lists(st.integers(0, 999), min_size=1, max_size=4), how=st.sampled_from(HARMS))
    @_step
    def harm(self, which: list[int], how: str) -> None:
        """Lose or damage some files."""
        for number in which:
            self.session.harm(number, how)

    @precondition(lambda self: self.session.harmed)
    @rule(space=_SPACES, prompt=prompts, end=_LENGTHS, order=st.permutations([0, 1]))
    @_step
    def heal(self, space: int, prompt: bytes, end: int, order: list[int]) -> None:
        """Both meet the damage, and both publish until all is there again: one finds what the other has healed."""
        prefix = prompt[: end * TOKEN_BYTES]
        for at in (0, 1):
            self.session.look(self.session.handles[at], space, prefix)
        for at in order:
            self.session.heal(self.session.handles[at], space, prefix)

    @precondition(lambda self: self.session.can("collect"))
    @rule(share=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
    @_step
    def collect(self, share: float) -> None:
        """Make room. What is left is whole, and no child is left without its parent."""
        self.session.subject.collect(share)
        self.session.check()
        self.session.take_stock()

    @precondition(lambda self: self.session.harmed and self.session.can("repair") and self.session.can("check"))
    @rule()
    @_step
    def repair(self) -> None:
        """Set aside what is damaged. What is left is whole."""
        self.session.subject.repair()
        self.session.harmed = False
        self.session.check()
        # Both may remember damage to what is in its place now.
        for at in (0, 1):
            self.session.reopen(at)
        self.session.take_stock()


def store_machine(
    make: MakeSubject,
    *,
    interval: int = 128,
    tensors: Sequence[TensorSpec] = TENSORS,
    overlaps: bool = True,
) -> type[RuleBasedStateMachine]:
    """A state machine for stores that make(folder, interval) gives; ``store_machine(…).TestCase`` is a unittest one.

    interval is small, so that histories have borders in them; 128 also has matches inside a chunk (from 64 tokens on).
    tensors may be empty: an engine that keeps nothing per token has boundary states only. overlaps False is for stores
    that only promise whole nodes.
    """
    return type(
        "StoreMachine",
        (_Machine,),
        {"make": staticmethod(make), "interval": interval, "tensors": tuple(tensors), "overlaps": overlaps},
    )
