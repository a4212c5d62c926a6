"""The forms that one model's caches can have, each with a plan and a namespace of its own.

Most models have one. With --kv-bits the engine begins with plain caches and quantizes all of them at once, when they
have reached a certain length; bytes of the two must never meet, and a prompt may need both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.store import Namespace
from kvstore_mlx.live import Live
from kvstore_mlx.plan import Plan

__all__ = ["Form", "ModelSpace"]


@dataclass(eq=False)
class Form:
    """One form: how its caches lie in the store, and where.

    least: prefixes shorter than this do not have this form in an uninterrupted run, so none is restored into it, and
    caches in memory that were cut to less are neither used nor saved.
    most: nothing is saved of caches that hold more than this, because what their rows hold depends on how the prompt
    was cut.
    extras: whether an engine attaches something to its boundaries without which it cannot go on.
    trouble: why nothing is saved or restored any more; set once, from any thread.
    """

    plan: Plan
    namespace: Namespace
    least: int = 0
    extras: bool = False
    trouble: str = ""
    most: int | None = None

    @property
    def stateful(self) -> bool:
        """Whether a prefix can be resumed at boundary states only."""
        return self.plan.stateful or self.extras

    @property
    def interval(self) -> int:
        """Tokens a chunk."""
        return self.namespace.interval


@dataclass(frozen=True, eq=False)
class ModelSpace:
    """Everything the adapter knows of one loaded model."""

    forms: tuple[Form, ...]
    label: str

    @property
    def ids(self) -> tuple[str, ...]:
        """What tells its prompts from those of any other model: the namespaces of its forms."""
        return tuple(form.namespace.id for form in self.forms)

    def form_of(self, caches: Sequence[Any]) -> Form:
        """The form that these caches have now; ValueError when it is none that this model makes."""
        for form in self.forms:
            if form.plan.fits(caches):
                return form
        raise ValueError("the engine holds other cache classes than the model makes")

    def look(self, caches: Sequence[Any], index: int | None, exactly: int | None) -> tuple[Form, Live]:
        """What caches hold between two steps, and the form they have; see Live.

        ValueError when they were quantized and then cut to fewer tokens than an uninterrupted run quantizes.
        """
        form = self.form_of(caches)
        if exactly is not None and exactly < form.least:
            raise ValueError(f"{exactly} tokens are quantized, which an engine does from {form.least} on")
        return form, Live(form.plan, caches, index, exactly)

    def check(self, caches: Sequence[Any], tokens: int, logits: Any | None = None, count: int | None = None) -> None:
        """ValueError unless these are caches of this model that hold exactly so many tokens, and its logits. For what a
        caller hands over; it computes nothing.

        count: tokens that the caches hold as the caller counted them. Where no layer counts (recurrent ones do not)
        nothing else tells, and what is saved under a wrong number gives wrong tokens: none is a ValueError there.
        """
        try:
            _, live = self.look(caches, None, tokens)
            live.check(logits)
            counted = live.plan.count(caches) is not None
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"these are no caches and logits of this model: {error}") from error
        if count is not None and count != tokens:
            raise ValueError(f"{count} tokens were counted where {tokens} are given")
        if count is None and not counted:
            raise ValueError("no layer of this model counts its tokens: say by count= how many the caches hold")

    def row_bytes(self, tokens: int) -> int:
        """Bytes that the blocks of a prompt of so many tokens take, in the form that it has then."""
        *_, form = (form for form in self.forms if form.least <= tokens)
        return form.plan.token_bytes * tokens

    @property
    def stateful(self) -> bool:
        """Whether its prefixes are resumed at boundary states only."""
        return any(form.stateful for form in self.forms)

    @property
    def most(self) -> int | None:
        """No prefix may be cut out of caches of more tokens than this, in memory neither; see Form."""
        return self.forms[0].most

    @property
    def usable(self) -> Iterable[Form]:
        """Forms without trouble."""
        return [form for form in self.forms if not form.trouble]
