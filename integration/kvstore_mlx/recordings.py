"""What a session saves of a prompt, and whether that pays: the beginnings of its recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore_mlx.boundaries import Saving
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.gate import Gate
from kvstore_mlx.live import ExtrasHook
from kvstore_mlx.recording import Recording
from kvstore_mlx.writer import Writer

__all__ = ["Recordings"]


@dataclass(frozen=True)
class Recordings:
    """The recordings of one session. Without a directory there are none. phase: see buffers.address_phase."""

    space: ModelSpace | None
    writer: Writer | None
    gate: Gate | None
    saving: Saving
    extras: ExtrasHook | None
    phase: int

    def begin(self, tokens: list[int], saved: Mapping[Form, int], known: int, ends: Sequence[int]) -> Recording | None:
        """Of a prompt that was looked up and is to be prefilled; None when it is not worth saving."""
        if not saved or self.gate is None or not self.gate.worth_saving(len(tokens)):
            return None
        decoded = known > 0 and not self.saving.prefill_only
        recording = self._recording(tokens, saved, known, decoded=decoded, ends=ends, prompt_end=len(tokens))
        if recording is not None:
            recording.prepare()
        return recording

    def of(self, tokens: list[int], saved: Mapping[Form, int], *, decoded: bool) -> Recording | None:
        """Of what caches of a caller's own hold. Where some of it was decoded, no part is known to be a prefill's."""
        return self._recording(tokens, saved, 0, decoded=decoded, prompt_end=0 if decoded else len(tokens))

    def _recording(
        self,
        tokens: list[int],
        saved: Mapping[Form, int],
        known: int,
        *,
        decoded: bool,
        prompt_end: int,
        ends: Sequence[int] = (),
    ) -> Recording | None:
        if self.writer is None or self.space is None:
            return None
        return Recording(
            self.space,
            self.writer,
            tokens,
            saved=saved,
            known=known,
            decoded=decoded,
            boundaries=ends,
            prompt_end=prompt_end,
            prefill_only=self.saving.prefill_only,
            extras=None if self.extras is None else self.extras.capture,
            phase=self.phase,
        )
