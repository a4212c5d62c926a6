"""What a session reads of a prompt, and whether that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.keys import TOKEN_BYTES, pack_tokens
from kvstore.lookup import has_state
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.gate import Gate
from kvstore_mlx.restoring import Found, Restored, find, longest, restore
from kvstore_mlx.writer import Writer

__all__ = ["Fetching"]


@dataclass(frozen=True)
class Fetching:
    """The lookups and restores of one session. Without a directory nothing is found. extras: whether a hook has to be
    given back what it saved.
    """

    space: ModelSpace | None
    writer: Writer | None
    gate: Gate | None
    saving: Saving
    extras: bool

    def whole(self, tokens: Sequence[int]) -> Restored | None:
        """The longest saved prefix, all of the tokens at most, whether it pays or not."""
        if self.space is None:
            return None
        found = self._find(pack_tokens(tokens))
        self._asked(found)
        best = longest(found)
        return None if best is None else self._read(best, len(tokens))

    def borders(self, tokens: Sequence[int]) -> dict[Form, int]:
        """For each form up to where the store holds the tokens in whole blocks."""
        return {one.form: one.match.border for one in self._find(pack_tokens(tokens))}

    def fetch(self, tokens: list[int]) -> tuple[Restored | None, dict[Form, int]]:
        """What of a prompt is better read than computed, and for each form up to where the store holds it.

        All of the prompt only with the logits after its last token: nothing would be left to compute them from.
        """
        if self.space is None:
            return None, {}
        if self.writer is not None:
            self.writer.prefilling()
        packed = pack_tokens(tokens)
        found = self._find(packed)
        best = longest(found)
        restored = None
        if best is not None and best.count == len(tokens):
            match = best.match
            if match.exact and has_state(match.space, match.steps[-1]) and self._pays(best):
                restored = self._read(best, len(tokens))
            if restored is None or restored.logits is None:
                restored = None
                found = self._find(packed[:-TOKEN_BYTES])
                best = longest(found)
        saved = {one.form: one.match.border for one in found}
        self._asked(found)
        if restored is None and best is not None and self._pays(best):
            restored = self._read(best, len(tokens))
            saved[best.form] = 0 if restored is None else restored.saved
        if restored is not None and self.gate is not None:
            self.gate.restored(restored)
        return restored, saved

    def _asked(self, found: Sequence[Found]) -> None:
        """Say that a request looked for this, whatever was found."""
        if self.writer is not None:
            for one in found:
                self.writer.asked(one.form, one.match)

    def _pays(self, found: Found) -> bool:
        return self.gate is not None and self.gate.worth_restoring(found)

    def _find(self, packed: bytes) -> list[Found]:
        usable = [] if self.space is None else self.space.usable
        return [find(form, packed, prefill_only=self.saving.prefill_only) for form in usable]

    def _read(self, found: Found, tokens: int) -> Restored | None:
        """Restore for a prompt of so many tokens. The logits that were saved after less than all of it are for nobody,
        so that they are not read; what a hook has to be given back may lie anywhere.
        """
        wanted = found.count == tokens or self.extras
        restored = restore(found, tokens, state=wanted, prefill_only=self.saving.prefill_only)
        if restored is None or restored.tokens == tokens:
            return restored
        return replace(restored, logits=None)
