"""One history of a store beside its model: what the rules of the state machine consist of, and what must hold.

Nothing here draws anything: hypothesis is kvstore.testing.machine's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from kvstore.blocks import TensorBuffer, TensorSpec
from kvstore.keys import TOKEN_BYTES
from kvstore.namespace import NamespaceInfo
from kvstore.testing.model import Model
from kvstore.testing.oracle import Memory, Oracle, StateMemory
from kvstore.testing.subject import NamespaceLike, StoreLike, Subject

__all__ = ["HARMS", "NAMESPACES", "Handle", "MakeSubject", "Session"]

NAMESPACES = (NamespaceInfo({"model": "one"}, "one"), NamespaceInfo({"model": "one"}, "a tenant", salt=b"tenant"))
"""Equal but for the salt: what is saved in one must not be found in the other."""

HARMS = ("delete", "truncate", "flip", "zero", "extend")

MakeSubject: TypeAlias = Callable[[Path, int], Subject]
"""A subject for a folder that is not there yet and an interval: a subclass of Subject will do."""


class Handle:
    """One open store. number: how many were opened before it."""

    def __init__(self, store: StoreLike, number: int) -> None:
        self.store = store
        self.number = number
        self.spaces: list[NamespaceLike] = [store.namespace(info) for info in NAMESPACES]


class Session:
    """Two handles of one store, and a model for each namespace."""

    def __init__(self, make: MakeSubject, interval: int, tensors: Sequence[TensorSpec], *, overlaps: bool) -> None:
        self.interval = interval
        self.tensors = tuple(tensors)
        self._folder = Path(tempfile.mkdtemp(prefix="kvstore-testing-"))
        self.subject = make(self._folder / "store", interval)
        self.models = [Model(interval, overlaps) for _ in NAMESPACES]
        self.oracles = [Oracle(tensors, str(number)) for number in range(len(NAMESPACES))]
        self.opened = 0
        self.harmed = False
        self.handles = [self.open(), self.open()]

    def open(self) -> Handle:
        """One more handle."""
        handle = Handle(self.subject.open(), self.opened)
        self.opened += 1
        return handle

    def reopen(self, at: int) -> None:
        """A restart: nothing that the process knew is needed."""
        self.handles[at].store.close()
        self.handles[at] = self.open()

    def can(self, method: str) -> bool:
        """Whether the subject has a method that it need not have."""
        return getattr(type(self.subject), method, None) is not getattr(Subject, method)

    def finish(self, *, look: bool) -> None:
        """A last look at everything through a fresh handle; then remove it."""
        try:
            for handle in self.handles:
                handle.store.close()
            if look:
                self._look_at_all()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look_at_all(self) -> None:
        last = self.open()
        for space, model in enumerate(self.models):
            for prefix in list(model.saved):
                self.look(last, space, prefix)
                self.look_for_state(last, space, prefix)
        last.store.close()
        self.check()

    def look(self, handle: Handle, space: int, tokens: bytes) -> tuple[int, int]:
        """One lookup and its restore, with all that must hold of them; tokens restored and the border."""
        model, target = self.models[space], handle.spaces[space]
        promise, most = model.promise(tokens, handle.number), model.most(tokens)
        restored = border = 0
        # A damaged node may hide a good one until it was read once.
        for _ in range(1 + self.harmed * len(model.ever)):
            match = target.lookup(tokens)
            assert promise <= match.count <= most, f"found {match.count} tokens, not {promise} to {most}"
            assert 0 <= match.border <= match.count
            memory = Memory()
            result = target.read(match, memory if self.tensors else _no_memory)
            restored, border = result.tokens, result.border
            self.oracles[space].check(memory, tokens, restored)
            assert 0 <= border <= restored <= match.count, (
                f"restored {restored} tokens with a border at {border}, of {match.count} that were found"
            )
            if match.exact:
                self._state_of(handle, space, match, tokens, must=False)
            if not self.harmed:
                assert restored == match.count, f"restored {restored} of the {match.count} tokens that were found"
            if restored >= promise:
                break
        assert restored >= promise, f"restored {restored} tokens, not {promise}"
        return restored, border

    def look_for_state(self, handle: Handle, space: int, tokens: bytes) -> int:
        """A lookup for an engine that can only resume at a boundary state; where it would."""
        model = self.models[space]
        promise = model.state_promise(tokens, handle.number)
        found = 0
        for _ in range(1 + self.harmed * len(model.ever)):
            match = handle.spaces[space].lookup(tokens, trimmable=False)
            found = match.count
            assert promise <= found, f"found a state at {found} tokens, not {promise}"
            if not found:
                break
            assert match.exact
            assert tokens[: found * TOKEN_BYTES] in model.states_ever, f"nobody saved a state at {found} tokens"
            if self._state_of(handle, space, match, tokens, must=not self.harmed):
                break
        return found

    def _state_of(self, handle: Handle, space: int, match: Any, tokens: bytes, *, must: bool) -> bool:
        memory = StateMemory()
        values = handle.spaces[space].read_state(match, memory)
        if values is not None:
            prefix = tokens[: match.count * TOKEN_BYTES]
            assert prefix in self.models[space].states_ever, f"nobody saved a state at {match.count} tokens"
            self.oracles[space].check_state(memory, values, prefix)
        else:
            assert not must, f"the state at {match.count} tokens was found and could not be read"
        return values is not None

    def save(
        self,
        handle: Handle,
        space: int,
        tokens: bytes,
        first: int,
        borders: Sequence[int],
        *,
        decode: bool = False,
        phase: int = 0,
    ) -> None:
        """Publish from first to the last border, which must succeed, and look at what came of it."""
        end, oracle = borders[-1], self.oracles[space]
        spans = [
            oracle.span(tokens, start, stop, decode=decode, phase=phase)
            for start, stop in zip((first, *borders), borders, strict=False)
        ]
        handle.spaces[space].publish(tokens, spans)
        prefix = tokens[: end * TOKEN_BYTES]
        model = self.models[space]
        model.ever.update(tokens[: border * TOKEN_BYTES] for border in borders)
        if self.harmed:
            self.heal(handle, space, prefix)
            self._remember(space, tokens, [*range(self.interval, end, self.interval), end], first, handle)
        else:
            self._remember(space, tokens, borders, first, None)
        restored, _ = self.look(handle, space, prefix)
        assert restored == end, f"{restored} tokens can be restored of the {end} that were just published"

    def heal(self, handle: Handle, space: int, prefix: bytes) -> None:
        """Look and publish until everything can be restored, as an engine does that computes what it did not get."""
        count = len(prefix) // TOKEN_BYTES
        for _ in range(2 + len(self.models[space].ever)):
            restored, border = self.look(handle, space, prefix)
            if restored == count:
                return
            ends = [*range((border // self.interval + 1) * self.interval, count, self.interval), count]
            spans = [
                self.oracles[space].span(prefix, start, stop)
                for start, stop in zip((border, *ends), ends, strict=False)
            ]
            handle.spaces[space].publish(prefix, spans)
            self.models[space].ever.update(prefix[: end * TOKEN_BYTES] for end in ends)
        raise AssertionError(f"publishing {count} tokens again and again does not make them restorable")

    def _remember(self, space: int, tokens: bytes, ends: Sequence[int], first: int, by: Handle | None) -> None:
        """Nodes that a publish completed, with the borders that they must have. by: only this handle surely knows."""
        model = self.models[space]
        known: frozenset[int] = frozenset()
        start = first
        for end in ends:
            prefix = tokens[: end * TOKEN_BYTES]
            if by is not None:
                model.add(prefix, frozenset({end}), self.opened, frozenset({by.number}))
                continue
            chunk = model.chunk_start(end)
            known = frozenset({border for border in known if border > chunk} | {end})
            if start > chunk:
                known |= {start}
            model.add(prefix, known, 0, frozenset())
            known = model.saved[prefix].borders
            start = end

    def check(self) -> None:
        """Ask the store itself what is wrong with it."""
        if not self.harmed and self.can("check"):
            problems = self.subject.check()
            assert not problems, "\n".join(problems)

    def take_stock(self) -> None:
        """After a collection: what is still there is whole, and the rest is forgotten."""
        handle = self.handles[0]
        for space, model in enumerate(self.models):
            before = list(model.saved)
            model.doubt_all()
            there = {}
            for prefix in before:
                match = handle.spaces[space].lookup(prefix)
                restored, _ = self.look(handle, space, prefix)
                if match.exact and restored == match.count == len(prefix) // TOKEN_BYTES:
                    state = self.look_for_state(handle, space, prefix) == match.count
                    there[prefix] = state
            model.keep_only(set(there))
            for prefix, state in there.items():
                if not self.harmed:
                    model.saved[prefix].sure = True
                    model.saved[prefix].state = state

    def save_state(self, handle: Handle, space: int, prefix: bytes) -> None:
        """Publish the boundary state at the end of a prefix that is surely there."""
        model = self.models[space]
        handle.spaces[space].publish_state(prefix, self.oracles[space].state(prefix))
        model.states_ever.add(prefix)
        if not self.harmed:
            model.saved[prefix].state = True
        self.look_for_state(handle, space, prefix)

    def harm(self, number: int, how: str) -> None:
        """Lose or damage one of the subject's files."""
        files = list(self.subject.files())
        if files:
            _harm(files[number % len(files)], how, number)
            self.harmed = True
            for model in self.models:
                model.doubt_all(harmed=True)


def _no_memory(tensors: tuple[TensorSpec, ...], tokens: int) -> dict[str, TensorBuffer]:
    """What a read of an engine that keeps nothing per token is given: there is nothing to ask memory for."""
    raise AssertionError(f"memory for {tokens} tokens of {tensors} was asked for, and nothing was saved per token")


def _harm(path: Path, how: str, number: int) -> None:
    """Damage one file."""
    data = bytearray(path.read_bytes())
    if how == "delete" or not data:
        path.unlink()
        return
    at = number * 7919 % len(data)
    if how == "truncate":
        del data[at:]
    elif how == "flip":
        data[at] ^= 1 << number % 8
    elif how == "zero":
        data[at:] = bytes(len(data) - at)
    else:
        data.append(0)
    path.write_bytes(data)
