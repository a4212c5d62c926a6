"""What a merge brought, and the sentences about what it left out."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["MAX_PROBLEMS", "MergeReport"]

MAX_PROBLEMS = 100
"""Sentences kept of a run; the rest is only counted."""


@dataclass
class MergeReport:
    """What was brought over, or with dry_run would be (as far as manifests and the headers of blocks tell).

    nodes, states, tokenizations, namespaces (descriptions), blocks: copied, and copied_bytes of these blocks. there:
    manifests that the target had already. damaged: files of the source that are not whole, manifests that name them,
    those that go on with other tensors, and files for which there is no place in the target; newer: those that a newer
    kvstore wrote; problems says which. without_parent: nodes that continue one which neither directory has whole.
    skipped: what changed or vanished meanwhile; another run brings what is still there. foreign: files in the source
    that are not kvstore's. error: one sentence, why it stopped; what was done until then is counted.
    """

    dry_run: bool = False
    nodes: int = 0
    states: int = 0
    blocks: int = 0
    copied_bytes: int = 0
    tokenizations: int = 0
    namespaces: int = 0
    there: int = 0
    damaged: int = 0
    newer: int = 0
    without_parent: int = 0
    skipped: int = 0
    foreign: int = 0
    problems: list[str] = field(default_factory=list)
    error: str = ""

    def leave_damaged(self, sentence: str) -> None:
        """Count what is left out, or left as it is, and say why."""
        self.damaged += 1
        self._say(sentence)

    def leave_newer(self, what: str, version: int) -> None:
        """Count what a newer kvstore wrote."""
        self.newer += 1
        self._say(f"{what} is left out: it has format {version}, which a newer kvstore wrote; merge with that one")

    def _say(self, sentence: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(sentence)
